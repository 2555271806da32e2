"""`export drafter.path=DIR`: a directory in any layout, written in another, bit for bit."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from published import LAYOUTS, Published, eagle, eagle3, edited, medusa
from safetensors.torch import load_file
from test_read import admitted

from drafttrain.__main__ import main
from drafttrain.target.model import Target


def convert(source: Path, target_dir: Path, out: Path, *more: str) -> int:
    given = [f"drafter.path={source}", "drafter.allow_pickle=true", f"model.path={target_dir}"]
    return main(["export", *given, f"export.dir={out}", "export.dtype=float32", *more])


# What each layout is converted to, and back: None where its family has the native one only.
ROUND_TRIPS = {
    "native": "speculators",
    "native layers.0": "speculators",
    "SafeAILab": "speculators",
    "norm_before_residual": "speculators",
    "fc_norm": "speculators",
    "rope llama3": "speculators",
    "own embedding": "speculators",
    "speculators": "vllm",
    "DFlash": "speculators",
    "DFlash-2": "speculators",
    "DFlash-2 of speculators": "vllm",
    "DSpark": "speculators",
    "DSpark of speculators": "vllm",
    "P-EAGLE": "speculators",
    "P-EAGLE, one layer, rope llama3": "speculators",
    "P-EAGLE of speculators": "vllm",
    "DFlash of speculators": "vllm",
    "EAGLE-1": None,
    "Medusa": None,
    "FasterDecoding": None,
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_a_directory_is_converted_and_back_bit_for_bit(
    name: str,
    target: Target,
    tiny_target_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = LAYOUTS[name][1]().write(tmp_path / "first")
    other = ROUND_TRIPS[name] or "vllm"
    assert convert(first, tiny_target_dir, tmp_path / "second", f"export={other}") == 0
    assert "loaded back: logits equal" in capsys.readouterr().out
    back = {"vllm": "speculators", "speculators": "vllm"}[other] if ROUND_TRIPS[name] else "vllm"
    assert convert(tmp_path / "second", tiny_target_dir, tmp_path / "third", f"export={back}") == 0
    theirs = [admitted(tmp_path / place, target) for place in ("first", "second", "third")]
    kinds = [one.recognised.layout.kind for one in theirs]
    assert [kind.startswith("speculators") for kind in kinds[1:]] == [
        other == "speculators",
        back == "speculators",
    ]
    states = [one.drafter.state_dict() for one in theirs]
    for state in states[1:]:
        state.pop("fc.bias", None)  # zero, where there was none
        assert state.keys() == states[0].keys()
        assert all(torch.equal(state[key], tensor) for key, tensor in states[0].items())
    assert len({one.drafter.captures for one in theirs}) == 1
    if name not in ("native", "speculators", "DFlash", "P-EAGLE", "Medusa"):
        return
    again = tmp_path / "again"
    assert convert(tmp_path / "third", tiny_target_dir, again, f"export={other}") == 0
    for file in ("config.json", "model.safetensors"):
        assert (again / file).read_bytes() == (tmp_path / "second" / file).read_bytes()


@pytest.mark.parametrize(
    ("make", "more", "said"),
    [
        (eagle3, ("export.dir=null",), "export.dir must be given with drafter.path"),
        (eagle3, ("export.num_speculative_tokens=auto",), "must be a number with drafter.path"),
        (
            lambda: medusa("bias"),
            ("export=speculators",),
            "export.format=speculators must be one of dflash, dflash2, dspark, eagle3, p_eagle, "
            "got medusa",
        ),
        (
            lambda: medusa("bias"),
            ("export=sglang",),
            "must be of a drafter that SGLang 0.5.23 serves, got medusa",
        ),
        (
            lambda: eagle3("norm_before_residual"),
            ("export=sglang",),
            "export.format=sglang cannot hold this eagle3 drafter: SGLang 0.5.23 computes a "
            "drafter with norm_before_residual as one without; give export=vllm",
        ),
        (lambda: eagle("fc_bias"), (), "fc.bias must be zero: vLLM drops it, SGLang applies it"),
        (lambda: eagle3("bias"), (), "config.json's attention_bias must be False, got True"),
        (
            lambda: eagle3("embedding", hidden=48),
            ("export=speculators",),
            "cannot hold this eagle3 drafter: it holds no drafter of another width",
        ),
        (
            lambda: edited(eagle3(), midlayer__mlp__up_proj__weight=None),
            (),
            "does not fit tiny_target0: missing: midlayer.mlp.up_proj.weight",
        ),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(
    make: Callable[[], Published],
    more: tuple[str, ...],
    said: str,
    tiny_target_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = make().write(tmp_path / "theirs")
    assert convert(source, tiny_target_dir, tmp_path / "out", *more) == 2
    error = capsys.readouterr().err
    assert said in " ".join(error.split())
    assert not (tmp_path / "out").exists()


def test_a_whole_model_has_no_other_layout(
    tiny_target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(tiny_target_dir, tiny_target_dir, tmp_path / "out") == 2
    assert "engines serve it as it is" in " ".join(capsys.readouterr().err.split())


def test_layers_with_a_window_are_neither_written_anew_nor_trained_further(
    tiny_target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    windowed = edited(eagle3(), layer_types=["sliding_attention"], sliding_window=8)
    source = windowed.write(tmp_path / "theirs")
    assert convert(source, tiny_target_dir, tmp_path / "out") == 2
    begun = [f"run.init_from={source}", f"model.path={tiny_target_dir}", f"run.dir={tmp_path}/run"]
    assert main(["train", *begun, "hardware=cpu"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    for key in ("drafter.path", "run.init_from"):
        assert f"{key}={source} must hold layers that see all of a text, got EAGLE-3" in said
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "run").exists()


def test_large_weights_are_written_in_shards_and_read_together(
    target: Target, tiny_target_dir: Path, tmp_path: Path
) -> None:
    source = LAYOUTS["native"][1]().write(tmp_path / "theirs")
    assert convert(source, tiny_target_dir, tmp_path / "out", "export.max_shard_size=10KB") == 0
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    shards = [name for name in files if name.startswith("model-")]
    assert len(shards) >= 2
    assert files == ["README.md", "config.json", *shards, "model.safetensors.index.json"]
    held = [load_file(tmp_path / "out" / name) for name in shards]
    largest = [sum(t.nbytes for t in one.values()) for one in held if len(one) > 1]
    assert max(largest) <= 10_000
    whole, sharded = (admitted(path, target).drafter for path in (source, tmp_path / "out"))
    found = sharded.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.state_dict().items())
    # An export in shards is replaced like any other, and nothing of it stays.
    assert convert(source, tiny_target_dir, tmp_path / "out", "export.overwrite=true") == 0
    assert not any((tmp_path / "out").glob("model-*"))


def test_a_link_to_a_folder_is_followed_and_the_place_where_one_is_refused(
    tiny_target_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = eagle3().write(tmp_path / "theirs")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for more in ((), ("export.overwrite=true",)):
        assert convert(source, tiny_target_dir, tmp_path / "link", *more) == 0
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "real" / "config.json").is_file()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert convert(source, tiny_target_dir, Path()) == 2
    assert "must be another folder than the one that the command runs in" in capsys.readouterr().err
    left = {path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")}
    assert left == {"theirs", "real", "link", "here"}


def test_what_rounding_costs_is_measured_on_held_out_prompts(
    tiny_target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = eagle3().write(tmp_path / "theirs")
    prompts = tmp_path / "prompts.jsonl"
    lines = [f'{{"id": "{i}", "task": "sums", "turns": ["{i} + {i}?"]}}' for i in range(6)]
    prompts.write_text("\n".join(lines))
    given = [f"drafter.path={source}", f"model.path={tiny_target_dir}", "eval.max_new_tokens=8"]
    given += [f"eval.prompts={prompts}", f"export.dir={tmp_path / 'out'}", "hardware=cpu"]
    assert main(["export", *given, "export=fp8", "export.measured_prompts=4"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "as written" in said
    assert "on 4 held-out prompts, greedy, chain of 3" in said
    assert "on 4 held-out prompts, greedy" in (tmp_path / "out" / "README.md").read_text()
    assert main(["export", *given, "export.overwrite=true"]) == 0  # bfloat16, not measured
    assert "held-out" not in capsys.readouterr().out
