"""The depth that pays on this machine."""

from pathlib import Path

from drafttrain.commands.setup.evaluation import held_setup
from drafttrain.commands.setup.target_and_drafter import record_evaluation
from drafttrain.config.groups import follow_up
from drafttrain.config.sections import TuneConfig
from drafttrain.evaluation.record import keep, settings_of
from drafttrain.evaluation.tune import choose, tune_drafter
from drafttrain.evaluation.tune_choice import TUNED, write_tuned
from drafttrain.report.tables import rich_table
from drafttrain.report.tune import headline, tune_tables, write_tuning
from drafttrain.runtime.settings import AUTO
from drafttrain.runtime.terminal import console

NAME = "tuned"  # of the evaluation that is suggested: it replaces none of another depth


def tune(config: TuneConfig) -> None:
    """Predict every depth's speedup on this machine, measure it, choose, and write the choice."""
    file = Path(config.run.dir) / TUNED
    ways = f"move {file} elsewhere to keep both, or replace it by tune.overwrite=true"
    place, overwrite = file.parent / "tune", config.tune.overwrite
    with held_setup(config, place, "run.dir", file, overwrite, ways) as setup:
        found = tune_drafter(setup, config.tune)
        record_evaluation(config)
        keep(setup.folder / "tune", settings_of(config, setup.subject))
        choices = choose(found.predictions)
        file = write_tuned(
            setup.folder,
            choices,
            found,
            setup.conditions,
            policy=setup.settings.policy_settings,
            weights=setup.weights,
            temperature=setup.settings.temperature,
        )
        console.print(headline(choices))
        for table in tune_tables(found.predictions, choices):
            console.print(rich_table(table))
        title = f"{config.drafter.name} on {config.model.label}: which depth"
        page = write_tuning(setup.folder, title, found.predictions, choices, setup.notes)
        console.print(f"chosen depths: {file}; details: {page}")
        run, auto = f"run.dir={setup.folder}", [f"eval.depth={AUTO}", f"eval.name={NAME}"]
        same = [] if setup.settings.kind == "chain" else setup.settings.policy_settings.split()
        alone = choices[min(choices, key=int)].all
        then = f", or {follow_up('export', run, f'export.num_speculative_tokens={AUTO}')}"
        then = then if alone.speculate and not same else ""
        console.print(f"next: {follow_up('evaluate', run, *same, *auto)}{then}")
