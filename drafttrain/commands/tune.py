"""The depth that pays on this machine."""

from collections.abc import Mapping
from pathlib import Path

from drafttrain.commands.setup.evaluation import Setup, set_up
from drafttrain.commands.setup.target_and_drafter import (
    record_evaluation,
)
from drafttrain.config.sections import TuneConfig
from drafttrain.evaluation.record import keep, require_same, settings_of
from drafttrain.evaluation.tune import TUNED, choose, tune_drafter, write_tuned
from drafttrain.report.terminal import rich_table
from drafttrain.report.tuning import headline, tune_tables, write_tuning
from drafttrain.runtime.lock import hold, require_free
from drafttrain.runtime.run_folder import call
from drafttrain.runtime.terminal import console


def tune(config: TuneConfig) -> None:
    """Predict every depth's speedup on this machine, measure it, choose, and write the choice."""
    folder = Path(config.run.dir)
    require_free(folder / "tune", "run.dir")
    require_kept(config, {})
    setup = set_up(config, needs_exact=False)
    with hold(folder / "tune", "run.dir", "tune", console.print):
        require_kept(config, setup.subject)
        tune_held(config, setup)


def require_kept(config: TuneConfig, subject: Mapping[str, str]) -> None:
    """Refuse to replace a choice by one of other settings, weights or prompts."""
    folder = Path(config.run.dir)
    ways = f"move {folder / TUNED} elsewhere to keep both, or replace it by tune.overwrite=true"
    settings, overwrite = settings_of(config, subject), config.tune.overwrite
    require_same(folder / "tune", folder / TUNED, settings, overwrite, ways)


def tune_held(config: TuneConfig, setup: Setup) -> None:
    """Predict, measure and choose from what is set up, where only this command tunes."""
    predictions, costs = tune_drafter(
        setup.parts,
        setup.prompts,
        setup.template,
        setup.settings,
        config.tune,
        folder=setup.folder / "tune",
        conditions=setup.conditions,
        seed=config.run.seed,
    )
    record_evaluation(config)
    keep(setup.folder / "tune", settings_of(config, setup.subject))
    file = write_tuned(setup.folder, predictions, costs, setup.conditions)
    choices = choose(predictions)
    console.print(headline(choices))
    for table in tune_tables(predictions, choices):
        console.print(rich_table(table))
    title = f"{config.drafter.name} on {config.model.label}: which depth"
    page = write_tuning(setup.folder, title, predictions, choices, setup.notes)
    console.print(f"chosen depths: {file}; the whole of it: {page}")
    console.print(
        f"next: {call('evaluate', f'run.dir={setup.folder}', 'eval.tuned=true')}, "
        f"or {call('export', f'run.dir={setup.folder}', 'export.tuned=true')}"
    )
