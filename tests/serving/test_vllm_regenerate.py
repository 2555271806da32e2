"""A real vLLM answers and hands over hidden states: as Transformers does, to rounding.

Run by scripts/serving_suite.sh. The embedded target in float32: greedy answers of Transformers, of
an engine and of a server; a server that dies; features of packed and padded rows; a training run.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from builders import BY_TEMPLATE, model_config
from paths import ROOT

from drafttrain import __main__ as cli
from drafttrain.config.groups import content_of
from drafttrain.core.types import Batch, Sample
from drafttrain.data.batches import collate, pack
from drafttrain.data.chat import prompt_tokens
from drafttrain.data.conversations import Conversation, JsonlConfig, read_asked
from drafttrain.data.records import Message
from drafttrain.decode.autoregressive import autoregressive_queue
from drafttrain.runtime.signals import StopRequest
from drafttrain.target.answers.answers_file import open_answers, regenerate
from drafttrain.target.answers.config import RegenerateSettings
from drafttrain.target.answers.dialogue import ChatTokens, by_transformers, by_vllm
from drafttrain.target.answers.endpoint import by_endpoint
from drafttrain.target.model import Target, load_target
from drafttrain.target.pretrained.models import EMBEDDED
from drafttrain.target.served import ServedTarget, open_served
from drafttrain.target.vllm.config import VllmConfig
from drafttrain.target.vllm.engine import VllmEngine
from drafttrain.target.vllm.process import DEFAULTS

pytestmark = pytest.mark.serving

CONF = ROOT / "conf"
LIMIT, ROOM = 48, 1024
NEAR_TIE = 1e-3  # difference of log-probabilities that rounding may turn around
TOLERANCE = 1e-5  # of features, beside the largest value of their layer; measured: below 1e-6
QUESTIONS = (
    ("What is the capital of France?", "And of Italy?"),
    ("Write a short poem about a cat.",),
    ("Count from one to five.", "And backwards?"),
    ("Hello", "How are you?"),
    ("Add 12 and 30.",),
    ("Name three colours.", "Which of them is the sky?"),
    ("What is a dog?",),
    ("Tell me a story about the sea.",),
    ("Sort these numbers: 5, 3, 9.",),
    ("Write a function that adds two numbers.",),
    ("Who was the first man on the moon?",),
    ("Translate 'good morning' into French.", "And into German?"),
)


def settings(**changes: Any) -> RegenerateSettings:
    values = yaml.safe_load((CONF / "regenerate.yaml").read_text())["regenerate"]
    return RegenerateSettings(**values | {"max_new_tokens": LIMIT, "concurrency": 4} | changes)


def vllm_config() -> VllmConfig:
    return VllmConfig(**yaml.safe_load((CONF / "vllm" / "default.yaml").read_text()))


SERVED = partial(by_endpoint, template=BY_TEMPLATE, stop=StopRequest())


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(model_config(EMBEDDED), torch.float32, "cpu")


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> list[Conversation]:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"turns": list(turns)}) + "\n" for turns in QUESTIONS))
    values = content_of("data", "jsonl")
    del values["_target_"]
    return read_asked(JsonlConfig(**values | {"path": str(file)}), "all")[0]


class Server:
    """A vLLM server of the embedded target, which can be killed and started again."""

    def __init__(self, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = log
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment |= DEFAULTS | {"OMP_NUM_THREADS": "1"}
        python = os.environ["DRAFTTRAIN_VLLM_PYTHON"]
        call = [python, "-I", "-m", "vllm.entrypoints.openai.api_server", "--model", str(EMBEDDED)]
        call += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32"]
        call += ["--enforce-eager", "--max-model-len", str(ROOM), "--served-model-name", "tiny"]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                call, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        deadline = time.monotonic() + 240
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2).close()
                return
            except OSError:
                assert self.process.poll() is None, self.log.read_text()[-2000:]
                assert time.monotonic() < deadline
                time.sleep(0.3)

    def kill(self) -> None:
        """End it at once, and all that it started."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server") / "server.log")
    server.start()
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    with VllmEngine(
        EMBEDDED,
        replace(vllm_config(), tensor_parallel=1),
        dtype="float32",
        device="cpu",
        longest=ROOM,
        folder=tmp_path_factory.mktemp("engine"),
    ) as engine:
        yield engine


def run(
    out: Path,
    asked: Sequence[Conversation],
    config: RegenerateSettings,
    backend: Callable[..., Any],
) -> list[dict[str, Any]]:
    with open_answers(out, config.identity()) as answers:
        opened = nullcontext(partial(backend, config=config))
        regenerate(asked, answers, opened, StopRequest(), show=False)
    return [json.loads(line) for line in out.read_text().splitlines()]


def chat_of(target: Target, config: RegenerateSettings) -> ChatTokens:
    return ChatTokens(config, BY_TEMPLATE, target.tokenizer, target.spec, ROOM)


def engine_backend(engine: VllmEngine, target: Target) -> Callable[..., Any]:
    return lambda asked, config: by_vllm(asked, engine, chat_of(target, config), in_flight=4)


def test_three_backends_give_the_same_greedy_answers(
    target: Target, engine: VllmEngine, server: Server, asked: list[Conversation], tmp_path: Path
) -> None:
    def here(asked: Sequence[Conversation], config: RegenerateSettings) -> Iterator[Any]:
        chat = chat_of(target, config)
        return by_transformers(asked, target, chat, autoregressive_queue)

    ours = run(tmp_path / "here.jsonl", asked, settings(), here)
    theirs = {
        "vllm": run(
            tmp_path / "engine.jsonl",
            asked,
            settings(backend="vllm"),
            engine_backend(engine, target),
        ),
        "openai": run(
            tmp_path / "server.jsonl",
            asked,
            settings(backend="openai", base_url=server.url),
            SERVED,
        ),
    }
    assert len(ours) == len(QUESTIONS)
    for name, rows in theirs.items():
        assert [row["index"] for row in rows] == [row["index"] for row in ours]
        num_equal = num_answers = 0
        for mine, other in zip(ours, rows, strict=True):
            for turn, (a, b) in enumerate(zip(mine["answers"], other["answers"], strict=True)):
                num_answers += 1
                if a["tokens"] == b["tokens"]:
                    num_equal += 1
                    continue
                assert gap_where_they_part(target, mine, turn, b["tokens"]) < NEAR_TIE
                break  # what follows answers another history
            else:
                assert mine["messages"] == other["messages"]
        print(f"{name}: {num_equal} of {num_answers} answers identical, token for token")
        assert num_equal >= 0.8 * num_answers


def gap_where_they_part(target: Target, row: dict[str, Any], turn: int, others: list[int]) -> float:
    """Return how much likelier our token is than theirs at the first place where they differ."""
    own = row["answers"][turn]["tokens"]
    place = next(i for i, (a, b) in enumerate(zip(own, others, strict=False)) if a != b)
    asked = [Message(**message) for message in row["messages"][: 2 * turn + 1]]
    prompt = prompt_tokens(asked, target.tokenizer, BY_TEMPLATE)
    logits, _ = target.step(target.begin(), torch.tensor([[*prompt, *own[:place]]]), last_only=True)
    distribution = logits[0, -1].log_softmax(-1)
    return abs(float(distribution[own[place]] - distribution[others[place]]))


def test_an_engine_samples_by_seed(
    target: Target, engine: VllmEngine, asked: list[Conversation], tmp_path: Path
) -> None:
    texts = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        config = settings(backend="vllm", temperature=0.8, top_p=0.9, seed=seed)
        run(tmp_path / f"{name}.jsonl", asked, config, engine_backend(engine, target))
        texts.append((tmp_path / f"{name}.jsonl").read_bytes())
    assert texts[0] == texts[1]
    assert texts[2] != texts[0]


def test_a_prompt_that_the_server_refuses_is_a_failure_of_its_own(
    server: Server, asked: list[Conversation], tmp_path: Path
) -> None:
    long = replace(asked[0], messages=(Message("user", "word " * 3 * ROOM),))
    config = settings(backend="openai", base_url=server.url)
    out = tmp_path / "out.jsonl"
    rows = run(out, [long, *asked[1:3]], config, SERVED)
    assert [row["index"] for row in rows] == [1, 2]
    failed = json.loads(out.with_suffix(".failed.jsonl").read_text())
    assert failed["reason"] == "refused by the endpoint"
    assert failed["detail"].startswith("400: ")
    assert failed["final"] is True


def test_a_server_that_dies_costs_nothing_that_was_answered(
    server: Server, asked: list[Conversation], tmp_path: Path
) -> None:
    config = settings(backend="openai", base_url=server.url, concurrency=1, max_retries=0)
    whole = run(tmp_path / "whole.jsonl", asked, config, SERVED)
    out = tmp_path / "out.jsonl"

    def dying(missing: Sequence[Conversation], config: RegenerateSettings) -> Iterator[Any]:
        num_answered = 0  # a list is empty where an answer takes longer than CHECK_S
        for outcomes in SERVED(missing, config=config):
            num_answered += len(outcomes)
            if num_answered == 4:
                server.kill()
            yield outcomes

    with pytest.raises(ValueError, match=r"failed 8 conversations in a row.*resumes there"):
        run(out, asked, config, dying)
    assert len(out.read_text().splitlines()) == 4
    server.start()
    assert run(out, asked, config, SERVED) == whole
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


# Hidden states


def samples_of(vocab: int, lengths: Sequence[int]) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(6, vocab, (length,), generator=generator) for length in lengths]
    return [Sample(text, torch.ones(len(text)) > 0, index) for index, text in enumerate(tokens)]


def assert_another_model_is_noticed(served: ServedTarget) -> None:
    own = served.readout
    head = own.head + 0.1 * own.head.std() * torch.randn(own.head.shape)
    others = [("log-probability", replace(own, head=head))]
    others += [("log-probability", replace(own, logit_scale=0.97))]
    if 0 in served.engine.captures:
        others += [("embeds", replace(own, embedding=own.embedding.flip(0)))]
    for word, other in others:
        alike = ServedTarget(served.engine, served.norm, other, served.spec, served.tokenizer)
        with pytest.raises(ValueError, match=f"{word}.* they must be the same model"):
            alike.check()


def assert_same_features(
    target: Target, folder: Path, place: Path, batches: Sequence[Batch], captures: tuple[int, ...]
) -> None:
    with open_served(
        model_config(place),
        vllm_config(),
        torch.float32,
        "cpu",
        captures=captures,
        longest=target.spec.max_positions,
        folder=folder,
    ) as served:
        assert served.spec == target.spec
        assert torch.equal(served.readout.embedding, target.readout.embedding)
        assert torch.equal(served.readout.head, target.readout.head)
        for batch in batches:
            theirs, ours = served.features(batch, captures), target.features(batch, captures)
            real = (batch.document >= 0)[..., None]
            pairs = {i: (theirs.captured[i], ours.captured[i]) for i in captures}
            pairs[-1] = (theirs.final_hidden, ours.final_hidden)
            for layer, (a, b) in pairs.items():
                size = (b * real).abs().max()
                gap = float(((a - b) * real).abs().max() / size)
                print(f"{target.spec.architecture} layer {layer}: {gap:.1e} of {size:.2f}")
                assert gap < TOLERANCE
        assert_another_model_is_noticed(served)
        with pytest.raises(ValueError, match=r"vLLM was started to hand over layers .*, got 1;"):
            served.features(batches[0], (1,))


def test_features_are_those_of_transformers(target: Target, tmp_path: Path) -> None:
    padded = collate(samples_of(4096, [5, 60, 33]))
    whole = collate(samples_of(4096, [target.spec.max_positions]))
    packed = pack(samples_of(4096, [20, 40, 64, 3]), 64)
    assert (packed.document[0] >= 0).sum() > 60
    last = target.spec.num_layers
    assert_same_features(target, tmp_path, EMBEDDED, [padded, packed, whole], (0, 3, last))


def test_features_of_another_architecture_with_a_head_of_its_own(tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    place = tmp_path / "qwen3"
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    Qwen3ForCausalLM(config).save_pretrained(place)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(EMBEDDED / name, place / name)
    target = load_target(model_config(place), torch.float32, "cpu")
    batch = collate(samples_of(4096, [17, 90]))
    assert_same_features(target, tmp_path / "log", place, [batch], (2, 3))


def test_a_drafter_trains_alike_on_hidden_states_from_vllm(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    talk = [
        {"messages": [{"role": "user", "content": q[0]}, {"role": "assistant", "content": q[0]}]}
        for q in QUESTIONS
    ]
    file.write_text("".join(json.dumps(record) + "\n" for record in talk))
    losses = {}
    for placement in ("device", "vllm"):
        folder = tmp_path / placement
        call = ["train", f"run.dir={folder}", "data=jsonl", f"data.path={file}", "data.holdout=2"]
        call += ["hardware=cpu", "hardware.dtype=float32", "hardware.train_dtype=float32"]
        call += ["hardware.threads=1", f"hardware.target_placement={placement}"]
        call += ["trainer.max_steps=3", "trainer.tokens_per_step=128", "trainer.log_every=1"]
        call += ["trainer.validation_prompts=1", "trainer.validation_tokens=8"]
        assert cli.main(call) == 0
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        losses[placement] = [row["train/loss"] for row in rows if "train/loss" in row]
    print(losses)
    assert losses["device"]
    assert losses["vllm"] == pytest.approx(losses["device"], rel=1e-5)


def test_what_vllm_hands_over_is_captured_and_trained_on(tmp_path: Path) -> None:
    """The target is never loaded here: vLLM holds it, then the store stands for it."""
    file = tmp_path / "chats.jsonl"
    talk = [
        {"messages": [{"role": "user", "content": q[0]}, {"role": "assistant", "content": q[0]}]}
        for q in QUESTIONS
    ]
    file.write_text("".join(json.dumps(record) + "\n" for record in talk))
    data = ["data=jsonl", f"data.path={file}", "data.holdout=2", "hardware=cpu"]
    data += ["hardware.dtype=float32", "hardware.train_dtype=float32", "hardware.threads=1"]
    losses = {}
    for placement in ("device", "vllm"):
        store, run = tmp_path / f"store_{placement}", tmp_path / placement
        call = ["capture", f"store.dir={store}", "store.dtype=float32", *data]
        assert cli.main([*call, f"hardware.target_placement={placement}"]) == 0
        call = ["train", f"run.dir={run}", "features=stored", f"features.dir={store}", *data]
        call += ["features.validate=false", "trainer.max_steps=3", "trainer.tokens_per_step=128"]
        call += ["trainer.log_every=1", "trainer.validation_prompts=1"]
        assert cli.main(call) == 0
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        losses[placement] = [row["train/loss"] for row in rows if "train/loss" in row]
    assert losses["device"]
    assert losses["vllm"] == pytest.approx(losses["device"], rel=1e-5)
