"""A drafter of the user's own, one file and one yaml outside the package, through every command."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from paths import PYTHONPATH, ROOT
from published import eagle, edited
from safetensors.torch import load_file

from drafttrain.__main__ import main
from drafttrain.commands.setup.target_and_drafter import own_layouts
from drafttrain.config.groups import own_choices
from drafttrain.formats.read.admit import recognise
from drafttrain.formats.read.folder import open_folder

pytestmark = pytest.mark.usefixtures("plain_pictures")

DRAFTER = '''
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from drafttrain.core.placed_batch import positions_to_predict
from drafttrain.core.readout import Readout
from drafttrain.core.types import Batch, Losses, LossTerm, TargetFeatures, TargetSpec
from drafttrain.drafters.base import (
    Drafter,
    DrafterConfig,
    DraftState,
    TrainingChance,
    last_of,
)


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig(DrafterConfig):
    width: int

    def build(self, spec: TargetSpec) -> "Recurrent":
        return Recurrent(self, spec)


@dataclass
class RecurrentState(DraftState):
    hidden: Tensor | None = None


class Recurrent(Drafter[RecurrentState]):
    """One recurrent cell: (f_t, x_t+1) -> a stand-in for f_t+1, which the target's head reads."""

    captures = ()

    def __init__(self, config: RecurrentConfig, spec: TargetSpec) -> None:
        super().__init__()
        self.config, self.spec = config, spec
        self.enter = nn.Linear(2 * spec.hidden_size, config.width)
        self.leave = nn.Linear(config.width, spec.hidden_size)

    def cell(self, readout: Readout, tokens: Tensor, hidden: Tensor) -> Tensor:
        dtype = self.enter.weight.dtype
        read = torch.cat([readout.embed(tokens).to(dtype), hidden.to(dtype)], dim=-1)
        return hidden.to(dtype) + self.leave(torch.tanh(self.enter(read)))

    def logits(self, readout: Readout, hidden: Tensor) -> Tensor:
        return readout.logits(hidden.to(readout.head.dtype))

    def forward(self, batch: Batch, features: TargetFeatures, chance: TrainingChance) -> Losses:
        readout = features.readout
        hidden = self.cell(readout, batch.tokens[:, 1:], features.final_hidden[:, :-1])
        rows, ahead = positions_to_predict(batch, 2)
        logits = self.logits(readout, hidden[rows, ahead - 2]).float()
        loss = functional.cross_entropy(logits, batch.tokens[rows, ahead], reduction="sum")
        return {"text": LossTerm(1.0, loss, torch.tensor(len(rows), device=loss.device))}

    def begin(self, readout: Readout, first_tokens: Tensor, capacity: int) -> RecurrentState:
        return RecurrentState(readout)

    def observe(
        self,
        state: RecurrentState,
        tokens: Tensor,
        counts: Sequence[int],
        features: TargetFeatures,
    ) -> None:
        state.hidden = last_of(self.cell(state.readout, tokens, features.final_hidden), counts)

    def expand(
        self, state: RecurrentState, newest: Tensor | None, parents: Tensor | None = None
    ) -> Tensor:
        if newest is not None:
            state.hidden = self.cell(state.readout, newest, state.hidden)
        return self.logits(state.readout, state.hidden)
'''
# The same with files of its own kind, which an engine is thought to read.
SERVED = """
from dataclasses import dataclass, replace

from my_own_drafter import Recurrent, RecurrentConfig

from drafttrain.drafters.serving.layout import (
    DECLARED,
    Expected,
    Reading,
    ServedLayout,
    Sign,
    architectures_of,
)


class RecurrentLayout(ServedLayout):
    kind = family = method = "served"
    title = "a recurrent cell"
    architectures = ("RecurrentDraft",)

    def recognises(self, files):
        named = self.architectures[0] in architectures_of(files.config)
        return Sign(DECLARED, "its architecture") if named else None

    def read(self, files, base, spec, layers):
        config = replace(base, width=files.config["cell"])
        return Reading(config, spec, files.tensors(), {})

    def expected_tensors(self, config):
        width, hidden = config["cell"], config["hidden_size"]
        return {
            "enter.weight": Expected((width, 2 * hidden)),
            "enter.bias": Expected((width,)),
            "leave.weight": Expected((hidden, width)),
            "leave.bias": Expected((hidden,)),
        }


@dataclass(frozen=True, kw_only=True)
class ServedConfig(RecurrentConfig):
    layout = RecurrentLayout()

    def build(self, spec):
        return Served(self, spec)


class Served(Recurrent):
    def to_serving(self):
        width, hidden = self.config.width, self.spec.hidden_size
        config = {"architectures": ["RecurrentDraft"], "cell": width, "hidden_size": hidden}
        return config, self.state_dict()
"""
# One that finds in its files what EAGLE's layout does.
HEIR = """
from dataclasses import dataclass

from my_own_drafter import RecurrentConfig

from drafttrain.drafters.serving.eagle_layout import EagleLayout


class HeirLayout(EagleLayout):
    kind = family = "heir"
    architectures = ("HeirEagle",)


@dataclass(frozen=True, kw_only=True)
class HeirConfig(RecurrentConfig):
    layout = HeirLayout()
"""
YAML = """# A recurrent cell.
_target_: my_own_drafter.RecurrentConfig

# Shown in reports and run names.
name: recurrent

# Of the cell.
width: 16
"""
QUICK = ["hardware=cpu", "hardware.threads=1", "hardware.dtype=float32"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the drafter, its yaml, conversations and prompts."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "my_own_drafter.py").write_text(DRAFTER)
    (folder / "conf" / "drafter").mkdir(parents=True)
    (folder / "conf" / "drafter" / "recurrent.yaml").write_text(YAML)
    (folder / "my_served_drafter.py").write_text(SERVED)
    served = YAML.replace("my_own_drafter.Recurrent", "my_served_drafter.Served")
    served = served.replace("name: recurrent", "name: served")
    (folder / "conf" / "drafter" / "served.yaml").write_text(served)
    with (folder / "data.jsonl").open("w") as file:
        for number in range(24):
            messages = [
                {"role": "user", "content": f"What is {number} plus {number}?"},
                {"role": "assistant", "content": f"It is {2 * number}, as it ever was."},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    prompts = [{"id": f"{n}", "task": "talk", "turns": [f"What is {n}?"]} for n in range(3)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in prompts))
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    for name in ("my_own_drafter", "my_served_drafter"):
        sys.modules.pop(name, None)


def run(place: Path, command: str, *arguments: str) -> int:
    return run_with(place / "conf", command, *arguments)


def run_with(folder: Path, command: str, *arguments: str) -> int:
    return main([command, f"--config-dir={folder}", *arguments])


@pytest.fixture(scope="module")
def trained(place: Path, tiny_target_dir: Path) -> Path:
    """A run of it, with the target at hand."""
    told = [f"run.dir={place / 'online'}", *training(place, tiny_target_dir)]
    assert run(place, "train", *told, "trainer.validation_tokens=4") == 0
    return place / "online"


def training(place: Path, target: Path, *data: str) -> list[str]:
    data = data or ("data=jsonl", f"data.path={place / 'data.jsonl'}")
    return [
        "drafter=recurrent",
        f"model.path={target}",
        *data,
        "data.holdout=4",
        "trainer.max_steps=8",
        "trainer.log_every=1",
        "trainer.validate_every=4",
        "trainer.tokens_per_step=256",
        "trainer.lr=1.0e-2",
        "trainer.validation_prompts=4",
        *QUICK,
    ]


def metrics(folder: Path, key: str) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row[key] for row in rows if key in row]


def evaluated(place: Path, folder: Path, *given: str) -> None:
    told = [f"eval.prompts={place / 'prompts.jsonl'}", "eval.max_new_tokens=6", "eval.depth=2"]
    told += ["eval.name=default", "eval.resamples=100", "eval.lossless_prompts=2"]
    assert run(place, "evaluate", f"run.dir={folder}", *told, *given) == 0


def test_it_is_trained_measured_compared_and_exported(
    trained: Path, place: Path, tiny_target_dir: Path
) -> None:
    losses = metrics(trained, "train/loss")
    assert losses[-1] < losses[0]
    evaluated(place, trained)
    report = json.loads((trained / "evaluations/default/report.json").read_text())
    lossless = report["lossless"]
    assert lossless["greedy_identical"] == lossless["greedy_total"] > 0
    other = place / "lookup"
    evaluated(place, other, "drafter=ngram", f"model.path={tiny_target_dir}", *QUICK)
    assert run(place, "compare", f"runs=[{trained},{other}]", f"compare.dir={place / 'c'}") == 0
    assert run(place, "export", f"run.dir={trained}") == 0
    exported = trained / "export"
    settings = json.loads((exported / "config.json").read_text())
    assert settings["drafter"]["width"] == 16
    assert "No engine serves drafter=recurrent" in (exported / "README.md").read_text()


def test_a_directory_in_its_own_layout_is_recognised(
    place: Path, tiny_target_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = [*training(place, tiny_target_dir), "drafter=served", "trainer.max_steps=2"]
    assert run(place, "train", f"run.dir={place / 'run'}", *told) == 0
    exported = place / "exported"
    assert run(place, "export", f"run.dir={place / 'run'}", f"export.dir={exported}") == 0
    given = [f"drafter.path={exported}", f"model.path={tiny_target_dir}", *QUICK]
    capsys.readouterr()
    evaluated(place, place / "admitted", *given)
    assert "drafter: a recurrent cell, by its architecture\n" in capsys.readouterr().out
    begun = [f"run.init_from={exported}", f"run.dir={place / 'more'}", "trainer.max_steps=1"]
    assert run(place, "train", *told, *begun) == 0
    (folder := place / "other").mkdir()
    assert run_with(folder, "evaluate", *given, f"run.dir={place / 'unknown'}") == 2
    assert "not a known drafter; it must be one of: " in capsys.readouterr().err


def test_another_file_of_the_folder_may_be_faulty_and_leaves_the_directories_of_others(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layout that finds the package's signs too, and a module that ends in an error."""
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "faulty.yaml").write_text(
        "_target_: my_faulty_drafter.Config\nname: faulty\n"
    )
    (tmp_path / "my_faulty_drafter.py").write_text("no_such_name\n")
    (tmp_path / "my_heir.py").write_text(HEIR)
    (tmp_path / "drafter" / "heir.yaml").write_text(
        YAML.replace("my_own_drafter.Recurrent", "my_heir.Heir").replace(": recurrent", ": heir")
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with own_choices(tmp_path):
        own = own_layouts()
    assert [layout.family for layout in own] == ["heir"]
    eagle().write(tmp_path / "eagle")
    found = recognise(open_folder(tmp_path / "eagle", False), own)
    assert found.layout.family == "eagle"
    edited(eagle(), architectures=["HeirEagle"]).write(tmp_path / "theirs")
    assert recognise(open_folder(tmp_path / "theirs", False), own).layout.family == "heir"


def test_it_is_planned_as_it_is_trained(trained: Path, place: Path, tiny_target_dir: Path) -> None:
    told = training(place, tiny_target_dir)
    assert run(place, "plan", *told, f"plan.dir={place / 'plan'}") == 0
    planned = json.loads((place / "plan/plan.json").read_text())["drafter"]
    weights = load_file(trained / "checkpoints/step-000008/drafter.safetensors")
    assert planned["name"] == "recurrent"
    assert planned["num_trained"] == sum(each.numel() for each in weights.values())
    assert planned["first"]["flops"] > 0


@pytest.mark.slow
def test_it_keeps_the_contract(place: Path) -> None:
    chosen = "recurrent and not overfitting and not replay"  # these train every family
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/drafters/test_drafters.py", "-k", chosen],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": f"{place}:{PYTHONPATH}",
            "CONFIG_DIR": f"{place / 'conf'}",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout


def test_what_to_run_next_names_its_folder_too(trained: Path, place: Path) -> None:
    said = (trained / "train.log").read_text().splitlines()
    told = f"--config-dir={place / 'conf'} run.dir={trained}"
    assert said[-1] == f"next: python -m drafttrain evaluate {told}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: other\nwidth: 3\n", "must name the class of its configuration, got nothing; the"),
        ("_target_: elsewhere.Config\nname: other\n", "of its file must be on PYTHONPATH"),
    ],
    ids=["no class", "a class that is not found"],
)
def test_a_yaml_that_leads_to_no_class_says_what_it_must_name(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "other.yaml").write_text(text)
    assert run_with(tmp_path, "train", "drafter=other", f"run.dir={tmp_path / 'run'}") == 2
    said = capsys.readouterr().err
    assert said.startswith("error: drafter._target_ must name ")
    assert message in said


def test_another_yaml_of_the_folder_may_be_broken(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "recurrent.yaml").write_text(YAML)
    (tmp_path / "drafter" / "begun.yaml").write_text("_target_: nowhere.Config\nname: begun\n")
    told = ["drafter=recurrent", "trainer.tokens_per_step=256", *QUICK]
    assert run_with(tmp_path, "plan", *told, f"plan.dir={tmp_path / 'plan'}") == 0
    assert run_with(tmp_path, "plan", "drafter=begun") == 2
    assert "got nowhere.Config: No module named 'nowhere'" in capsys.readouterr().err


def test_a_key_that_its_yaml_does_not_list_is_told_where_keys_are_listed(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(place, "plan", "drafter=recurrent", "drafter.lr=1.0e-2") == 2
    file = place / "conf" / "drafter" / "recurrent.yaml"
    assert f"has no key lr; keys: name, width; a yaml lists what can be set: {file}\n" in (
        capsys.readouterr().err
    )


def test_a_folder_without_the_choice_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_with(tmp_path, "train", "drafter=other", f"run.dir={tmp_path / 'run'}") == 2
    assert f"; looked in {tmp_path / 'drafter'} too\n" in capsys.readouterr().err


def test_it_is_trained_on_stored_features_and_validated_without_the_target(
    place: Path, tiny_target_dir: Path
) -> None:
    store, folder = place / "store", place / "stored"
    data = ["data=jsonl", f"data.path={place / 'data.jsonl'}"]
    told = ["drafter=recurrent", f"model.path={tiny_target_dir}", *data, *QUICK]
    assert run(place, "capture", f"store.dir={store}", *told) == 0
    stored = ["features=stored", f"features.dir={store}", "features.validate=false"]
    arguments = training(place, tiny_target_dir, *stored)
    assert run(place, "train", f"run.dir={folder}", *arguments) == 0
    found = metrics(folder, "val/expected_acceptance_length")
    assert len(found) == 2
    assert found[0] != found[1]
    assert all(1 < value < 1 + 5 for value in found)
    assert yaml.safe_load((folder / "config.yaml").read_text())["drafter"]["width"] == 16
