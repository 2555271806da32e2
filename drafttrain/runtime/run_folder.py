"""The run folder: the configuration of a run, its provenance, and whether the folder is free."""

import glob
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

import drafttrain
from drafttrain.runtime import limits
from drafttrain.runtime.disk import append_text, refuse_links, require_writable, write_whole
from drafttrain.runtime.settings import Settings
from drafttrain.runtime.untrusted_input import UntrustedError, read_object, read_yaml, shown

CONFIG = "config.yaml"
DEEPEST = 8  # lists and dicts in one another; DeepSpeed's own keys have four
CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"  # of a store
PROVENANCE = "provenance.json"
LOG = "train.log"
METRICS_FILE = "metrics.jsonl"
# The settings that name a file or a folder: recorded so that they hold wherever they are read.
PATHS = frozenset(
    {"model.path", "model.adapter", "data.path", "data.cache_dir", "drafter.path", "store.dir"}
    | {"drafter.members", "features.dir", "run.init_from", "eval.prompts", "eval.vllm_python"}
    | {"vllm.python", "data.repo", "eval.dataset", "eval.two_model"}  # or on the Hub, or the PATH
)
REPO = re.compile(r"[\w-][\w.-]{,95}/[\w-][\w.-]{,95}", re.ASCII)  # of the Hub: owner/name
WITHIN = "${run.dir}/"  # begins a path below the run folder, which may be moved or copied
PACKAGES = (
    *("torch", "transformers", "tokenizers", "datasets", "peft", "deepspeed", "wandb"),
    *("hydra-core", "huggingface_hub", "safetensors", "numpy"),
)


@dataclass(frozen=True, kw_only=True)
class RunConfig(Settings):
    """The name and seed of a run, its folder, and what it starts or resumes from."""

    section = "run"

    name: limits.FolderName
    dir: str
    resume: bool
    skip_damaged: bool
    allow_changes: list[str]
    init_from: str | None
    seed: limits.NonNegativeInt


def call(*arguments: str) -> str:
    """Return a command line of this program that a shell reads back."""
    return " ".join(map(_quoted, ["python", "-m", "drafttrain", *arguments]))


def _quoted(word: str) -> str:
    """Return a word for a shell; one with control characters as $'...', which bash reads back."""
    if word.isprintable():
        return shlex.quote(word)
    plain = (char if char.isprintable() and char not in "\\'" else None for char in word)
    codes = ("".join(f"\\x{byte:02x}" for byte in os.fsencode(char)) for char in word)
    return "$'" + "".join(char or code for char, code in zip(plain, codes, strict=True)) + "'"


def absolute(key: str, value: Any) -> Any:
    """Return the value of a setting; where it names what exists here, by its absolute path or glob.

    Other names stay as they are: of a repository, of a program on the PATH, in a home folder.
    """
    if key not in PATHS:
        return value
    return _each(_absolute, value)


def _absolute(path: str) -> str:
    if os.path.lexists(path):
        return os.path.abspath(path)
    matches = glob.has_magic(path) and any(glob.iglob(path, recursive=True))
    return os.path.join(glob.escape(os.getcwd()), path) if matches else path


def is_repo(path: str) -> bool:
    """Return whether a path names a repository of the Hub, and nothing in a folder that is here."""
    return bool(REPO.fullmatch(path)) and not (Path(path).exists() or Path(path).parent.is_dir())


def _each(change: Callable[[str], str], value: Any) -> Any:
    """Return a setting with its path, or its list of paths, changed; another value as it is."""
    if isinstance(value, list):
        return [_each(change, one) for one in value]
    return change(value) if isinstance(value, str) else value


def write_config(config: Any, path: Path) -> None:
    """Write the sections of a command such as `TrainConfig`, each with its class.

    Paths are written absolute, or from `WITHIN` where they lie in the folder of `path`.
    """
    folder = f"{os.path.abspath(path.parent)}/"

    def recorded(path: str) -> str:
        return WITHIN + path.removeprefix(folder) if path.startswith(folder) else path

    plain = sections_of(config)
    for name, section in plain.items():
        for key in section:
            if (whole := f"{name}.{key}") in PATHS:
                section[key] = _each(recorded, absolute(whole, section[key]))
    write_whole(path, yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))


def sections_of(config: Any) -> dict[str, dict[str, Any]]:
    """Return the sections of a command's configuration as plain data, each with its class."""
    plain = {}
    for name, section in vars(config).items():
        kind = f"{type(section).__module__}.{type(section).__qualname__}"
        plain[name] = {"_target_": kind, **asdict(section)}
    return plain


def common_to_ranks(command: str, config: Any, dtype: str) -> dict[str, Any]:
    """Return what must be the same on every rank, by name: versions, command and settings.

    dtype: of the products in training, which a rank chooses by its device.
    """
    return {
        **{f"the version of {name}": metadata.version(name) for name in ("torch", "transformers")},
        "the version of drafttrain": drafttrain.__version__,
        "the command": command,
        "the dtype of training": dtype,
        **{
            f"{name}.{key}": value
            for name, section in sections_of(config).items()
            for key, value in section.items()
        },
    }


def append_log(folder: Path, lines: list[str]) -> None:
    """Move lines from the list to the end of the run's log."""
    append_text(folder / LOG, "".join(f"{line}\n" for line in lines))
    lines.clear()


def load_config(folder: Path, key: str = "run.dir") -> dict[str, dict[str, Any]]:
    """Return the sections in the config.yaml of a run, which may be anyone's, as plain data.

    key: the setting that names the folder, for the ValueError if it is not a run's.
    """
    file = folder / CONFIG
    if not os.path.isfile(file):
        state = "does not exist"
        if os.path.exists(folder):
            state = f"has no {CONFIG}" if os.path.isdir(folder) else "is a file"
        raise ValueError(
            f"{key} must be the folder of a run, got {shown(folder, 400)}, which {state}; "
            "`train` makes one: python -m drafttrain train run.name=demo"
        )
    refuse_links(folder)  # so before anything of it is read, written over or removed
    saved = read_yaml(file)
    if not isinstance(saved, dict) or not all(isinstance(v, dict) for v in saved.values()):
        raise ValueError(f"{file} must hold the sections of a run, got something else")
    here = f"{os.path.abspath(folder)}/"

    def found(path: str) -> str:
        return here + path.removeprefix(WITHIN) if path.startswith(WITHIN) else path

    for name, section in saved.items():
        _check_plain(section, f"{shown(file, 400)}: {shown(name)}", DEEPEST)
        for key in section:
            if f"{name}.{key}" in PATHS:
                section[key] = _each(found, section[key])
    return saved


def _check_plain(value: Any, where: str, depth: int) -> None:
    if isinstance(value, dict) and depth:
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where} must have keys that are text, got {shown(repr(key))}")
            _check_plain(inner, f"{where}.{shown(key)}", depth - 1)
    elif isinstance(value, list) and depth:
        for inner in value:
            _check_plain(inner, where, depth - 1)
    elif not isinstance(value, str | int | float | None):
        raise ValueError(
            f"{where} must be text, a number, true, false, null, or few lists of these, "
            f"got {shown(repr(value))}"
        )


def refuse_foreign(
    folder: Path, key: str, names: Iterable[str], first: str, holds: tuple[str, str]
) -> None:
    """Raise ValueError where files that a command would replace are not drafttrain's.

    key: the setting that names the folder. names: of the files. first: the one that the command
    writes first; if it is drafttrain's, its section holds[0] has the key holds[1].
    """
    there = sorted(name for name in names if os.path.lexists(folder / name))
    with suppress(OSError, UntrustedError, TypeError, KeyError):
        read: Callable[[Path], Any] = read_yaml if first == CONFIG else read_object
        if holds[1] in read(folder / first)[holds[0]]:
            return
    if there:
        raise ValueError(
            f"{key} must be a new folder, or one that this command has written, got "
            f"{shown(folder, 400)}, which holds {shown(there[0])} of something else, which would "
            "be replaced; name another folder"
        )


def has_checkpoints(folder: Path) -> bool:
    """Whether a folder holds a checkpoint of training."""
    checkpoints = folder / CHECKPOINTS
    return checkpoints.is_dir() and any(checkpoints.iterdir())


def check_run_folder(config: Any) -> None:
    """Refuse to write over an earlier run. config: that of `train`."""
    folder = Path(config.run.dir)
    require_writable(folder, "run.dir")
    refuse_links(folder)
    if not has_checkpoints(folder):
        names = (CONFIG, PROVENANCE, METRICS_FILE, LOG)
        refuse_foreign(folder, "run.dir", names, CONFIG, ("run", "_target_"))
    elif not config.run.resume:
        raise ValueError(
            f"run.dir must be a folder without checkpoints, got {folder}, which holds an earlier "
            "run; resume it by run.resume=true, or start another by run.name=ANOTHER_NAME"
        )


def provenance(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Return how a result was made: commit, versions, hardware, date, command (this process's)."""
    return {
        "command": call(*(sys.argv[1:] if argv is None else argv)),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **_commit(),
        "versions": {
            "drafttrain": drafttrain.__version__,
            **{name: metadata.version(name) for name in PACKAGES},
        },
        "python": platform.python_version(),
        "platform": platform.platform(),
        "hardware": hardware(),
    }


def _commit() -> dict[str, Any]:
    """Return the commit of the checkout that this package is in, None outside of one."""
    top = Path(drafttrain.__file__).resolve().parent.parent
    call = "git status --porcelain=v2 --branch --untracked-files=no"
    if (top / ".git").exists():
        with suppress(OSError, subprocess.SubprocessError):
            told = subprocess.check_output(
                call.split(), cwd=top, text=True, stderr=subprocess.DEVNULL, timeout=10
            )
            head, *others = told.splitlines()
            changed = any(not line.startswith("#") for line in others)
            return {"commit": head.removeprefix("# branch.oid "), "dirty": changed}
    return {"commit": None, "dirty": None}


def hardware() -> dict[str, Any]:
    """Return the names and numbers of this machine's processors."""
    import torch

    from drafttrain.runtime.hardware import num_cores

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": num_cores(),
        "memory_gib": round(memory / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }
