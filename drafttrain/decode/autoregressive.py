"""The plain loop: the baseline of every speedup and the oracle of every equivalence test."""

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from drafttrain.core.chance import Chance, Purpose, draw_of
from drafttrain.core.ops.ragged_cache import RaggedCache, padded_rows
from drafttrain.core.sampling import most_likely, probabilities
from drafttrain.core.sampling_config import Sampling
from drafttrain.core.transfer import send_numbers
from drafttrain.core.types import Decoded
from drafttrain.decode.clock import Clock
from drafttrain.decode.rows import Passes, Rows, Stops, check_room, to_the_end
from drafttrain.target.model import Target

REFILL = 8  # new prompts are prefilled together, once an eighth of the batch has ended


def emit(
    logits: Float[Tensor, "batch vocab"],
    sampling: Sampling,
    chance: Chance,
    rows: Sequence[int],
    starts: Sequence[int],
) -> Int[Tensor, " batch"]:
    """Return the next token of each row, chosen from the target's logits."""
    if sampling.greedy:
        return most_likely(logits)
    return chance.choose(probabilities(logits, sampling), rows, starts, draw_of(0, Purpose.EMIT))


def autoregressive_decode(
    target: Target, prompt: Sequence[int], *, row: int = 0, **settings: object
) -> Decoded:
    """Decode one prompt token by token: `autoregressive_decode_batch` of a single row."""
    decode: Callable[..., list[Decoded]] = autoregressive_decode_batch
    return decode(target, [prompt], rows=[row], **settings)[0]


def autoregressive_passes(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: Sampling,
    max_new_tokens: int,
    chance: Chance,
    rows: Sequence[int],
    stop_tokens: Collection[int] | None = None,
    stop_strings: Sequence[str] = (),
) -> Passes:
    """Decode prompts together, token by token; a row leaves the batch when it has ended.

    rows: the name of each prompt, which keys its chance. An output ends with the first stop
    token, with the token that completes a stop string, or at the limit. stop_tokens: None takes the
    target's end-of-sequence tokens.
    """
    check_room(target, prompts, max_new_tokens)
    stops = Stops(target, max_new_tokens, stop_tokens, stop_strings)
    batch, clock = Rows(prompts, rows), Clock(target.device)
    started = clock.now()
    cache = target.begin()
    tokens, counts = padded_rows(prompts, target.device)
    logits, _ = target.step(cache, tokens, counts=counts, last_only=True)
    token = emit(logits[:, -1], sampling, chance, batch.names, batch.starts)
    new = token.tolist()
    before = clock.now()
    clock.charge(batch.active, prefill_s=[(started, before)])
    while True:
        active = batch.active
        _, kept = batch.commit([[value] for value in new], stops)
        committed = clock.now()
        yield active
        resumed = clock.now()
        if not kept:
            break
        if len(kept) < len(active):
            target.select(cache, kept)
            token = token[send_numbers(kept, token.device)]
        stepping = clock.now()
        logits, _ = target.step(cache, token[:, None])
        stepped = clock.now()
        token = emit(logits[:, -1], sampling, chance, batch.names, batch.starts)
        new = token.tolist()  # the only wait of the host
        after = clock.now()
        own = [(before, committed), (resumed, stepping), (stepped, after)]
        clock.charge(batch.active, (0, 0), verify_s=[(stepping, stepped)], other_s=own)
        for row in batch.active:
            row.stats.num_target_passes += 1
        before = after
    clock.settle()
    return batch.decoded()


autoregressive_decode_batch = to_the_end(autoregressive_passes)


def autoregressive_queue(
    target: Target,
    more: Callable[[int], Sequence[tuple[int, Sequence[int]]]],
    *,
    sampling: Sampling,
    max_new_tokens: int,
    chance: Chance,
    batch_size: int,
) -> Iterator[list[tuple[int, list[int]]]]:
    """Decode any number of prompts in one batch: new prompts replace the rows that have ended.

    Yields (name, output tokens) of the rows that ended in a pass. more(n) returns up to n new
    (name, prompt); it is called again after outputs were yielded, and none ends the decoding once
    all rows have ended. An output does not depend on the other rows, except for rounding.
    """
    stops = Stops(target, max_new_tokens, None, ())
    cache, batch = RaggedCache(), Rows([], [])  # rows are replaced in it: it needs no fixed room
    ended: list[int] = []  # indices of rows that have ended: their passes are wasted
    token = torch.empty(0, dtype=torch.long, device=target.device)
    while True:
        rows = batch.active
        few = REFILL * len(ended) >= len(rows)
        prompts = more(len(ended) or batch_size) if few else []
        counts: list[int] | None = None
        with torch.inference_mode():
            if prompts:
                names, texts = zip(*prompts, strict=True)
                check_room(target, texts, max_new_tokens)
                scored, fed = RaggedCache(), Rows(texts, names)
                tokens, counts = padded_rows(texts, target.device)
            else:
                running = [index for index in range(len(rows)) if index not in ended]
                if not running:
                    return
                if few:
                    target.select(cache, running)
                    rows[:], token = [rows[index] for index in running], token[running]
                    running, ended = list(range(len(rows))), []
                scored, fed, tokens = cache, batch, token[:, None]
            logits, _ = target.step(scored, tokens, counts=counts, last_only=True)
            new = emit(logits[:, -1], sampling, chance, fed.names, fed.starts)
            if not prompts:
                token = new
            elif not rows:
                cache, batch, token, running = scored, fed, new, list(range(len(prompts)))
            else:
                running, ended = ended[: len(prompts)], ended[len(prompts) :]
                cache.replace(running, scored)
                token[running] = new
                for index, row in zip(running, fed.active, strict=True):
                    rows[index] = row
            outputs = []
            for index, value in zip(running, token[running].tolist(), strict=True):
                row = batch.active[index]
                _, over = stops.cut(row.output, [value])
                row.output.append(value)
                if over:
                    ended.append(index)
                    outputs.append((row.name, row.output))
            if outputs:  # so that the length of a row that has ended does not widen the passes
                lengths = enumerate(cache.lengths)
                cache.rollback([0 if index in ended else length for index, length in lengths])
        if outputs:
            yield outputs
