"""The depth that pays on this machine."""

from drafttrain.assemble import (
    record_evaluation,
)
from drafttrain.config import (
    TuneConfig,
)
from drafttrain.evaluation.tune import as_rows, choose, tune_drafter, write_tuned
from drafttrain.measuring import set_up
from drafttrain.report.tuning import headline, rich_table, tune_tables, write_tuning
from drafttrain.run import call
from drafttrain.terminal import console


def tune(config: TuneConfig) -> None:
    """Predict every depth's speedup on this machine, measure it, choose, and write the choice."""
    setup = set_up(config, needs_exact=False)
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
    file = write_tuned(setup.folder, predictions, costs, setup.conditions)
    rows = as_rows(predictions)
    choice = choose(predictions)
    tables = tune_tables(rows, choice)
    console.print(headline(choice))
    for table in tables:
        console.print(rich_table(table))
    title = f"{config.drafter.name} on {config.model.label}: which depth"
    page = write_tuning(setup.folder, title, rows, tables, setup.notes, choice)
    console.print(f"chosen depths: {file}; the whole of it: {page}")
    console.print(
        f"next: {call('evaluate', f'run.dir={setup.folder}', 'eval.tuned=true')}, "
        f"or {call('export', f'run.dir={setup.folder}', 'export.tuned=true')}"
    )
