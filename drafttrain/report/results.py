"""What an evaluation found, as frozen dataclasses; report.json is their fields in this order."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

from drafttrain.core.sampling_config import Sampling
from drafttrain.core.types import Counters
from drafttrain.runtime.untrusted_input import Amount, Count

PLAIN = "autoregressive"  # the method that drafts nothing
SCHEMA_VERSION = 2

Kind = TypeVar("Kind")
Interval = list[float]  # lower and upper bound, 95 %
Rates = list[float | None]  # by position; None: no draft got so far


@dataclass(frozen=True)
class Estimate:
    """A measured value and its interval; no value: nothing to compute it from."""

    value: float | None
    ci95: Interval | None

    @property
    def estimate(self) -> "Estimate":
        """The value and its interval alone."""
        return Estimate(self.value, self.ci95)


@dataclass(frozen=True)
class Change(Estimate):
    """A difference, written with its sign."""

    def decides(self, above: str, below: str, neither: str) -> str | None:
        """Return on which side of zero the interval lies, None without one."""
        if self.ci95 is None:
            return None
        return above if self.ci95[0] > 0 else below if self.ci95[1] < 0 else neither


NOT_COMPARED = Change(None, None)


class Badge(str):
    """A word of a table that a page sets off in colour."""


Cell = str | Estimate | Rates


@dataclass(frozen=True)
class Table:
    """A titled table with a caption above and notes below; the first column names the rows."""

    title: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str]


class ByTask(Generic[Kind]):
    """What has something for all prompts (`summary`) and for each task (`tasks`)."""

    summary: Kind
    tasks: dict[str, Kind]

    @property
    def by_name(self) -> dict[str, Kind]:
        """The same by task, that of all prompts first, under "all"."""
        return {"all": self.summary, **self.tasks}


@dataclass(frozen=True)
class Flag:
    """What to read with care: in which row, and why."""

    kind: str
    row: str
    text: str


@dataclass(frozen=True)
class Seconds:
    """Where the time of a prompt went: for each turn the median over its blocks, summed."""

    total: Amount
    prefill: Amount
    draft: Amount
    verify: Amount
    other: Amount


@dataclass(frozen=True)
class OutsideCounts:
    """What began where the text does not repeat itself."""

    num_target_passes: Count
    num_drafts: Count
    num_draft_tokens: Count
    num_accepted_tokens: Count


@dataclass(frozen=True)
class Measurement:
    """One prompt decoded by one method, its turns taken together: the unit of the bootstrap."""

    task: str
    prompt_id: str
    method: str
    num_output_tokens: Count
    num_target_passes: Count
    num_drafts: Count
    num_draft_tokens: Count
    num_accepted_tokens: Count
    num_repeated_tokens: Count
    outside_repetition: OutsideCounts | None  # None: cycles were not recorded
    seconds: Seconds
    disturbed: bool  # its seconds are what the other methods' passes promise


@dataclass(frozen=True)
class AcceptanceLength:
    """Over all drafts (micro, with its interval), and the mean of the prompts' own (macro)."""

    micro: float | None
    macro: float | None
    ci95: Interval | None

    @property
    def estimate(self) -> Estimate:
        """The micro length and its interval."""
        return Estimate(self.micro, self.ci95)


@dataclass(frozen=True)
class Speedup(Estimate):
    """Times as fast as plain decoding, also within each timing block."""

    blocks: Rates
    num_disturbed: int


@dataclass(frozen=True)
class PlainSpeed:
    """Tokens per second of the plain loop."""

    autoregressive: float | None


@dataclass(frozen=True)
class Speeds(PlainSpeed):
    """Tokens per second without and with the drafter (or what they cost)."""

    speculative: float | None


@dataclass(frozen=True)
class Times:
    """Milliseconds per target pass; prefill: per turn."""

    draft: float | None
    verify: float | None
    other: float | None
    prefill: float | None


@dataclass(frozen=True)
class Outside:
    """Acceptance where the text does not repeat itself; all None where that was not recorded."""

    num_target_passes: int | None = None
    num_drafts: int | None = None
    num_draft_tokens: int | None = None
    num_accepted_tokens: int | None = None
    acceptance_length: float | None = None
    ci95: Interval | None = None
    acceptance_rate: float | None = None
    share_of_drafts: float | None = None


@dataclass(frozen=True)
class Differences:
    """A difference to prompt lookup, of all drafts and of those outside repetition."""

    all_text: Change
    outside_repetition: Change


@dataclass(frozen=True)
class Differing:
    """How many outputs are not those of the plain loop."""

    num: int
    of: int


@dataclass(frozen=True)
class Untrimmed:
    """The counters as vLLM counts: with what lay past the end token or the limit."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_position: list[int]
    acceptance_length: float | None


@dataclass(frozen=True)
class Sizes:
    """How much was measured."""

    num_prompts: int
    num_turns: int
    num_output_tokens: int
    num_target_passes: int


@dataclass(frozen=True)
class PlainRow(Sizes):
    """Plain decoding on one task, or on all."""

    tokens_per_second: PlainSpeed
    time_ms: Times
    repetition_rate: float | None


@dataclass(frozen=True)
class MethodRow(Sizes):
    """A drafting method on one task, or on all, beside plain decoding of the same prompts."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_length: AcceptanceLength
    acceptance_rate: float | None
    acceptance_per_position: Rates
    conditional_acceptance: Rates
    tokens_per_second: Speeds
    speedup: Speedup
    predicted_speedup: float | None
    time_ms: Times
    repetition_rate: float | None
    outside_repetition: Outside
    acceptance_length_difference_to_ngram: Differences
    tokens_per_pass_difference_to_ngram: Differences
    outputs_differing: Differing
    untrimmed: Untrimmed


@dataclass(frozen=True)
class PlainRows:
    """Plain decoding on all prompts and by task."""

    summary: PlainRow
    tasks: dict[str, PlainRow]


@dataclass(frozen=True)
class MethodRows(ByTask[MethodRow]):
    """A drafting method on all prompts and by task."""

    summary: MethodRow
    tasks: dict[str, MethodRow]


@dataclass(frozen=True)
class Point(ByTask[MethodRow]):
    """The drafter at one depth, temperature and batch size of a sweep; prompt lookup beside it."""

    depth: int
    temperature: float
    batch_size: int
    summary: MethodRow
    tasks: dict[str, MethodRow]
    ngram: MethodRow | None


def depths_of(sweep: Sequence[Point], temperature: float, batch_size: int) -> dict[int, MethodRows]:
    """Return the rows of a sweep at one temperature and batch size, by depth."""
    return {
        point.depth: MethodRows(point.summary, point.tasks)
        for point in sweep
        if (point.temperature, point.batch_size) == (temperature, batch_size)
    }


@dataclass(frozen=True)
class Check:
    """One check: what was measured, what bounds it, and a sentence that says so."""

    name: str
    passed: bool | None  # None: the rule is not lossless, or the number is only reported
    measured: float
    bound: str
    text: str
    divergences: list[dict[str, Any]]  # of each: prompt, position, gap, noise, tie


@dataclass(frozen=True)
class Certificate:
    """The checks that a decode loop passed, and what they say together."""

    statement: str
    rule: str
    lossless: bool
    certified: bool
    dtype: str
    num_prompts: int
    checks: list[Check]


@dataclass(frozen=True)
class LosslessCheck:
    """The verification rule, whether it is lossless by itself, and greedy beside plain outputs."""

    rule: str
    lossless: bool
    dtype: str  # of the check
    greedy_identical: Count
    greedy_total: Count
    divergences: list[dict[str, Any]]  # of each: prompt, position, gap ...
    statement: str = ""

    @property
    def identical(self) -> bool:
        """Whether no greedy output differed."""
        return self.greedy_identical == self.greedy_total


@dataclass(frozen=True)
class TimingInfo:
    """What timings were taken with; in a block, all methods decode each prompt in turn."""

    dtype: str
    threads: int
    blocks: int
    device: str
    draft_dtype: str | None = None  # of the drafter, where it is not the target's
    repeats: int = 0  # how many blocks timed each prompt, at the least; a report fills it in


@dataclass(frozen=True)
class LimitedSampling(Sampling):
    """How tokens were drawn, and how many at most."""

    max_new_tokens: int


@dataclass(frozen=True)
class NgramAnswer:
    """Whether the drafter beats prompt lookup: yes, no or undecided; None: not compared."""

    answer: str | None
    speedup_difference: Change
    statement: str


@dataclass(frozen=True)
class ExtraMemory:
    """What the drafter holds besides the target: its own weights and its own KV cache, in bytes."""

    weight_bytes: int
    kv_bytes_per_token: int  # of one row

    def at(self, num_positions: int, batch_size: int) -> "MemoryUse":
        """Return the bytes at a context of so many positions in each row of a batch."""
        kv_bytes = self.kv_bytes_per_token * num_positions * batch_size
        total = self.weight_bytes + kv_bytes
        return MemoryUse(**asdict(self), num_positions=num_positions, batch_size=batch_size,
                         kv_bytes=kv_bytes, total_bytes=total)  # fmt: skip


@dataclass(frozen=True)
class MemoryUse(ExtraMemory):
    """Extra memory at one context and batch size."""

    num_positions: int
    batch_size: int
    kv_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Money:
    """The price of a million output tokens, plain and drafted, and the share saved."""

    currency: str
    price_per_hour: float
    per_million_tokens: Speeds
    saving: Estimate


@dataclass(frozen=True)
class TaskVerdict:
    """What to do with the drafter on one task, or on all: in numbers and in a sentence."""

    decision: str
    depth: int
    of_depths: list[int]  # that were measured; `depth` is the fastest
    num_prompts: int
    speedup: Estimate
    acceptance_length: float | None
    acceptance_rate: float | None
    money: Money | None
    extra_memory: MemoryUse | None
    flagged: bool  # its plain loop was handicapped
    disturbed: bool = False  # its timings were
    statement: str = ""


@dataclass(frozen=True)
class BeforeAfter:
    """A quantity before and after adapting, and their paired difference."""

    before: Estimate
    after: Estimate
    difference: Change


@dataclass(frozen=True)
class AdaptationRow:
    """What adapting brought on one task, or on all."""

    num_prompts: int
    acceptance_length: BeforeAfter
    speedup: BeforeAfter


@dataclass(frozen=True)
class Adaptation:
    """The drafter beside the one that its training started from."""

    rows: dict[str, AdaptationRow]
    statement: str
    definition: str


@dataclass(frozen=True)
class Disagreement:
    """An output on which vLLM and we counted or wrote something else."""

    name: str
    position: int | None  # of the first token that differs, None where the outputs are equal
    gap: float | None  # between the target's two best logits there
    tie: bool
    ours: Counters
    theirs: Counters


@dataclass(frozen=True)
class Agreement:
    """Greedy outputs and counters of both loops, compared one by one, in `dtype`."""

    dtype: str
    num_outputs: int
    num_equal: int  # the same tokens and the same counters
    num_ties: int  # part at a near tie of the target
    holds: bool  # every disagreement is explained by a near tie
    ours: Counters
    theirs: Counters
    disagreements: list[Disagreement]
    statement: str


@dataclass(frozen=True)
class Prediction:
    """vLLM's speedup at batch 1 foretold, and measured on outputs that did not calibrate."""

    num_calibration: int
    num_test: int
    tokens_per_pass: float  # of our loop, on the outputs that did not calibrate
    t_plain_s: float  # a plain step without prefill, on the calibrating outputs
    t_cycle_s: float  # the same of drafting and verification, which vLLM does not tell apart
    predicted: float
    predicted_with_prefill: float
    measured: float
    error: float  # of the prediction with prefill, as a share of what was measured
    statement: str


@dataclass(frozen=True)
class BothSeconds:
    """Seconds of both engines at one batch size."""

    plain: float
    drafted: float


@dataclass(frozen=True)
class OursBeside:
    """Our loop's numbers that stand beside vLLM's; the counters behind them are untrimmed."""

    acceptance_length: float | None
    tokens_per_second: Speeds
    speedup: Speedup


@dataclass(frozen=True)
class WitnessRow:
    """vLLM at one batch size, by its own counters."""

    batch_size: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_position: list[int]
    acceptance_length: Estimate
    acceptance_per_position: Rates
    seconds: BothSeconds
    num_output_tokens: int
    tokens_per_second: Speeds
    speedup: Speedup
    outputs_differing: int
    num_unstable: int
    ours: OursBeside | None


@dataclass(frozen=True)
class WitnessSection:
    """vLLM beside our loop, on the same prompts."""

    vllm: str  # its version
    drafter: str
    method: str | None
    draft_sampling: str
    depth: int
    sampling: LimitedSampling
    dtype: str
    device: str
    threads: int
    interleaved: bool
    repeats: int
    num_outputs: int
    batches: list[WitnessRow]
    agreement: Agreement
    prediction: Prediction | None
    notes: list[str]
    definitions: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that a report says. Its drafter's rows head it, those of others are `methods`."""

    schema_version: int
    target: str
    drafter: str
    depth: Count
    sampling: LimitedSampling
    draft_sampling: Sampling | None = None
    batch_size: Count = 1
    summary: MethodRow
    tasks: dict[str, MethodRow]
    methods: dict[str, MethodRows | PlainRows]
    lossless: LosslessCheck
    certificate: Certificate | None = None
    sweep: list[Point]
    vllm: WitnessSection | None = None
    tables: list[Table]
    beats_ngram: NgramAnswer
    timing: TimingInfo
    prompts: Mapping[str, Any]
    notes: list[str]
    measurements: list[Measurement]
    definitions: dict[str, str]
    provenance: Mapping[str, Any]
    flags: list[Flag]
    verdicts: dict[str, TaskVerdict]
    verdict: str
    adaptation: Adaptation | None = None

    @property
    def by_depth(self) -> dict[int, MethodRows]:
        """The drafter's rows at every depth measured at the report's temperature and batch size."""
        found = depths_of(self.sweep, self.sampling.temperature, self.batch_size)
        return found | {self.depth: MethodRows(self.summary, self.tasks)}

    @property
    def main_depth(self) -> int:
        """The depth of the headline: every page shows the drafter at that depth."""
        return self.verdicts["all"].depth

    @property
    def drafting(self) -> dict[str, MethodRows]:
        """The rows of each drafting method: the drafter's, at the headline's depth, come first."""
        others = {name: m for name, m in self.methods.items() if isinstance(m, MethodRows)}
        return {self.drafter: self.by_depth[self.main_depth], **others}
