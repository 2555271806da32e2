"""Imports point down, and each heavy dependency has its door."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import ROOT

PACKAGE = ROOT / "drafttrain"

# The folders of the package: each imports from those below it.
FLOORS = (
    "commands", "config", "plan", "formats", "evaluation", "report", "training", "decode",
    "drafters", "target", "data", "core", "runtime",
)  # fmt: skip

# Who may import what is heavy, or dangerous, or changes often.
DOORS = {
    "hydra": {
        "config.groups",
        "config.compose",
        "config.overrides",
        "config.resume",
        "config.sweep",
    },
    "omegaconf": {"config.compose", "config.values"},
    "deepspeed": {"runtime.deepspeed", "training.engine.deepspeed"},
    "accelerate": {"target.pretrained.shards", "target.device_map"},
    "tensorboard": {"runtime.tracker"},
    "wandb": {"runtime.tracker"},
    "datasets": {"data.files"},
    "filelock": {"runtime.lock"},
    "huggingface_hub": {"target.pretrained.hub", "formats.write.hub", "formats.write.directory"},
    "matplotlib": {"report.plots"},
    "gguf": {"target.pretrained.gguf"},
    "peft": {"drafters.shared.lora", "target.pretrained.adapter"},
    "pydantic": {"runtime.untrusted_input"},
    "openai": {"target.answers.endpoint"},
    # which the interpreter of vLLM's environment runs
    "vllm": {"target.vllm.worker"},
}

FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(file: Path) -> str:
    """Return the dotted name below the package, '' for the package itself."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(file): file.read_text() for file in FILES if module_of(file)}


def imports_of(source: str) -> Iterator[str]:
    """Yield every imported module by its full name, lazy imports and type checking too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            # `from drafttrain.core import losses` imports a module, and so may any other
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def ours(source: str) -> set[str]:
    """Return the modules of the package that a source imports."""
    found = set()
    for name in imports_of(source):
        parts = name.split(".")[1:] if name.startswith("drafttrain.") else []
        known = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        found.add(next((module for module in known if module in MODULES), ""))
    return found - {""}


def upward(module: str, source: str) -> list[str]:
    """Return the modules that a module imports although they lie in a folder above its own."""
    floor = FLOORS.index(module.split(".")[0])
    return [other for other in ours(source) if FLOORS.index(other.split(".")[0]) < floor]


def circles(imports: dict[str, set[str]]) -> set[str]:
    """Return the modules that import each other in a circle, and those that only these import."""
    left = {module: set(others) for module, others in imports.items()}
    while free := {module for module, others in left.items() if not others & left.keys()}:
        left = {module: others for module, others in left.items() if module not in free}
    return set(left)


def test_the_package_is_its_folders_and_a_door() -> None:
    entries = {path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    assert entries == {*FLOORS, "__init__.py", "__main__.py", "assets", "py.typed"}


def test_imports_point_down() -> None:
    for module, source in MODULES.items():
        assert module == "__main__" or upward(module, source) == [], module


def test_no_modules_import_each_other_in_a_circle() -> None:
    imports = {module: ours(source) - {module} for module, source in MODULES.items()}
    assert circles(imports) == set()


def test_heavy_imports_go_through_their_door() -> None:
    for module, source in MODULES.items():
        for name in imports_of(source):
            package = name.split(".")[0]
            assert package not in DOORS or module in DOORS[package], (module, package)


@pytest.mark.parametrize("folder", [file.parent for file in FILES if file.name == "__init__.py"])
def test_a_folder_is_light_to_import(folder: Path) -> None:
    """It says what it is for; names are imported from where they are defined."""
    body = ast.parse((folder / "__init__.py").read_text()).body
    assert folder == PACKAGE or len(body) == 1


def test_an_import_from_a_folder_above_is_noticed() -> None:
    inside = "def f():\n    from drafttrain.training import loop"
    assert upward("decode.loop", inside) == ["training.loop"]
    assert upward("drafters.eagle", "from drafttrain.decode.rows import Rows") == ["decode.rows"]
    assert upward("runtime.run_folder", "from drafttrain.core import types") == ["core.types"]
    assert upward("decode.loop", "from drafttrain.decode.verify import verify_greedy") == []
    assert upward("training.loop", "import drafttrain.decode.loop, torch") == []


def test_a_circle_is_noticed() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == set()
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == {"a", "b", "c"}


def classes_twice(sources: dict[str, str]) -> dict[str, list[str]]:
    """Return class names that stand for two things, with the modules that define them."""
    found: dict[str, list[str]] = {}
    for module, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(module)
    return {name: modules for name, modules in found.items() if len(modules) > 1}


def test_a_class_name_stands_for_one_class() -> None:
    assert classes_twice({"a": "class A: ...", "b": "class A: ...\nclass B: ..."}) == {
        "A": ["a", "b"]
    }
    assert not classes_twice(MODULES)


def as_written(name: str) -> str:
    """Return a pattern of a family's name: medusa_heads, MedusaHeads; hass, but not hassle."""
    pattern = re.escape(name).replace("_", "_?")
    return rf"\b{pattern}\b" if len(name) < 5 else pattern


PLACES = (PACKAGE / "drafters", ROOT / "conf" / "drafter")
NAMES = {file.stem for folder in PLACES for file in folder.iterdir()}
NOT_FAMILIES = {"__init__", "__pycache__", "admitted", "base", "parts", "references"}
NOT_FAMILIES |= {"serving", "shared"}
# The shortest first: eagle is found in eagle3.
FAMILIES = re.compile(
    "|".join(map(as_written, sorted(NAMES - NOT_FAMILIES, key=lambda name: (len(name), name)))),
    re.IGNORECASE,
)
# Where one of these words is not a family that code knows by name, and why.
SPOKEN = {
    "config.help": "all",  # command lines as users type them
    "report": "ngram",  # keys and columns of report.json: prompt lookup stands beside every drafter
    "report.definitions": "eagle",  # EAGLE's n-alpha, a quantity of the literature
    "data.evaluation_prompts": "ngram",  # n-grams of words that two texts share
    "target.vllm.worker": "eagle",  # what vLLM calls its setting for captured layers
    "evaluation.config": "two_model",  # eval.two_model, a setting
    "commands.setup.evaluation": "two_model",  # the same
    "runtime.run_folder": "two_model",  # the same
}


def spoken_in(module: str) -> set[str]:
    """Return which of the words a module may use: its own and those of the folders around it."""
    parts = module.split(".")
    return {SPOKEN.get(".".join(parts[:end]), "") for end in range(1, len(parts) + 1)}


def families_in(source: str) -> set[str]:
    """Return the names of families in imports, identifiers and texts; docstrings cite papers."""
    tree = ast.parse(source)
    prose = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in prose:
            continue
        for _, value in ast.iter_fields(node):
            texts = value if isinstance(value, list) else [value]
            found |= {
                word.lower()
                for text in texts
                if isinstance(text, str)
                for word in FAMILIES.findall(text)
            }
    return found


def test_no_module_outside_drafters_names_a_family() -> None:
    for module, source in MODULES.items():
        spoken = spoken_in(module)
        if not module.startswith("drafters") and "all" not in spoken:
            assert families_in(source) <= spoken, module


def test_a_family_that_is_named_is_noticed() -> None:
    assert families_in("from drafttrain.drafters.eagle3 import X") == {"eagle"}
    assert families_in("def f(x):\n    return x.SmallLMConfig") == {"smalllm"}
    assert families_in("if name == f'{a}-medusa': pass") == {"medusa"}
    assert families_in("def two_model_of(num_ngrams): pass") == {"two_model", "ngram"}
    assert families_in('def f():\n    """As in EAGLE."""') == set()
