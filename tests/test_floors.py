"""Imports point down, and each heavy dependency has its door."""

import ast
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
    "accelerate": {"target.pretrained.ends", "target.pretrained.shards", "target.device_map"},
    "tensorboard": {"runtime.tensorboard"},
    "wandb": {"runtime.tracker"},
    "datasets": {"data.conversations"},
    "huggingface_hub": {"target.pretrained.hub", "formats.write.hub"},
    "matplotlib": {"report.plots"},
    "peft": {"drafters.shared.lora"},
    "pydantic": {"runtime.untrusted_input"},
    "openai": {"target.answers.endpoint"},
    # which the interpreter of vLLM's environment runs
    "vllm": {"target.vllm.worker", "evaluation.witness.worker"},
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


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    assert module == "__main__" or upward(module, MODULES[module]) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    imports = {module: ours(source) - {module} for module, source in MODULES.items()}
    assert circles(imports) == set()


@pytest.mark.parametrize("module", MODULES)
def test_heavy_imports_go_through_their_door(module: str) -> None:
    for name in imports_of(MODULES[module]):
        package = name.split(".")[0]
        assert package not in DOORS or module in DOORS[package], package


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
