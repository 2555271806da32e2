"""drafttrain: train, measure and serve the drafters of speculative decoding.

From Python, with what the commands write:

    target = drafttrain.load_target("tiny")
    drafter = drafttrain.load_drafter("outputs/demo", target)
    print(drafttrain.generate(target, drafter, "Why is the sky blue?").text)
    for piece in drafttrain.stream(target, drafter, "And the sea?"):
        print(piece.text, end="")
    report = drafttrain.evaluate(target, drafter, prompts_per_task=2)
"""

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drafttrain.commands.setup.api import evaluate, generate, load_drafter, load_target, stream

# OpenMP's threads spin for milliseconds before they sleep. Beside another process they take the
# time of the thread that they wait for: two threads were five times slower than one. A hundred
# rounds are what libgomp itself takes where there are more threads than cores. It reads this when
# torch loads; where torch came first, `choose_device` does what can still be done.
if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "100")

__version__ = "0.4.0"
__all__ = ["evaluate", "generate", "load_drafter", "load_target", "stream"]


def __dir__() -> list[str]:
    """List the public names, which are imported late, and no import for types."""
    return sorted({*globals(), *__all__} - {"Any", "TYPE_CHECKING", "os", "sys"})


def __getattr__(name: str) -> Any:
    """Import a name when it is first used, because importing torch takes seconds."""
    if name not in __all__:
        raise AttributeError(f"module 'drafttrain' has no attribute {name!r}")
    from drafttrain.commands.setup import api

    return getattr(api, name)
