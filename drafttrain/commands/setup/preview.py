"""Show what would be trained, token by token, and train nothing."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.text import Text

from drafttrain.commands.setup.target_and_drafter import load_alone, load_samples, read_samples
from drafttrain.config.sections import CaptureConfig, TrainConfig
from drafttrain.core.tokenizer import text_of
from drafttrain.core.types import Sample
from drafttrain.data.chat import as_trained
from drafttrain.data.conversations import DataConfig, ReadConfig, SelfgenConfig
from drafttrain.data.skips import SkipReport
from drafttrain.runtime.hardware import choose_device, choose_train_dtype
from drafttrain.runtime.rank_process import rank
from drafttrain.runtime.ranks import ALONE
from drafttrain.runtime.terminal import console
from drafttrain.target.pretrained.models import load_tokenizer
from drafttrain.target.store.config import StoredFeaturesConfig
from drafttrain.target.store.features import StoredTarget

ENOUGH = 1000  # conversations that are read: the share of trained tokens is theirs


def preview(config: TrainConfig | CaptureConfig) -> None:
    """Print the first data.preview conversations with their trained tokens marked.

    ValueError where the data cannot be read.
    """
    if rank() != 0:
        return
    count = config.data.preview
    samples, skipped = _samples(config, max(count, ENOUGH))
    for line in skipped.lines():
        console.print(line)
    tokenizer = load_tokenizer(config.model)
    samples = as_trained(samples, config.data.train_on)
    for sample in samples[:count]:
        console.print(f"conversation {sample.index}: {_share([sample])}")
        console.print(marked_text(sample, tokenizer))
    console.print(f"{len(samples):,} conversations: {_share(samples)}: what stands in «»")
    console.print(f"data.preview={count}: nothing else is done; leave it out to begin")


def marked_text(sample: Sample, tokenizer: Any) -> Text:
    """Return a conversation's text, each run of trained tokens between « and »."""
    text = Text()
    runs = zip(sample.tokens.tolist(), sample.loss_mask.tolist(), strict=True)
    for trained, run in groupby(runs, key=lambda pair: pair[1]):
        tokens = [token for token, _ in run]
        words = text_of(tokenizer, tokens, clean_up_tokenization_spaces=False)
        text.append(f"«{words}»" if trained else words, style="bold green" if trained else "")
    return text


def _share(samples: Sequence[Sample]) -> str:
    trained = sum(int(sample.loss_mask.sum()) for sample in samples)
    total = sum(len(sample.tokens) for sample in samples)
    return f"{trained:,} of {total:,} tokens are trained ({100 * trained / total:.1f} %)"


def _samples(config: TrainConfig | CaptureConfig, most: int) -> tuple[Sequence[Sample], SkipReport]:
    """Return the first conversations that a command would take, and what was skipped."""
    features = getattr(config, "features", None)
    if isinstance(features, StoredFeaturesConfig):
        assert features.dir is not None
        device = torch.device("cpu")
        store = StoredTarget(Path(features.dir), torch.float32, device, features.checksums)
        return store.samples, SkipReport(len(store.samples))
    data: DataConfig = config.data
    if isinstance(data, ReadConfig):
        data = replace(data, limit=min(most, data.limit or most))
    ready = read_samples(data, config.model, ALONE)
    if ready is not None:
        return ready
    assert isinstance(data, SelfgenConfig)
    device = torch.device(choose_device(config.hardware))
    dtype = choose_train_dtype(config.hardware, device)
    target = load_alone(config.model, config.hardware, dtype, device)
    written = min(data.preview, data.num_conversations)  # they stay in the cache for the training
    return load_samples(replace(data, num_conversations=written), target, ALONE)
