"""The settings of `evaluate` and `tune`."""

from dataclasses import asdict, dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from drafttrain.core.sampling_config import SMALLEST_TEMPERATURE, Sampling, Temperature
from drafttrain.data.suites import PromptSource
from drafttrain.runtime import limits
from drafttrain.runtime.settings import AUTO, Settings

if TYPE_CHECKING:
    from drafttrain.decode.policy import Policy
    from drafttrain.decode.verify import Rule
from drafttrain.report.config import VerdictSettings

ENGINES = ("drafttrain", "vllm")
RULES = ("lossless", "block", "typical", "lenience")
LOSSY = ("typical", "lenience")
POLICIES = (AUTO, "chain", "static_tree", "dynamic_tree", "optimal_tree", "adaptive")
FROM_TUNE = ("optimal_tree", "adaptive")  # policies made of what `tune` measured
TREES = ("fastest", "longest")
MOST_NODES = 1024  # of a tree
# Keys of `eval` that no measurement depends on.
REPORTED = (
    *("name", "overwrite", "resamples", "certify", "lossless_prompts", "temperatures"),
    *("batch_sizes", "engine", "vllm_python", "vllm_batch_sizes", "vllm_tensor_parallel"),
    *("marginal_speedup", "price_per_hour", "currency"),
)
Counts = Annotated[list[limits.PositiveInt], limits.NOT_EMPTY, limits.DISTINCT]


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Settings):
    """Which prompts are decoded, how, and how carefully that is measured."""

    section = "eval"

    name: limits.FolderName
    overwrite: bool
    prompts: str | None
    dataset: str | None
    subset: str | None
    split: str
    revision: str | None
    task: str | None
    task_by: Annotated[str, limits.one_of("task", "category")]
    prompts_per_task: limits.PositiveInt | None
    skip_long_prompts: bool
    depth: limits.CountOrAuto  # AUTO until it is chosen
    policy: Annotated[str, limits.one_of(*POLICIES)]
    tree: list[Any]  # widths by level, or nodes by the ranks on their paths
    tree_replacement: bool
    tree_nodes: int
    tree_width: int
    tree_temperature: Annotated[float, limits.at_least(SMALLEST_TEMPERATURE)]
    latency_ms: limits.PositiveFloat | None
    temperature: Temperature
    top_k: limits.NonNegativeInt
    top_p: limits.PositiveFraction
    draft_temperature: Temperature | None
    draft_top_k: limits.NonNegativeInt | None
    draft_top_p: limits.PositiveFraction | None
    rule: Annotated[str, limits.one_of(*RULES)]
    typical_epsilon: limits.OpenFraction
    typical_delta: limits.OpenFraction
    lenience: limits.PositiveFraction
    batch_size: limits.PositiveInt
    max_new_tokens: limits.PositiveInt
    stop_strings: list[Annotated[str, limits.NOT_EMPTY]]
    blocks: limits.PositiveInt
    repeats: int
    lossless_prompts: limits.NonNegativeInt
    certify: bool
    resamples: Annotated[int, limits.at_least(100)]
    before: bool
    two_model: str | None
    engine: Annotated[str, limits.one_of(*ENGINES)]
    vllm_python: str | None
    vllm_tensor_parallel: limits.CountOrAuto
    vllm_batch_sizes: Annotated[list[limits.PositiveInt], limits.NOT_EMPTY]
    depths: Annotated[list[limits.PositiveInt], limits.DISTINCT]
    temperatures: Annotated[list[Temperature], limits.DISTINCT]
    batch_sizes: Annotated[list[limits.PositiveInt], limits.DISTINCT]
    marginal_speedup: float
    price_per_hour: float | None
    currency: str
    from_tune: ClassVar[Any] = None  # no setting: see TunedEval

    def __post_init__(self) -> None:
        super().__post_init__()
        several = 1 <= self.repeats <= self.blocks
        self.require("repeats", several, f"be in 1..eval.blocks ({self.blocks})")
        if self.certify or self.lossy:
            why = "eval.certify=true" if self.certify else f"eval.rule={self.rule}"
            need, made = f"be at least 1 with {why}", ": the certificate is made from them"
            self.require("lossless_prompts", self.lossless_prompts >= 1, need, made)
        self._check_tree()
        _ = self.source, self.verdict  # building them checks their settings

    def _check_tree(self) -> None:
        deepest = self.deepest
        if self.policy == "static_tree":
            self._check_static_tree(deepest)
        if self.policy in ("dynamic_tree", "optimal_tree"):
            allowed = f"be in {deepest}..{MOST_NODES}, at least one node for each level"
            self.require("tree_nodes", deepest <= self.tree_nodes <= MOST_NODES, allowed)
            narrow, allowed = 1 <= self.tree_width <= self.tree_nodes, "be in 1..eval.tree_nodes"
            self.require("tree_width", narrow, f"{allowed} ({self.tree_nodes})")
        if self.policy == "optimal_tree":
            drawn = "be false with eval.policy=optimal_tree, whose children all differ"
            self.require("tree_replacement", not self.tree_replacement, drawn)
        if self.policy == "dynamic_tree":
            allowed = "be 0 or null with eval.policy=dynamic_tree: it keeps nodes for their own "
            allowed += "probability, which is not lossless for nodes that are drawn by chance"
            self.require("draft_temperature", not self.draft_temperature, allowed)
        if self.policy not in (AUTO, "chain", "adaptive"):
            need = f"not be block with eval.policy={self.policy}: it is defined for chains"
            self.require("rule", self.rule != "block", need, "; use eval.rule=lossless")
        if self.engine != "drafttrain":
            need = f"not be block with eval.engine={self.engine}, which verifies token by token"
            self.require("rule", self.rule != "block", need, "; use eval.rule=lossless")
            need = f"be chain with eval.engine={self.engine}, which drafts chains"
            self.require("policy", self.policy in (AUTO, "chain"), need)

    def _check_static_tree(self, deepest: int) -> None:
        words = "be numbers of at least 1, one for each level, or nodes such as [[0],[1],[0,0]]"
        if self.tree and all(isinstance(node, list) for node in self.tree):
            ranks = [rank for node in self.tree for rank in node]
            whole = all(self.tree) and all(type(rank) is int and rank >= 0 for rank in ranks)
            self.require("tree", whole, words)
            nodes, levels = len(self.tree), max(map(len, self.tree))
        else:
            every = all(type(width) is int and width >= 1 for width in self.tree)
            self.require("tree", bool(self.tree) and every, words)
            levels = len(self.tree)
            nodes = sum(prod(self.tree[: level + 1]) for level in range(min(deepest, levels)))
        self.require("tree", nodes <= MOST_NODES, f"make at most {MOST_NODES:,} nodes")
        words = f"have {deepest} levels, as deep as the deepest of eval.depth and eval.depths"
        self.require("tree", levels >= deepest, words)

    @property
    def kind(self) -> str:
        """The policy itself: `auto` is adaptive where passes were measured for it, else a chain."""
        if self.policy != AUTO:
            return self.policy
        return "adaptive" if self.from_tune is not None and self.from_tune.costs_ms else "chain"

    @property
    def undecided(self) -> bool:
        """Whether `auto` may still become adaptive; depths of a sweep and of vLLM are fixed."""
        fixed = self.depth == AUTO or self.depths or self.engine != "drafttrain"
        return self.policy == AUTO and self.from_tune is None and not fixed

    @property
    def policy_settings(self) -> str:
        """The settings of the policy, as on the command line, but for the depth."""
        ranked = ("tree_temperature",) if self.tree_temperature != 1 else ()
        of_it = {
            "static_tree": ("tree", "tree_replacement"),
            "dynamic_tree": ("tree_nodes", "tree_width", *ranked),
            "optimal_tree": ("tree_nodes", "tree_width"),
        }
        told = [f"eval.policy={self.kind}"]
        for key in of_it.get(self.policy, ()):
            told.append(f"eval.{key}={str(getattr(self, key)).replace(' ', '')}")
        return " ".join(told).replace("True", "true").replace("False", "false")

    @property
    def shape(self) -> str:
        """Whether proposals are chains or trees, in a word."""
        return "tree" if self.policy_at(self.depth).branches else "chain"

    @property
    def of_tasks(self) -> dict[str, "Policy"]:
        """The policies of tasks that have one of their own, at the depth of the report."""
        depths = {} if self.from_tune is None else self.from_tune.tasks
        return {task: self.policy_at(depth) for task, depth in depths.items() if depth}

    def drafts(self, task: str) -> bool:
        """Whether the prompts of a task are drafted, not decoded plainly because `tune` says so."""
        chosen = self.from_tune
        return chosen is None or bool(chosen.tasks.get(task, chosen.speculate))

    def policy_at(self, depth: int) -> "Policy":
        """The policy of the drafter, at a depth of the sweep."""
        from drafttrain.decode import policy  # this imports torch

        if self.kind == "adaptive" and self.from_tune is not None:
            from drafttrain.decode.adaptive import Adaptive
            from drafttrain.decode.costs import Costs

            limit = None if self.latency_ms is None else self.latency_ms / 1000
            costs = Costs.of_records(self.from_tune.costs_ms)
            return Adaptive(depth, costs, self.from_tune.acceptance, limit)
        if self.policy == "optimal_tree":
            if self.from_tune is None:  # acceptance is counted with this one
                return policy.spine(depth, self.tree_width)
            tree = policy.tree_of_ranks(self.from_tune.trees[depth])
            if tree.depth != depth:
                raise ValueError(f"tree of depth {depth} must be so deep, got depth {tree.depth}")
            return tree
        if self.policy == "static_tree":
            if isinstance(self.tree[0], list):
                nodes = [path for path in self.tree if len(path) <= depth]
                return policy.tree_of_ranks(nodes, self.tree_replacement)
            return policy.tree_of_widths(self.tree[:depth], self.tree_replacement)
        if self.policy == "dynamic_tree":
            ranked_at = self.tree_temperature
            return policy.DynamicTree(depth, self.tree_width, self.tree_nodes, ranked_at)
        return policy.chain(depth)

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
        return self.sampling_at(self.temperature)

    def sampling_at(self, temperature: float) -> Sampling:
        """The same at another temperature of the sweep."""
        return Sampling(temperature, self.top_k, self.top_p)

    @property
    def draft_sampling(self) -> Sampling:
        """How the drafter's logits become the distribution that drafts are drawn from."""
        return self.draft_sampling_beside(self.sampling)

    def draft_sampling_beside(self, sampling: Sampling) -> Sampling:
        """How drafts are drawn if the target is sampled with `sampling`."""
        own = 0.0 if self.policy == "dynamic_tree" else sampling.temperature
        return Sampling(
            own if self.draft_temperature is None else self.draft_temperature,
            sampling.top_k if self.draft_top_k is None else self.draft_top_k,
            sampling.top_p if self.draft_top_p is None else self.draft_top_p,
        )

    @property
    def acceptance_rule(self) -> "Rule":
        """The rule by which drafts are accepted."""
        from drafttrain.decode.verify import LOSSLESS, Block, Lenience, Typical  # imports torch

        if self.rule == "block":
            return Block()
        if self.rule == "typical":
            return Typical(self.typical_epsilon, self.typical_delta)
        return Lenience(self.lenience) if self.rule == "lenience" else LOSSLESS

    @property
    def lossy(self) -> bool:
        """Whether the rule changes the target's distribution at any measured point."""
        lossy = self.rule in LOSSY and not self.acceptance_rule.lossless
        return lossy and any(temperature for temperature, _ in self.points)

    @property
    def every_depth(self) -> list[int]:
        """The depths to measure, ascending: eval.depth and those of the sweep."""
        chosen = [] if self.depth == AUTO else [self.depth]
        return sorted({*chosen, *self.depths}) or [1]

    @property
    def deepest(self) -> int:
        """The greatest depth that is decoded, tasks with a depth of their own included."""
        own = [] if self.from_tune is None else self.from_tune.tasks.values()
        return max([*self.every_depth, *own])

    @property
    def points(self) -> list[tuple[float, int]]:
        """The (temperature, batch size) pairs to measure: that of the report comes first."""
        temperatures, sizes = self.temperatures, self.batch_sizes
        every = product(temperatures or [self.temperature], sizes or [self.batch_size])
        return list(dict.fromkeys([(self.temperature, self.batch_size), *every]))

    @property
    def conditions(self) -> dict[str, Any]:
        """The settings that a measurement depends on; the others affect its report only."""
        known = {key: value for key, value in vars(self).items() if key not in REPORTED}
        return known | {"from_tune": None if self.from_tune is None else asdict(self.from_tune)}

    @property
    def sweeps(self) -> bool:
        """Whether anything besides the report's own point is measured."""
        return len(self.every_depth) > 1 or len(self.points) > 1


@dataclass(frozen=True, kw_only=True)
class TunedEval(EvalConfig):
    """The settings with what `tune` chose, where one of them asks for it."""

    from_tune: Any  # type: ignore[misc]  # evaluation.tune_choice.Chosen


@dataclass(frozen=True, kw_only=True)
class TuneSettings(Settings):
    """Which depths and batch sizes are considered, and how carefully."""

    section = "tune"

    name: str
    overwrite: bool
    depths: Counts
    batch_sizes: Counts
    contexts: Counts
    rounds: limits.PositiveInt
    measure: bool
    trees: Annotated[str, limits.one_of(*TREES)]

    def fitting(self, deepest: int | None) -> list[int]:
        """Return the depths, ascending, that a drafter can draft (None: any)."""
        depths = sorted(depth for depth in self.depths if deepest is None or depth <= deepest)
        need = f"have a depth of at most {deepest}, the drafter's own limit"
        self.require("depths", bool(depths), need)
        return depths
