"""The exact law of the real decode loop, by replaying it over every answer that chance could give.

Targets of at most six tokens in float64. `loop_law` runs the loop itself (its caches, positions,
warpers, stops, limits, batches) once for every sequence of answers; `target_law` asks Transformers
for full forwards and warps them with its own processors. `deviation` is the largest difference.
"""

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from tests_support import model_config
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from drafttrain.decode.loop import Cycle, speculative_decode_batch
from drafttrain.decode.verify import LOSSLESS, Rule
from drafttrain.drafters.base import Drafter
from drafttrain.sampling import probabilities
from drafttrain.target.describe import describe
from drafttrain.target.target import Target
from drafttrain.types import Nodes, Sampling

EXACT = 1e-12  # what rounding may do
BROKEN = 1e-3  # what a mistake does at least
PLAIN = Sampling(1.0, 0, 1.0)
WORDS, END = ("a", "b", "ab", "c", "ca"), "<end>"
SEEDS = {3: 28, 4: 22, 5: 12, 6: 18}  # chosen so that no law is nearly certain
CONF = Path(__file__).parents[1] / "conf" / "drafter"

Text = tuple[int, ...]
Law = dict[tuple[Text, ...], float]  # of the outputs of all rows of a batch, jointly


# --- targets and drafters ---


def tokenizer_of(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """One token for each word; the last is the end of an answer."""
    from tokenizers import Tokenizer, decoders, models

    backend = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([words[-1]])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=words[-1], clean_up_tokenization_spaces=False
    )


def small_llama(words: Sequence[str], seed: int, **shape: Any) -> LlamaForCausalLM:
    """A random Llama over these words, whose laws are far from flat and from each other."""
    settings: dict[str, Any] = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "initializer_range": 0.5,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": len(words) - 1,
        "pad_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **{**settings, **shape}))


@dataclass(frozen=True, eq=False)
class Small:
    """A target whose every law can be enumerated; the folder is for what its drafters need."""

    target: Target
    words: tuple[str, ...]
    folder: Path

    @classmethod
    def make(cls, folder: Path, num_words: int) -> "Small":
        """Make a random target over the first so many words, the last of which is the end."""
        words = (*WORDS[: num_words - 1], END)
        model, tokenizer = small_llama(words, SEEDS[num_words]).double(), tokenizer_of(words)
        spec = describe(model_config(folder), model.config, None, tokenizer, "small")
        return cls(Target(model, tokenizer, spec), words, folder)


def _two_model(small: Small) -> dict[str, Any]:
    """A smaller model of the same vocabulary, in a directory."""
    place = small.folder / f"draft_{len(small.words)}"
    if not place.exists():
        small_llama(small.words, seed=5, num_hidden_layers=1).save_pretrained(place)
        tokenizer_of(small.words).save_pretrained(place)
    return {"path": str(place)}


# What a drafter needs besides its yaml: the folder is that of the target it drafts for.
SETTINGS: dict[str, Callable[[Small], dict[str, Any]]] = {
    "eagle3": lambda small: {"layers": [0, 1, 2], "draft_vocab_size": len(small.words) - 1},
    "two_model": _two_model,
}
# `admitted` is no family of its own: it reads a directory that holds one of the others.
DRAFTERS = sorted(path.stem for path in CONF.glob("*.yaml") if path.stem != "admitted")


def drafter_for(name: str, small: Small) -> Drafter:
    """Build conf/drafter/<name>.yaml with random weights in float64."""
    values = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    assert isinstance(values, dict)
    module, kind = values.pop("_target_").rsplit(".", 1)
    values |= SETTINGS.get(name, lambda small: {})(small)
    config = getattr(importlib.import_module(module), kind)(**values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        drafter: Drafter = config.build(small.target.spec)
        if hasattr(drafter, "attach"):
            drafter.attach(small.target.tokenizer)
        drafter = drafter.double()
        if drafter.capabilities.trainable:
            counts = torch.arange(len(small.words))  # a reduced vocabulary lacks the first word
            drafter.prepare(counts, small.target.readout)
            for parameter in drafter.parameters():
                torch.nn.init.normal_(parameter, std=0.5)
    return drafter.eval()


# --- what is decoded ---


@dataclass(frozen=True)
class Case:
    """One setting of the loop; every prompt is a row of one batch."""

    prompts: tuple[Text, ...] = ((0, 1, 0, 1, 0),)  # prompt lookup finds something in it
    limit: int = 3
    depth: int = 2
    sampling: Sampling = PLAIN
    draft_sampling: Sampling | None = None
    rule: Rule = LOSSLESS
    stop_strings: tuple[str, ...] = ()


Key = tuple[int, int, int]  # (row of the case, start, draw): whatever chance is asked for
Walk = dict[Key, tuple[float, float]]  # the interval in which each key's uniform lies


class Replay:
    """A Chance that follows walks, and where one leaves it free, takes the first answer there is.

    Every key names one uniform, as in `SeededChance`; a walk says in which interval it lies, so
    whoever asks for a key twice gets answers of the same uniform. Rows walk * group to
    walk * group + group - 1 of the batch belong to one walk. `siblings` are the walks not taken.
    """

    def __init__(self, walks: Sequence[Walk], group: int) -> None:
        self.walks = [dict(walk) for walk in walks]
        self.group = group
        self.asked: set[Key] = set()
        self.num_repeated = 0  # keys asked for more than once in one decoding
        self.siblings: list[Walk] = []

    def _answer(self, row: int, start: int, draw: int, edges: Sequence[float]) -> int:
        """Return i with edges[i] <= uniform < edges[i + 1]."""
        walk, member = self.walks[row // self.group], row % self.group
        key = (member, start, draw)
        self.num_repeated += (row, start, draw) in self.asked
        self.asked.add((row, start, draw))
        low, high = walk.get(key, (0.0, 1.0))
        parts = [(max(low, left), min(high, right)) for left, right in pairwise(edges)]
        # Slivers of rounding are no answers.
        answer, *others = [i for i, (left, right) in enumerate(parts) if right - left > 1e-15]
        self.siblings.extend({**walk, key: parts[other]} for other in others)
        walk[key] = parts[answer]
        return answer

    def accept(
        self, probability: Tensor, rows: Sequence[int], starts: Sequence[int], draw: int
    ) -> Tensor:
        answers = [
            self._answer(row, start, draw, (0.0, p, 1.0)) == 0
            for row, start, p in zip(rows, starts, probability.tolist(), strict=True)
        ]
        return torch.tensor(answers)

    def choose(
        self, probs: Tensor, rows: Sequence[int], starts: Sequence[int], draw: int
    ) -> Tensor:
        cumulative = probs.double().cumsum(-1)
        edges = torch.cat([torch.zeros_like(cumulative[:, :1]), cumulative / cumulative[:, -1:]], dim=1)
        answers = [
            self._answer(row, start, draw, row_edges)
            for row, start, row_edges in zip(rows, starts, edges.tolist(), strict=True)
        ]
        return torch.tensor(answers)


class Seen(set[str]):
    """What happened in some walk: a proof over walks in which nothing happens proves nothing."""

    def __init__(self, case: Case, ends: Sequence[int]) -> None:
        super().__init__()
        self.case, self.ends = case, torch.tensor(ends)

    def __call__(self, cycle: Cycle) -> None:
        """Take in one verification."""
        case, verdict, proposal = self.case, cycle.verdict, cycle.proposal
        accepted = verdict.num_accepted
        nodes = torch.arange(proposal.tokens.shape[1])
        ends = torch.isin(proposal.tokens, self.ends) & (nodes < accepted[:, None])
        first = [len(case.prompts[row % len(case.prompts)]) for row in cycle.rows]
        said = torch.tensor(cycle.starts) - torch.tensor(first)
        full = accepted == proposal.num_nodes
        self |= {
            name
            for name, happened in {
                "nothing proposed": proposal.num_nodes == 0,
                "first rejected": (accepted == 0) & ~full,
                "partly accepted": (accepted > 0) & ~full,
                "all accepted": (accepted > 0) & full,
                "end inside an accepted run": ends.any(-1),
                "limit inside an accepted run": said + accepted + 1 > case.limit,
            }.items()
            if bool(happened.any())
        }
        if len(set(accepted.tolist())) > 1:
            self.add("rows accept differently")
        if len(cycle.rows) % len(case.prompts):
            self.add("a row has left")


@dataclass(frozen=True)
class Replayed:
    """The law of what the loop emitted, how many walks that took, and what happened in them."""

    law: Law
    num_walks: int
    num_repeated: int
    seen: Seen


def replay(small: Small, drafter: Drafter, case: Case, width: int) -> Replayed:
    """Run the real loop over all answers of chance, depth-first; `width` walks in each batch.

    width 1 is the loop as it is called: one walk, the rows of the case. Wider batches hold many
    walks, as rows that know nothing of each other, at a hundredth of the price.
    """
    group = len(case.prompts)
    law: Law = {}
    seen = Seen(case, small.target.spec.eos_token_ids)
    pending: list[Walk] = [{}]
    num_walks = num_repeated = 0
    while pending:
        chance = Replay(pending[-width:], group)
        del pending[-width:]
        prompts = case.prompts * len(chance.walks)
        decoded = speculative_decode_batch(
            small.target,
            drafter,
            prompts,
            depth=case.depth,
            sampling=case.sampling,
            max_new_tokens=case.limit,
            chance=chance,
            rows=range(len(prompts)),
            stop_strings=case.stop_strings,
            draft_sampling=case.draft_sampling,
            rule=case.rule,
            record=seen,
        )
        outputs = [row.tokens for row in decoded]
        for index, walk in enumerate(chance.walks):
            said = tuple(outputs[index * group : (index + 1) * group])
            law[said] = law.get(said, 0.0) + math.prod(b - a for a, b in walk.values())
        pending += chance.siblings
        num_walks += len(chance.walks)
        num_repeated += chance.num_repeated
    return Replayed(law, num_walks, num_repeated, seen)


# --- what it is compared with ---


def ended(small: Small, case: Case, output: Text) -> bool:
    """Whether an answer ends here: by its definition, token by token."""
    if len(output) == case.limit or output[-1:] == (len(small.words) - 1,):
        return True
    text = "".join(small.words[token] for token in output)
    return any(string in text for string in case.stop_strings)


@torch.no_grad()
def next_laws(small: Small, texts: Sequence[Text], sampling: Sampling) -> Tensor:
    """The target's law after each text (equally long): full forwards, warped by Transformers."""
    tokens = torch.tensor(texts)
    scores = small.target.model(input_ids=tokens, use_cache=False).logits[:, -1]
    if sampling.greedy:
        return torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).double()
    for wanted, warper in (
        (sampling.temperature != 1, lambda: TemperatureLogitsWarper(sampling.temperature)),
        (sampling.top_k > 0, lambda: TopKLogitsWarper(sampling.top_k)),
        (sampling.top_p < 1, lambda: TopPLogitsWarper(sampling.top_p)),
    ):
        if wanted:
            scores = warper()(tokens, scores)
    return scores.softmax(-1)


def row_law(small: Small, case: Case, prompt: Text) -> dict[Text, float]:
    """The target's own law of one row's output."""
    done: dict[Text, float] = {}
    going: dict[Text, float] = {(): 1.0}
    while going:
        laws = next_laws(small, [prompt + output for output in going], case.sampling)
        longer = {
            (*output, token): probability * p
            for (output, probability), law in zip(going.items(), laws.tolist(), strict=True)
            for token, p in enumerate(law)
            if p > 0
        }
        done |= {output: p for output, p in longer.items() if ended(small, case, output)}
        going = {output: p for output, p in longer.items() if output not in done}
    return done


def product(laws: Sequence[dict[Text, float]]) -> Law:
    """The joint law of independent rows."""
    joint: Law = {(): 1.0}
    for law in laws:
        joint = {(*key, text): p * q for key, p in joint.items() for text, q in law.items()}
    return joint


def target_law(small: Small, case: Case) -> Law:
    """The target's own law of the outputs of all rows."""
    return product([row_law(small, case, prompt) for prompt in case.prompts])


def distance(one: Law, other: Law) -> float:
    """The largest difference between the probabilities of an output."""
    return max(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in one | other)


def deviation(small: Small, drafter: Drafter, case: Case, width: int) -> float:
    """The check itself: how far the loop's law is from the target's own."""
    return distance(replay(small, drafter, case, width).law, target_law(small, case))


# --- the law that a rule predicts, in closed form ---


@torch.no_grad()
def draft_law(
    small: Small, drafter: Drafter, case: Case, text: Text, drafted: Text
) -> Tensor | None:
    """The law of the next draft, from nothing: "1 vocab", or None where nothing is offered."""
    target = small.target
    prefix = torch.tensor([text])
    _, features = target.step(target.begin(), prefix[:, :-1], drafter.captures)
    state = drafter.begin(target.readout, prefix[:, 0], len(text) + case.depth + 1)
    drafter.observe(state, prefix[:, 1:], [len(text) - 1], features)
    whole = drafter.propose(state, case.depth)
    if whole is not None:
        if len(drafted) >= int(whole.num_nodes[0]):
            return None
        return torch.nn.functional.one_hot(
            whole.tokens[:, len(drafted)], len(small.words)
        ).double()  # fmt: skip
    expansion = drafter.expand(state, None)
    for level, token in enumerate(drafted):
        node = torch.tensor([[token]])
        expansion = drafter.expand(state, Nodes(node, torch.full_like(node, level - 1)))
    law = probabilities(expansion.logits[:, 0], case.draft_sampling or case.sampling)
    return law if drafter.vocab is None else drafter.vocab.scatter(law)


def predicted_law(small: Small, drafter: Drafter, case: Case) -> Law:
    """The law of one row under the case's rule: acceptance and correction, node by node.

    A cycle's node takes draft * acceptance on to the next node, and the rest, by the correction,
    to the next cycle: the two terms of `one_step_law`, apart.
    """
    (prompt,) = case.prompts
    law: Law = {}

    @functools.cache
    def next_law(output: Text) -> Tensor:
        return next_laws(small, [prompt + output], case.sampling)

    def says(probs: Tensor, output: Text, drafted: Text | None, probability: float) -> None:
        for token, p in enumerate(probs[0].tolist()):
            if p > 0:
                path = None if drafted is None else (*drafted, token)
                walk((*output, token), path, probability * p)

    def walk(output: Text, drafted: Text | None, probability: float) -> None:
        if output and ended(small, case, output):
            law[(output,)] = law.get((output,), 0.0) + probability
            return
        if drafted is None:
            drafted = ()
        target_probs = next_law(output)
        root = prompt + output[: len(output) - len(drafted)]
        draft_probs = None
        if output and len(drafted) < case.depth:
            draft_probs = draft_law(small, drafter, case, root, drafted)
        if draft_probs is None:
            says(target_probs, output, None, probability)  # the root, or the bonus
            return
        accepted, corrected = parts(case.rule, target_probs, draft_probs)
        says(accepted, output, drafted, probability)
        says(corrected, output, None, probability)

    walk((), None, 1.0)
    return law


def parts(rule: Rule, target_probs: Tensor, draft_probs: Tensor) -> tuple[Tensor, Tensor]:
    """What a node emits by acceptance and by correction; together `one_step_law`."""
    every = torch.arange(target_probs.shape[1])[None]
    accepted = draft_probs * rule.acceptance(target_probs, draft_probs, every)
    rest = 1 - accepted.sum(-1, keepdim=True)
    return accepted, rest.clamp(min=0) * rule.correction(target_probs, draft_probs)

