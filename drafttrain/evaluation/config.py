"""What `evaluate` measures, and how carefully."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafttrain.core.sampling_config import Sampling
from drafttrain.data.suites import PromptSource
from drafttrain.runtime.untrusted_input import folder_name

if TYPE_CHECKING:
    from drafttrain.decode.verify import Rule
from drafttrain.report.config import VerdictSettings

ENGINES = ("drafttrain", "vllm")
RULES = ("lossless", "typical", "lenience")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Which prompts, how they are decoded, and how carefully that is measured."""

    name: str
    overwrite: bool
    prompts: str | None
    dataset: str | None
    subset: str | None
    split: str
    revision: str | None
    task: str | None
    task_by: str
    prompts_per_task: int | None
    skip_long_prompts: bool
    depth: int
    temperature: float
    top_k: int
    top_p: float
    draft_temperature: float | None
    draft_top_k: int | None
    draft_top_p: float | None
    rule: str
    typical_epsilon: float
    typical_delta: float
    lenience: float
    batch_size: int
    max_new_tokens: int
    stop_strings: list[str]
    blocks: int
    repeats: int
    lossless_prompts: int
    certify: bool
    resamples: int
    before: bool
    two_model: str | None
    tuned: bool
    engine: str
    vllm_python: str | None
    vllm_batch_sizes: list[int]
    depths: list[int]
    temperatures: list[float]
    batch_sizes: list[int]
    marginal_speedup: float
    price_per_hour: float | None
    currency: str

    def __post_init__(self) -> None:
        folder_name(self.name, "eval.name")
        _sampling("", self.temperature, self.top_k, self.top_p)
        for temperature in self.temperatures:
            _sampling("temperatures: ", temperature, self.top_k, self.top_p)
        for key in ("depth", "max_new_tokens", "blocks", "batch_size"):
            _require(key, getattr(self, key) >= 1, "at least 1", getattr(self, key))
        for key in ("depths", "batch_sizes"):
            values = getattr(self, key)
            _require(key, all(value >= 1 for value in values), "numbers of at least 1", values)
        for key in ("depths", "batch_sizes", "temperatures"):
            values = getattr(self, key)
            _require(key, len(set(values)) == len(values), "distinct values", values)
        if not 1 <= self.repeats <= self.blocks:
            raise ValueError(
                f"eval.repeats must be in 1..eval.blocks ({self.blocks}), got {self.repeats}"
            )
        wanted = self.prompts_per_task
        _require("prompts_per_task", wanted is None or wanted >= 1, "at least 1 or null", wanted)
        _require("rule", self.rule in RULES, f"one of {', '.join(RULES)}", self.rule)
        checked = self.lossless_prompts
        _require("lossless_prompts", checked >= 0, "at least 0", checked)
        if (self.certify or self.lossy) and not checked:
            why = "eval.certify=true" if self.certify else f"eval.rule={self.rule}"
            raise ValueError(
                f"eval.lossless_prompts must be at least 1 with {why}, got 0: they are the prompts "
                "that the certificate is made from"
            )
        _require("engine", self.engine in ENGINES, f"one of {', '.join(ENGINES)}", self.engine)
        sizes = self.vllm_batch_sizes
        _require("vllm_batch_sizes", bool(sizes) and min(sizes) >= 1, "numbers from 1 on", sizes)
        _require("resamples", self.resamples >= 100, "at least 100", self.resamples)
        for key in ("typical_epsilon", "typical_delta"):
            value = getattr(self, key)
            _require(key, 0 < value < 1, "between 0 and 1", value)
        _require("lenience", 0 < self.lenience <= 1, "in (0, 1]", self.lenience)
        _require("stop_strings", all(self.stop_strings), "texts that are not empty", "''")
        _ = self.draft_sampling, self.source, self.verdict  # they check what they are made of

    @property
    def source(self) -> PromptSource:
        """Where the prompts come from."""
        return PromptSource(
            path=self.prompts,
            dataset=self.dataset,
            subset=self.subset,
            split=self.split,
            revision=self.revision,
            task=self.task,
            task_by=self.task_by,
            limit=self.prompts_per_task,
        )

    @property
    def verdict(self) -> VerdictSettings:
        """When a speedup is worth having, and what the machine costs."""
        return VerdictSettings(self.marginal_speedup, self.price_per_hour, self.currency)

    @property
    def sampling(self) -> Sampling:
        """How the target's logits become probabilities."""
        return Sampling(self.temperature, self.top_k, self.top_p)

    @property
    def draft_sampling(self) -> Sampling:
        """How the drafter's logits become the law that drafts are drawn from."""
        return self.draft_sampling_beside(self.sampling)

    def draft_sampling_beside(self, sampling: Sampling) -> Sampling:
        """How drafts are drawn where the target is sampled as `sampling` says."""
        return _sampling(
            "draft_",
            sampling.temperature if self.draft_temperature is None else self.draft_temperature,
            sampling.top_k if self.draft_top_k is None else self.draft_top_k,
            sampling.top_p if self.draft_top_p is None else self.draft_top_p,
        )

    @property
    def acceptance_rule(self) -> "Rule":
        """The rule by which drafts are accepted."""
        from drafttrain.decode.verify import LOSSLESS, Lenience, Typical  # with them comes torch

        if self.rule == "typical":
            return Typical(self.typical_epsilon, self.typical_delta)
        return Lenience(self.lenience) if self.rule == "lenience" else LOSSLESS

    @property
    def lossy(self) -> bool:
        """Whether the rule changes the target's law anywhere in what is measured."""
        return self.rule != "lossless" and any(temperature for temperature, _ in self.points)

    @property
    def every_depth(self) -> list[int]:
        """The depths to measure, ascending: eval.depth and those of the sweep."""
        return sorted({self.depth, *self.depths})

    @property
    def points(self) -> list[tuple[float, int]]:
        """The (temperature, batch size) pairs to measure: that of the report comes first."""
        base = (self.temperature, self.batch_size)
        every = [
            (temperature, size)
            for temperature in self.temperatures or [self.temperature]
            for size in self.batch_sizes or [self.batch_size]
        ]
        return [base, *(point for point in every if point != base)]

    @property
    def conditions(self) -> dict[str, Any]:
        """What a measurement depends on: what else is set here only says how it is reported."""
        reported = ["name", "overwrite", "resamples", "certify", "lossless_prompts", "temperatures"]
        reported += [
            "engine",
            "vllm_python",
            "vllm_batch_sizes",
            "batch_sizes",
            "marginal_speedup",
            "price_per_hour",
            "currency",
        ]
        return {key: value for key, value in vars(self).items() if key not in reported}

    @property
    def sweeps(self) -> bool:
        """Whether anything beside the report's own point is measured."""
        return len(self.every_depth) > 1 or len(self.points) > 1


def _sampling(prefix: str, temperature: float, top_k: int, top_p: float) -> Sampling:
    try:
        return Sampling(temperature, top_k, top_p)
    except ValueError as error:
        raise ValueError(f"eval.{prefix}{error}") from None


def _require(key: str, holds: bool, what: str, got: object) -> None:
    if not holds:
        shown = list(got) if isinstance(got, Sequence) and not isinstance(got, str) else got
        raise ValueError(f"eval.{key} must be {what}, got {shown}")


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """Which depths and batches are weighed, and how carefully."""

    name: str
    overwrite: bool
    depths: list[int]
    batch_sizes: list[int]
    contexts: list[int]
    rounds: int
    measure: bool

    def __post_init__(self) -> None:
        for key in ("depths", "batch_sizes", "contexts"):
            values = getattr(self, key)
            if not values or min(values) < 1 or len(set(values)) < len(values):
                raise ValueError(
                    f"tune.{key} must be distinct numbers of at least 1, got {list(values)}"
                )
        if self.rounds < 1:
            raise ValueError(f"tune.rounds must be at least 1, got {self.rounds}")

    def fitting(self, deepest: int | None) -> list[int]:
        """Return the depths, ascending, that a drafter can draft (None: any)."""
        depths = sorted(depth for depth in self.depths if deepest is None or depth <= deepest)
        if not depths:
            raise ValueError(
                f"tune.depths must have a depth of at most {deepest}, the drafter's own limit, got "
                f"{list(self.depths)}"
            )
        return depths


@dataclass(frozen=True, kw_only=True)
class CompareSettings:
    """Which runs are compared, with what, and where the comparison goes."""

    runs: list[str]
    evaluation: str
    baseline: str | None
    all_pairs: bool
    resamples: int
    seed: int
    name: str
    dir: str

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError(
                "runs must name at least one evaluated run, got none: "
                "python -m drafttrain compare 'runs=[outputs/a,outputs/b]'"
            )
        places = [Path(run).resolve() for run in self.runs]
        twice = [
            run for run, place in zip(self.runs, places, strict=True) if places.count(place) > 1
        ]
        if twice:
            raise ValueError(f"runs must name each run once, got {' and '.join(twice[:2])}")
        folder_name(self.evaluation, "compare.evaluation")
        if self.resamples < 100:
            raise ValueError(f"compare.resamples must be at least 100, got {self.resamples}")
        if self.seed < 0:
            raise ValueError(f"compare.seed must be at least 0, got {self.seed}")
