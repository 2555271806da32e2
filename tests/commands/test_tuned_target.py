"""A drafter whose training changes the target, through the commands: what "lossless" refers to."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import model_config

import drafttrain
from drafttrain.__main__ import main
from drafttrain.report.phrases import OF_TUNED
from drafttrain.report.results import Report
from drafttrain.runtime.untrusted_input import read_typed
from drafttrain.target.model import load_target

pytestmark = pytest.mark.usefixtures("plain_pictures")

FAMILY = "medusa2"
QUICK = ["hardware=cpu", "hardware.threads=1", "hardware.dtype=float32"]
TOLD = "changed the target's weights too: it drafts for that tuned target"


@pytest.fixture(scope="module")
def place(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of the family and of one that changes nothing, both evaluated, and their comparison."""
    folder = tmp_path_factory.mktemp("tuned")
    talk = [{"role": "user", "content": "Add 2 and 2."}, {"role": "assistant", "content": "4."}]
    data, prompts = folder / "data.jsonl", folder / "prompts.jsonl"
    data.write_text(
        "".join(
            json.dumps({"messages": [{**talk[0], "content": f"Add {n} and 2."}, talk[1]]}) + "\n"
            for n in range(24)
        )
    )
    lines = [{"id": f"{n}", "task": "talk", "turns": [f"What is {n}?"]} for n in range(3)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name in (FAMILY, "medusa"):
        told = ["train", f"run.dir={folder / name}", f"drafter={name}", *QUICK]
        told += [f"model.path={tiny_target_dir}", "data=jsonl", f"data.path={data}"]
        told += ["data.holdout=2", "trainer.max_steps=6", "trainer.tokens_per_step=64"]
        told += ["trainer.validation_prompts=2", "trainer.validation_tokens=4", "trainer.lr=0.05"]
        assert main(told) == 0
        told = ["evaluate", f"run.dir={folder / name}", f"eval.prompts={prompts}"]
        told += ["eval.max_new_tokens=8", "eval.resamples=100", "eval.lossless_prompts=3"]
        assert main([*told, "eval.name=default", "eval.certify=true", "eval.depth=3"]) == 0
    runs = f"runs=[{folder / 'medusa'},{folder / FAMILY}]"
    assert main(["compare", runs, f"compare.dir={folder / 'c'}", "compare.resamples=100"]) == 0
    return folder


def report_of(place: Path, name: str) -> dict[str, Any]:
    file = place / name / "evaluations/default/report.json"
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_training_records_what_the_target_lost_and_says_what_lossless_means(place: Path) -> None:
    rows = [json.loads(row) for row in (place / FAMILY / "metrics.jsonl").read_text().splitlines()]
    found = [row for row in rows if "val/target_loss" in row]
    assert {row["val/target_loss_before"] for row in found} == {found[0]["val/target_loss_before"]}
    assert found[-1]["val/target_loss"] != found[-1]["val/target_loss_before"]
    log = (place / FAMILY / "train.log").read_text()
    assert TOLD in log
    assert "the tuned target's own next-token loss on held-out conversations: " in log
    assert TOLD not in (place / "medusa" / "train.log").read_text()


def test_a_report_says_which_target_its_output_is_lossless_for(place: Path) -> None:
    report = report_of(place, FAMILY)
    lossless = report["lossless"]
    assert lossless["greedy_identical"] == lossless["greedy_total"] == 3
    assert lossless["tuned"]
    assert OF_TUNED in lossless["statement"]
    assert report["certificate"]["certified"], report["certificate"]
    notes = "\n".join(report["notes"])
    assert TOLD in notes
    assert "own next-token loss on held-out conversations" in notes
    for page in ("report.md", "report.html"):
        assert "not for the model that was given" in (
            place / FAMILY / "evaluations/default" / page
        ).read_text()  # fmt: skip
    other = report_of(place, "medusa")
    assert not other["lossless"]["tuned"]
    assert "tuned" not in other["lossless"]["statement"]
    assert report["provenance"]["target_fingerprint"] == other["provenance"]["target_fingerprint"]


def test_the_plain_loop_beside_it_is_that_of_the_tuned_target(
    place: Path, tiny_target_dir: Path
) -> None:
    """Else the outputs would only be identical by luck, and the speedup of another model's text."""
    target = load_target(model_config(tiny_target_dir), torch.float32, "cpu")
    before = target.decoder.layers[0].mlp.up_proj.weight.clone()
    tuned = drafttrain.load_target(tiny_target_dir, dtype="float32")
    drafter = drafttrain.load_drafter(place / FAMILY, tuned)
    changed = tuned.decoder.layers[0].mlp.up_proj.weight
    delta = drafter.target_changes()["layers.0.mlp.up_proj.weight"]
    assert delta.abs().max() > 1e-3
    torch.testing.assert_close(changed, before + delta)
    mine = drafttrain.generate(tuned, drafter, "What is 1?", max_new_tokens=12)
    assert mine.tokens == drafttrain.generate(tuned, None, "What is 1?", max_new_tokens=12).tokens
    fresh = drafttrain.load_target(tiny_target_dir, dtype="float32")
    with pytest.raises(ValueError, match="must be loaded with this very target, whose weights"):
        drafttrain.generate(fresh, drafter, "What is 1?", max_new_tokens=4)


def test_a_comparison_says_that_another_model_answers(place: Path) -> None:
    found = json.loads((place / "c" / "compare.json").read_text())
    rows = {row["method"]: row["lossless"] for row in found["rows"]}
    assert OF_TUNED in rows[FAMILY]["statement"]
    assert rows[FAMILY]["tuned"]
    assert not rows["medusa"]["tuned"]
    # Prompt lookup beside a tuned target is not that beside the given one.
    assert {"ngram", f"ngram, target tuned by {FAMILY}"} <= rows.keys()
    flags = {(flag["kind"], flag["row"]) for flag in found["flags"]}
    assert ("tuned_target", FAMILY) in flags
    said = {pair["method"]: pair["statement"] for pair in found["differences"]}
    assert f"not the same model answers: the target of {FAMILY} was tuned" in said[FAMILY]
    assert "not the same model" not in said["ngram"]
    assert "not for the model that was given" in (place / "c" / "compare.md").read_text()


def test_it_is_trained_further_from_where_it_was(place: Path, tiny_target_dir: Path) -> None:
    told = ["train", f"run.dir={place / 'further'}", f"drafter={FAMILY}", *QUICK]
    told += [f"run.init_from={place / FAMILY}", f"model.path={tiny_target_dir}", "data=jsonl"]
    told += [f"data.path={place / 'data.jsonl'}", "data.holdout=2", "trainer.max_steps=1"]
    told += ["trainer.tokens_per_step=64", "trainer.validation_tokens=4", "trainer.lr=1.0e-9"]
    assert main([*told, "trainer.validation_prompts=2", "drafter.head_warmup=0"]) == 0
    before, after = (
        [json.loads(row) for row in (place / name / "metrics.jsonl").read_text().splitlines()]
        for name in (FAMILY, "further")
    )
    last = [[row["val/target_loss"] for row in rows if "val/target_loss" in row][-1]
            for rows in (before, after)]  # fmt: skip
    assert last[1] == pytest.approx(last[0], abs=1e-4)
    first = next(row for row in after if "train/loss_target" in row)
    assert first["train/loss_target"] > 1e-6, "it is compared with the target as it was given"


def test_its_card_says_so_too(place: Path) -> None:
    assert main(["export", f"run.dir={place / FAMILY}"]) == 0
    card = (place / FAMILY / "export" / "README.md").read_text()
    assert f"No engine serves drafter={FAMILY}" in card
    assert TOLD in card


def test_a_report_of_before_there_were_tuned_targets_is_read(place: Path, tmp_path: Path) -> None:
    report = report_of(place, "medusa")
    del report["lossless"]["tuned"]
    (tmp_path / "report.json").write_text(json.dumps(report))
    assert not read_typed(Report, tmp_path / "report.json").lossless.tuned
