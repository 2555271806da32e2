"""Where the time of a drafted token goes on a CPU, by part of the drafter.

    python benchmarks/profile_draft.py drafter=eagle model=smollm2_135m [section.key=value ...]

The arguments are those of `train`; the drafter has its initial weights, as the time does not depend
on them. A prompt is decoded greedily with chains of `eval.depth` tokens. Each part's time excludes
that of the parts that it calls; it is CPU time of one thread, so that other processes count less.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import drafttrain.decode.draft as draft
import drafttrain.decode.loop as loop
from drafttrain.config.compose import compose, typed
from drafttrain.config.sections import TrainConfig
from drafttrain.core.chance import SeededChance
from drafttrain.core.sampling_config import GREEDY
from drafttrain.runtime.hardware import TORCH_DTYPES, choose_draft_dtype
from drafttrain.target.model import load_target

PROMPT, NEW = 64, 96  # tokens
# By part: the methods of drafters and of their layers.
METHODS = {
    "embedding and fusion": ("_pairs", "_embedded", "pairs", "embed", "fuse", "inputs"),
    "attention": ("enter", "project", "merge"),
    "feed-forward": ("finish",),
    "head": ("logits",),
    "rest of drafting": ("expand",),
    "rest of reading": ("observe",),
}


STAGES = ("drafting", "reading")
TARGET = "the target's pass"


class Timers:
    """Seconds by part and stage, without those of the parts called within."""

    def __init__(self) -> None:
        self.seconds: Counter[tuple[str, str]] = Counter()
        self.open: list[str] = []
        self.begun = False  # a draft; what comes before reads the prompt
        self.since = time.thread_time()

    def charge(self) -> None:
        """Charge the time since the last call to the part that is open."""
        now = time.thread_time()
        if self.open:
            stage = "reading" if "rest of reading" in self.open else "drafting"
            self.seconds[self.open[-1], stage] += now - self.since
        self.since = now

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Time a function of a module, or a method of an object, from now on."""
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.charge()
            if name == "expand" and not self.begun:
                self.seconds.clear()
                self.begun = True
            self.open.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.charge()
                self.open.pop()

        setattr(owner, name, timed)


def main() -> None:
    """Decode, and print the time of every part."""
    torch.set_num_threads(1)
    config = typed(compose("train", sys.argv[1:]), TrainConfig)
    dtype = TORCH_DTYPES.get(config.hardware.dtype, torch.bfloat16)
    target = load_target(config.model, dtype, "cpu")
    drafter = config.drafter.build(target.spec)
    drafter.prepare(torch.ones(target.spec.vocab_size, dtype=torch.long), target.readout)
    size = sum(parameter.numel() for parameter in drafter.parameters())
    own = choose_draft_dtype(config.hardware, target.device, dtype, size)
    drafter = drafter.to(own).eval()
    timers, depth = Timers(), config.eval.depth

    def decode(new: int) -> Any:
        with torch.inference_mode():
            return loop.speculative_decode(
                *(target, drafter, list(range(1, PROMPT + 1))),
                **{"policy": depth, "sampling": GREEDY, "chance": SeededChance(0)},
                **{"max_new_tokens": new, "stop_tokens": ()},
            )

    decode(NEW // 4)
    modules: list[nn.Module] = [drafter, *drafter.modules()]
    for part, names in METHODS.items():
        for module in dict.fromkeys(modules):
            for name in names:
                if name not in vars(module) and callable(getattr(type(module), name, None)):
                    timers.wrap(module, name, part)
    for file in {sys.modules[kind.__module__] for kind in type(drafter).__mro__}:
        if hasattr(file, "attend_cached"):
            timers.wrap(file, "attend_cached", "attention")
    timers.wrap(draft, "best_children", "choice of the token")
    timers.wrap(target, "step", TARGET)
    timers.wrap(loop, "speculative_decode", "rest of the loop")
    stats = decode(NEW).stats
    cycles = len(stats.cycles)
    drafted = cycles * depth
    known = drafter.vocab.size if drafter.vocab else target.spec.vocab_size
    print(
        f"{config.drafter.name} in {own}, {size:,} parameters, {known:,} tokens; {cycles} cycles of"
        f" {depth} drafts on a target in {dtype}; one thread\n"
    )
    print("| part | CPU ms per drafted token | while reading what was verified |\n|---|---|---|")
    passes = sum(timers.seconds.pop((TARGET, stage), 0.0) for stage in STAGES)
    parts = dict.fromkeys(part for part, _ in timers.seconds)
    for part in sorted(parts, key=lambda one: -sum(timers.seconds[one, s] for s in STAGES)):
        first, second = (1e3 * timers.seconds[part, stage] / drafted for stage in STAGES)
        print(f"| {part} | {first + second:.3f} | {second:.3f} |")
    drafting = 1e3 * sum(timers.seconds.values()) / cycles
    print(
        f"\nall of it, for {depth} tokens: {drafting:.2f} ms; the target's pass over them: "
        f"{1e3 * passes / cycles:.2f} ms"
    )


if __name__ == "__main__":
    main()
