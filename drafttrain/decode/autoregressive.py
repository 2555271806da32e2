"""The plain loop: the baseline of every speedup and the oracle of every equivalence test."""

from collections.abc import Callable, Collection, Sequence

from jaxtyping import Float, Int
from torch import Tensor

from drafttrain.core.chance import Chance, Purpose, draw_of
from drafttrain.core.ops.ragged_cache import padded_rows
from drafttrain.core.sampling import most_likely, probabilities
from drafttrain.core.sampling_config import Sampling
from drafttrain.core.transfer import send_numbers
from drafttrain.core.types import Decoded
from drafttrain.decode.clock import Clock
from drafttrain.decode.rows import Passes, Rows, Stops, check_room, to_the_end
from drafttrain.target.model import Target


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
