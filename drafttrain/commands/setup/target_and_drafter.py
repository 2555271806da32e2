"""From sections of a configuration to the objects that commands use."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafttrain.commands.setup.members import member_of
from drafttrain.config.compose import load_choice, recorded
from drafttrain.config.groups import (
    changed_keys,
    choices,
    content_of,
    follow_up,
    own_file,
    told_target,
)
from drafttrain.config.sections import CaptureConfig, TrainConfig
from drafttrain.config.values import class_of
from drafttrain.core.ops.graphs import CAPTURES
from drafttrain.core.types import FeatureSource, Sample, TargetSpec, changed_part
from drafttrain.data.chat import encode, within_limits
from drafttrain.data.conversations import ANSWERS, DataConfig, HubConfig, SelfgenConfig, read
from drafttrain.data.skips import SkipReport
from drafttrain.data.template import template_fingerprint
from drafttrain.drafters.base import Drafter, DrafterConfig, JoinedConfig
from drafttrain.drafters.serving.known import LAYOUTS
from drafttrain.drafters.serving.layout import ServedLayout
from drafttrain.drafters.shared.layer import ROPE_SCALINGS, TARGET, scaling_of
from drafttrain.formats.read.admit import AdmittedConfig, admit
from drafttrain.report.phrases import memory
from drafttrain.runtime.config import HardwareConfig
from drafttrain.runtime.disk import refuse_links, sha256_of
from drafttrain.runtime.hardware import DecodeChoice, choose_decoding, dtype_name
from drafttrain.runtime.lock import alone, holder_of
from drafttrain.runtime.ranks import Ranks
from drafttrain.runtime.run_folder import (
    CHECKPOINTS,
    CONFIG,
    MANIFEST,
    PROVENANCE,
    load_config,
    write_config,
)
from drafttrain.runtime.settings import AUTO, require
from drafttrain.runtime.terminal import console, working
from drafttrain.runtime.untrusted_input import UntrustedError, read_typed, shown
from drafttrain.target.answers.selfgen import selfgen
from drafttrain.target.describe import describe
from drafttrain.target.model import Target
from drafttrain.target.placement import (
    Placement,
    can_be_spread,
    choose_placement,
    load_placed,
    room_for,
)
from drafttrain.target.pretrained.adapter import open_adapter
from drafttrain.target.pretrained.config import ModelConfig
from drafttrain.target.pretrained.inflate import MULTIPLE, count_parameters, is_gated, widen
from drafttrain.target.pretrained.models import load_model_config, load_tokenizer
from drafttrain.target.pretrained.shards import weight_bytes
from drafttrain.target.pretrained.size import parameters
from drafttrain.target.served import ServedTarget, open_served
from drafttrain.target.store.config import StoredFeaturesConfig
from drafttrain.target.store.features import StoredTarget
from drafttrain.target.store.shards import wrong_spec
from drafttrain.target.vllm.process import require_vllm
from drafttrain.training.checkpoint import Checkpoints, TrainState


def others_answers(data: DataConfig, model: ModelConfig) -> list[str]:
    """Return a line on data whose answers the target did not write, with what makes it do so."""
    if not isinstance(data, HubConfig):
        return []
    asked = [f"data={data.name}", *changed_keys("data", data), *told_target(model)]
    return [
        f"  the answers of data={data.name} are another's; training on the target's "
        f"own gives longer drafts: {follow_up('regenerate', *asked)}"
    ]


def read_samples(
    config: DataConfig, model: ModelConfig, ranks: Ranks
) -> tuple[list[Sample], SkipReport] | None:
    """Return conversations as tokens, the same on every rank, and what was skipped.

    None where the target is to write them itself. ValueError where none can be used. Rank 0 reads
    them: tokenising takes every core.
    """
    config.check_text()
    if isinstance(config, SelfgenConfig):
        return None
    found = ranks.on_rank_0(lambda: _read_samples(config, model))
    if ranks.world_size == 1:
        return found
    samples, report = found or ([], None)
    told = ranks.broadcast_object(None if report is None else report.to_dict())
    return shared_samples(samples, ranks), SkipReport.from_dict(told)


def shared_samples(samples: list[Sample], ranks: Ranks) -> list[Sample]:
    """Return rank 0's samples on every rank."""
    mine = None
    if ranks.is_main:
        mine = [
            torch.cat([sample.tokens for sample in samples]),
            torch.cat([sample.loss_mask for sample in samples]).to(torch.uint8),
            torch.tensor([[len(sample.tokens), sample.index] for sample in samples]),
        ]
    tokens, masks, numbers = ranks.broadcast_tensors(mine)
    lengths, names = numbers.T.tolist()
    parts = zip(tokens.split(lengths), masks.bool().split(lengths), names, strict=True)
    return [Sample(*part) for part in parts]


def _read_samples(config: DataConfig, model: ModelConfig) -> tuple[list[Sample], SkipReport]:
    tokenizer = load_tokenizer(model)  # first: a data set may take long to download
    with working("reading the data"):
        conversations, unread = read(config)
    samples, unfit = encode(conversations, tokenizer, config)
    sources = {one.index: one.source for one in conversations}
    samples, beyond = within_limits(samples, expected_spec(model), sources)
    return samples, unread + unfit + beyond


def load_samples(
    config: DataConfig, target: Target | ServedTarget, ranks: Ranks
) -> tuple[list[Sample], SkipReport]:
    """Return conversations that the target writes itself, the same on every rank."""
    assert isinstance(config, SelfgenConfig), "`read_samples` reads all others"
    assert isinstance(target, Target), "`refuse_selfgen` comes first"
    return selfgen(target, config, ranks.is_main, ranks)


def refuse_selfgen(config: DataConfig) -> None:
    """Raise where the target is to write the conversations, but only vLLM holds it."""
    if isinstance(config, SelfgenConfig):
        raise ValueError(
            "data must be conversations that are there where only vLLM holds the target, got "
            f"data={config.name}; let the engine answer prompts first, python -m drafttrain "
            "regenerate regenerate.backend=vllm, then data=jsonl"
        )


def open_features(
    config: TrainConfig,
    fresh: bool,
    dtype: torch.dtype,
    ranks: Ranks,
    planned: Placement | None,
) -> tuple[StoredTarget | None, Target | None]:
    """Return the store of features, if they are stored, and the target, if it is to be loaded.

    Raises ValueError, before the target is loaded, where the store is of another target or cannot
    train the drafter. fresh: whether the drafter has no weights yet. planned: where the target
    goes; None chooses it by its files.
    """
    features, model, drafter = config.features, config.model, config.drafter
    placement = planned or config.hardware.target_placement
    if not isinstance(features, StoredFeaturesConfig):
        return None, load_on_ranks(model, dtype, ranks, placement)
    assert features.dir is not None
    store = StoredTarget(Path(features.dir), dtype, ranks.device, features.checksums)
    if store.spec.name != model.label and model.path is None:  # whose folder may have moved
        raise ValueError(
            f"model must be {store.spec.name}, the target of features.dir={features.dir}, got "
            f"{model.label}; give that one, or capture features of this one"
        )
    require_one_target(ranks, store.spec)
    file = Path(features.dir) / MANIFEST
    ranks.require_equal({f"the checksum of features.dir/{MANIFEST}": sha256_of(file)})
    shape = shape_of(drafter, store.spec)
    refuse_without_store(shape)
    store.require(drafter.name, shape.captures, shape.reach)
    known = store.manifest.reach is None or config.data.train_on == ANSWERS
    need = "be answers with this store, which has no features of other tokens"
    config.data.require("train_on", known, need)
    if not features.validate:
        need = f"be true for drafter={drafter.name} with drafter.path or drafter.layers"
        why = ": its first weights need the target, which is not loaded"
        known = not (fresh and shape.begins_from_target)
        require(known, "features.validate", need, "false", why)
        return store, None
    target = load_on_ranks(model, dtype, ranks, placement)
    template = template_fingerprint(target.tokenizer, config.data.text_format)
    store.check_target(target.spec.fingerprint, template, model.origin)
    return store, target


def load_on_ranks(
    model: ModelConfig, dtype: torch.dtype, ranks: Ranks, placement: str | Placement
) -> Target:
    """Return the target for a command of several ranks, placed as planned, or by what is asked."""
    if ranks.world_size > 1:  # ranks that split a target would wait for each other forever
        require_one_target(ranks, expected_spec(model))
    if isinstance(placement, str):
        placement = choose_placement(placement, model, dtype, ranks)
    target = load_placed(model, dtype, ranks, placement)
    require_one_target(ranks, target.spec)
    return target


def require_one_target(ranks: Ranks, spec: TargetSpec) -> None:
    """Raise ValueError unless the target, which each rank reads from its own disk, is the same."""
    ranks.require_equal({f"the target's {name}": value for name, value in asdict(spec).items()})


def shape_of(config: DrafterConfig, spec: TargetSpec) -> Drafter:
    """Return a drafter to query for what it reads, on the meta device wherever it can be built."""
    try:
        with torch.device("meta"):
            return config.build(spec)
    except RuntimeError:  # a language model runs once when it is built, which needs real numbers
        return config.build(spec)


@contextmanager
def source_of_features(
    source: FeatureSource,
    config: TrainConfig,
    captures: tuple[int, ...],
    samples: Iterable[Sample],
    ranks: Ranks,
) -> Iterator[FeatureSource]:
    """Yield what features are read from: `source`, or an engine that holds the target.

    source: the target, or a store, which needs no engine. Each rank has an engine of its own, in
    another process; the target is loaded here as well, to validate in the real decode loop.
    """
    if config.hardware.target_placement != "vllm" or not isinstance(source, Target):
        yield source
        return
    longest, folder = max(len(sample.tokens) for sample in samples), Path(config.run.dir)
    with served_to(ranks, config, source.dtype, captures, longest, folder) as served:
        if ranks.is_main:
            console.print(f"features: by vLLM {served.engine.version}")
        yield served


def check_engine(config: TrainConfig | CaptureConfig, ranks: Ranks) -> None:
    """Raise ValueError, before anything is loaded, where an engine is asked for that cannot start.

    An engine needs an interpreter that has vLLM, and each rank starts one.
    """
    vllm = config.vllm
    if config.hardware.target_placement != "vllm":
        return
    fits = ranks.world_size == 1 or vllm.tensor_parallel in (1, AUTO)
    need = "be 1 with several ranks, each of which has an engine of its own"
    vllm.require("tensor_parallel", fits, need, f" with {ranks.world_size} ranks")
    require_vllm(vllm.python, "hardware.target_placement=vllm")


def served_to(
    ranks: Ranks,
    config: TrainConfig | CaptureConfig,
    dtype: torch.dtype,
    captures: tuple[int, ...],
    longest: int,
    folder: Path,
) -> ServedTarget:
    """Start this rank's engine, with the target in it; its log goes to `folder`."""
    logs = folder / ("vllm" if ranks.is_main else f"vllm_rank{ranks.rank}")
    refuse_links(folder, logs.name)
    place = str(ranks.device)
    engine = open_served(
        config.model, config.vllm, dtype, place, captures=captures, longest=longest, folder=logs
    )
    require_one_target(ranks, engine.spec)
    return engine


@dataclass(frozen=True)
class _TargetProvenance:
    target: TargetSpec


def recorded_spec(run: Path) -> TargetSpec:
    """Return the target as a run recorded it, so that an export need not load a 70B model."""
    file = run / PROVENANCE
    try:
        spec = read_typed(_TargetProvenance, file).target
        wrong = next(wrong_spec(spec), None)
        if wrong is not None:
            raise UntrustedError(wrong)
        return spec
    except (OSError, UntrustedError) as error:
        raise ValueError(
            f"{file} must record the run's target, but cannot be used ({shown(error, 400)}); "
            "`train` writes it: restore the file, or resume the run with run.resume=true"
        ) from error


def load_drafter(run: Path, config: DrafterConfig, spec: TargetSpec) -> tuple[Drafter, Path | None]:
    """Return a run's drafter with the weights of its best checkpoint, if it has any, on the CPU.

    ValueError where the run has no checkpoint, or is of another family or target.
    """
    if not config.trainable:
        return config.build(spec), None
    if (run / CONFIG).is_file():
        require_family(run, "run.dir", config)
    drafter = config.build(spec)
    checkpoint, state, weights = best_of(run, "run.dir")
    if state.fingerprint != spec.fingerprint:
        raise ValueError(
            f"{checkpoint} must be of the target that {PROVENANCE} records, {spec.name}: "
            f"{changed_part(state.fingerprint, spec.fingerprint)}; restore that file, or train "
            "another run"
        )
    drafter.load_weights(weights)
    return drafter, checkpoint


@dataclass(frozen=True)
class _Trained:
    """What of a run's configuration tells the family: nothing else of it need be readable."""

    drafter: DrafterConfig


def require_family(run: Path, key: str, config: DrafterConfig) -> None:
    """Raise ValueError if a run trained a drafter of another family than this configuration's."""
    trained = recorded(run, _Trained, key).drafter
    if type(trained) is not type(config):
        raise ValueError(
            f"{key}={run} holds a drafter of the family {trained.name}, got drafter={config.name}; "
            f"give drafter={trained.name}"
        )


def best_of(run: Path, key: str) -> tuple[Path, TrainState, dict[str, Tensor]]:
    """Return a run's best checkpoint; ValueError without one, by `key`, which names the run."""
    chosen = Checkpoints(run / CHECKPOINTS, keep=1).load_chosen()
    if chosen is None:
        raise ValueError(
            f"{key}={run} must hold a trained drafter, but has no checkpoint yet; train it first, "
            "or wait for its first one (trainer.save_every)"
        )
    checkpoint, _, weights = chosen
    for name, weight in weights.items():
        if weight.is_floating_point() and not bool(weight.isfinite().all()):
            raise ValueError(
                f"{key}={run} must hold finite weights, got NaN or infinity in {shown(name)} of "
                f"{checkpoint.name}; train it again"
            )
    return chosen


def expected_spec(model: ModelConfig) -> TargetSpec:
    """Return the description of a target by its configuration and tokenizer, without weights."""
    settings = load_model_config(model)
    return describe(model, settings, None, load_tokenizer(model))


@dataclass(frozen=True)
class GivenDrafter:
    """A drafter to measure or to train further, in float32 on the CPU."""

    drafter: Drafter
    checkpoint: Path | None  # of a run
    origin: str  # identifies the very weights: results of others are not mixed in
    lines: tuple[str, ...]  # what to print about it
    fingerprint: str | None = None  # of the target it was trained on, where its files say so
    trained_for: str = "another target"  # the name of that target, for messages
    members: "tuple[GivenDrafter, ...]" = ()  # the drafters that it drafts with

    @property
    def weights(self) -> str:
        """The name of the weights: of the checkpoint, wherever its run lies."""
        return self.origin if self.checkpoint is None else self.checkpoint.name


def drafter_to_evaluate(run: Path, config: DrafterConfig, model: ModelConfig) -> GivenDrafter:
    """Return the drafter that an evaluation is to measure, before the target's weights are read.

    ValueError for whatever does not fit.
    """
    if isinstance(config, AdmittedConfig):
        own = partial(load_choice, "drafter")
        spec, tokenizer = expected_spec(model), load_tokenizer(model)
        found = admit(config, spec, tokenizer, own, own_layouts())
        lines, fingerprint = tuple(found.lines()), found.target_fingerprint
        return GivenDrafter(found.drafter, None, found.origin, lines, fingerprint)
    if isinstance(config, JoinedConfig):
        return _joined(config, model)
    if not config.trainable:
        return GivenDrafter(config.build(expected_spec(model)), None, config.name, ())
    if not (run / CONFIG).is_file():
        raise ValueError(
            f"run.dir must be the folder of a run for drafter={config.name}, whose weights a run "
            f"holds, got {run}; a drafter that others trained is given by drafter.path=DIR"
        )
    if (holder := holder_of(run)) is not None:
        console.print(f"{run} is still written by {holder}: its best checkpoint so far is taken")
    drafter, checkpoint = load_drafter(run, config, recorded_spec(run))
    trained_on = drafter.spec.fingerprint if checkpoint else None
    return GivenDrafter(drafter, checkpoint, str(checkpoint), (), trained_on, target_of(run))


def _joined(config: JoinedConfig, model: ModelConfig) -> GivenDrafter:
    """Return a drafter of several, each loaded as an evaluation of it alone loads it."""
    chosen = [member_of(name, config.settings.get(name)) for name in config.members]
    given = []
    for name, (run, own) in zip(config.members, chosen, strict=True):
        try:
            given.append(drafter_to_evaluate(run, own, model))
        except ValueError as error:
            raise ValueError(f"drafter.members: {shown(name)} must be loaded: {error}") from error
    drafter = config.join(expected_spec(model), [each.drafter for each in given])
    lines = []
    for name, each in zip(config.members, given, strict=True):
        weights = "" if each.checkpoint is None else f": {each.weights}"
        lines += [f"member {shown(name)}{weights}", *each.lines]
    origin = f"{config.name} of {', '.join(each.origin for each in given)}"
    return GivenDrafter(drafter, None, origin, tuple(lines), members=tuple(given))


def check_members(given: GivenDrafter, spec: TargetSpec) -> None:
    """Raise ValueError where a member is known to draft for other weights than the target's."""
    for each in given.members:
        if each.fingerprint not in (None, spec.fingerprint):
            raise ValueError(
                f"drafter.members must be trained on {spec.name}, got {each.origin}: "
                f"{changed_part(each.fingerprint, spec.fingerprint)}"
            )


def record_evaluation(config: Any) -> None:
    """Write the config.yaml of an evaluation without a run, so that run.dir=FOLDER repeats it."""
    folder = Path(config.run.dir)
    if (folder / CONFIG).is_file() and "trainer" in load_config(folder):
        return
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder / CONFIG):  # evaluations of other names write it too
        write_config(config, folder / CONFIG)


def target_of(run: Path) -> str:
    """Return the name of the target that a run was trained on, and where it was."""
    return _named_target(load_config(run).get("model", {}))


def _named_target(model: Mapping[str, Any]) -> str:
    name, where = model.get("name"), model.get("path") or model.get("repo")
    parts = [where] if where else []
    parts += [f"model.adapter={model['adapter']}"] if model.get("adapter") else []
    return f"{shown(name)} ({shown(' with '.join(parts), 400)})" if parts else shown(name)


def changed_target(
    given: GivenDrafter, model: ModelConfig, spec: TargetSpec, now: str = "measured on"
) -> list[str]:
    """Return a line that names both targets if a drafter is known to be trained on another.

    model, spec: what it meets. now: what happens to it there.
    """
    if given.fingerprint in (None, "", spec.fingerprint):
        return []
    assert given.fingerprint is not None
    return [
        f"drafter trained for {given.trained_for}, {now} {_named_target(vars(model))}: "
        f"{changed_part(given.fingerprint, spec.fingerprint)}"
    ]


def check_sibling(given: GivenDrafter, spec: TargetSpec) -> None:
    """Refuse a run's drafter for a target that is not shaped as the one that it was trained on.

    A fine-tune of that target will do.
    """
    before = given.drafter.spec
    if given.fingerprint == spec.fingerprint or given.checkpoint is None:
        return
    for key in ("vocab_size", "hidden_size", "num_layers"):
        was, now = getattr(before, key), getattr(spec, key)
        need = f"have {key}={was} as {given.trained_for}, for which {given.checkpoint} was trained"
        require(was == now, "model", need, now)


def load_target_to_decode(
    model: ModelConfig, hardware: HardwareConfig, device: torch.device
) -> tuple[Target, DecodeChoice]:
    """Return the target in the dtype to decode in, and how that was chosen."""

    @cache
    def target_in(dtype: torch.dtype) -> Target:
        return load_alone(model, hardware, dtype, device)

    def pass_of(dtype: torch.dtype) -> Callable[[int], None]:
        target = target_in(dtype)
        cache = target.begin()
        context = torch.zeros(1, 16, dtype=torch.long, device=device)

        @torch.inference_mode()
        def run(num_tokens: int) -> None:
            target.step(cache, context[:, :num_tokens])
            target.rollback(cache, [context.shape[1]])

        with torch.inference_mode():
            target.step(cache, context)
        return run

    if hardware.dtype == "auto" and device.type == "cpu" and can_be_spread(model):
        # Both dtypes are in memory while they are compared.
        size, room = weight_bytes(model, torch.bfloat16), room_for(model, device)
        if 3 * size > room:
            hardware = replace(hardware, dtype="bfloat16")
            console.print(f"decoding in bfloat16: float32 beside it would take {memory(3 * size)}")
    with working("choosing the dtype to decode in"):
        choice = choose_decoding(hardware, device, pass_of)
    target = target_in(choice.dtype)
    use_graphs(target, hardware.graphs)
    return target, choice


def use_graphs(target: Target, asked: bool | str) -> None:
    """Run the target's passes by graphs where that is asked for and can be; ValueError if not."""
    if asked is False or (asked == "auto" and target.device.type not in CAPTURES):
        return
    problem = target.use_graphs()
    if problem and asked is True:
        raise ValueError(f"hardware.graphs must be auto or false: {problem}")
    console.print(f"without graphs: {problem}" if problem else "passes are launched by graphs")


def load_alone(
    model: ModelConfig, hardware: HardwareConfig, dtype: torch.dtype, device: torch.device
) -> Target:
    """Return the target for a command of a single process, placed where there is room for it."""
    alone, asked = Ranks(0, 0, 1, device), hardware.target_placement
    # A run may record zero3, which needs several ranks, and vllm, whose engine is not for this.
    asked = "auto" if asked in ("zero3", "vllm") else asked
    placement = choose_placement(asked, model, dtype, alone)
    if placement.kind != "device":
        console.print(str(placement))
    return load_placed(model, dtype, alone, placement)


def inflate_as(model: ModelConfig, target: Target, drafters: Iterable[Drafter]) -> str | None:
    """Widen drafters in place as `model.inflate` widened the target; return what reports say."""
    if model.inflate is None:
        return None
    # The specification describes the stored weights; the model's configuration, what really runs.
    width = target.model.config.get_text_config(decoder=True).intermediate_size
    ratio = width / target.spec.intermediate_size
    size = parameters(target.num_parameters)
    drafted = "; ".join(inflate_drafter(drafter, ratio) for drafter in drafters)
    return (
        f"cost without weights: {model.name} inflated to {model.inflate} ({size}): "
        f"feed-forward layers {ratio:.1f} times as wide behind zero columns, the same function up "
        f"to rounding; {drafted}"
    )


def describe_target(target: Target, started: float) -> str:
    """Return a line about a loaded target; `started` is when loading began (time.monotonic)."""
    spec = target.spec
    where = "".join(f"; {told}" for told in (target.placed, target.where) if told)
    if target.config is not None and target.config.adapter is not None:
        where += f"; its adapter was trained for {open_adapter(target.config.adapter).trained_for}"
    return (
        f"target: {spec.name}, {spec.architecture}, {parameters(target.num_parameters)} "
        f"in {dtype_name(target.dtype)}, loaded in {time.monotonic() - started:.1f} s{where}"
    )


def describe_drafter(drafter: Drafter) -> str:
    """Return a line about an untrained drafter."""
    line = f"drafter: {drafter.config.name}, {parameters(count_parameters(drafter))}"
    if drafter.captures:
        line += f", reads layers {', '.join(map(str, drafter.captures))}"
    if drafter.vocab is not None:
        line += f", can predict {drafter.vocab.size:,} of {drafter.spec.vocab_size:,} tokens"
    return line


def scaling_lines(drafter: Drafter) -> list[str]:
    """Return a line about a drafter's rotary positions where those of its target are scaled."""
    target, setting = drafter.spec.rope_scaling, getattr(drafter.config, "rope_scaling", "")
    if target is None or setting == "":  # it has none
        return []
    kind, own = target["rope_type"], scaling_of(setting, drafter.spec)
    line = f"rotary positions: the target's are scaled ({kind}), the drafter's"
    if own is not None and own == scaling_of(TARGET, drafter.spec):
        read = "which vLLM and SGLang read; llama.cpp was not tried with it"
        return [f"{line} are too, {read}: drafter.rope_scaling=null trains without"]
    helps = f"drafter.rope_scaling={TARGET} takes the target's"
    if kind not in ROPE_SCALINGS:
        helps = f"drafters can be scaled by {', '.join(ROPE_SCALINGS)} alone"
    return [f"{line} are {'scaled otherwise' if own else 'not'}; {helps}"]


def inflate_drafter(drafter: Drafter, ratio: float) -> str:
    """Widen every gated feed-forward layer `ratio` times, in place; return a note for reports.

    The drafter's output stays the same, up to rounding: the added columns are zero. A drafter
    without such layers stays as it is, and the note says so.
    """
    assert ratio >= 1, f"a drafter is only ever widened, got a ratio of {ratio}"
    name = drafter.config.name
    layers: list[Any] = [module for module in drafter.modules() if is_gated(module)]
    if not layers:
        return f"{name} not inflated (it has no gated feed-forward layer)"
    before = _numbers_of(drafter)
    for layer in layers:
        old = layer.gate_proj.out_features
        widen(layer, max(old, round(old * ratio / MULTIPLE) * MULTIPLE))
    return f"{name} inflated from {parameters(before)} to {parameters(_numbers_of(drafter))}"


def _numbers_of(drafter: Drafter) -> int:
    """Return how many numbers its weights hold, with those that it has frozen."""
    saved = drafter.state_dict().keys()
    frozen = [b for n, b in drafter.named_buffers() if n in saved and b.is_floating_point()]
    return count_parameters(drafter) + sum(map(torch.numel, frozen))


def own_layouts() -> tuple[ServedLayout, ...]:
    """Return the layout of each class that a yaml of --config-dir names, if it is the class's own.

    It is if its `family` is the name of the yaml, and its first architecture is none of the
    package's.
    """
    ours = {
        name
        for layout in LAYOUTS
        if isinstance(layout, ServedLayout)
        for name in layout.architectures
    }
    found: list[ServedLayout] = []
    for name in choices("drafter"):
        if own_file("drafter", name) is None:
            continue
        try:
            layout = class_of("drafter", content_of("drafter", name).get("_target_")).layout
        except Exception:  # of a file that this command was not told to use
            continue
        if layout is None or layout.family != name:
            continue
        if layout.architectures and layout.architectures[0] not in ours:
            found.append(layout)
    return tuple(found)


def refuse_without_store(drafter: Drafter) -> None:
    """Raise ValueError for a drafter that no stored features can train."""
    if not drafter.config.trainable:
        raise ValueError(
            f"drafter={drafter.config.name} has nothing to train, so no features to store; choose "
            "another drafter"
        )
    if drafter.text_source is not None:
        raise ValueError(
            f"drafter={drafter.config.name} trains on text of its own, for which no store "
            "has features; use features=online, or drafter.on_policy=0"
        )
