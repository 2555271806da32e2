"""Train the embedded target: a byte-level BPE of 4,096 tokens and a Llama of 14M parameters.

    python scripts/train_tiny_target.py --data chats.jsonl.gz --out outputs/tiny --minutes 72

Writes a directory that `model.path` reads. After an interruption the same command resumes from its
last checkpoint. The learning rate follows the share of --tokens or --minutes that is spent: with
--tokens the result depends only on data, seed and kernels, with --minutes on the machine's speed
too. drafttrain/assets/tiny/README.md describes how the embedded model was made.
"""

import argparse
import dataclasses
import json
import math
import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from drafttrain.data.conversations import Conversation, JsonlConfig
from drafttrain.data.conversations import read as read_conversations
from drafttrain.runtime.terminal import progress

SPECIAL = ["<|pad|>", "<|begin|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
TEMPLATE = (
    "{{ '<|begin|>' }}{% for m in messages %}{{ '<|' + m['role'] + '|>\n' }}"
    "{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
WARMUP_STEPS, FINAL_LR_RATIO = 50, 0.05
CHECKPOINT, RECORD = "checkpoint.pt", "training.json"


@dataclass(frozen=True)
class Settings:
    """What determines the result; a checkpoint is resumed only with the same settings."""

    data: str
    minutes: float | None
    tokens: int | None
    seed: int
    held_out: int
    vocab_size: int
    hidden_size: int
    layers: int
    context: int
    batch: int
    lr: float

    def progress(self, step: int, seconds: float) -> float:
        """Return the share of the budget that is spent."""
        if self.tokens is not None:
            return step * self.batch * self.context / self.tokens
        assert self.minutes is not None, "the parser asks for one of the two"
        return seconds / (60 * self.minutes)


def parse(argv: list[str]) -> argparse.Namespace:
    assert __doc__, "docstrings are not stripped"
    what, _, rest = __doc__.partition("\n")
    parser = argparse.ArgumentParser(
        description=what, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, help="conversations: .jsonl or .jsonl.gz")
    parser.add_argument("--out", required=True, type=Path, help="directory to write")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--minutes", type=float, help="train this long")
    budget.add_argument("--tokens", type=int, help="train on this many tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--held-out", type=int, default=300, help="conversations not trained on")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--hidden-size", type=int, default=384, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024, help="tokens of one window")
    parser.add_argument("--batch", type=int, default=16, help="windows of one optimizer step")
    parser.add_argument("--micro-batch", type=int, default=8, help="windows at a time")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--save-every", type=float, default=300, help="seconds of training")
    return parser.parse_args(argv)


def read(path: str, seed: int) -> list[Conversation]:
    """Return the conversations in a fixed random order, naming those that cannot be used."""
    config = JsonlConfig(
        name="jsonl",
        max_length=2,
        holdout=0,
        template="chat",
        template_kwargs={},
        template_date="2024-07-26",
        roles={},
        preview=0,
        train_on="answers",
        seed=seed,
        path=path,
        limit=None,
    )
    rows, report = read_conversations(config)
    for line in report.lines():
        print(line)
    chats = [row for row in rows if isinstance(row, Conversation)]
    random.Random(seed).shuffle(chats)
    return chats


def build_tokenizer(rows: list[Conversation], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE learned from the text, with a chat template."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator((m.content for row in rows for m in row.messages), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def stream(rows: list[Conversation], tokenizer: Any) -> torch.Tensor:
    """Return the tokens of all conversations, one after the other."""
    tokens: list[int] = []
    for first in range(0, len(rows), 512):
        texts = [
            tokenizer.apply_chat_template(
                [{"role": m.role, "content": m.content} for m in row.messages], tokenize=False
            )
            for row in rows[first : first + 512]
        ]
        for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]:
            tokens += ids
    return torch.tensor(tokens)


class Windows:
    """Windows of the stream, which every epoch cuts anew; the number of a window determines it."""

    def __init__(self, tokens: torch.Tensor, context: int, seed: int) -> None:
        self.tokens, self.context, self.seed = tokens, context, seed
        self.per_epoch = len(tokens) // context - 1
        if self.per_epoch < 1:
            raise SystemExit(
                f"--data must hold at least {2 * context} tokens to train on, got {len(tokens)};"
                " give more conversations or a smaller --context"
            )
        self.epoch, self.starts = -1, np.empty(0, dtype=np.int64)

    def __getitem__(self, number: int) -> torch.Tensor:
        epoch, place = divmod(number, self.per_epoch)
        if epoch != self.epoch:
            generator = np.random.default_rng((self.seed, epoch))
            first = generator.integers(self.context)
            self.starts = first + self.context * generator.permutation(self.per_epoch)
            self.epoch = epoch
        start = int(self.starts[place])
        return self.tokens[start : start + self.context]


def new_model(settings: Settings, tokenizer: Any) -> LlamaForCausalLM:
    """Return a Llama with random weights, drawn from the seed."""
    torch.manual_seed(settings.seed)
    heads = settings.hidden_size // 64
    config = LlamaConfig(
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.hidden_size * 8 // 3,
        num_hidden_layers=settings.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 3),
        head_dim=64,
        max_position_embeddings=2 * settings.context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, windows: torch.Tensor, device: str) -> float:
    """Return the mean loss per token in nats."""
    total = 0.0
    for part in windows.split(8):
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            total += model(input_ids=part, labels=part).loss.item() * len(part)
    return total / len(windows)


def save_atomically(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint so that a crash leaves the old one."""
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def main(argv: list[str]) -> None:
    args = parse(argv)
    names = [field.name for field in dataclasses.fields(Settings)]
    settings = Settings(**{name: getattr(args, name) for name in names})
    if settings.batch % args.micro_batch:
        raise SystemExit(f"--micro-batch must divide --batch={settings.batch}")
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)

    rows = read(settings.data, settings.seed)
    if len(rows) <= settings.held_out:
        raise SystemExit(f"--held-out must be below the {len(rows)} conversations of --data")
    # The vocabulary is learned from the held-out conversations too; the weights are not.
    tokenizer = build_tokenizer(rows, settings.vocab_size)
    train = stream(rows[settings.held_out :], tokenizer)
    held = stream(rows[: settings.held_out], tokenizer)
    context = min(settings.context, len(held))
    held = held[: len(held) // context * context].view(-1, context).to(args.device)
    windows = Windows(train, settings.context, settings.seed)
    print(f"{len(train):,} tokens to train on, {held.numel():,} held out")

    model = new_model(settings, tokenizer).to(args.device)
    print(f"{sum(weight.numel() for weight in model.parameters()):,} parameters")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.1
    )

    step, spent = 0, 0.0
    if (out / CHECKPOINT).exists():
        state = torch.load(out / CHECKPOINT, map_location=args.device, weights_only=True)
        if state["settings"] != dataclasses.asdict(settings):
            raise SystemExit(f"{out} holds a run with other settings; give another --out")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, spent = state["step"], state["seconds"]
        print(f"resuming from step {step}")

    def checkpoint() -> None:
        save_atomically(
            {
                "settings": dataclasses.asdict(settings),
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step,
                "seconds": spent,
            },
            out / CHECKPOINT,
        )

    saved = spent
    shown = round(1000 * settings.progress(step, spent))
    with progress("training (per mille)", 1000, done=min(shown, 1000)) as tick:
        while (done := settings.progress(step, spent)) < 1:
            start = time.perf_counter()
            cosine = 0.5 * (1 + math.cos(math.pi * done))
            lr = settings.lr * min(1.0, (step + 1) / WARMUP_STEPS)
            for group in optimizer.param_groups:
                group["lr"] = lr * (FINAL_LR_RATIO + (1 - FINAL_LR_RATIO) * cosine)
            numbers = range(step * settings.batch, (step + 1) * settings.batch)
            inputs = torch.stack([windows[number] for number in numbers]).to(args.device)
            loss = torch.zeros((), device=args.device)
            for part in inputs.split(args.micro_batch):
                with torch.autocast(torch.device(args.device).type, torch.bfloat16):
                    share = model(input_ids=part, labels=part).loss * len(part) / settings.batch
                share.backward()
                loss += share.detach()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            value = loss.item()  # waits for the device, so that the time is the step's
            step, spent = step + 1, spent + time.perf_counter() - start
            now = min(1000, round(1000 * settings.progress(step, spent)))
            tick(now - shown, f"step {step} loss {value:.3f}")
            shown = now
            if spent - saved >= args.save_every:
                checkpoint()
                saved = spent
                print(f"step {step}: held-out loss {held_out_loss(model, held, args.device):.4f}")

    final = held_out_loss(model, held, args.device)
    record = {
        **dataclasses.asdict(settings),
        "data": Path(settings.data).name,
        "steps": step,
        "trained_tokens": step * settings.batch * settings.context,
        "seconds": round(spent),
        "held_out_loss": round(final, 4),
        "device": torch.cuda.get_device_name() if args.device.startswith("cuda") else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    (out / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    checkpoint()
    tokenizer.save_pretrained(out)
    model.to(torch.bfloat16).save_pretrained(out)
    print(f"held-out loss {final:.4f} after {step} steps; try it: model.path={out}")


if __name__ == "__main__":
    main(sys.argv[1:])
