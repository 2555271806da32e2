"""The loss curve of every trainable family, kept in tests/golden: computation may not drift."""

import json
import sys
from pathlib import Path

import pytest
import torch
from paths import ROOT, load_script
from test_drafters import FAMILIES, NoChance, as_batch, build

from drafttrain.core.readout import Readout
from drafttrain.core.types import Batch, TargetFeatures, TargetSpec, weighted_sum

GOLDEN = ROOT / "tests" / "golden" / "losses.json"
STEPS = 5


def spec_of(vocab_size: int) -> TargetSpec:
    """A target of no model: four layers, hidden 32."""
    return TargetSpec(
        "random", "0" * 64, "llama", vocab_size, 32, 48, 4, 4, 2, 8, 1e-5, 1e4, 512, (5,), 1, 0
    )


def features_like(batch: Batch, spec: TargetSpec, captures: tuple[int, ...]) -> TargetFeatures:
    """Random states and a random readout, sharp enough to have something to teach."""
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    readout = Readout(draw(spec.vocab_size, 32), draw(spec.vocab_size, 32) / 3, torch.ones(32))
    shape = (*batch.tokens.shape, 32)
    return TargetFeatures({layer: draw(*shape) for layer in captures}, draw(*shape), readout)


def curve(family: str) -> list[float]:
    """Return the mean loss at five steps of AdamW, float32, one batch of three conversations."""
    spec = spec_of(193)
    generator = torch.Generator().manual_seed(4)
    rows = [torch.randint(6, 193, (n,), generator=generator).tolist() for n in (24, 17, 9)]
    masks = [[index > 4 for index in range(len(row))] for row in rows]
    batch = as_batch(*rows, mask=masks)
    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 48} if family == "small_lm" else {}
    drafter = build(family, spec, **small)
    features = features_like(batch, spec, drafter.captures)
    counts = torch.bincount(batch.tokens.flatten(), minlength=193)
    drafter.prepare(counts, features.readout)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=2e-3)
    losses = []
    for _ in range(STEPS):
        terms = drafter(batch, features, NoChance())
        loss = weighted_sum(terms) / int(batch.loss_mask.sum())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_curve_is_the_recorded_one(family: str) -> None:
    recorded = json.loads(GOLDEN.read_text())
    assert curve(family) == pytest.approx(recorded["curves"][family], rel=recorded["tolerance"])


def test_every_trainable_family_is_recorded() -> None:
    assert sorted(json.loads(GOLDEN.read_text())["curves"]) == sorted(FAMILIES)


def test_the_script_writes_what_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script("update_golden")
    monkeypatch.setattr(script, "GOLDEN", tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "FAMILIES", ["medusa"])
    script.main()
    written = json.loads((tmp_path / GOLDEN.name).read_text())
    recorded = json.loads(GOLDEN.read_text())
    assert written["curves"]["medusa"] == pytest.approx(
        recorded["curves"]["medusa"], rel=recorded["tolerance"]
    )
    config = "config_train.yaml"
    assert (tmp_path / config).read_text() == GOLDEN.with_name(config).read_text()
