"""The results of an evaluation as frozen dataclasses; report.json has their fields in order."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, TypeVar

from drafttrain.core.sampling_config import Sampling
from drafttrain.core.types import Counters, Drafted
from drafttrain.drafters.shared.publications import Published
from drafttrain.runtime.untrusted_input import Amount, Count

PLAIN = "autoregressive"  # the method that drafts nothing
BEFORE = "before"  # the method that decodes with the drafter that training started from
SCHEMA_VERSION = 2

Kind = TypeVar("Kind")
Interval = list[float]  # lower and upper bound, 95 %
Rates = list[float | None]  # by position; None: no draft got so far


@dataclass(frozen=True)
class Estimate:
    """A measured value and its interval; None: it could not be computed."""

    value: float | None
    ci95: Interval | None

    @property
    def estimate(self) -> "Estimate":
        """The value and its interval, without other fields."""
        return Estimate(self.value, self.ci95)


@dataclass(frozen=True)
class Change(Estimate):
    """A difference, written with its sign."""

    def decides(self, above: str, below: str, neither: str) -> str | None:
        """Return the word for the interval's side of zero, None without an interval."""
        if self.ci95 is None:
            return None
        return above if self.ci95[0] > 0 else below if self.ci95[1] < 0 else neither


NOT_COMPARED = Change(None, None)


class Badge(str):
    """A word in a table that a page shows in colour."""


Cell = str | Estimate | Rates


@dataclass(frozen=True)
class Table:
    """A titled table with a caption above and notes below; the first column names the rows."""

    title: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()


class ByTask(Generic[Kind]):
    """A value for all prompts (`summary`), and one for each task (`tasks`)."""

    summary: Kind
    tasks: dict[str, Kind]

    @property
    def by_name(self) -> dict[str, Kind]:
        """The values by task; that of all prompts comes first, under "all"."""
        return {"all": self.summary, **self.tasks}


@dataclass(frozen=True)
class Flag:
    """A row to read with care, and the reason."""

    kind: str
    row: str
    text: str


@dataclass(frozen=True)
class Seconds:
    """The time of a prompt by stage: each of its passes at the median of its kind."""

    total: Amount
    prefill: Amount
    draft: Amount
    verify: Amount
    other: Amount


@dataclass(frozen=True)
class OutsideCounts(Drafted):
    """Counts of the drafts and passes that began where the text does not repeat itself."""

    num_target_passes: Count
    num_drafts: Count
    num_draft_tokens: Count
    num_accepted_tokens: Count
    num_cut_drafts: Count = 0  # those whose bonus did not reach the output


@dataclass(frozen=True)
class Measurement(Drafted):
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
    num_cut_drafts: Count = 0  # those whose bonus did not reach the output


@dataclass(frozen=True)
class AcceptanceLength:
    """The length over all drafts (micro, with interval), and the mean over prompts (macro)."""

    micro: float | None
    macro: float | None
    ci95: Interval | None

    @property
    def estimate(self) -> Estimate:
        """The micro length and its interval."""
        return Estimate(self.micro, self.ci95)


@dataclass(frozen=True)
class Speedup(Estimate):
    """The speedup over plain decoding, also by the passes of each timing block alone."""

    blocks: Rates


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
    """Milliseconds per target pass, in a batch a row's share of it; prefill: per turn."""

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
    num_cut_drafts: int | None = None
    acceptance_length: float | None = None
    ci95: Interval | None = None
    acceptance_rate: float | None = None
    share_of_drafts: float | None = None

    @property
    def estimate(self) -> Estimate:
        """The acceptance length and its interval."""
        return Estimate(self.acceptance_length, self.ci95)


@dataclass(frozen=True)
class Differences:
    """A difference to prompt lookup, of all drafts and of those outside repetition."""

    all_text: Change
    outside_repetition: Change


@dataclass(frozen=True)
class Differing:
    """How many outputs differ from those of the plain loop."""

    num: int
    of: int


@dataclass(frozen=True)
class Untrimmed:
    """The counters as vLLM counts: including tokens past the end token or the limit."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_position: list[int]
    mean_acceptance_length: float | None = None  # vLLM's: 1 + accepted / drafts


@dataclass(frozen=True)
class MemberRow:
    """The part of the drafts that one member of an ensemble drafted."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_rate: float | None


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
    """A drafting method on one task, or on all, relative to plain decoding of the same prompts."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_cut_drafts: int
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
    break_even_length: float | None = None
    by_member: dict[str, MemberRow] = field(default_factory=dict)  # empty but for an ensemble


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
    """The drafter at one depth, temperature and batch size of a sweep, and prompt lookup there."""

    depth: int
    temperature: float
    batch_size: int
    summary: MethodRow
    tasks: dict[str, MethodRow]
    ngram: MethodRow | None


EXACT_DTYPES = ("float32", "float64")  # in which greedy outputs must be equal


@dataclass(frozen=True)
class Divergence:
    """The first place where a greedy output differs from the plain loop's.

    gap: between the target's two best logits there. noise: by how much its logits differ between a
    pass over several tokens and one over one. tie: whether the gap is within that.
    """

    prompt: str
    position: int
    gap: float
    noise: float
    tie: bool


@dataclass(frozen=True)
class Check:
    """One check: the measured value, its bound, and a sentence about both."""

    name: str
    passed: bool | None  # None: the rule is not lossless, or the number is only reported
    measured: float
    bound: str
    text: str
    divergences: list[Divergence]


@dataclass(frozen=True)
class Certificate:
    """The checks of a decode loop, and the overall result."""

    statement: str
    rule: str
    lossless: bool
    certified: bool
    dtype: str
    num_prompts: int
    checks: list[Check]


@dataclass(frozen=True)
class LosslessCheck:
    """The verification rule, whether it is lossless, and how greedy outputs match plain ones."""

    rule: str
    lossless: bool
    dtype: str  # of the check
    greedy_identical: Count
    greedy_total: Count
    divergences: list[Divergence]
    statement: str  # empty until a report words it

    @property
    def identical(self) -> bool:
        """Whether all greedy outputs are identical, but for near ties in short dtypes."""
        ties = 0 if self.dtype in EXACT_DTYPES else sum(one.tie for one in self.divergences)
        return self.greedy_identical + ties == self.greedy_total


@dataclass(frozen=True)
class TimingInfo:
    """The conditions of the timings; in a block, all methods decode each prompt in turn."""

    dtype: str
    threads: int
    blocks: int
    device: str
    draft_dtype: str | None = None  # of the drafter, where it is not the target's
    repeats: int = 0  # how many blocks timed each prompt, at the least; a report fills it in
    others_cores: float | None = None  # that other processes kept busy meanwhile; None: not known
    stolen: float | None = None  # share of the time that the host gave to other machines
    delayed: float = 0.0  # share of the decodings that were delayed, after the last try


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
    """The memory of a drafter besides the target's: its own weights and KV cache, in bytes."""

    weight_bytes: int
    kv_bytes_per_token: int  # of one row

    def at(self, num_positions: int, batch_size: int) -> "MemoryUse":
        """Return the bytes at a context of `num_positions` in each row of a batch."""
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
    """The verdict on the drafter for one task, or for all: in numbers and in a sentence."""

    decision: str
    depth: int
    of_depths: list[int]  # `depth` was the fastest of them, on other prompts
    num_prompts: int
    speedup: Estimate
    acceptance_length: float | None
    acceptance_rate: float | None
    money: Money | None
    extra_memory: MemoryUse | None
    flagged: bool  # its plain loop was handicapped
    disturbed: bool = False  # its timing blocks disagree
    adaptive: bool = False  # so that depths are maxima
    statement: str = ""
    break_even_length: float | None = None


@dataclass(frozen=True)
class BeforeAfter:
    """A quantity before and after adapting, and their paired difference."""

    before: Estimate
    after: Estimate
    difference: Change


@dataclass(frozen=True)
class AdaptationRow:
    """The effect of adapting on one task, or on all."""

    num_prompts: int
    acceptance_length: BeforeAfter
    speedup: BeforeAfter


@dataclass(frozen=True)
class Adaptation:
    """The drafter compared with the one that its training started from."""

    rows: dict[str, AdaptationRow]
    statement: str
    definition: str


@dataclass(frozen=True)
class Disagreement:
    """An output on which vLLM's tokens or counters differ from ours."""

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
    num_ties: int  # outputs that diverge at a near tie of the target
    holds: bool  # every disagreement is explained by a near tie
    ours: Counters
    theirs: Counters
    disagreements: list[Disagreement]
    statement: str


@dataclass(frozen=True)
class Prediction:
    """vLLM's speedup at batch 1, predicted, and measured on outputs not used to calibrate."""

    num_calibration: int
    num_test: int
    tokens_per_pass: float  # of our loop, on the outputs not used to calibrate
    t_plain_s: float  # a plain step without prefill, on the calibration outputs
    t_cycle_s: float  # the same for a cycle: vLLM does not time draft and verification separately
    predicted: float
    predicted_with_prefill: float
    measured: float
    error: float  # of the prediction with prefill, relative to the measurement
    statement: str


@dataclass(frozen=True)
class BothSeconds:
    """Seconds of both engines at one batch size."""

    plain: float
    drafted: float


@dataclass(frozen=True)
class OursBeside:
    """Our loop's numbers to compare with vLLM's; the counters behind them are untrimmed."""

    tokens_per_second: Speeds
    speedup: Speedup
    mean_acceptance_length: float | None = None


@dataclass(frozen=True)
class WitnessRow:
    """vLLM at one batch size, by its own counters."""

    batch_size: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_position: list[int]
    acceptance_per_position: Rates
    seconds: BothSeconds
    num_output_tokens: int
    tokens_per_second: Speeds
    speedup: Speedup
    outputs_differing: int
    num_unstable: int
    ours: OursBeside | None
    mean_acceptance_length: Estimate


@dataclass(frozen=True)
class WitnessSection:
    """vLLM compared with our loop, on the same prompts."""

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


@dataclass(frozen=True)
class WrittenText:
    """A run of an output's text by one writer: accepted, corrected, bonus or plain."""

    writer: str
    text: str
    num_tokens: Count


@dataclass(frozen=True)
class TokensByTime:
    """The tokens of an output after the prefill and after each pass, and the seconds since then."""

    seconds: list[Amount]
    tokens: list[Count]


@dataclass(frozen=True)
class Example:
    """The answer to the first turn of a prompt, by who wrote it; its times, drafted and plain."""

    task: str
    prompt_id: str
    prompt: str
    pieces: list[WrittenText]
    drafted: TokensByTime
    plain: TokensByTime

    def num_tokens(self, writer: str) -> int:
        """Return how many tokens one writer wrote."""
        return sum(piece.num_tokens for piece in self.pieces if piece.writer == writer)


@dataclass(frozen=True)
class Waits:
    """How long one waits for answers, and for their first tokens: median and 95th percentile."""

    seconds: list[Amount]
    first_token_ms: list[Amount]


@dataclass(frozen=True)
class AnswerTimes:
    """The answers whose plain ones have at most so many tokens, and more than half; 0: all."""

    most_tokens: Count
    num_answers: Count
    plain: Waits
    drafted: Waits
    speedup: Estimate


@dataclass(frozen=True)
class OutputBin:
    """The drafts that began at positions `first` to `last` of an output."""

    first: Count
    last: Count
    num_drafts: Count
    num_accepted_tokens: Count
    accepted_per_draft: Estimate


@dataclass(frozen=True)
class TrainingSeries:
    """One quantity of a run's log, by optimizer step and by the tokens trained until then."""

    name: str  # as in metrics.jsonl
    unit: str
    steps: list[Count]
    tokens: list[Count]
    values: list[float]


@dataclass(frozen=True)
class TrainingCurves:
    """The curves of the run that trained the drafter."""

    series: list[TrainingSeries]  # the loss comes first
    checkpoint_step: Count | None  # of the evaluated checkpoint
    statement: str  # what the loss is
    seconds: Amount | None = None  # of its optimizer steps, up to that checkpoint


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """What was evaluated, and under which conditions."""

    schema_version: int
    target: str
    drafter: str
    depth: Count
    tree: str = ""  # how its proposals grow; "": they are chains of `depth`
    sampling: LimitedSampling
    draft_sampling: Sampling | None = None
    batch_size: Count
    lossless: LosslessCheck
    certificate: Certificate | None = None
    sweep: list[Point]
    tables: list[Table]  # shown in addition to the report's own
    timing: TimingInfo
    prompts: Mapping[str, Any]
    notes: list[str]
    provenance: Mapping[str, Any]
    examples: list[Example] = field(default_factory=list)
    training: TrainingCurves | None = None
    published: list[Published] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Report(Evaluated):
    """The content of a report. Its drafter's rows come first, those of others are `methods`."""

    summary: MethodRow
    tasks: dict[str, MethodRow]
    methods: dict[str, MethodRows | PlainRows]
    vllm: WitnessSection | None = None
    beats_ngram: NgramAnswer
    measurements: list[Measurement]
    definitions: dict[str, str]
    flags: list[Flag]
    verdicts: dict[str, TaskVerdict]
    verdict: str
    adaptation: Adaptation | None = None
    answer_times: list[AnswerTimes] = field(default_factory=list)
    along_output: list[OutputBin] = field(default_factory=list)

    @property
    def drafting(self) -> dict[str, MethodRows]:
        """The rows of each drafting method; the drafter's come first."""
        others = {name: m for name, m in self.methods.items() if isinstance(m, MethodRows)}
        return {self.drafter: MethodRows(self.summary, self.tasks), **others}
