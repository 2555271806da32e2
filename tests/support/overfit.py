"""Targets and quickly trained drafters for the serving suite: acceptance must not be zero."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from builders import drafter_config
from paths import ROOT
from torch import Tensor

from drafttrain.core.chance import SeededChance
from drafttrain.core.sampling_config import GREEDY
from drafttrain.core.types import PAD_DOCUMENT, Batch, weighted_sum
from drafttrain.decode.autoregressive import autoregressive_decode
from drafttrain.drafters.base import Drafter, TrainingChance
from drafttrain.target.model import Target, load_target
from drafttrain.target.pretrained.config import ModelConfig

CONF = ROOT / "conf"
LEARNING_RATE = 2e-3
DECISIVE_GAP = 1e-3  # of the two best logits; kernels differ by about 1e-5


class NoChance(TrainingChance):
    """The middle of every interval: feature noise of zero."""

    def uniform_like(self, values: Tensor, document: Tensor) -> Tensor:
        """Return one half everywhere."""
        return torch.full_like(values, 0.5)


@dataclass(frozen=True)
class Text:
    """A prompt, and what the target says to it by itself, greedily, past any end of text."""

    prompt: list[int]
    answer: list[int]


def target_at(folder: Path) -> Target:
    """Load a target from a directory, in float32."""
    values = yaml.safe_load((CONF / "model" / "tiny.yaml").read_text())
    del values["_target_"]
    config = ModelConfig(**{**values, "name": folder.name, "path": str(folder)})
    return load_target(config, torch.float32, "cpu")


def decisive_texts(
    target: Target, prompts: list[list[int]], wanted: int, max_new_tokens: int
) -> list[Text]:
    """Let our plain loop answer prompts until so many answers nowhere hang on a tie.

    Where two logits are as close as rounding (a gap of 3e-6 was met in 4000 tokens), kernels
    decide the token, not the target: such a text would compare kernels.
    """
    texts: list[Text] = []
    for tried, prompt in enumerate(prompts, start=1):
        answer = list(autoregressive(target, prompt, max_new_tokens))
        logits, _ = target.step(target.begin(), torch.tensor([prompt + answer[:-1]]))
        best = logits[0, len(prompt) - 1 :].topk(2).values
        if (best[:, 0] - best[:, 1]).min() > DECISIVE_GAP:
            texts.append(Text(prompt, answer))
        if len(texts) == wanted:
            print(f"{target.spec.name}: {tried - wanted} of {tried} prompts left out for ties")
            return texts
    raise AssertionError(f"only {len(texts)} of {len(prompts)} answers are free of ties")


def autoregressive(target: Target, prompt: list[int], max_new_tokens: int) -> tuple[int, ...]:
    """Return new tokens of the plain loop; nothing ends them but the limit."""
    decoded = autoregressive_decode(
        target,
        prompt,
        sampling=GREEDY,
        max_new_tokens=max_new_tokens,
        chance=SeededChance(0),
        stop_tokens=(),
    )
    return decoded.tokens


def overfit(family: str, target: Target, texts: list[Text], steps: int, **changes: Any) -> Drafter:
    """Train a drafter on the target's own answers until it drafts some of them."""
    torch.manual_seed(0)
    drafter = drafter_config(family, **changes).build(target.spec)
    batch = _batch(texts)
    counts = torch.bincount(batch.tokens[batch.loss_mask], minlength=target.spec.vocab_size)
    drafter.initialise(target.model, target.tokenizer)
    drafter.prepare(counts, target.readout)
    features = target.features(batch, drafter.captures)
    optimizer = torch.optim.AdamW(
        [p for p in drafter.parameters() if p.requires_grad], lr=LEARNING_RATE
    )
    for _ in range(steps):
        loss = weighted_sum(drafter(batch, features, NoChance())) / batch.loss_mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    loaded = drafter.config.build(target.spec)  # as the commands load a checkpoint: LoRA is merged
    loaded.load_weights({name: tensor.clone() for name, tensor in drafter.state_dict().items()})
    return loaded.eval()


def _batch(texts: list[Text]) -> Batch:
    length = max(len(text.prompt) + len(text.answer) for text in texts)
    tokens = torch.zeros(len(texts), length, dtype=torch.long)
    mask = torch.zeros(len(texts), length, dtype=torch.bool)
    document = torch.full((len(texts), length), PAD_DOCUMENT)
    for row, text in enumerate(texts):
        whole = text.prompt + text.answer
        tokens[row, : len(whole)] = torch.tensor(whole)
        mask[row, len(text.prompt) : len(whole)] = True
        document[row, : len(whole)] = row
    positions = torch.arange(length).expand(len(texts), length).contiguous()
    return Batch(tokens, mask, positions, document)
