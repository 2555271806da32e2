"""From the configuration of `evaluate` or `tune` to what is measured: target, drafter, prompts."""

import copy
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from drafttrain.commands.setup.init_from import drafter_before
from drafttrain.commands.setup.target_and_drafter import (
    GivenDrafter,
    changed_target,
    check_members,
    check_sibling,
    drafter_to_evaluate,
    inflate_as,
    load_alone,
    load_target_to_decode,
)
from drafttrain.config.compose import load_choice
from drafttrain.config.groups import follow_up
from drafttrain.config.sections import ChatConfig, EvaluateConfig, TuneConfig
from drafttrain.core.ops.graphs import noting
from drafttrain.core.ops.packed_weights import pack
from drafttrain.data.evaluation_prompts import (
    load_prompts,
    overlap_line,
    overlap_record,
    prompts_sha256,
)
from drafttrain.data.suites import BUILTIN_PROMPTS
from drafttrain.decode.costs import Costs
from drafttrain.decode.policy import Policy
from drafttrain.drafters.base import Drafter, beside_every
from drafttrain.evaluation.config import FROM_TUNE, EvalConfig, TunedEval
from drafttrain.evaluation.evaluate import Parts, Setup
from drafttrain.evaluation.last_validation import validated
from drafttrain.evaluation.measure import check_depths, fitting, reference_settings
from drafttrain.evaluation.record import require_same, settings_of
from drafttrain.evaluation.tune_choice import CHAIN, TUNED, Chosen, read_tuned
from drafttrain.report.curves import training_curves
from drafttrain.report.phrases import memory
from drafttrain.report.results import BEFORE, TimingInfo, TrainingCurves
from drafttrain.runtime.disk import refuse_links
from drafttrain.runtime.hardware import DecodeChoice, choose_device, choose_draft_dtype, dtype_name
from drafttrain.runtime.lock import hold, require_free
from drafttrain.runtime.run_folder import METRICS_FILE
from drafttrain.runtime.settings import AUTO
from drafttrain.runtime.terminal import console
from drafttrain.runtime.tracker import read_metrics
from drafttrain.runtime.untrusted_input import UntrustedError, read_object, shown
from drafttrain.target.model import Target
from drafttrain.target.placement import room_for
from drafttrain.target.pretrained.inflate import count_parameters
from drafttrain.target.pretrained.size import parameters
from drafttrain.training.checkpoint import NAME

NO_DEPTH_PAYS = "`tune` chose not to speculate, because the target alone was faster ({file})"
SMALL_TARGET = 100_000_000  # parameters below which a pass is mostly dispatch, not products


@dataclass(frozen=True)
class Loaded:
    """A drafter that is ready for its target, and the target in the dtype to decode in."""

    given: GivenDrafter
    target: Target
    choice: DecodeChoice
    device: torch.device
    settings: EvalConfig
    decision: str = ""  # what eval.policy=auto became, if it was decided


def load(config: EvaluateConfig | ChatConfig, settings: EvalConfig) -> Loaded:
    """Load the drafter, then the target, which takes longer. ValueError for what does not fit."""
    model = config.model
    device = torch.device(choose_device(config.hardware))
    given = drafter_to_evaluate(Path(config.run.dir), config.drafter, model)
    for line in given.lines:
        console.print(line)
    check_depths(given.drafter, settings)
    target, choice = load_target_to_decode(model, config.hardware, device)
    meet(given, target, device)
    loaded = Loaded(given, target, choice, device, settings)
    if isinstance(config, TuneConfig) or not settings.undecided or given.checkpoint is None:
        return loaded
    decided, decision = drafts_where_it_pays(config, given, device, settings)
    if decision:
        console.print(decision)
    return replace(loaded, settings=decided, decision=decision)


def drafts_where_it_pays(
    config: EvaluateConfig | ChatConfig,
    given: GivenDrafter,
    device: torch.device,
    settings: EvalConfig,
) -> tuple[EvalConfig, str]:
    """Return the settings with eval.policy=auto decided for a run's drafter, and a line on it.

    It becomes a chain that ends where one token more would not pay, as eval.policy=adaptive, by
    what `tune` measured, else by the last validation of the run. It stays a chain, and the line is
    "", where neither was measured for this target, this batch size and this machine.
    """
    assert given.checkpoint is not None
    run, depth = Path(config.run.dir), int(settings.depth)
    most = f"up to {depth} tokens are drafted, as many as pay"
    if (file := run / TUNED).is_file():
        with suppress(ValueError):  # of other weights, at another temperature, of another policy
            tuned = as_tuned(replace(settings, policy="adaptive"), str(run), given.weights)
            then = read_object(file).get("conditions")
            here = {"model": json.loads(json.dumps(asdict(config.model))), "device": str(device)}
            if isinstance(then, dict) and here.items() <= then.items():
                return replace(tuned, policy=AUTO), f"{most}, by {file}"
    known = validated(run, given.checkpoint)
    alone = settings.batch_size == 1 and not settings.batch_sizes and settings.latency_ms is None
    if known is None or not known.on_this(device) or not alone or config.model.inflate is not None:
        return settings, ""
    hardly = "hardly anything is drafted; eval.policy=chain always drafts"
    chosen = Chosen(depth, {}, {}, known.acceptance, known.costs(depth).records())
    decided = TunedEval(**(vars(settings) | {"from_tune": chosen}))
    return decided, f"{known.statement}: {most if known.pays else hardly}"


def meet(given: GivenDrafter, target: Target, device: torch.device) -> None:
    """Make a drafter ready to draft for a target. ValueError where it cannot."""
    drafter = given.drafter
    check_members(given, target.spec)
    check_sibling(given, target.spec)
    assert target.config is not None, "whatever loads a target sets it"
    for line in changed_target(given, target.config, target.spec):
        console.print(line)
    drafter.attach(target.tokenizer)
    drafter.to(device).eval()
    use_graphs_as(target, [drafter], console.print)


def use_graphs_as(
    target: Target, drafters: Iterable[Drafter], tell: Callable[[str], object]
) -> None:
    """Run the passes of drafters by graphs if those of the target are; tell whose cannot be."""
    if target.rooms is not None:
        for drafter in drafters:
            refusal = told_once(drafter.config.name, tell)
            drafter.use_graphs(noting(target.rooms.capture, refusal))


def told_once(name: str, tell: Callable[[str], object]) -> Callable[[RuntimeError], None]:
    """Return what tells of the first pass of a drafter that cannot be captured."""
    told = False

    def refusal(error: RuntimeError) -> None:
        nonlocal told
        if not told:
            tell(f"{name} drafts without graphs, which takes longer: {shown(error, 200)}")
        told = True

    return refusal


@contextmanager
def held_setup(
    config: EvaluateConfig, place: Path, key: str, result: Path, overwrite: bool, ways: str
) -> Iterator[Setup]:
    """Set up a measurement, and yield it while this command holds the lock on its folder.

    result: the file that another measurement, of other settings, weights or prompts, replaces only
    with `overwrite`. ways: what else the user can do.
    """
    refuse_links(Path(config.run.dir))
    require_free(place, key)
    tunes = isinstance(config, TuneConfig)
    settings = config.eval if tunes else as_tuned(config.eval, config.run.dir)
    chosen = replace(config, eval=settings)
    require_same(place, result, settings_of(chosen, {}), overwrite, ways)
    setup = set_up(chosen)
    if not tunes:  # for these very weights?
        as_tuned(config.eval, config.run.dir, setup.weights)
    with hold(place, key, "tune" if tunes else "evaluate", console.print):
        require_same(place, result, settings_of(chosen, setup.subject), overwrite, ways)
        yield setup


def set_up(config: EvaluateConfig, loaded: Loaded | None = None) -> Setup:
    """Return what is to be measured, loaded unless `loaded` is given, and print notes on it.

    ValueError for whatever does not fit.
    """
    folder, model, settings = Path(config.run.dir), config.model, config.eval
    tunes = isinstance(config, TuneConfig)  # it only times, so it needs no target in float32
    source = settings.source
    prompts, skipped = load_prompts(source, config.data.known_roles)
    if source.path is not None and skipped.counts:
        raise ValueError(
            f"eval.prompts={source.path} must be usable in every line, got "
            f"{skipped.sentence()}; correct or remove them"
        )
    # Overlap is recorded with the embedded target's training text; no other's text is known.
    file = BUILTIN_PROMPTS if source.embedded else source.path
    ours = model.embedded and not model.path
    overlap = overlap_record(file) if file is not None and ours else None
    loaded = loaded or load(config, settings)
    given, target, choice, device = loaded.given, loaded.target, loaded.choice, loaded.device
    settings, drafter = loaded.settings, given.drafter
    references = reference_drafters(settings, drafter, target)
    if settings.before and given.checkpoint is not None and not tunes:
        started = drafter_before(folder, config.drafter, drafter.spec)
        if started is not None:
            references[BEFORE] = started
    for member in [] if tunes else given.members:  # each alone, beside all together
        if (member.drafter.max_depth or settings.deepest) >= settings.deepest:
            alone = copy.deepcopy(member.drafter)  # whose dtype may be another
            references.setdefault(alone.config.name, alone)
    everyone = [drafter, *references.values()]
    widened = inflate_as(model, target, everyone)
    size = count_parameters(drafter)
    draft_dtype = choose_draft_dtype(config.hardware, device, choice.dtype, size)
    for each in references.values():
        pack(each.to(device, draft_dtype))
    notes: list[str] = []

    def tell(line: str) -> None:
        console.print(line)
        notes.append(line)

    use_graphs_as(target, everyone, tell)
    how = f"decoded in {choice.reason}; the drafter in {dtype_name(draft_dtype)}"
    console.print(how)
    template = config.data.text_format
    check_depths(drafter, settings)
    every = settings
    if isinstance(config, TuneConfig):  # prompts need room for its deepest drafts
        try:
            every = replace(settings, depths=config.tune.fitting(drafter.max_depth))
            check_depths(drafter, every)
        except ValueError as error:
            raise ValueError(str(error).replace("eval.depths", "tune.depths")) from error
    for name, each in references.items():
        check_depths(each, reference_settings(settings, name, each))
    prompts = fitting(prompts, skipped, target, template, every, everyone)
    lines = [widened] if widened else []
    notes += [loaded.decision] if loaded.decision else []
    label = model.label
    if sibling := changed_target(given, model, target.spec):  # `meet` has printed it
        # Without the folder's path: reports stand on cards that are pushed.
        label += f" ({Path(model.path or model.repo or model.name).name})"
    if settings.of_tasks:
        told = ", ".join(f"{task}: {one.describe()}" for task, one in settings.of_tasks.items())
        lines.append(f"tasks drafted as `tune` chose for them: {told}")
    tasks = dict.fromkeys(prompt.task for prompt in prompts)
    if plain := [task for task in tasks if not settings.drafts(task)]:
        lines.append(f"tasks decoded plainly, where `tune` chose no depth: {', '.join(plain)}")
    size = target.num_parameters
    if size < SMALL_TARGET:
        lines.append(
            f"a pass of a target of {parameters(size)} is mostly dispatch: its speedups "
            "say little of a large one's; model.inflate=200M times the cost of a larger one"
        )
    training, logged = trained(folder, given.checkpoint)
    lines += logged
    for line in [*skipped.lines(), overlap_line(overlap), *lines]:
        console.print(line)
    exact = target
    if not tunes and settings.lossless_prompts and choice.dtype != torch.float32:
        exact = in_float32(config, target, tell)
    timing: dict[str, Any] = {
        "dtype": dtype_name(choice.dtype),
        "draft_dtype": dtype_name(draft_dtype),
        "threads": choice.threads,
        "device": str(device),
    }
    notes += [how, "losslessness is checked on first turns", *sibling, *lines, *given.lines]
    return Setup(
        folder=folder,
        settings=settings,
        seed=config.run.seed,
        label=label,
        parts=Parts(target, exact, drafter, config.drafter.name, draft_dtype, references),
        prompts=prompts,
        template=template,
        checkpoint=given.checkpoint,
        origin=given.origin,
        weights=given.weights,
        conditions={
            "checkpoint": given.origin,
            # A drafter without a checkpoint is identified by its settings.
            "drafter": asdict(config.drafter),
            "model": asdict(model),
            "target_fingerprint": target.spec.fingerprint,
            **timing,
            "graphs": target.rooms is not None,
            "seed": config.run.seed,
            "prompts_sha256": prompts_sha256(prompts),
            "template": asdict(template),
        },
        timing=TimingInfo(blocks=settings.blocks, **timing),
        about_prompts={
            "source": source.describe(),
            "sha256": prompts_sha256(prompts),
            "template": template.kind,
            "template_kwargs": template.kwargs,
            "task_by": source.task_by,
            "num_prompts": len(prompts),
            "skipped": skipped.to_dict(),
            "overlap": overlap,
            "overlap_statement": overlap_line(overlap),
        },
        notes=notes,
        training=training,
    )


def in_float32(config: EvaluateConfig, target: Target, tell: Callable[[str], object]) -> Target:
    """Return a float32 copy of a target where one fits beside it, else the target itself.

    On GPUs alone: layers on the host are too slow for some hundred passes. vLLM, if it is asked
    for, needs another such copy.
    """
    copies = 2 if config.eval.engine == "vllm" else 1
    size, room = 4 * copies * target.num_parameters, room_for(config.model, target.device)
    if size <= room:
        return load_alone(config.model, config.hardware, torch.float32, target.device)
    dtype = dtype_name(target.dtype)
    tell(
        f"losslessness is checked in {dtype}, where outputs may differ by choices within twice its "
        f"rounding noise: float32 takes {memory(size)} more, and there is "
        f"room for {memory(room)}; eval.lossless_prompts=0 skips the check"
    )
    return target


def trained(folder: Path, checkpoint: Path | None) -> tuple[TrainingCurves | None, list[str]]:
    """Return the curves of the run behind a checkpoint, and why they are left out if they are."""
    file = folder / METRICS_FILE
    if checkpoint is None or not file.is_file():
        return None, []
    match = NAME.fullmatch(checkpoint.name)
    step = int(match[1]) if match else None
    try:
        return training_curves(read_metrics(file), step), []
    except (OSError, UntrustedError) as error:
        return None, [f"the training curves are left out: {error}"]


def as_tuned(settings: EvalConfig, folder: str, weights: str | None = None) -> EvalConfig:
    """Return the settings with what `tune` chose, where they ask for it.

    ValueError for what it chose for other weights (None: they are not known yet), and for a file
    that holds what no policy can be.
    """
    wanted = [f"eval.depth={AUTO}"] * (settings.depth == AUTO)
    wanted += [f"eval.policy={name}" for name in FROM_TUNE if name == settings.policy]
    if not wanted:
        return settings
    policy = CHAIN if settings.policy == "adaptive" else settings.policy_settings
    told = settings.batch_size, policy, weights, settings.temperature
    found = chosen_by_tune(folder, wanted[-1], *told)
    depth = found.depth if settings.depth == AUTO else settings.depth
    # Depths of a sweep are measured as they are, and vLLM drafts one depth.
    alone = settings.depth == AUTO and not settings.depths and settings.engine == "drafttrain"
    usual = depth if found.speculate else 0
    own = {task: each for task, each in found.tasks.items() if each != usual}
    chosen = Chosen(depth, own if alone else {}, speculate=found.speculate or not alone)
    if settings.depth == AUTO and not (alone or found.speculate or settings.policy == "adaptive"):
        raise ValueError(
            f"eval.depth must be a number with eval.depths or eval.engine=vllm, got {AUTO}: "
            f"{NO_DEPTH_PAYS.format(file=Path(folder) / TUNED)}"
        )
    try:
        if settings.policy == "optimal_tree":
            one = "be empty with eval.policy=optimal_tree; `tune` measures the trees of all depths"
            settings.require("depths", not settings.depths, one)
            trees = ", ".join(map(str, found.trees)) or "none"
            one = f"be {AUTO} or one that `tune` made a tree for: {trees}"
            settings.require("depth", {depth, *chosen.tasks.values()} <= {0, *found.trees}, one)
            chosen = replace(chosen, trees=found.trees)
        if settings.policy == "adaptive":
            costs = Costs.of_records(found.costs_ms)
            depth = costs.depths[-1] if settings.depth == AUTO else depth
            one = f"be {AUTO} or at most {costs.depths[-1]}, the deepest that `tune` timed"
            settings.require("depth", max([depth, *settings.depths]) <= costs.depths[-1], one)
            least, most = costs.batches[0], costs.batches[-1]
            few = f"be at least {least}, the smallest batch that `tune` timed (tune.batch_sizes)"
            many = f"be at most {most}, the largest batch that `tune` timed (tune.batch_sizes)"
            for key, sizes in (("batch_size", []), ("batch_sizes", settings.batch_sizes)):
                asked = [settings.batch_size, *sizes]
                settings.require(key, min(asked) >= least, few)
                settings.require(key, max(asked) <= most, many)
            chosen = Chosen(depth, {}, {}, found.acceptance, found.costs_ms)
        decided = TunedEval(**(vars(settings) | {"depth": depth, "from_tune": chosen}))
        for each in [decided.policy_at(depth), *decided.of_tasks.values()]:
            check_tuned(each, decided)
    except ValueError as error:
        if str(error).startswith("eval."):
            raise
        raise ValueError(
            f"{folder}/{TUNED} must be what `tune` wrote, but its {error}; run tune again"
        ) from None
    return decided


def check_tuned(policy: Policy, settings: EvalConfig) -> None:
    """Raise ValueError for a policy that `tune` would not have chosen with these settings."""
    if settings.policy == "optimal_tree" and not (
        policy.num_nodes <= settings.tree_nodes and policy.width <= settings.tree_width
    ):
        raise ValueError(
            f"tree must have at most {settings.tree_nodes} nodes, and {settings.tree_width} "
            f"children of a node, got {policy.num_nodes} and {policy.width}"
        )


def chosen_by_tune(
    folder: str | Path,
    wanted: str,
    batch_size: int = 1,
    policy: str = CHAIN,
    weights: str | None = None,
    temperature: float | None = None,
) -> Chosen:
    """Return what `tune` chose for a run; wanted: the setting that asks for it, for messages."""
    chosen = read_tuned(
        Path(folder), batch_size, policy=policy, weights=weights, temperature=temperature
    )
    if chosen is None:
        more = [] if policy == CHAIN else policy.split()
        raise ValueError(
            f"{wanted} takes what `tune` chose from {folder}/tuned.json, which is not there; write "
            f"it with {follow_up('tune', f'run.dir={folder}', *more)}"
        )
    return chosen


def reference_drafters(
    settings: EvalConfig, drafter: Drafter, target: Target
) -> dict[str, Drafter]:
    """Return the reference drafters: prompt lookup, and a smaller model if one is named."""
    references: dict[str, Drafter] = {}
    for name, changes in beside_every(settings.two_model).items():
        if drafter.config.name != name:
            try:
                reference = replace(load_choice("drafter", name), **changes).build(target.spec)
                reference.attach(target.tokenizer)
            except ValueError as error:
                raise ValueError(str(error).replace("drafter.path", "eval.two_model")) from error
            references[name] = reference.eval()
    return references
