"""What training needs: features, conversations, the initial drafter, its validation."""

import time
from dataclasses import dataclass

import torch

from drafttrain.commands.setup.init_from import coverage
from drafttrain.commands.setup.target_and_drafter import (
    GivenDrafter,
    changed_target,
    check_engine,
    describe_drafter,
    describe_target,
    load_samples,
    open_features,
    read_samples,
    scaling_lines,
)
from drafttrain.config.compose import load_choice
from drafttrain.config.sections import TrainConfig
from drafttrain.core.types import FeatureSource, Sample
from drafttrain.data.batches import token_counts
from drafttrain.data.chat import REPEATED, as_trained, check_holdout, num_repeated, split_holdout
from drafttrain.data.conversations import SelfgenConfig
from drafttrain.data.skips import SkipReport
from drafttrain.drafters.base import LOOKUP, Drafter
from drafttrain.runtime.hardware import choose_draft_dtype
from drafttrain.runtime.ranks import Ranks
from drafttrain.runtime.signals import StopRequest
from drafttrain.runtime.terminal import Tell
from drafttrain.target.model import Target
from drafttrain.target.placement import Placement
from drafttrain.target.pretrained.inflate import count_parameters
from drafttrain.target.store.config import StoredFeaturesConfig
from drafttrain.target.store.features import StoredTarget
from drafttrain.training.engine.engine import Engine
from drafttrain.training.teacher_forced import TeacherForced
from drafttrain.training.validation import Validation, held_out_prompts, prompts_in


@dataclass(frozen=True)
class Material:
    """A source of features, and the conversations that are trained on and held out."""

    store: StoredTarget | None
    target: Target | None  # None with features.validate=false
    samples: list[Sample]
    held_out: list[Sample]
    skipped: SkipReport

    @property
    def everything(self) -> list[Sample]:
        """All conversations that are read."""
        return [*self.samples, *self.held_out]

    @property
    def source(self) -> FeatureSource:
        """Where features come from; training does not know which it is."""
        source = self.store or self.target
        assert source is not None
        return source


def gather(
    config: TrainConfig,
    fresh: bool,
    dtype: torch.dtype,
    ranks: Ranks,
    placement: Placement | None,
    say: Tell,
) -> Material:
    """Load the target, or open the store of its features, and read the conversations.

    fresh: whether the drafter has no weights yet. placement: of the target, as planned; None
    chooses it by its files. ValueError for whatever does not fit.
    """
    online = not isinstance(config.features, StoredFeaturesConfig)
    if online and isinstance(config.data, SelfgenConfig):  # known before the target writes them
        check_holdout(config.data.num_conversations, config.data.holdout)
    if online:  # else no engine is started
        check_engine(config, ranks)
    ready = read_samples(config.data, config.model, ranks) if online else None
    started = time.monotonic()
    store, target = open_features(config, fresh, dtype, ranks, placement)
    if target is not None:
        say(describe_target(target, started))
    if store is not None:
        say(f"{store.manifest.summary()}; no other data is read")
        samples, skipped = store.samples, SkipReport(len(store.samples))
    else:
        assert target is not None
        samples, skipped = ready or load_samples(config.data, target, ranks)
    skipped.note(REPEATED, num_repeated(samples))
    for line in skipped.lines():
        say(line)
    kept, held_out = split_holdout(samples, config.data.holdout, config.data.seed)
    kept = as_trained(kept, config.data.train_on)
    return Material(store, target, kept, held_out, skipped)


def first_weights(
    config: TrainConfig, start: GivenDrafter | None, material: Material, say: Tell
) -> Drafter:
    """Return the drafter that training begins with: that of run.init_from, or a fresh one."""
    spec = material.source.spec
    counts = token_counts(material.samples, spec.vocab_size)
    if start is not None:
        changed = changed_target(start, config.model, spec, "trained further for")
        for line in [*start.lines, *changed]:
            say(line)
        say(describe_drafter(start.drafter) + coverage(start.drafter, counts))
        return start.drafter
    torch.manual_seed(config.run.seed)  # here, so that loading a target does not change the weights
    drafter = config.drafter.build(spec)
    if material.target is not None:
        drafter.initialise(material.target.own_model, material.target.tokenizer)
    drafter.prepare(counts, material.source.readout)
    say(describe_drafter(drafter))
    if (mask := getattr(drafter, "mask_token_id", None)) in spec.eos_token_ids:
        say(
            f"drafter.mask_token_id is {mask}, which also ends answers of {spec.name}: the drafter "
            "cannot tell the two apart; give another id that no text holds"
        )
    for line in scaling_lines(drafter):
        say(line)
    return drafter


def validation_of(
    config: TrainConfig, material: Material, engine: Engine, stop: StopRequest, dtype: torch.dtype
) -> Validation | TeacherForced:
    """Return the validation: the real decode loop, or without a target, teacher-forced text."""
    trainer = config.trainer
    if material.target is None:
        assert material.store is not None
        counted, need = isinstance(trainer.validation_prompts, int), "be a number of conversations"
        trainer.require("validation_prompts", counted, f"{need} with features.validate=false")
        return TeacherForced(
            material.store,
            engine,
            material.held_out,
            num_conversations=trainer.validation_prompts,
            micro_batch=config.hardware.micro_batch,
        )
    asked, target = trainer.validation_prompts, material.target
    if isinstance(asked, str):
        prompts = prompts_in(asked, target, config.data.text_format)
    else:
        prompts = held_out_prompts(material.held_out)
    return Validation(
        target,
        engine,
        prompts,
        most=len(prompts) if isinstance(asked, str) else asked,
        depth=config.eval.depth,
        max_new_tokens=trainer.validation_tokens,
        draft_dtype=choose_draft_dtype(
            config.hardware, engine.device, dtype, count_parameters(engine.module)
        ),
        stop=stop,
        lookup=load_choice("drafter", LOOKUP).build(target.spec).replay,
    )
