"""A run folder of someone else's: its checkpoints name their own files, their numbers are typed."""

import json
from collections.abc import Callable
from inspect import unwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import drafter_config, model_config
from safetensors.torch import load_file, save_file
from test_checkpoint import make_engine, saved

from drafttrain.commands.setup.target_and_drafter import recorded_spec
from drafttrain.core.vocab import DraftVocab
from drafttrain.data.evaluation_prompts import overlap_path, overlap_record
from drafttrain.evaluation.measurements import Measurements
from drafttrain.evaluation.tune_choice import TUNED, read_tuned
from drafttrain.runtime.disk import digest_of
from drafttrain.target.model import load_target
from drafttrain.training.checkpoint import Checkpoints, load_state, load_weights, verify


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a record as one who knows its format would, checksum and all."""
    plain = json.loads(file.read_text())
    change(plain)
    plain.pop("sha256", None)
    plain["sha256"] = digest_of(plain)
    file.write_text(json.dumps(plain))


EMPTY = {"bytes": 1, "sha256": ""}
STATES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a file outside": lambda plain: plain["files"].update({"../victim": EMPTY}),
    "a file by its whole path": lambda plain: plain["files"].update({"/tmp/victim": EMPTY}),
    "no weights": lambda plain: plain["files"].pop("drafter.safetensors"),
    "a size of text": lambda plain: plain["files"]["drafter.safetensors"].update(bytes="1"),
    "a step of text": lambda plain: plain["state"].update(step="1"),
    "a step below zero": lambda plain: plain["state"].update(step=-1),
    "no state": lambda plain: plain.update(state=[]),
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_what_a_checkpoints_record_must_not_say(name: str, tmp_path: Path) -> None:
    saved(tmp_path, steps=[10], best=10)
    folder = tmp_path / "step-000010"
    edit(folder / "state.json", STATES[name])
    for work in (verify, load_state, load_weights):
        with pytest.raises(
            ValueError, match=r"state\.json must be the record .*, but it is"
        ) as got:
            work(folder)
        assert str(got.value).isprintable()


@pytest.mark.parametrize("name", ["../victim", "step-1/../..", 7, ["step-000010"], "step-٣"])
def test_an_index_names_checkpoints(name: object, tmp_path: Path) -> None:
    saved(tmp_path, steps=[10], best=10)
    for key in ("latest", "best"):
        before = (tmp_path / "index.json").read_text()
        edit(tmp_path / "index.json", lambda plain, key=key: plain.update({key: name}))
        with pytest.raises(ValueError, match=r"index\.json must be as this program wrote it"):
            Checkpoints(tmp_path, 2).latest()
        (tmp_path / "index.json").write_text(before)


@pytest.mark.parametrize("file", ["state.json", "../index.json"])
def test_deep_json_is_one_line(file: str, tmp_path: Path) -> None:
    saved(tmp_path, steps=[10], best=10)
    (tmp_path / "step-000010" / file).write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"json must be") as caught:
        Checkpoints(tmp_path, 2).resume(make_engine("none"))
    assert str(caught.value).isprintable()


def test_an_optimizers_file_without_its_step_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, steps=[10], best=10)
    file = tmp_path / "step-000010" / "optimizer.safetensors"
    tensors = load_file(file)
    for wrong in (None, torch.ones(3), torch.tensor(1.5)):
        changed = {name: tensor for name, tensor in tensors.items() if name != "step"}
        save_file(changed if wrong is None else {**changed, "step": wrong}, file)
        with pytest.raises(ValueError, match=r"must hold the finished steps"):
            make_engine("none").load(file.parent)


@pytest.mark.parametrize(
    "ids",
    [torch.tensor(3), torch.tensor([[1, 2]]), torch.tensor([1.0, 2.0]), torch.zeros(0).long()],
)
def test_a_vocabulary_is_a_row_of_integers(ids: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"d2t must name target ids, one integer each"):
        unwrap(DraftVocab.of.__func__)(DraftVocab, ids, 97)  # past CHECK_SHAPES


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "[1]", '{"target": 1}', '{"target": {}}', '{"target": {"eos_token_ids": 1}}'],
)
def test_what_a_run_recorded_of_its_target_is_typed(text: str, tmp_path: Path) -> None:
    (tmp_path / "provenance.json").write_text(text)
    with pytest.raises(ValueError, match=r"provenance\.json must record the run's target") as got:
        recorded_spec(tmp_path)
    assert str(got.value).isprintable()


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "[1]", '{"batches": [1]}', '{"batches": {"x": {}}}', '{"batches": {}}',
     '{"batches": {"1": {"all": {"depth": "4"}}}}', '{"batches": {"1": {"all": {"depth": -4}}}}'],
)  # fmt: skip
def test_what_tune_wrote_is_typed(text: str, tmp_path: Path) -> None:
    (tmp_path / TUNED).write_text(text)
    with pytest.raises(ValueError, match=r"must be what `tune` wrote") as caught:
        read_tuned(tmp_path, 1)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("text", ["[" * 100_000, "[1]", "{}", '{"prompts_sha256": 1}', "x"])
def test_an_overlap_record_is_typed(text: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("{}\n")
    overlap_path(prompts).write_text(text)
    with pytest.raises(ValueError, match=r"overlap\.json") as caught:
        overlap_record(prompts)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "line",
    ["[" * 100_000, "[1]", '{"key": [1, 1], "results": [{}]}', '{"key": ["a"], "results": []}',
     '{"key": [0, 0], "results": [{"stats": 1}]}', "\xff"],
)  # fmt: skip
def test_measurements_that_are_none_are_measured_again(line: str, tmp_path: Path) -> None:
    journal = Measurements(tmp_path, "x", {"a": 1})
    with journal.file.open("a") as stream:
        stream.write(line + "\n")
    assert len(Measurements(tmp_path, "x", {"a": 1}).known) == 0


def small_lm_settings(**changes: Any) -> torch.Tensor:
    config = {"model_type": "llama", "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1}
    return torch.tensor(list(json.dumps(config | changes).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (torch.tensor([1.0]), "is missing or no text"),
        (torch.tensor(list(b"[" * 100_000), dtype=torch.uint8), "must be valid JSON"),
        (torch.tensor(list(b"[1]"), dtype=torch.uint8), "must be an object, got list"),
        (torch.zeros(1 << 21, dtype=torch.uint8), "is too long"),
        (small_lm_settings(hidden_size=10**12), "hidden_size must be a whole number of at most"),
        (small_lm_settings(hidden_size=4096, intermediate_size=10**6), "but declares .* numbers"),
        (small_lm_settings(model_type="none"), "must describe a model"),
        (small_lm_settings(attn_implementation="someone/kernel"), "must not name code of the Hub"),
    ],
    ids=["floats", "deep", "list", "long", "wide", "wider than its weights", "unknown", "code"],
)
def test_a_model_that_weights_describe_is_checked_before_it_is_made(
    settings: torch.Tensor, said: str, tiny_target_dir: Path
) -> None:
    spec = load_target(model_config(tiny_target_dir), torch.float32, "cpu").spec
    drafter = drafter_config("small_lm").build(spec)
    with pytest.raises(ValueError, match=said) as caught:
        drafter.load_weights({"settings": settings, "x": torch.zeros(3)})
    assert str(caught.value).isprintable()
