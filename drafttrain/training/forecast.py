"""What each validation says of the rest of a run, in lines for the user."""

import math
from collections.abc import Callable, Mapping, Sequence

from drafttrain.runtime.terminal import Tell
from drafttrain.runtime.tracker import ACCEPTANCE_LENGTH
from drafttrain.training.validation import BREAK_EVEN, LOOKUP_LENGTH

TEXTS = {
    ACCEPTANCE_LENGTH: "acceptance length {:.2f}",
    f"{ACCEPTANCE_LENGTH}_error": "standard error {:.2f}",
    BREAK_EVEN: "speculation pays here from {:.2f}",
    LOOKUP_LENGTH: "prompt lookup has {:.2f} where it finds a match",
}
# The share of its gain over 1 that a drafter lacks for each e-fold of fewer steps: EAGLE of a chat
# model 0.21 to 0.30, of the embedded target 0.21 to 0.24.
GROWTH = (0.15, 0.27)
MEMORISED = 0.1  # more first tokens right in training than in validation: some are known by heart


def forecast(steps: int, tokens: int, terms: Sequence[str], say: Tell) -> Callable[..., None]:
    """Return what reads a run's metrics as they are logged, and explains each validation.

    tokens: of the data. terms: the losses of the drafted tokens, in their order.
    """
    right = math.nan  # of first drafted tokens, in training

    def read(step: int, values: Mapping[str, float]) -> None:
        nonlocal right
        right = values.get(f"train/accuracy_{(*terms, '')[0]}", right)
        if ACCEPTANCE_LENGTH not in values:
            return
        length, pays = values[ACCEPTANCE_LENGTH], values.get(BREAK_EVEN, math.nan)
        parts = [text.format(values[name]) for name, text in TEXTS.items() if name in values]
        say(f"validation after step {step:,}: {', '.join(parts)}")
        if steps // 10 <= step < steps:
            ahead = math.log(steps / step)
            most = 1 + sum(name.startswith("val/acceptance_position_") for name in values)
            low, high = (min(most, 1 + (length - 1) / (1 - each * ahead)) for each in GROWTH)
            verdict = "pays" if low > pays else "does not pay" if high < pays else "may pay"
            say(f"  at this rate {low:.1f} to {high:.1f} at the end, which {verdict} here")
        reached = values.get("val/acceptance_position_1", math.nan)
        if right - reached > MEMORISED:
            say(
                f"  first tokens right: {right:.2f} in training, {reached:.2f} here: the drafter "
                f"memorises the {tokens:,} tokens; more text helps more than more steps"
            )

    return read
