"""Resuming a run: its saved settings are restored, and settings that differ are reported."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override

from drafttrain.config.groups import WITHHELD, own_groups, saved_section
from drafttrain.config.overrides import SAVED, UsageError, parse, spelled
from drafttrain.runtime.run_folder import CONFIG, absolute, has_checkpoints, load_config
from drafttrain.runtime.settings import AUTO, require
from drafttrain.runtime.untrusted_input import did_you_mean, shown

Saved = dict[str, dict[str, Any]]
Difference = tuple[str, Any, Any]  # a key, its saved value, its value now

# Keys that the folder of a run may be derived from, where it is not given.
NAMING = ("run.name", "run.init_from", "drafter", "drafter.name", "model", "model.name")
# Keys of the section `run` that belong to the run, not to one command.
OF_THE_RUN = ("name", "init_from", "seed")
# Sections and keys that the losses, and so the drafter, depend on ...
DECISIVE = {
    *("run.seed", "run.init_from", "model", "data", "features", "drafter", "trainer", "optimizer"),
    *("hardware.train_dtype", "hardware.weights_dtype"),
}
# ... except these. The target's weights are compared by their fingerprint, wherever they are.
HARMLESS = {
    *("model.name", "model.path", "model.adapter", "model.repo", "model.revision"),
    *("model.embedded", "model.shape"),
    *("data.name", "data.cache_dir", "data.preview"),
    *("drafter.name", "trainer.name", "optimizer.name"),
    *("features.name", "features.prefetch", "features.validate", "features.checksums"),
    *("trainer.epochs", "trainer.max_steps", "trainer.log_every", "trainer.validate_every"),
    *("trainer.validation_prompts", "trainer.validation_tokens"),
    *("trainer.save_every", "trainer.keep_checkpoints"),
}
# What a checkpoint cannot be trained further with, whatever run.allow_changes names.
NEVER = {"run.seed", "run.init_from", "trainer.tokens_per_step", "optimizer.muon"}
MOST = 3  # differences that an error names


def run_to_resume(parsed: list[Override], dir_of: Callable[[list[str]], str]) -> Saved | None:
    """Return the saved configuration of the run to resume, None if there is none or not asked."""
    given = {override.key_or_group: override for override in parsed}
    asked = given["run.resume"].value() if "run.resume" in given else False
    if not isinstance(asked, bool):  # which would become true later, without the saved settings
        raise UsageError(f"run.resume must be true or false, got {shown(asked)}")
    if not asked:
        return None
    naming = ("run.dir", "run.name") if "run.dir" in given else NAMING
    naming = (*naming, *own_groups())
    folder = dir_of([str(given[key].input_line) for key in naming if key in given])
    if not (Path(folder) / CONFIG).is_file():
        return None
    saved = load_config(Path(folder))
    # An evaluation without a run leaves a configuration too.
    return {**saved, "run": {**saved.get("run", {}), "dir": folder}} if "trainer" in saved else None


def with_saved(parsed: list[Override], saved: Saved, groups: Iterable[str]) -> list[Override]:
    """Restore the groups and the section `run` as saved, except what is given."""
    given = {override.key_or_group: override.value() for override in parsed}
    run = saved_section("run", saved)
    if run["init_from"] is not None and given.get("drafter") == saved["drafter"].get("name"):
        # What it started from has set the drafter's shape, which the family alone does not tell.
        parsed = [override for override in parsed if override.key_or_group != "drafter"]
        del given["drafter"]
    told = [f"{group}={SAVED}" for group in groups if group not in given]
    told += [f"run.{key}={spelled(run[key])}" for key in (*OF_THE_RUN, "dir")]
    return [*parse("train", told), *parsed]


def check_resumed(config: Any) -> list[str]:
    """Return lines on the settings in which a resumed run differs from its saved configuration.

    ValueError where a difference changes the losses and run.allow_changes does not name it.
    """
    folder = Path(config.run.dir)
    sections = {field.name: asdict(getattr(config, field.name)) for field in fields(config)}
    known = [*sections, *(f"{name}.{key}" for name, section in sections.items() for key in section)]
    for name in config.run.allow_changes:
        hint = did_you_mean(name, known).rstrip(";")
        require(name in known, "run.allow_changes", "name sections and keys", name, hint)
    if not (config.run.resume and has_checkpoints(folder)):
        return []
    found = differences(config, load_config(folder))
    decisive = [one for one in found if _named(one[0], DECISIVE) and one[0] not in HARMLESS]
    possible = [one for one in decisive if not _never(*one)]
    allowed = [one for one in possible if _named(one[0], config.run.allow_changes)]
    refused = [one for one in decisive if one not in allowed]
    refused.sort(key=lambda one: one in possible)  # what cannot be allowed comes first
    if refused:
        key, before, now = refused[0]
        names = ",".join(dict.fromkeys([*config.run.allow_changes, *(one[0] for one in refused)]))
        others = [one[0] for one in refused[1:]]
        more = f"; so do {', '.join(others[:MOST])}" if others else ""
        more += f" and {len(others) - MOST} more" if len(others) > MOST else ""
        allow = "no checkpoint allows that"
        if refused[0] in possible:
            allow = (
                f"run.allow_changes=[{names}] resumes all the same where target, data and the "
                "drafter's shape stay as they were"
            )
        raise ValueError(
            f"{key} must be {_text(before)} to resume, as in {folder / CONFIG}, got {_text(now)}, "
            f"which changes the losses{more}; {allow}, "
            "run.name=ANOTHER_NAME starts another run"
        )
    lines = []
    if free := [one for one in found if one not in decisive]:
        line, schedule = f"resumed with {_listed(free)}", config.trainer.schedule
        line += ", which changes no loss of a step"
        if schedule != "constant" and "trainer.max_steps" in [one[0] for one in free]:
            line += f"; the {schedule} schedule of trainer.lr ends with the last"
        lines.append(line)
    if allowed:
        lines.append(f"resumed with {_listed(allowed)}, as run.allow_changes allows")
    return lines


def differences(config: Any, saved: Saved) -> list[Difference]:
    """Return where a configuration differs from a saved one; another class differs as a whole."""
    found: list[Difference] = []
    for field in fields(config):
        section = getattr(config, field.name)
        before = saved_section(field.name, saved)
        kind = str(before.get("_target_", "")).rpartition(".")[2]
        if kind and kind != type(section).__name__:
            found.append((field.name, before.get("name", kind), section.name))
            continue
        keys = OF_THE_RUN if field.name == "run" else asdict(section)
        found += [
            (f"{field.name}.{key}", before.get(key), value)
            for key, value in asdict(section).items()
            if key in keys
            and key not in WITHHELD
            and absolute(f"{field.name}.{key}", before.get(key))
            != absolute(f"{field.name}.{key}", value)
            and not (field.name == "trainer" and value == AUTO)  # not chosen yet
        ]
    return found


def _never(key: str, before: Any, now: Any) -> bool:
    return key in NEVER or (key == "trainer.ema_decay" and 0 in (before, now))  # no average is kept


def _named(key: str, names: Iterable[str]) -> bool:
    return bool({key, key.split(".")[0]} & set(names))


def _listed(differences: list[Difference]) -> str:
    return ", ".join(f"{key} {_text(before)} -> {_text(now)}" for key, before, now in differences)


def _text(value: Any) -> str:
    return spelled(value) if value is None or isinstance(value, bool) else str(value)
