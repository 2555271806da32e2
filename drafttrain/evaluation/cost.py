"""The cost of a pass on this machine: target and drafter, by tokens, rows and context."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from statistics import median
from typing import Any

import torch

from drafttrain.core.chance import SeededChance
from drafttrain.decode.autoregressive import emit
from drafttrain.decode.clock import clock_of
from drafttrain.decode.costs import Costs
from drafttrain.decode.draft import draft
from drafttrain.decode.loop import keep_path, verify
from drafttrain.decode.policy import Policy
from drafttrain.drafters.base import Drafter
from drafttrain.evaluation.config import EvalConfig, TuneSettings
from drafttrain.runtime.terminal import progress
from drafttrain.target.model import Target

# Passes of one kind in a row, as in a loop; the first ones, which find the machine's caches filled
# by another kind, do not count. Timed one at a time, a plain step seemed a quarter slower.
BURST = 8
SETTLING = 2
WARM_UP = 2  # rounds before the first one that counts


def measure_costs(
    target: Target,
    drafter: Drafter,
    policies: Callable[[int], Mapping[int, Policy]],
    batches: Sequence[int],
    config: EvalConfig,
    settings: TuneSettings,
) -> Costs:
    """Return the costs of target passes and drafter cycles, each timed in turn, `rounds` times.

    policies: those to time at a batch size, by depth. config: how tokens are drawn and accepted.

    The context is random tokens: the cost of a pass does not depend on the text, except for a
    drafter that looks up suffixes.
    """
    contexts = sorted(settings.contexts)
    plain, verify, draft, read = (defaultdict[Any, list[float]](list) for _ in range(4))
    with progress("tune: costs", len(batches) * len(contexts)) as tick:
        for batch, context in product(batches, contexts):
            timed = policies(batch)
            cell = Cell(target, drafter, config, batch, context, list(timed.values()))
            for turn in range(WARM_UP + settings.rounds):
                steps = cell.steps()
                cycles = {depth: cell.cycles(policy) for depth, policy in timed.items()}
                if turn < WARM_UP:
                    continue
                plain[batch, context] += steps
                for depth in timed:
                    draft[depth, batch, context] += [drafted for drafted, _ in cycles[depth]]
                    verify[depth, batch, context] += [verified for _, verified in cycles[depth]]
            read[batch, context] = cell.reading
            tick(1)
    medians = (
        {key: median(values) for key, values in seconds.items()}
        for seconds in (plain, verify, draft, read)
    )
    return Costs(batches, contexts, *medians)


class Cell:
    """Rows of one context, for passes that are rolled back."""

    @torch.inference_mode()
    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        config: EvalConfig,
        batch: int,
        context: int,
        policies: Sequence[Policy],
    ) -> None:
        self.target, self.drafter, self.config, self.context = target, drafter, config, context
        self.now = clock_of(target.device)
        self.rows, self.starts = range(batch), [context] * batch
        generator = torch.Generator().manual_seed(0)
        most = max(policy.num_nodes for policy in policies)
        shape = (batch, context + max(most + 1, BURST))
        ids = torch.randint(target.spec.vocab_size, shape, generator=generator)
        self.tokens = ids.to(target.device)
        self.cache = target.begin()
        read = self.tokens[:, :context]
        _, self.features = target.step(self.cache, read, drafter.captures, last_only=True)
        self.deepest = max(policy.depth for policy in policies)
        self.reading: list[float] = []  # seconds of the drafter's reading of the context

    @torch.inference_mode()
    def steps(self) -> list[float]:
        """Return the seconds of plain steps, taken one after another as in the plain loop."""
        now, sampling, seconds = self.now, self.config.sampling, []
        for place in range(BURST):
            new = self.tokens[:, self.context + place, None]
            started = now()
            logits, _ = self.target.step(self.cache, new)
            emit(logits[:, -1], sampling, SeededChance(0), self.rows, self.starts).tolist()
            seconds.append(now() - started)
        self.target.rollback(self.cache, self.starts)
        return seconds[SETTLING:]

    @torch.inference_mode()
    def cycles(self, policy: Policy) -> list[tuple[float, float]]:
        """Return the drafter's and the target's seconds of cycles, taken one after another.

        Rows accept unequally, from nothing to the longest path, as in decoding.
        """
        now, sampling, draft_sampling = self.now, self.config.sampling, self.config.draft_sampling
        rule = self.config.acceptance_rule
        # One state for all rounds would grow; a new one reads the context.
        capacity = self.context + (BURST + 1) * (self.deepest + 1)
        began = now()
        state = self.drafter.begin(self.target.readout, self.tokens[:, 0], capacity)
        following = self.tokens[:, 1 : self.context + 1]
        self.drafter.observe(state, following, self.starts, self.features)
        self.reading.append(now() - began)
        seconds = []
        for turn in range(BURST):
            started = now()
            keys = SeededChance(0), self.rows, self.starts
            proposal = draft(policy, self.drafter, state, draft_sampling, *keys)
            drafted = now()
            width = proposal.tokens.shape[1]
            fed = self.tokens[:, self.context : self.context + 1 + width]
            lengths, tree = self.cache.lengths, proposal.tree
            logits, features = self.target.step(
                self.cache, fed, self.drafter.captures, branches=proposal.branches
            )
            verify(rule, proposal, logits, sampling, *keys).num_accepted.tolist()
            verified = now()
            counts = [1 + (row + turn) % (proposal.depth + 1) for row in self.rows]
            if tree is not None:
                reached = torch.tensor(counts, device=fed.device)[:, None] - 1
                path = tree.path_to((tree.depth >= reached).int().argmax(1))[:, : max(counts) - 1]
                features = keep_path(self.target, self.cache, lengths, features, path)
            kept = [length + count for length, count in zip(lengths, counts, strict=True)]
            self.target.rollback(self.cache, kept)
            longest = max(counts)
            self.drafter.observe(state, fed[:, :longest], counts, features.slice(0, longest))
            seconds.append(((drafted - started) + (now() - verified), verified - drafted))
        self.target.rollback(self.cache, self.starts)
        return seconds[SETTLING:]
