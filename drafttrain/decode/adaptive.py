"""How far to draft, cycle by cycle: a chain that ends where one token more would not pay.

The decision on a token uses only what precedes it: how far drafts came before, the drafter's
confidence in the tokens drafted so far, and the costs of passes. A drafted token is verified
whatever its confidence; so the output keeps its distribution (SpecDec++, Huang et al., 2024;
AdaEDL, Agrawal et al., 2024, end a draft by confidence; a cut after the fact would be lossy).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from drafttrain.decode.costs import Costs
from drafttrain.decode.policy import Policy

PRIOR = 16.0  # drafts that what was known before counts for
DECAY = 0.96  # of what was seen, from draft to draft: half of it after 17
TRIES = 0.02  # of the time of plain steps, for drafts that try whether they pay again
GRAIN = 64  # positions of context within which costs are taken as the same


@dataclass(frozen=True, eq=False)
class Adaptive(Policy):
    """A chain that goes on while the next token is worth its time, or is not begun at all.

    costs: of passes on this machine. acceptance: how often each position of a chain was accepted
    before, where the one before it was. latency_s: no cycle takes longer, if a plain step does not.
    """

    depth: int
    costs: Costs
    acceptance: Sequence[float]
    latency_s: float | None = None
    width = 1

    def __post_init__(self) -> None:
        if not self.acceptance:
            raise ValueError("acceptance must have a number for each position, got none")
        if self.depth < 1:
            raise ValueError(f"depth must be at least 1, got {self.depth}")

    @property
    def num_nodes(self) -> int:  # type: ignore[override]
        return self.depth

    @cached_property
    def prior(self) -> np.ndarray:
        """The acceptance known before, by position; the last known one holds for deeper ones."""
        known = list(self.acceptance[: self.depth])
        every = known + known[-1:] * (self.depth - len(known))
        return np.clip(every, 0.01, 0.99)  # never so sure that nothing could be learnt

    def describe(self) -> str:
        return f"adaptive chain of at most {self.depth}"


class Pace:
    """The decisions of one decoding, over the rows that are active together.

    A pass costs the same whether all its rows need it or one does, so rows decide together; each
    brings what it has seen itself.
    """

    def __init__(self, policy: Adaptive, names: Sequence[int]) -> None:
        self.policy = policy
        self.tested = {name: np.zeros(policy.depth) for name in names}
        self.accepted = {name: np.zeros(policy.depth) for name in names}
        self.weight = dict.fromkeys(names, PRIOR)  # of the acceptance known before
        # How many tokens were accepted, and the sum of the confidences in those that were tested.
        self.words = dict.fromkeys(names, (0.0, 0.0))
        self.has_read = False  # whether the drafter has read the text
        self.quiet = 0.0  # plain steps since the last draft
        self._seconds: dict[tuple[int, int], np.ndarray] = {}

    def begins(self, names: Sequence[int], starts: Sequence[int], left: Sequence[int]) -> bool:
        """Return whether the drafter drafts in the cycle that begins now.

        starts: positions behind each row. left: tokens that each may still emit. `planned` is then
        the depth for a drafter that proposes a whole chain at once.
        """
        self.seconds = self._seconds_of(len(names), sum(starts) / len(starts))
        self.ahead = np.array([self._acceptance(name) for name in names])
        self.kept, self.predicted = np.array([self.words[name] for name in names]).T
        self.path = np.ones(len(names))
        self.confidence: list[np.ndarray] = []
        rates = (len(names) + np.cumsum(self.ahead.cumprod(1).sum(0))) / self.seconds[1:]
        plain = len(names) / self.seconds[0]
        self.rate, self.probing = max(rates.max(), plain), False
        pays = bool(rates.max() > plain)
        reading = 0.0
        if not self.has_read:
            reading = self.policy.costs.read_s(len(names), sum(starts) / len(starts))
            pays = pays and max(left) * len(names) * (1 / plain - 1 / rates.max()) > reading
        if not pays:
            dearer = self.seconds[1] - self.seconds[0] + reading
            affordable = TRIES * self.quiet * self.seconds[0] >= dearer
            self.probing = bool(affordable and np.isfinite(dearer))
        self.planned = 1 if self.probing else int(rates.argmax()) + 1
        drafts = bool(pays or self.probing)
        self.quiet = 0.0 if drafts else self.quiet + 1
        self.has_read |= drafts
        return drafts

    def goes_on(self, confidence: Sequence[float]) -> bool:
        """Return whether one more token is drafted; confidence: each row's in its last one.

        Drafters say too much or too little: what counts is how a confidence compares with those
        before it, by what was accepted of those. The first one of a text says nothing yet.
        """
        predicted = np.array(confidence)
        kept = self.kept + PRIOR * self.ahead[:, len(self.confidence)]
        sure = predicted * kept / np.maximum(self.predicted + PRIOR * predicted, 1e-9)
        self.path = self.path * np.minimum(sure, 1.0)
        self.confidence.append(predicted)
        depth = len(self.confidence)
        if depth == self.policy.depth or self.probing:
            return False
        gained = float((self.path * self.ahead[:, depth]).sum())
        return bool(gained > self.rate * (self.seconds[depth + 1] - self.seconds[depth]))

    def learn(
        self, names: Sequence[int], num_accepted: Sequence[int], num_nodes: Sequence[int]
    ) -> None:
        """Take in how far the drafts of a cycle came."""
        if self.probing and any(num_accepted):
            self.quiet = np.inf  # the next cycle tries again
        told = zip(names, num_accepted, num_nodes, strict=True)
        for place, (name, count, drafted) in enumerate(told):
            tested = min(count + 1, drafted)
            self.weight[name] = max(DECAY * self.weight[name], 1.0)
            self.tested[name] *= DECAY
            self.accepted[name] *= DECAY
            self.tested[name][:tested] += 1
            self.accepted[name][:count] += 1
            predicted = [float(each[place]) for each in self.confidence[:tested]]
            if predicted:  # a drafter that proposes a whole chain says nothing
                kept, before = self.words[name]
                self.words[name] = (DECAY * kept + count, DECAY * before + sum(predicted))

    def _acceptance(self, name: int) -> np.ndarray:
        """Return how often each position is accepted, where the one before it was, for a row.

        What was known before is forgotten like what was seen. A position that was tested little
        follows what the others did against their prior: their odds are shifted alike.
        """
        tested, accepted, prior = self.tested[name], self.accepted[name], self.policy.prior
        known, weight = np.average(prior, weights=tested + 1), self.weight[name]
        found = (accepted.sum() + weight * known) / (tested.sum() + weight)
        odds = prior / (1 - prior) * (found / (1 - found)) * (1 - known) / known
        return (accepted + PRIOR * odds / (1 + odds)) / (tested + PRIOR)

    def _seconds_of(self, rows: int, context: float) -> np.ndarray:
        """Return the seconds of a cycle by its depth; 0 is a plain step."""
        key = rows, int(context) // GRAIN
        if key not in self._seconds:
            costs, depths = self.policy.costs, self.policy.costs.depths
            middle = (key[1] + 0.5) * GRAIN
            known = [costs.cycle_s(depth, rows, middle) for depth in depths]
            cycles = np.interp(range(1, self.policy.depth + 1), depths, known)
            if self.policy.latency_s is not None:
                cycles = np.where(cycles > self.policy.latency_s, np.inf, cycles)
            self._seconds[key] = np.array([costs.plain_s(rows, middle), *cycles])
        return self._seconds[key]
