"""The configuration of a command: Hydra composes yaml, frozen dataclasses check it."""

import os
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from drafttrain.config.groups import (
    choices,
    command_groups,
    conf_dir,
    content_of,
    keys_of,
    offer_saved,
    own_dir,
    own_file,
    own_groups,
    saved_section,
)
from drafttrain.config.overrides import (
    ADMITTED,
    SAVED,
    WITHOUT_RUN,
    UsageError,
    hidden,
    parse,
    quoted,
    revealed,
    start_of,
    with_drafter,
    with_start,
    with_target,
)
from drafttrain.config.resume import Saved, run_to_resume, with_saved
from drafttrain.config.sections import COMMANDS, Config
from drafttrain.config.values import build, check_target
from drafttrain.runtime.run_folder import CONFIG, call, load_config
from drafttrain.runtime.settings import AUTO
from drafttrain.runtime.untrusted_input import did_you_mean, shown

# The sections that training takes from the run it starts from, where nothing else is chosen.
STARTED_FROM = ("model", "trainer", "drafter")
# Keys that name a folder, where ~ is the user's own.
FOLDERS = {"dir", "converter", "measured", "run"}
# Keys that name a file or folder, which those who read it expand.
FILES = {"path", "adapter", "out", "prompts", "init_from", "cache_dir", "python", "vllm_python"}
# Names that other programs use for a key of ours.
ELSEWHERE = {
    "batch_size": ["hardware.micro_batch", "trainer.tokens_per_step"],
    "learning_rate": ["trainer.lr"],
    "lr": ["trainer.lr"],
    "steps": ["trainer.max_steps"],
}


def compose(command: str, overrides: Sequence[str]) -> DictConfig:
    """Return the resolved configuration of a command, its texts `hidden`; imports nothing heavy.

    The choice `saved` of a group is what run.dir/config.yaml holds, whose texts stay as they are.
    The command line and the user's own yaml may interpolate values, as in ${oc.env:USER}. Raises
    UsageError in one line for an unknown section, choice or key and for a missing value.
    """
    try:
        head, chosen, values, resumed = _chosen(command, overrides)
        config = _composed(head, chosen, values)
        missing = sorted(OmegaConf.missing_keys(config))
        if missing:
            raise UsageError(f"{missing[0]} must be given, as in {missing[0]}=VALUE")
        sections = [field.name for field in fields(COMMANDS[command])]
        plain: dict[str, Any] = {
            name: OmegaConf.to_container(config[name], resolve=True) for name in sections
        }
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise UsageError(shown(error, 400)) from error
    _check_effect({override.key_or_group for override in values}, plain, resumed)
    for name, section in plain.items():
        for key, value in section.items():
            if key not in FOLDERS | FILES or not str(value).startswith("~"):
                continue
            if (expanded := os.path.expanduser(value)) == value:
                raise UsageError(
                    f"{name}.{key} must have the name of a user after ~, got {shown(value)}; "
                    f"./{shown(value)} is a place in this folder"
                )
            section[key] = expanded if key in FOLDERS else value
    if command == "compare" and isinstance(runs := plain["compare"]["runs"], list):
        plain["compare"]["runs"] = [
            os.path.expanduser(run) if isinstance(run, str) else run for run in runs
        ]
    return OmegaConf.create(hidden(plain))


def defaults_of(command: str, overrides: Sequence[str]) -> list[tuple[str, str]]:
    """Return the files that a command composes, in order, and the section that each fills."""
    head, chosen, *_ = _chosen(command, overrides)
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        try:
            found = loader.compute_defaults_list(head, _groups_told(chosen), RunMode.RUN).defaults
        except (HydraException, yaml.YAMLError) as error:
            raise UsageError(shown(error, 400)) from error
    return [
        (str(entry.config_path), entry.package or "")
        for entry in found
        if not str(entry.config_path).startswith(("hydra", "_dummy"))
    ]


def _chosen(
    command: str, overrides: Sequence[str]
) -> tuple[str, list[Override], list[Override], Saved]:
    """Return a command's primary yaml, its choices and values as overrides, and a resumed run's."""
    if command == "compare":  # the one key that may omit its section
        overrides = [f"compare.{text}" if text.startswith("runs=") else text for text in overrides]
    if command == "plan":
        overrides = [re.sub("^run.dir=", "plan.run=", text) for text in overrides]
    parsed = parse(command, overrides)
    sections = [field.name for field in fields(COMMANDS[command])]
    head = command
    if command in WITHOUT_RUN:
        parsed = with_drafter(command, parsed)
        given = {override.key_or_group: override.value() for override in parsed}
        run = given.get("run.dir")
        if "drafter" in given and (run is None or not os.path.isfile(_folder(run) / CONFIG)):
            head = "evaluate_without_run"  # for a drafter that no run has trained
    groups = command_groups(head)
    if head != command:
        wanted = command_groups(command).items()
        more = {group: name for group, name in wanted if group not in groups and name != SAVED}
        parsed = [*parse(command, [f"+{group}={name}" for group, name in more.items()]), *parsed]
        groups |= more
    resumed = start = None
    if command == "train":
        resumed = run_to_resume(parsed, lambda texts: revealed(compose(command, texts).run.dir))
        start = start_of(parsed) if resumed is None else None
    if resumed is not None:
        offer_saved(resumed, [*groups], sections)
        parsed = with_saved(parsed, resumed, groups)
        groups = dict.fromkeys(groups, SAVED)
    if start is not None:
        offered = STARTED_FROM if os.path.isfile(start / CONFIG) else ()
        if offered:
            saved_run = load_config(start, "run.init_from")
            if "trainer" not in saved_run:
                raise UsageError(
                    f"run.init_from must be the folder of a run that was trained, got {start}, "
                    "that of an evaluation; give the directory of the drafter it measured"
                )
            offer_saved(saved_run, [*offered], sections)
        parsed = with_start(parsed, start, offered)
        groups |= {group: SAVED for group in offered}
    run = [override.value() for override in parsed if override.key_or_group == "plan.run"]
    if run and run[-1] is not None:
        saved_run = load_config(_folder(run[-1]))
        theirs = [name for name in sections if name in groups and name in saved_run]
        offer_saved(saved_run, theirs, sections)
        chosen_here = {override.key_or_group for override in parsed}
        usual = [f"{group}={SAVED}" for group in theirs if group not in chosen_here]
        parsed, groups = [*parse(command, usual), *parsed], groups | dict.fromkeys(theirs, SAVED)
    if groups.get("model") != SAVED:  # a run's target keeps the name that it was trained under
        parsed = with_target(command, parsed)
    if command not in ("train", "plan") and SAVED in groups.values():
        saved_run = _saved_run(command, parsed)
        offer_saved(saved_run, [g for g in groups if groups[g] == SAVED], sections)
    others, chosen, values = own_groups(), [], []
    for override in parsed:
        key, value = override.key_or_group, override.value()
        own = key in others
        if not own and _section_of(override, command, sections, groups) != key:
            values.append(override)
            continue
        if own and override.type != OverrideType.ADD:
            raise UsageError(f"{key} is in no defaults: it takes a plus, as in +{key}={value}")
        if not own and key not in groups:
            raise UsageError(f"{key} is a section: set its keys, as in {key}.dir=...")
        saved = [SAVED] if groups.get(key) == SAVED else []
        check_choice(key, value, [*sorted(choices(key)), *saved])
        if command == "train" and not (start or resumed) and value == ADMITTED:
            raise UsageError(
                "drafter=admitted was trained elsewhere: measure it, python -m drafttrain evaluate "
                "drafter.path=DIR, or train it further, python -m drafttrain train "
                "run.init_from=DIR"
            )
        chosen.append(override)
    return head, chosen, values, resumed or {}


def _check_effect(given: set[str], plain: dict[str, Any], saved: Saved) -> None:
    """Refuse a value that another one, which is a number already, leaves without effect.

    What a resumed run was told in the first place may be told again.
    """
    for key, by, instead in (
        ("drafter.lr", "trainer.lr", "give trainer.lr={}"),
        ("trainer.epochs", "trainer.max_steps", "give trainer.max_steps=auto"),
    ):
        section, name = key.split(".")
        if key not in given or by in given or "trainer" not in plain:
            continue
        value, other = plain[section][name], plain["trainer"][by.split(".")[1]]
        if other in (AUTO, value) or saved.get(section, {}).get(name) == value:
            continue
        raise UsageError(f"{key}={value} has no effect with {by}={other}: {instead.format(value)}")


def _folder(given: object) -> Path:
    return Path(str(given)).expanduser()


def typed(config: DictConfig, schema: type[Config]) -> Config:
    """Return the frozen dataclasses of a composed configuration; this imports their modules.

    ValueError in one line names section.key, what must hold and what was got.
    """
    return _typed(as_plain(config), schema)


def _typed(plain: dict[str, dict[str, Any]], schema: type[Config]) -> Config:
    for section, values in plain.items():
        check_target(section, values.get("_target_"))
    # Drafters come last: their modules alone import torch, which takes seconds.
    built = {name: build(name, plain[name]) for name in sorted(plain, key="drafter".__eq__)}
    return schema(**built)


def as_plain(config: DictConfig) -> dict[str, dict[str, Any]]:
    """Return a composed configuration as plain dicts."""
    found: dict[str, dict[str, Any]] = revealed(OmegaConf.to_container(config))
    return found


def printed(config: DictConfig) -> str:
    """Return a composed configuration as yaml."""
    return str(yaml.safe_dump(as_plain(config), sort_keys=False, allow_unicode=True))


def load_choice(section: str, name: str) -> Any:
    """Return one entry of a group as its dataclass, such as the drafter every report refers to."""
    check_choice(section, name, sorted(choices(section)))
    return build(section, content_of(section, name))


def recorded(folder: Path, schema: type[Config], key: str) -> Config:
    """Return a run's configuration; key: the setting that names the folder, for messages."""
    saved = load_config(folder, key)
    names = [field.name for field in fields(cast(Any, schema))]
    return _typed({name: saved_section(name, saved) for name in names}, schema)


def _composed(head: str, chosen: list[Override], values: list[Override]) -> DictConfig:
    """Return what Hydra composes; an unknown key is reported in our words, not in Hydra's."""
    search = _groups_told(chosen)
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        try:
            return hydra.compose(head, [*search, *(text for o in values for text in _told(o))])
        except (HydraException, OmegaConfBaseException):
            config = hydra.compose(head, search)
            for override in values:
                _check_key(override, config)
            raise


def _groups_told(chosen: list[Override]) -> list[str]:
    """Return the choices as overrides for Hydra, and the search path of the user's own yaml."""
    own = own_dir()
    search = [f"hydra.searchpath=[{quoted(own.resolve().as_uri())}]"] if own else []
    return search + [str(override.input_line) for override in chosen]


def _told(override: Override) -> list[str]:
    """Return a value as overrides for Hydra."""
    key, text = override.key_or_group, str(override.input_line)
    if key.split(".")[0] == "deepspeed":  # its `config` holds DeepSpeed's own keys
        return [text]
    # A key that exists needs no plus, and no new key can be added.
    text = text.lstrip("+")
    # A dict replaces the one before it, as a list does; Hydra would join them.
    return [f"{key}=null", text] if isinstance(override.value(), dict) else [text]


def _section_of(
    override: Override, command: str, sections: list[str], groups: dict[str, str]
) -> str:
    key = override.key_or_group
    section = key.split(".")[0]
    if section in sections:
        return section
    places = ELSEWHERE.get(key, [])
    if key not in ELSEWHERE:
        places = [f"{name}.{key}" for name in sections if key in keys_of(command, name, groups)]
    places = [place for place in places if place.split(".")[0] in sections]
    hint = did_you_mean(section, sections)
    if places:
        value = str(override.input_line).partition("=")[2]
        hint = f"; did you mean {' or '.join(f'{place}={value}' for place in places[:3])}?"
    raise UsageError(f"no section is called {shown(section)}{hint} sections: {', '.join(sections)}")


def check_choice(section: str, value: Any, options: list[str]) -> None:
    """Raise UsageError unless `value` is among the choices of a section."""
    if value not in options:
        own = own_dir()
        raise UsageError(
            f"{section}={value} is not a choice{did_you_mean(str(value), options)} "
            f"choices: {', '.join(options)}{f'; looked in {own / section} too' if own else ''}"
        )
    # By its name a saved run finds the choice again.
    file = own_file(section, str(value)) if section == "drafter" else None
    named = content_of(section, str(value)).get("name", value) if file else value
    if named != value:
        raise UsageError(f"{file} must say `name: {value}`, as the file is called, got {named}")


def _check_key(override: Override, config: DictConfig) -> None:
    dotted = override.key_or_group
    path = dotted.split(".")
    if override.type != OverrideType.CHANGE and path[0] == "deepspeed":
        return
    node: Any = config
    for depth, key in enumerate(path):
        keys = [str(k) for k in node] if isinstance(node, DictConfig) else []
        if key not in keys:
            name = config[path[0]].get("name") if depth == 1 and choices(path[0]) else None
            section = f"{path[0]}={name}" if name else ".".join(path[:depth])
            own = ""
            if isinstance(node, DictConfig) and path[0] == "deepspeed" and depth > 1:
                own = f"; a key of DeepSpeed's own takes a plus: +{dotted}=..."
            elif isinstance(node, DictConfig) and depth > 1:
                own = f"; another dict replaces it: {section}='{{{key}: ...}}'"
            elif name and (file := own_file(path[0], name)):
                own = f"; a yaml lists what can be set: {file}"
            raise UsageError(
                f"{section} has no key {key}{did_you_mean(key, keys)} "
                f"keys: {', '.join(k for k in keys if k != '_target_') or 'none'}"
                f"{own}"
            )
        node = None if OmegaConf.is_missing(node, key) else node[key]


def _saved_run(command: str, parsed: list[Override]) -> dict[str, dict[str, Any]]:
    named = [override.value() for override in parsed if override.key_or_group == "run.dir"]
    if not named or named[-1] is None:
        found = sorted(Path("outputs").glob("*/config.yaml"), key=lambda p: p.stat().st_mtime)
        example = found[-1].parent if found else "outputs/demo"
        raise UsageError(f"run.dir must be given: {call(command, f'run.dir={example}')}")
    return load_config(_folder(named[-1]))
