"""Prompts x methods: the decode loops, interleaved and timed."""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, zip_longest
from typing import Any

from drafttrain.core.chance import SeededChance
from drafttrain.core.sampling_config import Sampling
from drafttrain.core.tokenizer import token_ids
from drafttrain.core.types import Decoded, MethodKey, PromptResult
from drafttrain.data.chat import answer_turn, prompt_tokens
from drafttrain.data.evaluation_prompts import Prompt
from drafttrain.data.records import Message
from drafttrain.data.skips import NothingUsable, SkipReport
from drafttrain.data.template import Template
from drafttrain.decode.autoregressive import autoregressive_passes
from drafttrain.decode.loop import speculative_passes
from drafttrain.decode.policy import Policy
from drafttrain.decode.rows import Passes, at_once, check_tokens, context_of, in_turns
from drafttrain.decode.verify import LOSSLESS
from drafttrain.drafters.base import Drafter
from drafttrain.evaluation.config import EvalConfig
from drafttrain.evaluation.measurements import Key, Measurements
from drafttrain.report.bootstrap import Resampling
from drafttrain.report.metrics import PER_DRAFT, Columns, ratio
from drafttrain.report.phrases import bounds, drawn, number, signed, things
from drafttrain.report.results import BEFORE, PLAIN, BeforeAfter, Estimate
from drafttrain.report.totals import PassTimes
from drafttrain.runtime.load import Busy, LoadWatch
from drafttrain.runtime.settings import require
from drafttrain.runtime.terminal import console, followed, progress, working
from drafttrain.target.model import Target

TRIES_AGAIN = 2  # how often delayed batches are measured again
DELAYED = 1.5  # times as long as usual: something else kept the machine busy
TURN = 8  # tokens that a method decodes before another continues with the same prompt

Decode = Callable[..., Passes]  # of prompts, and rows: their names
ALONE = (PLAIN, 0)


@dataclass(frozen=True)
class DraftMethod:
    """A drafter under a policy; its results have its name and the depth that is asked for."""

    name: str
    depth: int
    drafter: Drafter
    policy: Policy
    of_task: Mapping[str, Policy] = field(default_factory=dict)  # tasks that have one of their own
    drafts: Callable[[str], bool] = lambda _: True  # whether a task is drafted; if not, plain

    @property
    def key(self) -> MethodKey:
        """What tells its results from others."""
        return self.name, self.depth


def methods_of(drafters: Mapping[str, Drafter], config: EvalConfig) -> list[DraftMethod]:
    """Return every drafter at every depth; the main one is the last.

    References draft as deep as it does, task by task too: what differs is then not the depth. They
    also draft on tasks where `tune` found that the main drafter does not pay.
    """
    *references, main = drafters
    told = {name: reference_settings(config, name, drafters[name]) for name in references}
    return [
        DraftMethod(
            name,
            depth,
            drafters[name],
            settings.policy_at(depth),
            settings.of_tasks if depth == config.depth else {},
            *([config.drafts] if settings is config else []),
        )
        for name, settings in {**told, main: config}.items()
        for depth in config.every_depth
    ]


def reference_settings(config: EvalConfig, name: str, drafter: Drafter) -> EvalConfig:
    """Return the settings of a reference: it drafts chains if it cannot branch.

    So it does beside what `tune` chose, which it chose for another; but the drafter before it was
    adapted drafts as it does after. One that proposes in a shape of its own has no nodes to rank.
    """
    if name == BEFORE:
        return config
    fits = drafter.branches and config.policy in ("chain", "static_tree", "dynamic_tree")
    ranked_at = config.tree_temperature if type(drafter).propose is Drafter.propose else 1.0
    policy = config.policy if fits else "chain"
    return replace(config, policy=policy, tree_temperature=ranked_at)


def check_depths(drafter: Drafter, config: EvalConfig) -> None:
    """Raise ValueError for a depth that the drafter cannot draft or the contexts cannot hold.

    The target is not needed: its shape is the one that the drafter was built for.
    """
    deepest = config.deepest
    key = "depths" if deepest in config.depths else "depth"
    try:
        for policy in [config.policy_at(max(config.every_depth)), *config.of_tasks.values()]:
            policy.check(drafter, config.draft_sampling)
    except ValueError as error:
        word, _, rest = str(error).partition(" ")
        width = "tree" if config.policy == "static_tree" else "tree_width"
        named = {"depth": key, "width": width}.get(word, word)
        raise ValueError(f"eval.{named} {rest}") from None
    ranked = config.policy == "dynamic_tree" and config.tree_temperature != 1
    if ranked and type(drafter).propose is not Drafter.propose:
        raise ValueError(
            f"eval.tree_temperature must be 1 with drafter={drafter.config.name}, which finds its "
            f"proposals in a shape of their own, got {config.tree_temperature:g}"
        )
    positions, who = context_of(drafter.spec, [drafter])
    most = positions - config.max_new_tokens - 1
    has = f": {who} has {positions} positions, and"
    why = f"{has} a prompt and a draft need some of them"
    config.require("max_new_tokens", most >= 1, f"be at most {positions - 2}", why)
    why = f"{has} eval.max_new_tokens={config.max_new_tokens} and a prompt need some of them"
    require(deepest <= most, f"eval.{key}", f"be at most {most}", deepest, why)


def fitting(
    prompts: Sequence[Prompt],
    report: SkipReport,
    target: Target,
    template: Template,
    config: EvalConfig,
    drafters: Sequence[Drafter],
) -> list[Prompt]:
    """Return the prompts that fit the contexts of the target and the drafters.

    ValueError for one that may not; with eval.skip_long_prompts it is counted in `report`.
    ValueError, too, for one that cannot become tokens of the target.
    """
    deepest = config.deepest
    positions, who = context_of(target.spec, drafters)
    room = positions - config.max_new_tokens - deepest
    found = []
    for prompt in prompts:
        later = [token_ids(target.tokenizer, turn) for turn in prompt.turns[1:]]
        try:
            first = first_turn(prompt, target, template)
            check_tokens(target.spec, [first, *filter(None, later)])
        except ValueError as error:
            raise ValueError(f"eval.prompts: {prompt.id}: {error}") from error
        # Later turns carry the answers before them, each at its longest.
        needed = len(first) + sum(len(turn) + config.max_new_tokens + 16 for turn in later)
        if needed <= room:
            found.append(prompt)
            continue
        complaint = (
            f"may need {needed} tokens before its last answer, but {who} has "
            f"{positions} positions; eval.max_new_tokens={config.max_new_tokens} and drafts of "
            f"{deepest} leave {room}"
        )
        if not config.skip_long_prompts:
            raise ValueError(
                f"eval.prompts: {prompt.id} {complaint}; shorten the prompt, lower "
                "eval.max_new_tokens, or leave such prompts out with eval.skip_long_prompts=true"
            )
        report.skip("too long for the context", prompt.id, complaint)
    if not found:
        what = f"eval.prompts must hold prompts that fit {target.spec.name}, got none"
        raise NothingUsable(what, report, "shorten them, or lower eval.max_new_tokens")
    return found


def first_turn(prompt: Prompt, target: Target, template: Template) -> list[int]:
    """Return the tokens of a prompt's first turn."""
    return prompt_tokens([Message("user", prompt.turns[0])], target.tokenizer, template)


def decoders(
    target: Target,
    methods: Sequence[DraftMethod],
    config: EvalConfig,
    sampling: Sampling,
    seed: int,
) -> dict[MethodKey, Decode]:
    """Return the plain loop and the speculative one of each method, ready to be called."""
    settings: dict[str, Any] = {
        "sampling": sampling,
        "max_new_tokens": config.max_new_tokens,
        "chance": SeededChance(seed),
        "stop_strings": tuple(config.stop_strings),
    }
    decode: dict[MethodKey, Decode] = {ALONE: partial(autoregressive_passes, target, **settings)}
    settings["draft_sampling"] = config.draft_sampling_beside(sampling)
    settings["rule"] = config.acceptance_rule
    for method in methods:
        ready = partial(speculative_passes, target, method.drafter, policy=method.policy)
        decode[method.key] = partial(ready, **settings)
    return decode


def of_task(
    decode: Mapping[MethodKey, Decode], methods: Sequence[DraftMethod], task: str
) -> dict[MethodKey, Decode]:
    """Return the loops for a task: some methods have a policy for it, or decode it plainly."""
    own = {each.key: each.of_task[task] for each in methods if task in each.of_task}
    plain = {each.key: decode[ALONE] for each in methods if not each.drafts(task)}
    return {**decode, **{key: partial(decode[key], policy=own[key]) for key in own}, **plain}


def groups_of(prompts: Sequence[Prompt], size: int) -> list[list[tuple[int, Prompt]]]:
    """Return prompts, with their places, in batches of one task; a task's last may be smaller."""
    if size == 1:  # in the given order, tasks mixed
        return [[one] for one in enumerate(prompts)]
    return [
        members[start : start + size]
        for members in in_tasks(prompts)
        for start in range(0, len(members), size)
    ]


def in_tasks(prompts: Sequence[Prompt]) -> list[list[tuple[int, Prompt]]]:
    """Return the prompts of each task, with their places."""
    tasks: dict[str, list[tuple[int, Prompt]]] = {}
    for place, prompt in enumerate(prompts):
        tasks.setdefault(prompt.task, []).append((place, prompt))
    return list(tasks.values())


@dataclass(frozen=True)
class MeasuredPoint:
    """One result per turn, method and block; what else the machine did, and what it delayed."""

    results: list[PromptResult]
    load: Busy
    delayed: float  # share of the batches, after the last try


def measure(
    target: Target,
    methods: Sequence[DraftMethod],
    prompts: Sequence[Prompt],
    template: Template,
    config: EvalConfig,
    *,
    sampling: Sampling,
    batch_size: int,
    seed: int,
    journal: Measurements | None = None,
) -> MeasuredPoint:
    """Decode every turn of every prompt by every method; return one result each.

    Prompts of a task are decoded `batch_size` together. The batches are dealt into `config.blocks`
    blocks, each into `config.repeats` of them. Within a block each batch goes through all methods,
    in an order that rotates, so that a change in the machine's speed affects all of them. Later
    turns follow the plain loop's answers, the same for every method. Batches that the journal holds
    are not measured again. Batches on which a method was delayed are, as a whole, and the times
    that are nearer to the usual ones are taken.
    """
    decode = decoders(target, methods, config, sampling, seed)
    keys = list(decode)
    groups = groups_of(prompts, batch_size)
    warm = [first_turn(prompt, target, template)[:64] for _, prompt in groups[0]]
    own = {task for method in methods for task in method.of_task}
    # First calls pay for allocations that later ones do not.
    with working("warming up"):
        for ready in [decode, *(of_task(decode, methods, task) for task in own)]:
            _decode(target, {each: one(warm, rows=[0] * len(warm)) for each, one in ready.items()})
    measured: dict[Key, list[PromptResult]] = {}
    work = [
        (block, place)
        for block in range(config.blocks)
        for place in range(len(groups))
        if (block - place) % config.blocks < config.repeats
    ]
    label = "evaluate" if batch_size == 1 else f"evaluate, batch {batch_size}"

    def take(done: int, key: Key) -> list[PromptResult]:
        block, place = key
        shift = (done + block) % len(keys)
        order = keys[shift:] + keys[:shift]
        here = of_task(decode, methods, groups[place][0][1].task)
        taken = _group(target, here, order, groups[place], template, block)
        gc.collect(0)  # new objects only; a full collection takes half a second
        return taken

    def keep(key: Key, results: list[PromptResult]) -> None:
        measured[key] = results
        if journal:
            journal.add(key, results)

    load = LoadWatch()
    gc.collect()
    gc.disable()  # a collection inside a timed pass would be charged to one method
    try:
        known = journal.known if journal else {}
        measured |= {key: known[key] for key in work if key in known}
        with progress(label, len(work), len(measured)) as tick:
            for done, key in enumerate(work):
                if key not in known:
                    keep(key, take(done, key))
                    tick(1)
        for _ in range(TRIES_AGAIN):
            times = usual(measured)
            if not (again := delayed(measured, times)):
                break
            console.print(
                f"measuring {len(again)} of {len(work)} batches of prompts again: something else "
                "kept the machine busy meanwhile"
            )
            with progress(f"{label}, again", len(again)) as tick:
                for key in again:
                    taken = take(work.index(key), key)
                    if _delay(taken, times) < _delay(measured[key], times):
                        keep(key, taken)
                    tick(1)
    finally:
        gc.enable()
    results = [result for key in work for result in measured[key]]
    return MeasuredPoint(
        results, load.so_far(), len(delayed(measured, usual(measured))) / len(work)
    )


def usual(measured: Mapping[Key, Sequence[PromptResult]]) -> PassTimes:
    """Return how long passes take in all that was measured so far."""
    return PassTimes(chain.from_iterable(measured.values()))


def delayed(measured: Mapping[Key, Sequence[PromptResult]], times: PassTimes) -> list[Key]:
    """Return the keys of batches on which a method took far longer than its passes usually do."""
    return [key for key, results in measured.items() if _delay(results, times) > DELAYED]


def _delay(results: Sequence[PromptResult], times: PassTimes) -> float:
    return max(map(times.delay, results))


def _decode(target: Target, decoding: Mapping[MethodKey, Passes]) -> dict[MethodKey, list[Decoded]]:
    """Decode a batch by every method: in turns on a CPU, which other processes use as well.

    On other devices one after the other, as they would need the caches of all at once.
    """
    if target.device.type == "cpu":
        return in_turns(decoding, TURN)
    return {key: at_once(passes) for key, passes in decoding.items()}


def _group(
    target: Target,
    decode: Mapping[MethodKey, Decode],
    order: Sequence[MethodKey],
    group: Sequence[tuple[int, Prompt]],
    template: Template,
    block: int,
) -> list[PromptResult]:
    """Return the results of one batch of prompts, decoded turn after turn by every method."""
    results: list[PromptResult] = []
    messages: dict[int, list[Message]] = {place: [] for place, _ in group}
    for turn in range(max(len(prompt.turns) for _, prompt in group)):
        members = [(place, prompt) for place, prompt in group if turn < len(prompt.turns)]
        for place, prompt in members:
            messages[place].append(Message("user", prompt.turns[turn]))
        places = [place for place, _ in members]
        tokens = [prompt_tokens(messages[p], target.tokenizer, template) for p in places]
        outputs = _decode(target, {key: decode[key](tokens, rows=places) for key in order})
        for name, depth in decode:
            mine = outputs[name, depth]
            for (_, prompt), asked, output in zip(members, tokens, mine, strict=True):
                about = (prompt.id, turn, prompt.task, name, block, len(asked))
                results.append(PromptResult(*about, output.tokens, output.stats, depth))
        for place, output in zip(places, outputs[ALONE], strict=True):
            history = messages[place]
            history.append(answer_turn(history, output.tokens, target.tokenizer, template))
    return results


def at_depth(results: Sequence[PromptResult], depth: int) -> list[PromptResult]:
    """Return the results of the plain loop, and those of every drafter at one depth."""
    return [result for result in results if result.method == PLAIN or result.depth == depth]


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Return `count` prompts, taken from the tasks in turn."""
    rounds = zip_longest(*in_tasks(prompts))
    return [placed[1] for found in rounds for placed in found if placed is not None][:count]


def acceptance_change(
    target: Target,
    before: Drafter,
    after: Drafter,
    prompts: Sequence[Prompt],
    template: Template,
    config: EvalConfig,
    seed: int,
) -> BeforeAfter:
    """Return what rounding a drafter's weights costs: its acceptance length before and after.

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
    one, two = (Estimate(ratio(sum(c["yielded"]), sum(c["drafts"])), None) for c in (old, new))
    difference = PER_DRAFT.difference([new], [old], Resampling(config.resamples, seed))
    return BeforeAfter(one, two, difference)


def change_statement(found: BeforeAfter, num_prompts: int, config: EvalConfig) -> str:
    """Return the sentence of a card on what was found."""
    policy = config.policy_at(config.depth).describe()
    return (
        f"Acceptance length {number(found.before.value, 3)} with the weights as trained, "
        f"{number(found.after.value, 3)} as written: {signed(found.difference.value, 3)} "
        f"({bounds(found.difference.ci95, 3)}), on {things(num_prompts, 'held-out prompt')}, "
        f"{drawn(config.temperature)}, {policy}, both decoded by drafttrain's own loop."
    )
