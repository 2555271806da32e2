"""What rounding a drafter's weights costs: both decode the same prompts, by the same chance."""

from collections.abc import Sequence

from drafttrain.core.types import MethodKey
from drafttrain.data.evaluation_prompts import Prompt
from drafttrain.data.template import Template
from drafttrain.decode.rows import at_once
from drafttrain.decode.verify import LOSSLESS
from drafttrain.drafters.base import Drafter
from drafttrain.evaluation.config import EvalConfig
from drafttrain.evaluation.measure import DraftMethod, decoders, first_turn
from drafttrain.report.bootstrap import Resampling
from drafttrain.report.metrics import PER_DRAFT, Columns, ratio
from drafttrain.report.phrases import bounds, drawn, number, signed, things
from drafttrain.report.results import BeforeAfter, Estimate
from drafttrain.runtime.terminal import followed
from drafttrain.target.model import Target


def acceptance_change(
    target: Target,
    before: Drafter,
    after: Drafter,
    prompts: Sequence[Prompt],
    template: Template,
    config: EvalConfig,
    seed: int,
) -> BeforeAfter:
    """Return the acceptance length of two drafters, and its difference paired by prompt.

    The first turns are decoded, each by both with the chance of its place and the policy of
    `config`; tokens past the end of an output do not count.
    """
    depth, policy = config.depth, config.policy_at(config.depth)
    methods = [
        DraftMethod(name, depth, drafter, policy)
        for name, drafter in (("before", before), ("after", after))
    ]
    decode = decoders(target, methods, config, config.sampling, seed)
    counted: dict[MethodKey, Columns] = {
        method.key: {"yielded": [], "drafts": []} for method in methods
    }
    for row, prompt in enumerate(followed("acceptance", prompts)):
        tokens = first_turn(prompt, target, template)
        for key, columns in counted.items():
            (decoded,) = at_once(decode[key]([tokens], rows=[row], rule=LOSSLESS))
            columns["yielded"].append(decoded.stats.trimmed.yielded)
            columns["drafts"].append(decoded.stats.trimmed.num_drafts)
    old, new = counted.values()
    lengths = (Estimate(ratio(sum(c["yielded"]), sum(c["drafts"])), None) for c in (old, new))
    difference = PER_DRAFT.difference([new], [old], Resampling(config.resamples, seed))
    return BeforeAfter(*lengths, difference)


def change_statement(found: BeforeAfter, num_prompts: int, config: EvalConfig) -> str:
    """Return the sentence of a card on what was found."""
    policy = config.policy_at(config.depth).describe()
    return (
        f"Acceptance length {number(found.before.value, 3)} with the weights as trained, "
        f"{number(found.after.value, 3)} as written: {signed(found.difference.value, 3)} "
        f"({bounds(found.difference.ci95, 3)}), on {things(num_prompts, 'held-out prompt')}, "
        f"{drawn(config.temperature)}, {policy}, both decoded by drafttrain's own loop."
    )
