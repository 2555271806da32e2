"""A sweep: a command line with several values of a key, as a command line for each combination."""

import itertools
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from drafttrain.config.compose import compose
from drafttrain.config.groups import bases, choices, file_of, own_groups, read_choice
from drafttrain.config.overrides import UsageError, parse, quoted, revealed
from drafttrain.runtime.untrusted_input import shown

FOLDER = "hydra.sweep.dir="  # Hydra's own key, the only one that is accepted
# The key that names what a command writes. `tune` writes into the run that it measures.
PLACES = {
    "train": "run.dir",
    "evaluate": "run.dir",
    "export": "export.dir",
    "compare": "compare.dir",
    "capture": "store.dir",
    "regenerate": "regenerate.out",
    "plan": "plan.dir",
}
LONGEST = 80  # characters of a name
LONGEST_TAG = 64  # characters that Weights & Biases takes


@dataclass(frozen=True)
class SweepJob:
    """One command line of a sweep."""

    name: str
    told: list[str]  # its own values of the swept keys
    overrides: list[str]  # all overrides of the command
    run: str | None  # the folder of the run that it makes or measures
    evaluation: str | None  # the name of what it measures there


@dataclass(frozen=True)
class Sweep:
    """The jobs of a sweep, and the folder that they write to."""

    folder: Path
    jobs: list[SweepJob]


def sweep_of(command: str, overrides: Sequence[str]) -> Sweep:
    """Return a job for every combination of the values that Hydra's sweep syntax gives.

    That is a,b or choice(a,b), range(3), and glob(eagle*) of a group; an experiment may give such
    values under hydra.sweeper.params, of keys that the command line does not set. A job without a
    given place gets one in the folder of the sweep, whose name is its group at the tracker; its own
    values are its tags. Each job is composed here: UsageError for the first that cannot be.
    """
    folders = [text.removeprefix(FOLDER) for text in overrides if text.startswith(FOLDER)]
    typed = [text for text in overrides if not text.startswith(FOLDER)]
    parsed = parse(command, typed, sweeps=True)
    typed += _asked_by_experiments(parsed)
    parsed = parse(command, typed, sweeps=True)
    swept = [override.is_sweep_override() for override in parsed]
    keys = [_leaf(o.key_or_group) for o, many in zip(parsed, swept, strict=True) if many]
    # The same command line finds the same folder again.
    code = zlib.crc32("\n".join([command, *typed]).encode())
    own = f"{'-'.join([command, *keys])[:LONGEST]}-{code:08x}"
    folder = Path(folders[-1]) if folders else Path("outputs", "sweeps", own)
    given = {override.key_or_group for override in parsed}
    jobs, names = [], Counter[str]()
    for values in itertools.product(*map(_values, parsed)):
        told = [value for value, many in zip(values, swept, strict=True) if many]
        name = _name(told) or command
        names[name] += 1
        if names[name] > 1:
            name = f"{name}-no{names[name]}"
        words = [*values, *_place(command, folder, name, given, told)]
        config: Any = compose(command, words)
        run = revealed(config.run.dir) if "run" in config else None
        evaluation = revealed(config.eval.name) if command == "evaluate" else None
        # An evaluation of a run stays in that run, where it is.
        stays = command == "evaluate" and "run.dir" in given
        if not stays and "group" in config.get("tracker", ()):
            tags = [revealed(tag) for tag in config.tracker.tags]
            tags += [text[:LONGEST_TAG] for text in told]
            words.append(listed("tracker.tags", list(dict.fromkeys(tags))))
            if config.tracker.group is None:
                words.append(f"tracker.group={quoted(folder.name)}")
        jobs.append(SweepJob(name, told, words, run, evaluation))
    return Sweep(folder, jobs)


def _asked_by_experiments(parsed: Sequence[Override]) -> list[str]:
    """Return the sweeps of the chosen experiments, as Hydra's own sweeper takes them from yaml."""
    given = {override.key_or_group for override in parsed}
    found = []
    for override in parsed:
        group, name = override.key_or_group, str(override.value())
        if group not in own_groups() or override.is_sweep_override() or name not in choices(group):
            continue
        found += [f"{k}={v}" for k, v in _params(group, name).items() if k not in given]
    return found


def _params(group: str, name: str) -> dict[str, Any]:
    """Return what a choice sweeps over, and what those that it is built on do."""
    file = file_of(group, name)
    content: Any = read_choice(file) if file else {}
    merged = {k: v for base in bases(content) for k, v in _params(group, base).items()}
    params = content
    for key in ("hydra", "sweeper", "params"):
        params = params.get(key, {}) if isinstance(params, dict) else None
    if not isinstance(params, dict):
        raise UsageError(
            f"hydra.sweeper.params of {group}={name} must be keys with values to sweep over, "
            f"as in run.seed: 0,1,2, got {shown(params)}"
        )
    return merged | params


def several(key: str, values: Sequence[str]) -> str:
    """Return the override that sweeps over these texts."""
    return f"{key}={','.join(map(_written, values))}"


def listed(key: str, values: Sequence[str]) -> str:
    """Return the override that gives a list of these texts."""
    return f"{key}=[{','.join(map(_written, values))}]"


def _written(text: str) -> str:
    return text if re.fullmatch(r"[\w./+-]+", text) else quoted(text)


def _values(override: Override) -> list[str]:
    """Return every value that an override sweeps over, each as an override of its own."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    loader: Any = SimpleNamespace(get_group_options=lambda group, **_: sorted(choices(group)))
    override.config_loader = loader  # what glob(...) asks for the choices of a group
    try:
        if not override.is_discrete_sweep():
            raise HydraException("an interval has infinitely many values")
        found = [f"{override.get_key_element()}={v}" for v in override.sweep_string_iterator()]
    except HydraException as error:
        raise UsageError(
            f"{override.input_line} must give values one by one, as a,b or range(3): {error}"
        ) from error
    if not found:
        raise UsageError(f"{override.input_line} must give values, got none")
    return found


def _place(command: str, folder: Path, name: str, given: set[str], told: list[str]) -> list[str]:
    """Return the overrides that give a job a place where no other job of the sweep writes."""
    key = PLACES.get(command)
    if command == "evaluate" and not given & {"drafter", "drafter.path"}:
        key = None  # it needs a run, which is not there
    added = {} if key is None or key in given else {key: str(folder / name)}
    if command == "regenerate" and added:
        added = {"regenerate.out": f"{folder / name}.jsonl"}
    if command == "train":
        added["run.name"] = name
    if command == "evaluate" and "run.dir" in given:
        own = _name([text for text in told if not text.startswith("run.dir=")])
        added = {"eval.name": own} if own else {}
    return [f"{key}={quoted(value)}" for key, value in added.items() if key not in given]


def _name(told: Sequence[str]) -> str:
    """Return a name for overrides: eagle3-seed_0 for drafter=eagle3 run.seed=0."""
    parts = []
    for text in told:
        key, _, value = text.lstrip("+").partition("=")
        value = value.strip("'\"")
        if key == "run.dir":  # whose last part is a name already
            value = Path(value).name
        parts.append(value if "." not in key or key == "run.dir" else f"{_leaf(key)}_{value}")
    return re.sub(r"[^\w.+-]+", "_", "-".join(parts)).strip("_.-")[:LONGEST]


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]
