"""Targets of at most six tokens in float64, their drafters, and what outputs must follow.

`target_distribution` asks Transformers for full forwards and warps them with its own processors:
nothing of the loop, of its caches or of `sampling` takes part. `predicted_distribution` is what a
rule promises.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from builders import drafter_config, model_config
from paths import ROOT
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from drafttrain.config.groups import content_of
from drafttrain.core.sampling import probabilities
from drafttrain.core.sampling_config import Sampling
from drafttrain.decode.policy import Policy
from drafttrain.decode.verify import LOSSLESS, Rule
from drafttrain.drafters.base import Drafter, JoinedConfig
from drafttrain.target.describe import describe
from drafttrain.target.model import Target

PLAIN = Sampling(1.0, 0, 1.0)
WORDS, END = ("a", "b", "ab", "c", "ca"), "<end>"
SEEDS = {3: 28, 4: 22, 5: 12, 6: 18}  # chosen so that no distribution is nearly certain
CONF = ROOT / "conf" / "drafter"

Text = tuple[int, ...]
Distribution = dict[tuple[Text, ...], float]  # of the outputs of all rows of a batch, jointly


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
    """A random Llama over these words, with distributions far from flat and from each other."""
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
    """A target that can be enumerated; the folder is for what its drafters need."""

    target: Target
    words: tuple[str, ...]
    folder: Path

    @classmethod
    def make(cls, folder: Path, num_words: int) -> "Small":
        """Make a random target over the first so many words, the last of which is the end."""
        words = (*WORDS[: num_words - 1], END)
        model, tokenizer = small_llama(words, SEEDS[num_words]).double(), tokenizer_of(words)
        spec = describe(model_config(folder), model.config, None, tokenizer)
        spec = replace(spec, fingerprint="small")
        return cls(Target(model, tokenizer, spec), words, folder)


def _draft_model(small: Small, words: Sequence[str]) -> str:
    """The directory of a smaller model that knows these words."""
    place = small.folder / "_".join(["draft", *words[:-1]])
    if not place.exists():
        small_llama(words, seed=5, num_hidden_layers=1).save_pretrained(place)
        tokenizer_of(words).save_pretrained(place)
    return str(place)


def _other_words(small: Small) -> tuple[str, ...]:
    """A vocabulary that lacks the target's first word and has others, in another order."""
    return ("x", *small.words[-2:0:-1], "y", END)


# What a drafter needs besides its yaml. A name with a slash is another setting of the same yaml.
SETTINGS: dict[str, Callable[[Small], dict[str, Any]]] = {
    "dflash2": lambda small: {
        "conv_group_size": 4,
        "selector_rank": 2,  # of a larger one random scores are too far apart to draw from
        "selector_top_k": len(small.words) - 1,
    },
    "eagle3": lambda small: {"layers": [0, 1, 2], "draft_vocab_size": len(small.words) - 1},
    "eagle/reduced": lambda small: {"draft_vocab_size": len(small.words) - 1},
    "early_exit": lambda small: {"exit_layer": 1},
    "hydra_pp": lambda small: {"scale_embeddings": False},  # else as dflash2's scores
    "redrafter": lambda small: {"scale_embeddings": False},
    "two_model": lambda small: {"path": _draft_model(small, small.words)},
    "two_model/intersection": lambda small: {
        "path": _draft_model(small, _other_words(small)),
        "vocabulary": "intersection",
    },
    "small_lm": lambda small: {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
}
# `admitted` is no family of its own: it reads a directory that holds one of the others.
FAMILIES = sorted(path.stem for path in CONF.glob("*.yaml") if path.stem != "admitted")
DRAFTERS = FAMILIES + [name for name in SETTINGS if "/" in name and name.split("/")[0] in FAMILIES]


SEED_OF = {"early_exit": 8, "eagle3_1": 4, "hydra_heads": 5, "p_eagle": 4}
SEED_OF |= {"redrafter": 6}


def drafter_for(name: str, small: Small) -> Drafter:
    """Build conf/drafter/<name>.yaml with random weights in float64."""
    if name == "ensemble":
        members = ["small_lm", "eagle3", "ngram"]
        config = drafter_config(name, members=members)
        assert isinstance(config, JoinedConfig)
        return config.join(small.target.spec, [drafter_for(each, small) for each in members]).eval()
    values = content_of("drafter", name.split("/")[0])
    module, kind = values.pop("_target_").rsplit(".", 1)
    values |= SETTINGS.get(name, lambda small: {})(small)
    config = getattr(importlib.import_module(module), kind)(**values)
    with torch.random.fork_rng(devices=[]):
        # With weights for which all that is looked for happens.
        torch.manual_seed(SEED_OF.get(name, 3))
        drafter: Drafter = config.build(small.target.spec)
        if hasattr(drafter, "attach"):
            drafter.attach(small.target.tokenizer)
        drafter = drafter.double()
        if drafter.config.trainable:
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
    depth: int = 2  # of a chain
    policy: Policy | None = None
    sampling: Sampling = PLAIN
    draft_sampling: Sampling | None = None
    rule: Rule = LOSSLESS
    stop_strings: tuple[str, ...] = ()


# --- what it is compared with ---


def ended(small: Small, case: Case, output: Text) -> bool:
    """Whether an answer ends here: by its definition, token by token."""
    if len(output) == case.limit or output[-1:] == (len(small.words) - 1,):
        return True
    text = "".join(small.words[token] for token in output)
    return any(string in text for string in case.stop_strings)


@torch.no_grad()
def next_distributions(small: Small, texts: Sequence[Text], sampling: Sampling) -> Tensor:
    """The target's distribution after each text (equally long), warped by Transformers."""
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


def row_distribution(small: Small, case: Case, prompt: Text) -> dict[Text, float]:
    """The target's own distribution of one row's output."""
    done: dict[Text, float] = {}
    active: dict[Text, float] = {(): 1.0}
    while active:
        distributions = next_distributions(
            small, [prompt + output for output in active], case.sampling
        )
        longer = {
            (*output, token): probability * p
            for (output, probability), distribution in zip(
                active.items(), distributions.tolist(), strict=True
            )
            for token, p in enumerate(distribution)
            if p > 0
        }
        done |= {output: p for output, p in longer.items() if ended(small, case, output)}
        active = {output: p for output, p in longer.items() if output not in done}
    return done


def product(distributions: Sequence[dict[Text, float]]) -> Distribution:
    """The joint distribution of independent rows."""
    joint: Distribution = {(): 1.0}
    for distribution in distributions:
        joint = {
            (*key, text): p * q for key, p in joint.items() for text, q in distribution.items()
        }
    return joint


def target_distribution(small: Small, case: Case) -> Distribution:
    """The target's own distribution of the outputs of all rows."""
    return product([row_distribution(small, case, prompt) for prompt in case.prompts])


# --- the distribution that a rule predicts, in closed form ---


@torch.no_grad()
def draft_distribution(
    small: Small, drafter: Drafter, case: Case, text: Text, drafted: Text
) -> Tensor | None:
    """The distribution of the next draft: "1 vocab", or None where nothing is offered."""
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
    logits = drafter.expand(state, None)
    for token in drafted:
        logits = drafter.expand(state, torch.tensor([[token]]))
    distribution = probabilities(logits[:, 0], case.draft_sampling or case.sampling)
    return distribution if drafter.vocab is None else drafter.vocab.scatter(distribution)


def predicted_distribution(small: Small, drafter: Drafter, case: Case) -> Distribution:
    """The distribution of one row under the case's rule: acceptance and correction, node by node.

    A cycle's node takes draft * acceptance on to the next node, and the rest, by the correction,
    to the next cycle: the two terms of `one_step_distribution`, apart.
    """
    (prompt,) = case.prompts
    distribution: Distribution = {}

    @functools.cache
    def next_distribution(output: Text) -> Tensor:
        return next_distributions(small, [prompt + output], case.sampling)

    def says(probs: Tensor, output: Text, drafted: Text | None, probability: float) -> None:
        for token, p in enumerate(probs[0].tolist()):
            if p > 0:
                path = None if drafted is None else (*drafted, token)
                walk((*output, token), path, probability * p)

    def walk(output: Text, drafted: Text | None, probability: float) -> None:
        if output and ended(small, case, output):
            distribution[(output,)] = distribution.get((output,), 0.0) + probability
            return
        if drafted is None:
            drafted = ()
        target_probs = next_distribution(output)
        root = prompt + output[: len(output) - len(drafted)]
        draft_probs = None
        if output and len(drafted) < case.depth:
            draft_probs = draft_distribution(small, drafter, case, root, drafted)
        if draft_probs is None:
            says(target_probs, output, None, probability)  # the root, or the bonus
            return
        accepted, corrected = parts(case.rule, target_probs, draft_probs)
        says(accepted, output, drafted, probability)
        says(corrected, output, None, probability)

    walk((), None, 1.0)
    return distribution


def parts(rule: Rule, target_probs: Tensor, draft_probs: Tensor) -> tuple[Tensor, Tensor]:
    """What a node emits by acceptance and by correction; together `one_step_distribution`."""
    every = torch.arange(target_probs.shape[1])[None]
    accepted = draft_probs * rule.acceptance(target_probs, draft_probs, every)
    rest = 1 - accepted.sum(-1, keepdim=True)
    return accepted, rest.clamp(min=0) * rule.correction(target_probs, draft_probs)
