"""Fine-tune a target with LoRA and write the merged model, to which a drafter can be adapted.

    python scripts/shift_target.py --data conversations.jsonl --out outputs/shifted

It shows what fine-tuning does to the drafter of the original model, which can then be adapted:

    python -m drafttrain train run.init_from=outputs/demo model.path=outputs/shifted
"""

import argparse
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from drafttrain.config.compose import load_choice
from drafttrain.core.types import Batch, Sample
from drafttrain.data.batches import pack
from drafttrain.data.chat import encode
from drafttrain.data.conversations import JsonlConfig, read
from drafttrain.drafters.shared.lora import add_lora, merge_lora
from drafttrain.runtime.terminal import progress
from drafttrain.target.pretrained.models import load_model, load_model_config, load_tokenizer


def main() -> None:
    """Train the adapter, merge it, write the model."""
    told = arguments()
    torch.set_num_threads(told.threads)
    torch.manual_seed(told.seed)
    source = load_choice("model", told.model)
    tokenizer = load_tokenizer(source)
    model = load_model(source, load_model_config(source), torch.float32, "cpu")
    data = JsonlConfig(
        name="jsonl",
        path=told.data,
        limit=None,
        max_length=told.length,
        holdout=0,
        template_kwargs={},
        template_date="2024-07-26",
        roles={},
        template="chat",
        preview=0,
        train_on="answers",
        seed=0,
    )
    samples, skipped = encode(*read(data)[:1], tokenizer, data)
    for line in skipped.lines():
        print(line)
    add_lora(model, told.rank, 2 * told.rank)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=told.lr, weight_decay=0.0)
    print(f"{sum(w.numel() for w in trained):,} weights of rank {told.rank}; {len(samples)} texts")
    model.train()
    with progress("shift", told.steps) as tick:
        for batch in itertools.islice(batches(samples, told), told.steps):
            loss = loss_of(model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            tick(1, f"loss {loss.item():.3f}")
    merge_lora(model)
    model.save_pretrained(told.out)
    tokenizer.save_pretrained(told.out)
    print(f"written: {told.out}; use it as a target with model.path={told.out}")


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, help="conversations, as data=jsonl reads them")
    parser.add_argument("--out", required=True, type=Path, help="directory of the new target")
    parser.add_argument("--model", default="tiny", help="an entry of conf/model")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--rows", type=int, default=4, help="rows of --length tokens in a step")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def batches(samples: list[Sample], told: argparse.Namespace) -> Iterator[Batch]:
    """Yield packed rows of the conversations in a random order, epoch after epoch."""
    for epoch in itertools.count():
        order = np.random.default_rng([told.seed, epoch]).permutation(len(samples))
        rows = pack([samples[place] for place in order], told.length)
        for first in range(0, len(rows.tokens), told.rows):
            part = slice(first, first + told.rows)
            yield Batch(
                rows.tokens[part], rows.loss_mask[part], rows.positions[part], rows.document[part]
            )


def loss_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean negative log-likelihood of the assistant's tokens."""
    same = batch.document[:, :, None] == batch.document[:, None, :]
    logits = model(
        input_ids=batch.tokens, position_ids=batch.positions, attention_mask=same.tril()[:, None]
    ).logits
    labels = batch.tokens[:, 1:].where(batch.loss_mask[:, 1:], -100)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels.flatten())
    assert math.isfinite(loss.item()), "the loss is not finite: lower --lr"
    return loss


if __name__ == "__main__":
    main()
