"""A real OpenVINO GenAI grows dynamic EAGLE-3 trees with our drafters, and says what we say.

Run by scripts/serving_suite.sh, which makes the environment that OpenVINO lives in. Everything is
float32, greedy, one prompt at a time, on the CPU, and nothing ends a text but the limit.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
from overfit import Text, decisive_texts, overfit, target_at
from test_vllm import card_of, export_config, prompts_of, random_target

from drafttrain.core.chance import SeededChance
from drafttrain.core.sampling_config import GREEDY
from drafttrain.decode.loop import speculative_decode
from drafttrain.decode.policy import DynamicTree
from drafttrain.drafters.base import Drafter
from drafttrain.formats.write.export import export_drafter
from drafttrain.target.model import Target
from drafttrain.target.pretrained.models import EMBEDDED

pytestmark = pytest.mark.serving

PYTHON = "DRAFTTRAIN_OPENVINO_PYTHON"
MAX_NEW_TOKENS, NUM_PROMPTS = 64, 8
TIMEOUT_S = 1800

Cycles = list[tuple[int, int]]  # first output position and accepted tokens of each, prefill apart


# The parameters of EAGLE-2's tree: depth, width, nodes without the last token.
TREES = {
    "chain": DynamicTree(3, 1, 3),
    "narrow": DynamicTree(4, 2, 4),  # fewer nodes than candidates of one level
    "small": DynamicTree(3, 3, 8),
    "deep": DynamicTree(5, 4, 20),
    "wide": DynamicTree(3, 8, 16),
}
# target: training steps, changes to the drafter's yaml. Few steps, so that some drafts fail.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "embedded": (25, {"draft_vocab_coverage": 0.95}),
    "qwen3": (50, {"draft_vocab_size": 128}),
    "whole": (40, {"draft_vocab_coverage": 1.0}),  # no reduced vocabulary
}
EVERY = [(case, tree) for case in CASES for tree in TREES]


@dataclass
class Witnessed:
    """What both sides did with the same prompts, by case."""

    texts: dict[str, list[Text]] = field(default_factory=dict)  # of our plain loop
    targets: dict[str, Target] = field(default_factory=dict)
    drafters: dict[str, Drafter] = field(default_factory=dict)
    theirs: dict[str, Any] = field(default_factory=dict)  # OpenVINO's answers

    def answer(self, case: str, tree: str) -> dict[str, Any]:
        """Return OpenVINO's answer of one case with one tree."""
        answer = self.theirs[case]
        assert "error" not in answer, answer["error"]
        return answer[tree]


@pytest.fixture(scope="module")
def witnessed(tmp_path_factory: pytest.TempPathFactory) -> Witnessed:
    """Train and export a drafter for every target, then let one OpenVINO process decode."""
    python = os.environ.get(PYTHON, "")
    if not python:
        pytest.skip(f"{PYTHON} is not set: scripts/serving_suite.sh makes OpenVINO's environment")
    folder = tmp_path_factory.mktemp("openvino")
    witnessed, requests = Witnessed(), []
    folders = {
        "embedded": EMBEDDED,
        "qwen3": random_target(folder / "qwen3", "qwen3", num_layers=7),
        "whole": random_target(folder / "whole", "llama", num_layers=4, vocab_size=97),
    }
    for case, (steps, changes) in CASES.items():
        target = target_at(folders[case])
        prompts = prompts_of(case, target)
        texts = decisive_texts(target, prompts, NUM_PROMPTS, MAX_NEW_TOKENS)
        drafter = overfit("eagle3", target, texts, steps, **changes)
        assert (drafter.vocab is None) == (case == "whole")
        out = folder / "exports" / case
        tokenizer = partial(getattr, target, "tokenizer")
        export_drafter(
            drafter, str(folders[case]), out, export_config(), card_of("eagle3"), tokenizer
        )
        witnessed.texts[case], witnessed.targets[case] = texts, target
        witnessed.drafters[case] = drafter
        requests.append(
            {
                "name": case,
                "target": str(folders[case]),
                "drafter": str(out),
                "captures": list(drafter.captures),
                "prompts": [text.prompt for text in texts],
                "trees": {name: asdict(tree) for name, tree in TREES.items()},
            }
        )
    witnessed.theirs = ask_openvino(python, folder, requests)
    return witnessed


def ask_openvino(python: str, folder: Path, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """Run every request in one process of the other environment; one that a signal ends, again."""
    paths = folder / "request.json", folder / "answer.json"
    request = {"max_new_tokens": MAX_NEW_TOKENS, "folder": str(folder / "ir"), "cases": requests}
    paths[0].write_text(json.dumps(request))
    client = Path(__file__).with_name("openvino_client.py")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "CI": "true"}  # CI: OpenVINO sends no telemetry
    for _ in range(2):  # seen once: glibc aborted it while OpenVINO converted a model
        shutil.rmtree(folder / "ir", ignore_errors=True)
        done = subprocess.run(
            [python, str(client), *map(str, paths)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode >= 0:
            break
        print(f"OpenVINO ended by signal {-done.returncode}: {done.stderr[-2000:]}")
    assert done.returncode == 0, done.stderr[-5000:]
    answer = json.loads(paths[1].read_text())
    print(f"OpenVINO GenAI {answer['openvino']}:", answer["seconds"])
    return answer["cases"]


def our_cycles(target: Target, drafter: Drafter, prompt: list[int], tree: DynamicTree) -> Cycles:
    """Return the cycles of our loop with a tree of the same parameters."""
    decoded = speculative_decode(
        target,
        drafter,
        prompt,
        policy=tree,
        sampling=GREEDY,
        max_new_tokens=MAX_NEW_TOKENS,
        chance=SeededChance(0),
        stop_tokens=(),
    )
    return [(start, accepted) for start, _, accepted in decoded.stats.cycles]


def their_cycles(steps: Sequence[int]) -> Cycles:
    """Return OpenVINO's cycles, from the tokens that each pass of its target gave."""
    return [(start, end - start - 1) for start, end in pairwise(accumulate(steps))]


def whole(cycles: Cycles, tree: DynamicTree) -> Cycles:
    """Return the cycles that end before the limit: near it OpenVINO drafts less, or not at all."""
    return [cycle for cycle in cycles if cycle[0] + tree.depth + 1 < MAX_NEW_TOKENS]


@pytest.mark.parametrize(("case", "tree"), EVERY)
def test_greedy_output_is_that_of_plain_decoding(
    witnessed: Witnessed, case: str, tree: str
) -> None:
    answer = witnessed.answer(case, tree)
    assert answer["tokens"] == [text.answer for text in witnessed.texts[case]]
    assert [sum(steps) for steps in answer["steps"]] == [MAX_NEW_TOKENS] * NUM_PROMPTS


@pytest.mark.parametrize(("case", "tree"), EVERY)
def test_every_cycle_accepts_as_many_tokens_as_ours(
    witnessed: Witnessed, case: str, tree: str
) -> None:
    differences = []
    target, drafter = witnessed.targets[case], witnessed.drafters[case]
    steps = witnessed.answer(case, tree)["steps"]
    for number, text in enumerate(witnessed.texts[case]):
        ours = whole(our_cycles(target, drafter, text.prompt, TREES[tree]), TREES[tree])
        theirs = whole(their_cycles(steps[number]), TREES[tree])
        if ours != theirs:
            apart = min(set(ours) ^ set(theirs))
            mine, other = ([cycle for cycle in side if cycle >= apart] for side in (ours, theirs))
            differences.append(f"prompt {number}: ours {mine[:4]}, OpenVINO {other[:4]}")
    assert not differences, "\n".join(differences)


@pytest.mark.parametrize("case", CASES)
def test_equal_counts_mean_something(witnessed: Witnessed, case: str) -> None:
    """Drafts must fail and succeed, and a tree of more nodes must need fewer cycles."""
    passes = {}
    for name, tree in TREES.items():
        cycles = [
            cycle
            for steps in witnessed.answer(case, name)["steps"]
            for cycle in whole(their_cycles(steps), tree)
        ]
        accepted = [count for _, count in cycles]
        passes[name] = sum(map(len, witnessed.answer(case, name)["steps"]))
        print(f"{case} {name} {tree}: {sum(accepted)} accepted in {len(cycles)} cycles")
        assert set(accepted) >= set(range(4)), name
        assert max(accepted) <= tree.depth, name
    assert passes["chain"] > passes["small"] > passes["deep"]
