"""python -m drafttrain COMMAND [section=choice ...] [section.key=value ...]"""

import importlib
import os
import re
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from drafttrain import __version__
from drafttrain.config.compose import check_choice, compose, defaults_of, printed, typed
from drafttrain.config.groups import choices, command_groups, own_choices
from drafttrain.config.overrides import UsageError
from drafttrain.config.sections import COMMANDS
from drafttrain.runtime.disk import OF_THE_MACHINE, MachineError, append_text, errno_of, reason
from drafttrain.runtime.rank_process import (
    TOGETHER,
    Output,
    end,
    guarded_output,
    is_consequence,
    is_ours,
    leave_word,
    rank,
    say_error,
    settle,
    speaks_first,
)
from drafttrain.runtime.run_folder import call
from drafttrain.runtime.signals import Stopped, StopRequest
from drafttrain.runtime.untrusted_input import did_you_mean, escaped, shown

DEBUG = "DRAFTTRAIN_DEBUG"  # set to 1: errors come with their traceback
UTF8 = "PYTHONUTF8"  # set to 1: Python reads and writes UTF-8 whatever the locale says
# The section that names the folder, where it is not `run`.
PLACES = {"compare": "compare", "capture": "store", "regenerate": "regenerate", "plan": "plan"}
PRINTED = ("plan", "generate", "chat")  # commands whose result is what they print
# What to say after "interrupted", where nothing more is known.
RESUMES = {
    "train": "; the same command with run.resume=true resumes",
    "capture": "; the same command resumes where it stopped",
    "regenerate": "; the same command resumes from what is answered",
    "evaluate": "; the same command resumes from what it measured",
    "tune": "; the same command resumes from what it measured",
    "generate": "; with chat.out the same command resumes with what is missing",
}
OPTIONS = (
    *("--help", "--config", "--cfg", "--info", "--config-dir", "--multirun", "--slurm"),
    "--version",
)
TAKES_A_VALUE = ("--local_rank", "--local-rank", "--cfg", "--info", "--config-dir")


@dataclass
class Request:
    """The command line, sorted."""

    command: str | None = None
    overrides: list[str] = field(default_factory=list)
    help: bool = False
    show_config: bool = False
    show_defaults: bool = False
    multirun: bool = False
    version: bool = False
    slurm: str | None = None  # options of sbatch, KEY=VALUE,...
    config_dir: Path | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its status.

    0: done. 2: the command line, or what it names, is invalid: the same command would fail again.
    1: a failure of the machine, a place held by another process, or an unexpected error. 130:
    Ctrl-C. 143: a scheduler's signal, after the progress was saved.
    """
    if argv is None and sys.getfilesystemencoding() != "utf-8" and os.environ.get(UTF8) != "1":
        # An ASCII locale, in which no path, record or line of output could be more than ASCII.
        os.execve(sys.executable, sys.orig_argv, os.environ | {UTF8: "1"})
    with guarded_output() as output:
        status = _run(list(sys.argv[1:] if argv is None else argv), output)
        try:
            if not output.failed:  # else it was said
                output.flush()
        except (BrokenPipeError, MachineError) as error:
            if isinstance(error, MachineError):
                say_error(f"error: {error}")
            status = 1
    return status


def _run(arguments: list[str], output: Output) -> int:
    # Torch reads it when it loads. Shapes vary from step to step: segments that grow leave no gaps
    # between blocks of many sizes.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    folder = command = None
    composed = False
    try:
        settle()
        request = read(arguments)
        with own_choices(request.config_dir):
            if request.version or request.help or request.command is None:
                print(__version__ if request.version else _help(request))
                return 0
            command = request.command
            output.is_progress = request.multirun
            if request.multirun:
                return _multirun(request)
            if request.show_defaults:
                for file, section in defaults_of(command, request.overrides):
                    print(f"{file:<40}{section}".rstrip())
                return 0
            config = compose(command, request.overrides)
            if request.show_config:
                print(printed(config), end="")
                return 0
            loaded: Any = typed(config, COMMANDS[command])
            count = getattr(getattr(loaded, "data", None), "preview", 0)
            if count and command not in TOGETHER:
                raise UsageError(
                    f"data.preview must be 0 for {command}, which trains on no records, got "
                    f"{count}; train and capture show what they would train on"
                )
            if request.slurm is not None:
                print(_slurm_script(request, loaded), end="")
                return 0
            place = getattr(loaded, PLACES.get(command, "run"))
            folder, composed = Path(place.dir) if place.dir else None, True
            output.is_progress = command not in PRINTED
            if command in TOGETHER:
                from drafttrain.runtime.launch import launch

                assert folder is not None, "a command of several ranks has a folder"
                code = launch(loaded.hardware, arguments, folder)
                if code is not None:
                    return code
            # A command that saves more when it is asked to stop installs a handler of its own.
            with StopRequest(RESUMES.get(command, "")).listening():
                name = "chat" if command == "generate" else command
                module = importlib.import_module(f"drafttrain.commands.{name}")
                getattr(module, command)(loaded)
            return 0
    except Stopped as stopped:
        # Of another launcher's ranks any may be the one that is left to say it.
        if rank() == 0 if is_ours() or not composed else speaks_first():
            say_error(str(stopped))
        return stopped.code
    except KeyboardInterrupt:  # before a command listens
        if rank() == 0:
            say_error(f"interrupted{RESUMES.get(command or '', '')}")
        return 130
    except BrokenPipeError:  # the reader of our output has left, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        debug = os.environ.get(DEBUG) == "1"
        if debug and not is_ours():
            raise
        text = traceback.format_exc() if debug else _explain(error, folder, arguments)
        status = _status(error)
        if is_ours():
            leave_word(text, status, foreseen=_foreseen(error), consequence=is_consequence(error))
        # Every rank finds the same mistake in the command line.
        elif speaks_first() if composed else rank() == 0:
            say_error(f"error: {text}")
        return status


def read(arguments: Sequence[str]) -> Request:
    """Parse the command line; UsageError names what is invalid in it."""
    request = Request()
    rest = iter(arguments)
    for text in rest:
        name, equals, value = text.partition("=")
        if name in TAKES_A_VALUE and not equals:
            value = next(rest, "")
        if name in ("--local_rank", "--local-rank"):  # DeepSpeed's launcher adds it
            continue
        if name in ("-h", "--help"):
            request.help = True
        elif name in ("-c", "--config"):
            request.show_config = True
        elif name in ("--cfg", "--info"):  # as Hydra spells it
            known = "job" if name == "--cfg" else "defaults"
            if value != known:
                raise UsageError(f"{name} must be {known}, got {shown(value) or 'nothing'}")
            request.show_config |= name == "--cfg"
            request.show_defaults |= name == "--info"
        elif name in ("-m", "--multirun"):
            request.multirun = True
        elif name == "--version":
            request.version = True
        elif name == "--config-dir":
            request.config_dir = Path(os.path.expanduser(value))
            if not value or not request.config_dir.is_dir():
                got = shown(value) or "nothing"
                raise UsageError(f"--config-dir must name a folder, got {got}")
        elif name == "--slurm":
            request.slurm = value
        elif text.startswith("-"):
            raise UsageError(
                f"no option is called {name}{did_you_mean(name, OPTIONS)} "
                f"options: {', '.join(OPTIONS)}"
            )
        elif request.command is None:
            if text not in COMMANDS:
                # Typos rarely change the first letter, and `generate` does not mean `regenerate`.
                near = [name for name in COMMANDS if name[0] == text[:1]]
                raise UsageError(
                    f"no command is called {shown(text)}{did_you_mean(text, near)} "
                    f"commands: {', '.join(COMMANDS)}"
                )
            request.command = text
        else:
            request.overrides.append(text)
    return request


def _help(request: Request) -> str:
    from drafttrain.config.help import command_help, overview, section_help

    if request.command is None:
        return overview()
    groups = command_groups(request.command)
    own = [entry.name for entry in fields(COMMANDS[request.command]) if entry.name not in groups]
    asked: dict[str, str] = {}
    for text in request.overrides:  # --help SECTION or --help SECTION=CHOICE; keys are ignored
        section, _, choice = text.partition("=")
        if "." in section:
            continue
        if section not in groups and section not in own:
            options = [*groups, *own]
            raise UsageError(
                f"no section is called {section}{did_you_mean(section, options)} "
                f"sections: {', '.join(options)}"
            )
        if choice and section in groups:
            check_choice(section, choice, sorted({*choices(section), groups[section]}))
        asked[section] = choice or asked.get(section) or groups.get(section, "")
    texts = [section_help(request.command, *each) for each in asked.items()]
    return "\n\n".join(texts) or command_help(request.command)


def _explain(error: Exception, folder: Path | None, arguments: list[str]) -> str:
    """Return the error in one line; write the traceback of an unexpected one to a file."""
    text = escaped(" ".join(str(error).split()))
    if _foreseen(error):
        return text
    if errno_of(error) in OF_THE_MACHINE:
        where = getattr(error, "filename", None) or folder
        return f"{escaped(str(where))}: {reason(error, folder or Path())}"
    # The driver's own refusal, with a few megabytes left, is an error like any other of a GPU.
    refused = type(error).__name__ == "AcceleratorError" and "out of memory" in text
    if refused or type(error).__name__ == "OutOfMemoryError":
        return (
            "out of GPU memory; lower hardware.micro_batch in training, which changes no result, "
            f"or eval.batch_size in decoding, or end other processes on this GPU: {text}"
        )
    name = f"error_rank{rank()}.log" if rank() else "error.log"
    # os.path returns False where pathlib raises: the name may be too long or invalid.
    kept = folder is not None and os.path.isdir(folder)
    log = folder / name if folder and kept else Path(f"drafttrain_{name}")
    date = datetime.now(UTC).isoformat(timespec="seconds")
    trace = "".join(traceback.format_exception(error))
    try:
        append_text(log, f"{date} {call(*arguments)}\n{trace}\n")
        where = f"the traceback is in {log}; {DEBUG}=1 shows it here"
    except Exception as problem:  # whatever it is, the first error must be reported
        where = f"{escaped(str(problem))}; {DEBUG}=1 shows the traceback here"
    return f"{type(error).__name__}: {text} ({where})"


def _status(error: Exception) -> int:
    meant = isinstance(error, ValueError) and not isinstance(error, MachineError)
    return 2 if meant and _foreseen(error) else 1


def _foreseen(error: Exception) -> bool:
    """Whether this package raised the error for the user to read."""
    if type(error).__module__.startswith("drafttrain."):
        return True
    frames = list(traceback.walk_tb(error.__traceback__))
    raised_in = frames[-1][0].f_globals.get("__name__", "") if frames else ""
    return isinstance(error, ValueError) and raised_in.startswith("drafttrain.")


def _multirun(request: Request) -> int:
    from drafttrain.commands.multirun import multirun

    if request.show_config or request.show_defaults or request.slurm is not None:
        other = "--slurm" if request.slurm is not None else "--config"
        raise UsageError(
            f"{other} is for one job: leave out --multirun, and give each key one value"
        )
    return multirun(str(request.command), request.overrides, request.config_dir)


def _slurm_script(request: Request, config: Any) -> str:
    from drafttrain.runtime.slurm import batch_script

    if request.command not in TOGETHER:
        raise UsageError(f"--slurm is for {', '.join(TOGETHER)}, got {request.command}")
    folder = [f"--config-dir={request.config_dir}"] if request.config_dir else []
    words = [str(request.command), *folder, *request.overrides]
    name = config.run.name if request.command == "train" else f"capture-{config.model.name}"
    return batch_script(words, request.slurm or "", config.hardware, re.sub(r"[^\w.-]", "_", name))


if __name__ == "__main__":
    end(main())
