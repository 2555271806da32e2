"""python -m drafttrain COMMAND [section=choice ...] [section.key=value ...]"""

import importlib
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from drafttrain import __version__
from drafttrain.config import COMMANDS, UsageError, command_groups, compose, did_you_mean, typed
from drafttrain.disk import OF_THE_MACHINE, DiskError, append_text, reason
from drafttrain.launched import (
    TOGETHER,
    end,
    is_consequence,
    is_ours,
    leave_word,
    rank,
    settle,
    speaks_first,
)
from drafttrain.stopping import Stopped, StopRequest

DEBUG = "DRAFTTRAIN_DEBUG"  # set to 1: errors come with their traceback
# The section that names the folder, where it is not `run`.
PLACES = {"compare": "compare", "capture": "store", "regenerate": "regenerate", "plan": "plan"}
# What to say after "interrupted", where nothing more is known.
GOES_ON = {
    "train": "; the same command with run.resume=true goes on",
    "capture": "; the same command goes on where it stopped",
    "regenerate": "; the same command goes on from what is answered",
    "evaluate": "; the same command goes on from what it measured",
    "tune": "; the same command goes on from what it measured",
}
OPTIONS = ("--help", "--config", "--config-dir", "--slurm", "--version")


@dataclass
class Request:
    """The command line, sorted."""

    command: str | None = None
    overrides: list[str] = field(default_factory=list)
    help: bool = False
    show_config: bool = False
    version: bool = False
    slurm: str | None = None  # options of sbatch, KEY=VALUE,...
    config_dir: Path | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return 0, or 2 for what cannot be meant, or 1 for what failed."""
    # Read when torch is loaded, later. OpenMP's threads spin for milliseconds before they sleep:
    # on a machine that does other work besides, that makes two threads ten times slower than one.
    # Some tens of microseconds bridge the gap between two products and harm nobody.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    arguments = list(sys.argv[1:] if argv is None else argv)
    folder = command = None
    failed = 2
    try:
        settle()
        request = read(arguments)
        if request.version or request.help or request.command is None:
            print(__version__ if request.version else _help(request))
            return 0
        command = request.command
        config = compose(request.command, request.overrides, request.config_dir)
        if request.show_config:
            print(OmegaConf.to_yaml(config), end="")
            return 0
        loaded: Any = typed(config, COMMANDS[request.command])
        place = getattr(loaded, PLACES.get(request.command, "run"))
        if request.slurm is not None:
            print(_slurm_script(request, loaded), end="")
            return 0
        folder, failed = Path(place.dir) if place.dir else None, 1
        if command in TOGETHER:
            from drafttrain.launch import launch

            assert folder is not None, "what ranks do together has a folder"
            code = launch(loaded.hardware, arguments, folder)
            if code is not None:
                return code
        # What saves more than this, when it is asked to end, listens for itself.
        with StopRequest(GOES_ON.get(request.command, "")).listening():
            module = importlib.import_module(f"drafttrain.commands.{request.command}")
            getattr(module, request.command)(loaded)
        return 0
    except Stopped as stopped:
        if rank() == 0:
            _say(str(stopped))
        return stopped.code
    except KeyboardInterrupt:  # before a command listens
        if rank() == 0:
            _say(f"interrupted{GOES_ON.get(command or '', '')}")
        return 130
    except BrokenPipeError:  # the reader of our output has left, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        debug = os.environ.get(DEBUG) == "1"
        if debug and not is_ours():
            raise
        text = traceback.format_exc() if debug else _explain(error, folder, arguments)
        if is_ours():
            leave_word(text, failed, foreseen=_foreseen(error), consequence=is_consequence(error))
        # Every rank finds the same mistake in what was typed.
        elif rank() == 0 if failed == 2 else speaks_first():
            _say(f"error: {text}")
        return failed


def read(arguments: Sequence[str]) -> Request:
    """Sort the command line; UsageError says what cannot be meant."""
    request = Request()
    rest = iter(arguments)
    for text in rest:
        name, equals, value = text.partition("=")
        if name in ("--local_rank", "--local-rank"):  # DeepSpeed's launcher adds it
            if not equals:
                next(rest, None)
        elif name in ("-h", "--help"):
            request.help = True
        elif name in ("-c", "--config"):
            request.show_config = True
        elif name == "--version":
            request.version = True
        elif name == "--config-dir":
            request.config_dir = Path(value if equals else next(rest, ""))
            if not request.config_dir.is_dir():
                raise UsageError(f"--config-dir must name a folder, got {request.config_dir}")
        elif name == "--slurm":
            request.slurm = value
        elif text.startswith("-"):
            raise UsageError(
                f"no option is called {name}{did_you_mean(name, OPTIONS)} "
                f"options: {', '.join(OPTIONS)}"
            )
        elif request.command is None:
            if text not in COMMANDS:
                raise UsageError(
                    f"no command is called {text}{did_you_mean(text, COMMANDS)} "
                    f"commands: {', '.join(COMMANDS)}"
                )
            request.command = text
        else:
            request.overrides.append(text)
    return request


def _help(request: Request) -> str:
    from drafttrain.help import command_help, overview, section_help

    if request.command is None:
        return overview()
    groups = command_groups(request.command)
    own = [entry.name for entry in fields(COMMANDS[request.command]) if entry.name not in groups]
    texts = []
    for text in request.overrides:  # --help SECTION or --help SECTION=CHOICE; keys say nothing here
        section, _, choice = text.partition("=")
        if "." in section:
            continue
        if section not in groups and section not in own:
            options = [*groups, *own]
            raise UsageError(
                f"no section is called {section}{did_you_mean(section, options)} "
                f"sections: {', '.join(options)}"
            )
        choice = choice or groups.get(section, "")
        texts.append(section_help(request.command, section, choice, request.config_dir))
    return "\n\n".join(texts) or command_help(request.command, request.config_dir)


def _explain(error: Exception, folder: Path | None, arguments: list[str]) -> str:
    """Say in one line what went wrong; what nobody foresaw leaves its traceback in a file."""
    text = " ".join(str(error).split())
    if _foreseen(error):
        return text
    if isinstance(error, OSError) and error.errno in OF_THE_MACHINE:
        return f"{error.filename or folder}: {reason(error, folder or Path())}"
    if type(error).__name__ == "OutOfMemoryError":
        return f"out of GPU memory; lower hardware.micro_batch, which changes no result: {text}"
    name = f"error_rank{rank()}.log" if rank() else "error.log"
    log = folder / name if folder and folder.is_dir() else Path(f"drafttrain_{name}")
    date = datetime.now(UTC).isoformat(timespec="seconds")
    trace = "".join(traceback.format_exception(error))
    try:
        append_text(log, f"{date} python -m drafttrain {shlex.join(arguments)}\n{trace}\n")
        where = f"the traceback is in {log}; {DEBUG}=1 shows it here"
    except DiskError as problem:
        where = f"{problem}; {DEBUG}=1 shows the traceback here"
    return f"{type(error).__name__}: {text} ({where})"


def _foreseen(error: Exception) -> bool:
    """Whether this package raised the error for the user to read."""
    if type(error).__module__.startswith("drafttrain."):
        return True
    frames = list(traceback.walk_tb(error.__traceback__))
    raised_in = frames[-1][0].f_globals.get("__name__", "") if frames else ""
    return isinstance(error, ValueError) and raised_in.startswith("drafttrain.")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _slurm_script(request: Request, config: Any) -> str:
    from drafttrain.slurm import batch_script

    if request.command not in TOGETHER:
        raise UsageError(f"--slurm is for {', '.join(TOGETHER)}, got {request.command}")
    folder = [f"--config-dir={request.config_dir}"] if request.config_dir else []
    call = [str(request.command), *folder, *request.overrides]
    name = config.run.name if request.command == "train" else f"capture-{config.model.name}"
    return batch_script(call, request.slurm or "", config.hardware, name)


if __name__ == "__main__":
    end(main())
