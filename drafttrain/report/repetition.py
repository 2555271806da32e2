"""Which tokens repeat earlier text of an output, and acceptance where nothing repeats."""

from collections.abc import Sequence

from drafttrain.core.types import Counters

REPEATED_NGRAM = 4  # tokens; shorter ones recur in any text


def repeats(tokens: Sequence[int]) -> list[bool]:
    """Return for each token whether it ends an n-gram that occurred earlier in the sequence.

    This depends on the text alone, not on the drafter.
    """
    seen: set[tuple[int, ...]] = set()
    flags = [False] * min(len(tokens), REPEATED_NGRAM - 1)
    for end in range(REPEATED_NGRAM, len(tokens) + 1):
        gram = tuple(tokens[end - REPEATED_NGRAM : end])
        flags.append(gram in seen)
        seen.add(gram)
    return flags


def outside_repetition(
    tokens: Sequence[int], cycles: Sequence[tuple[int, int, int]]
) -> tuple[Counters, int]:
    """Return the counters and target passes that began where the output does not repeat itself.

    cycles: (output position of the cycle's first token, drafted, accepted), the latter two trimmed
    as in `Counters`; a cycle without drafted tokens is a pass, but not a draft. A cycle is outside
    repetition if the token at its first position does not end a 4-gram that occurred earlier in
    the output.
    """
    flags = repeats(tokens)
    counters, num_target_passes = Counters(), 0
    starts = [*(position for position, *_ in cycles), len(tokens)]
    for (position, num_draft_tokens, num_accepted_tokens), end in zip(
        cycles, starts[1:], strict=True
    ):
        if flags[position]:
            continue
        num_target_passes += 1
        if num_draft_tokens:
            cut = end - position == num_accepted_tokens
            counters.add(num_draft_tokens, num_accepted_tokens, cut=cut)
    return counters, num_target_passes
