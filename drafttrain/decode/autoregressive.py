"""The plain loop: the baseline of every speedup and the oracle of every equivalence test."""

import time
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from drafttrain.chance import Chance, Purpose, draw_of
from drafttrain.sampling import probabilities
from drafttrain.target.target import Target
from drafttrain.types import Decoded, DecodeStats, Sampling


def check_room(target: Target, prompt: Sequence[int], max_new_tokens: int, depth: int) -> int:
    """Return the positions that decoding may need; ValueError where the context is too short."""
    if not prompt:
        raise ValueError("the prompt is empty: it must hold at least one token")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    needed = len(prompt) + max_new_tokens + depth
    if needed > target.spec.max_positions:
        raise ValueError(
            f"prompt and output must fit the context of {target.spec.max_positions} tokens of "
            f"{target.spec.name}: the prompt has {len(prompt)}, max_new_tokens is "
            f"{max_new_tokens}, the depth {depth}; shorten one of them"
        )
    return needed


def clock_of(target: Target) -> Callable[[], float]:
    """Return a clock in seconds that waits for the device's queued work first."""
    if target.device.type != "cuda":
        return time.perf_counter

    def now() -> float:
        torch.cuda.synchronize(target.device)
        return time.perf_counter()

    return now


def emit(
    logits: Tensor, sampling: Sampling, chance: Chance, rows: Sequence[int], starts: Sequence[int]
) -> Tensor:
    """Choose the next token of each row from the target's logits "batch vocab"."""
    if sampling.greedy:
        return logits.argmax(-1)
    law = probabilities(logits, sampling)
    return chance.choose(law, rows, starts, draw_of(0, Purpose.EMIT))


@torch.inference_mode()
def autoregressive_decode(
    target: Target,
    prompt: Sequence[int],
    *,
    sampling: Sampling,
    max_new_tokens: int,
    chance: Chance,
    row: int = 0,
    stop_tokens: Collection[int] | None = None,
) -> Decoded:
    """Decode one prompt token by token; the output ends with the first stop token or the limit.

    stop_tokens: ids that end the output (None: the target's end-of-sequence tokens).
    """
    check_room(target, prompt, max_new_tokens, 0)
    stops = frozenset(target.spec.eos_token_ids if stop_tokens is None else stop_tokens)
    stats, now = DecodeStats(), clock_of(target)
    started = now()
    cache = target.begin()
    tokens = torch.tensor([list(prompt)], device=target.device)
    logits, _ = target.step(cache, tokens, last_only=True)
    output: list[int] = []
    token = emit(logits[:, -1], sampling, chance, [row], [len(prompt)])
    output.append(int(token))
    decoding = now()
    stats.prefill_s = decoding - started
    while len(output) < max_new_tokens and output[-1] not in stops:
        before = now()
        logits, _ = target.step(cache, token[:, None])
        stats.verify_s += now() - before
        stats.num_target_passes += 1
        token = emit(logits[:, -1], sampling, chance, [row], [len(prompt) + len(output)])
        output.append(int(token))
    stats.other_s = now() - decoding - stats.verify_s
    return Decoded(tuple(output), stats)
