"""drafttrain from Python: what its functions return is what the commands measure."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import drafttrain
from drafttrain.__main__ import main
from drafttrain.drafters.base import Drafter
from drafttrain.target.model import Target

pytestmark = pytest.mark.usefixtures("plain_pictures")

PROMPTS = [
    {"id": "sum", "task": "math", "turns": ["What is 2 + 2?"]},
    {"id": "talk", "task": "chat", "turns": ["Say hello.", "And good bye."]},
]
SHORT = {"max_new_tokens": 6, "resamples": 100, "lossless_prompts": 1, "blocks": 1, "depth": 3}


@pytest.fixture(scope="module")
def place(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with prompts and with a run of one step of Medusa."""
    folder = tmp_path_factory.mktemp("api")
    turns = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
    lines = [{"messages": [{**turns[0], "content": f"Hi {n}."}, turns[1]]} for n in range(8)]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in PROMPTS))
    told = ["train", f"run.dir={folder / 'run'}", f"model.path={tiny_target_dir}"]
    told += ["drafter=medusa", "data=jsonl", f"data.path={folder / 'data.jsonl'}", "data.holdout=2"]
    told += ["trainer.max_steps=1", "trainer.tokens_per_step=64", "trainer.validation_prompts=1"]
    told += ["trainer.validation_tokens=4", "hardware=cpu", "hardware.threads=1"]
    assert main([*told, "hardware.dtype=float32"]) == 0
    return folder


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return drafttrain.load_target(tiny_target_dir, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def drafter(place: Path, target: Target) -> Drafter:
    return drafttrain.load_drafter(place / "run", target)


def test_importing_the_package_is_light() -> None:
    program = "import sys, drafttrain; print(drafttrain.__all__, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (
        done.stdout == "['evaluate', 'generate', 'load_drafter', 'load_target', 'stream'] False\n"
    )


def test_what_the_package_does_not_offer_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'load_targets'"):
        drafttrain.load_targets  # noqa: B018


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_is_the_only_message_of_a_chat(
    temperature: float, target: Target, drafter: Drafter
) -> None:
    told: dict[str, Any] = {"max_new_tokens": 12, "temperature": temperature, "seed": 3}
    text = drafttrain.generate(target, drafter, "Say hello.", **told)
    messages = [{"role": "user", "content": "Say hello."}]
    same = drafttrain.generate(target, drafter, messages, **told)
    assert same.tokens == text.tokens
    assert same.message == {"role": "assistant", "content": same.text}
    assert text.text == target.tokenizer.decode(text.tokens, skip_special_tokens=True)
    counters = text.stats.trimmed
    assert text.acceptance_length == 1 + counters.num_accepted_tokens / counters.num_drafts


def test_greedy_text_is_the_plain_loops_with_any_drafter(target: Target, drafter: Drafter) -> None:
    plain = drafttrain.generate(target, None, "What is 2 + 2?", max_new_tokens=16)
    assert plain.acceptance_length is None
    for each in (drafter, drafttrain.load_drafter("ngram", target)):
        assert drafttrain.generate(target, each, "What is 2 + 2?").tokens[:16] == plain.tokens


def test_what_ends_or_bounds_a_text_is_obeyed(target: Target) -> None:
    whole = drafttrain.generate(target, None, "Count.", max_new_tokens=24)
    stop = whole.text[2]
    cut = drafttrain.generate(target, None, "Count.", max_new_tokens=24, stop_strings=[stop])
    assert cut.text == whole.text[: whole.text.index(stop) + 1]
    raw = drafttrain.generate(target, None, "Count.", max_new_tokens=24, template="none")
    assert raw.tokens != whole.tokens


def without_times(report: Any) -> Any:
    """What two evaluations of the same text have in common."""
    cost = ("seconds", "disturbed", "num_unstable_turns")
    return {
        "summary": report["summary"]["acceptance_length"],
        "tasks": {task: row["acceptance_length"] for task, row in report["tasks"].items()},
        "lossless": report["lossless"],
        "prompts": report["prompts"],
        "methods": sorted(report["methods"]),
        "target": report["target"],
        "measurements": [
            {key: value for key, value in row.items() if key not in cost}
            for row in report["measurements"]
        ],
    }


def test_an_evaluation_is_that_of_the_command(
    place: Path, target: Target, drafter: Drafter
) -> None:
    prompts = str(place / "prompts.jsonl")
    settings: dict[str, Any] = {**SHORT, "policy": "chain"}
    told = [f"eval.{key}={value}" for key, value in settings.items()]
    assert main(["evaluate", f"run.dir={place / 'run'}", f"eval.prompts={prompts}", *told]) == 0
    drafttrain.evaluate(target, drafter, prompts=prompts, folder=place / "here", **settings)
    command = json.loads((place / "run/evaluations/default/report.json").read_text())
    ours = json.loads((place / "here/report.json").read_text())
    assert without_times(ours) == without_times(command)
    assert ours["provenance"]["command"] == "drafttrain.evaluate(target, drafter)"
    assert sorted(file.suffix for file in (place / "here").iterdir()) == [
        ".html", ".json", ".jsonl", ".md",
    ]  # fmt: skip


def test_a_drafter_is_measured_as_it_is_now_and_stays_so(
    place: Path, target: Target, drafter: Drafter
) -> None:
    def origin(name: str) -> str:
        told: dict[str, Any] = {**SHORT, "prompts": str(place / "prompts.jsonl")}
        drafttrain.evaluate(target, drafter, folder=place / name, **told)
        return json.loads((place / name / "report.json").read_text())["provenance"]["drafter"]

    first = next(drafter.parameters())
    before, kept = origin("before"), first.detach().clone()
    assert origin("again") == before
    with torch.no_grad():
        first.add_(1.0)
    assert origin("after") != before
    with torch.no_grad():
        first.copy_(kept)
    assert origin("restored") == before


def test_a_drafter_with_tied_weights_is_measured(
    place: Path, target: Target, drafter: Drafter
) -> None:
    tied = copy.deepcopy(drafter)
    tied.register_parameter("again", next(tied.parameters()))
    told: dict[str, Any] = {**SHORT, "prompts": str(place / "prompts.jsonl")}
    report = drafttrain.evaluate(target, tied, **told)
    assert report.provenance["drafter"].startswith("medusa from Python, weights ")


WRONG: list[tuple[str, Callable[[Target, Drafter], object]]] = [
    (
        r"eval=default has no key dept; did you mean depth\?",
        lambda t, d: drafttrain.generate(t, d, "Hi", dept=3),
    ),
    (
        "eval.depth must be a number of at least 1, or auto, got four",
        lambda t, d: drafttrain.generate(t, d, "Hi", depth="four"),
    ),
    (r"depth must be in 1\.\.4", lambda t, d: drafttrain.generate(t, d, "Hi", depth=5)),
    ("run.seed must be at least 0", lambda t, d: drafttrain.generate(t, d, "Hi", seed=-1)),
    (
        "prompt must be text, or messages such as .* got unknown role",
        lambda t, d: drafttrain.generate(t, d, [{"role": "cat", "content": "Hi"}]),
    ),
    (
        "of which the last is a user's, got the assistant's at the end",
        lambda t, d: drafttrain.generate(t, d, [{"role": "assistant", "content": "Hi"}]),
    ),
    ("of which the last is a user's, got no turn", lambda t, d: drafttrain.generate(t, d, [])),
    ("model must be the directory of a model or one of .*tiny, got tinny; a model of the Hub",
     lambda t, d: drafttrain.load_target("tinny")),
    (r"model=tiny has no key revison; did you mean revision\?",
     lambda t, d: drafttrain.load_target("tiny", revison="main")),
    ("drafter must be the folder of a run, .* got nowhere, which is none; train one",
     lambda t, d: drafttrain.load_drafter("nowhere", t)),
    ("whose weights a run holds", lambda t, d: drafttrain.load_drafter("eagle3", t)),
    ("engine must be drafttrain here, got vllm",
     lambda t, d: drafttrain.evaluate(t, d, engine="vllm")),
]  # fmt: skip


@pytest.mark.parametrize(("told", "call"), WRONG)
def test_a_mistake_is_answered_with_key_need_and_remedy(
    told: str, call: Callable[[Target, Drafter], object], target: Target, drafter: Drafter
) -> None:
    with pytest.raises(ValueError, match=told):
        call(target, drafter)


def test_a_drafter_of_another_target_is_refused(target: Target) -> None:
    other = drafttrain.load_target("tiny", device="cpu", dtype="float32")
    ngram = drafttrain.load_drafter("ngram", other)
    with pytest.raises(ValueError, match=r"must be one for .*, whose vocab_size is 97, got"):
        drafttrain.generate(target, ngram, "Hi")


def test_a_notebook_completes_the_public_names() -> None:
    shown = {name for name in dir(drafttrain) if not name.startswith("_")}
    assert set(drafttrain.__all__) <= shown
    assert not shown & {"Any", "TYPE_CHECKING", "os", "sys"}
