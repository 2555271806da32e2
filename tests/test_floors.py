"""Imports point down, and each heavy dependency has its door."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "drafttrain"

# A unit is a module, or a folder of modules of one kind. It imports from lower lines only; the
# ground floor has three lines of its own, because the words (types) need a readout.
FLOORS = {
    "the package itself": [""],
    "below ground, what comes from outside": ["untrusted"],
    "below ground": ["disk", "flock", "stopping"],
    "ground": ["cache", "flash", "growing", "launched", "lock", "readout", "run", "terminal"],
    "ground, words": ["types"],
    "ground, tensors": [
        "chance", "hardware", "layers", "losses", "optim", "pretrained", "ranks",
        "sampling", "vocab",
    ],
    "ground, losses": ["chunked"],
    "ground, another interpreter": ["serving"],
    "ground, what need not be installed": ["tensorboard"],
    "1, stations": ["data", "drafters", "engine", "report", "tracker"],
    "1, the target": ["target"],  # in pieces it needs the engine's DeepSpeed
    "2, joins": ["admit", "checkpoint", "decode"],
    "3, workers": [
        "capture", "compare", "evaluation", "export", "regenerate", "teacher_forced", "train",
        "validate", "witness",
    ],
    "3, before the work": ["plan"],
    "4, what was typed": ["overrides"],
    "4, what can be chosen": ["choices"],
    "4, what is resumed": ["resume"],
    "4, what each command is told": ["sections"],
    "4, values of a section": ["values"],
    "4, configuration": ["assemble", "config"],
    "4, what training starts from": ["adapting"],
    "4, what is measured": ["measuring", "planning"],
    "4, what training is made of": ["material"],
    "4, ranks": ["launch", "slurm"],
    "4, beside vLLM": ["witnessing"],
    "5, assembly": ["commands", "help"],
    "5, the door": ["__main__"],
}  # fmt: skip
FLOOR_OF = {unit: floor for floor, units in enumerate(FLOORS.values()) for unit in units}

# Who may import what is heavy, or dangerous, or changes often.
DOORS = {
    "hydra": {"choices", "config", "overrides", "resume"},
    "omegaconf": {"config", "values"},
    "deepspeed": {"engine.deepspeed"},
    "accelerate": {"pretrained.ends", "pretrained.shards", "target.spread"},
    "tensorboard": {"tensorboard"},
    "wandb": {"tracker"},
    "datasets": {"data.conversations"},
    "huggingface_hub": {"pretrained.hub", "export.hub"},
    "matplotlib": {"report.plots"},
    "peft": {"drafters.lora"},
    "pydantic": {"untrusted"},
    "openai": {"regenerate.endpoint"},
    "vllm": {
        "serving.worker",
        "witness.worker",
    },  # which the interpreter of vLLM's environment runs
}

FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(file: Path) -> str:
    """Return the dotted name below the package, '' for the package itself."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(source: str) -> Iterator[str]:
    """Yield every imported module by its full name, lazy imports and type checking too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            if node.module == "drafttrain":  # from drafttrain import commands, __version__
                yield from (
                    f"drafttrain.{alias.name}" if alias.name in FLOOR_OF else "drafttrain"
                    for alias in node.names
                )
            else:
                yield node.module


def upward(unit: str, source: str) -> list[str]:
    """Return the units that a unit imports although they do not lie below it."""
    found = []
    for name in imports_of(source):
        top, _, rest = name.partition(".")
        other = rest.split(".")[0]
        if top == "drafttrain" and other != unit and FLOOR_OF[other] >= FLOOR_OF[unit]:
            found.append(other)
    return found


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_imports_point_down(file: Path) -> None:
    unit = module_of(file).split(".")[0]
    assert unit in FLOOR_OF, f"{unit} has no floor yet: give it one above"
    assert upward(unit, file.read_text()) == []


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_heavy_imports_go_through_their_door(file: Path) -> None:
    for name in imports_of(file.read_text()):
        package = name.split(".")[0]
        assert package not in DOORS or module_of(file) in DOORS[package], package


def test_an_import_from_the_same_or_a_higher_floor_is_noticed() -> None:
    assert upward("decode", "from drafttrain.train import train") == ["train"]
    assert upward("drafters", "def f():\n    from drafttrain.data import batches") == ["data"]
    assert upward("run", "from drafttrain import types") == ["types"]
    assert upward("decode", "from drafttrain.decode.verify import verify_greedy") == []
    assert upward("train", "import drafttrain.checkpoint, torch") == []


def test_every_floor_names_what_exists() -> None:
    units = {module_of(file).split(".")[0] for file in FILES}
    assert units == set(FLOOR_OF)
