"""From the values of a section to its dataclass: which class and which values are allowed."""

import ast
import importlib
import math
import re
import sys
from dataclasses import fields, make_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from drafttrain.config.groups import targets
from drafttrain.config.overrides import UsageError, hidden, revealed
from drafttrain.config.sections import SECTIONS
from drafttrain.runtime.untrusted_input import did_you_mean, shown

PACKAGE = Path(__file__).parents[1]
LARGEST = 2**63  # no count, size or seed is as large, and torch takes none that is
OURS = re.compile(r"drafttrain(\.[A-Za-z_]\w*)+")
BLANKS = ("eval.stop_strings",)  # a line end is one


def check_target(section: str, target: Any) -> None:
    """Raise UsageError unless `_target_` names a class that may be imported, which executes code.

    Allowed: a class of this package, one that the user's own yaml names (--config-dir), or None,
    the section's own class, which a drafter has not.
    """
    if target is None and section == "drafter":
        raise UsageError(
            "drafter._target_ must name the class of its configuration, got nothing; the yaml of a "
            "drafter begins with _target_: MODULE.CLASS"
        )
    is_text = isinstance(target, str)
    if target is not None and not (
        is_text and (OURS.fullmatch(target) or _is_own(section, target))
    ):
        raise UsageError(
            f"{section}._target_ must name a class of drafttrain or of a yaml of yours, "
            f"got {shown(target)}; add its yaml with --config-dir FOLDER "
            f"(FOLDER/{section}/NAME.yaml; from Python config_dir=FOLDER)"
        )


def class_of(section: str, target: Any) -> Any:
    """Return the class of a section: its own, or the subclass of it that `_target_` names."""
    check_target(section, target)
    base = _load(section, SECTIONS[section])
    kind = base if target is None else _load(section, target)
    if not issubclass(kind, base):
        raise UsageError(
            f"{section}._target_ must name a subclass of {base.__name__}, got {kind.__name__}"
        )
    return kind


def _is_own(section: str, target: str) -> bool:
    """Return whether the user's yaml names a class, there or where it is defined.

    What other yamls of the folder name is imported only where this one's name alone does not tell.
    """
    named = sorted(name for name in targets(section) if not OURS.fullmatch(name))
    kinds = (_load(section, name) for name in named)
    return target in named or any(
        target == f"{kind.__module__}.{kind.__qualname__}" for kind in kinds
    )


def _load(section: str, path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"{section}._target_ must name a class that can be imported, got {path}: {error}; the "
            "folder of its file must be on PYTHONPATH"
        ) from error
    if not isinstance(found, type):
        raise UsageError(f"{section}._target_ must name a class, got {path}")
    return found


def check_drafter(plain: dict[str, Any]) -> None:
    """Refuse values of the wrong type before torch is imported, as the modules of drafters do.

    The fields are read from the source of the class, where that is of this package, named in conf/,
    and not imported yet.
    """
    target = str(plain.get("_target_"))
    module, _, name = target.rpartition(".")
    if module not in sys.modules and OURS.fullmatch(target) and target in targets("drafter"):
        hints = [
            (key, eval(ast.unparse(line.annotation), {"Any": Any}))
            for key, line in _declared(target).items()
            if key in plain or line.value is None
        ]
        values_of("drafter", plain, make_dataclass(name, hints, kw_only=True))


def _declared(path: str) -> dict[str, ast.AnnAssign]:
    """Return the fields of a dataclass of this package as written, those of its bases too."""
    module, _, name = path.rpartition(".")
    place = PACKAGE.joinpath(*module.split(".")[1:])
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    found: dict[str, ast.AnnAssign] = {}
    for node in ast.parse(file.read_text()).body if file.is_file() else []:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return _declared(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.ClassDef) and node.name == name:
            for base in reversed(node.bases):
                found |= _declared(f"{module}.{ast.unparse(base)}")
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and "ClassVar" not in ast.unparse(line):
                    found[ast.unparse(line.target)] = line
    return found


def build(section: str, plain: dict[str, Any]) -> Any:
    """Return the dataclass of a section. ValueError names the key, what must hold, what was got."""
    kind = class_of(section, plain.get("_target_"))
    return kind(**values_of(section, plain, kind))


def values_of(section: str, plain: dict[str, Any], kind: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, each of its type. UsageError for an invalid value."""
    value = {key: given for key, given in plain.items() if key != "_target_"}
    names = [field.name for field in fields(kind)]
    # Under its own key, so that OmegaConf's errors name drafter.num_heads, not num_heads.
    schema = OmegaConf.create({section: OmegaConf.structured(kind)})
    OmegaConf.set_readonly(schema[section], False)  # frozen dataclasses arrive read-only
    try:
        merged = OmegaConf.select(OmegaConf.merge(schema, {section: hidden(value)}), section)
    except ConfigKeyError as error:
        decorator = "; decorate the class: @dataclass(frozen=True, kw_only=True)"
        raise UsageError(
            f"{error.full_key} is not a field of {kind.__name__}"
            f"{did_you_mean(str(error.key), names)} fields: {', '.join(names)}"
            f"{decorator if error.key in kind.__annotations__ else ''}"
        ) from error
    except OmegaConfBaseException as error:
        raise UsageError(wrong_value(error, kind, value)) from error
    unset = [name for name in names if OmegaConf.is_missing(merged, name)]
    if unset:
        raise UsageError(f"{section}.{unset[0]} must be given, as in {section}.{unset[0]}=VALUE")
    typed = revealed(OmegaConf.to_container(merged))
    hints = get_type_hints(kind)
    for name in names:
        key, found, options = f"{section}.{name}", typed[name], _options(hints[name])
        if found == [] and type(None) in options:
            raise UsageError(f"{key} must not be empty, got []; null takes the usual")
        # OmegaConf lets lists of lists pass for lists of texts.
        nested = isinstance(found, list) and any(isinstance(each, list | dict) for each in found)
        if nested and any(option in WORDS for option in options):
            raise UsageError(_must_be(key, hints[name], found))
        _check(key, found)
    return {name: typed[name] for name in names}


def _check(key: str, value: Any) -> None:
    """Refuse what no setting may be: numbers that are not finite or too large, empty text."""
    if isinstance(value, dict):
        for name, inner in value.items():
            _check(f"{key}.{name}", inner)
    elif isinstance(value, list):
        for inner in value:
            _check(key, inner)
    elif isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{key} must be a finite number, got {value}")
    elif isinstance(value, int) and abs(value) >= LARGEST:
        raise UsageError(f"{key} must be below 2**63, got a number of {value.bit_length()} bits")
    elif isinstance(value, str):
        if not value.strip() and key not in BLANKS:
            raise UsageError(
                f"{key} must not be empty, got {value!r}; leave it out, or give null for none"
            )
        if "\0" in value or (not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value)):
            raise UsageError(f"{key} must be text in UTF-8, got {shown(value)}")


WORDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    list[int]: "a list of integers such as [1,2]",
    list[float]: "a list of numbers such as [0.5,1]",
    list[str]: "a list of texts such as [a,b]",
    dict[str, float]: "numbers by name such as {a: 1.0}",
    dict[str, Any]: "values by name such as {a: 1}",
}


def wrong_value(error: Any, kind: type, value: dict[Any, Any]) -> str:
    """Return OmegaConf's error in our words: the key, what must hold, what was got."""
    key = str(error.full_key).split("[")[0]
    name, *inner = key.split(".")[1:]
    hint, given = get_type_hints(kind)[name], value.get(name)
    if inner and isinstance(given, dict):  # one entry of a dict: {name: number}
        hint, given = float, given.get(inner[0])
    return _must_be(key, hint, given)


def _must_be(key: str, hint: Any, given: Any) -> str:
    options = _options(hint)
    words = next((WORDS[option] for option in options if option in WORDS), str(hint))
    null = " or null" if type(None) in options else ""
    return f"{key} must be {words}{null}, got {'null' if given is None else shown(given)}"


def _options(hint: Any) -> tuple[Any, ...]:
    """Return a type hint and its arguments: the options of a union, such as null."""
    return (hint, *get_args(hint))
