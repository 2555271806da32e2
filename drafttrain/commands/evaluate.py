"""A drafter measured in the whole speculative loop."""

from dataclasses import asdict, replace
from pathlib import Path

from drafttrain.commands.setup.evaluation import held_setup
from drafttrain.commands.setup.target_and_drafter import record_evaluation
from drafttrain.commands.setup.vllm_witness import served_by_vllm, witnessed
from drafttrain.config.groups import follow_up
from drafttrain.config.sections import EvaluateConfig
from drafttrain.evaluation.config import TunedEval
from drafttrain.evaluation.evaluate import evaluate_drafter
from drafttrain.evaluation.last_validation import Validated, validated
from drafttrain.evaluation.record import SETTINGS, keep, settings_of
from drafttrain.evaluation.tune_choice import TUNED
from drafttrain.report.pages import REPORT_FILES, write_report
from drafttrain.report.results import Report
from drafttrain.report.tables import adaptation_table, rich_table, summary_table, witness_table
from drafttrain.report.write import pictures
from drafttrain.runtime.run_folder import CONFIG, provenance
from drafttrain.runtime.terminal import console
from drafttrain.runtime.tracker import destination, open_tracker, require_tracker

UNLIKE = 0.1  # in the share of first tokens that are accepted: several standard errors


def evaluate(config: EvaluateConfig) -> None:
    """Measure a drafter in the whole speculative loop and write the report."""
    folder = Path(config.run.dir)
    require_tracker(config.tracker, folder)
    for line in destination(config.tracker):
        console.print(line)
    place = folder / "evaluations" / config.eval.name
    result, overwrite = place / "report.json", config.eval.overwrite
    ways = "keep both by eval.name=OTHER_NAME, or replace it by eval.overwrite=true"
    with held_setup(config, place, "eval.name", result, overwrite, ways) as setup:
        settings = setup.settings
        config = replace(config, eval=settings)
        served = served_by_vllm(config, setup) if settings.engine == "vllm" else None
        record_evaluation(config)
        report, results, journals = evaluate_drafter(setup, place, provenance())
        keep(place, settings_of(config, setup.subject))
        figures = write_report(report, place)
        if served is not None:  # our own measurements are on disk even if vLLM fails
            report = witnessed(report, results, config, setup, served, place / "vllm")
            figures = write_report(report, place)
        for journal in journals:
            journal.finish()
        console.print(rich_table(summary_table(report)))
        if setup.checkpoint is None or settings.shape == "tree":
            known = None
        else:
            known = validated(setup.folder, setup.checkpoint)
        for line in unlike_validation(report, known):
            console.print(line)
        if report.adaptation is not None:
            console.print(rich_table(adaptation_table(report.adaptation)))
            console.print(report.adaptation.statement)
        if report.vllm is not None:
            console.print(rich_table(witness_table(report.vllm)))
        if report.certificate is not None:
            console.print(f"certificate: {report.certificate.statement}")
        console.print(f"report: {place / 'report.html'} (the same in report.md and report.json)")
        tuned = isinstance(settings, TunedEval) and (setup.folder / TUNED).is_file()
        if setup.checkpoint is not None and not tuned:
            console.print(f"next: {follow_up('tune', f'run.dir={setup.folder}')}")
        told = asdict(config)
        tracker = open_tracker(
            config.tracker, setup.folder, config=told, command="evaluate", append=True
        )
        tracker.table(f"evaluation/{settings.name}", *evaluation_table(report))
        files = [setup.folder / CONFIG, *(place / name for name in (*REPORT_FILES, SETTINGS))]
        tracker.keep(f"report/{settings.name}", "report", files)
        tracker.pictures(f"report/{settings.name}", lambda: pictures(figures))
        tracker.finish()


def unlike_validation(report: Report, known: Validated | None) -> list[str]:
    """Return a line if first tokens are accepted otherwise than when the run last validated."""
    here = report.summary.acceptance_per_position[0]
    if known is None or here is None or report.sampling.temperature:
        return []
    there = known.reached[0]
    return [
        f"{here:.2f} of the first drafted tokens are accepted here, {there:.2f} were when the run "
        "last validated: these prompts are of other kinds; train on some like them"
    ] * (abs(there - here) > UNLIKE)


def evaluation_table(report: Report) -> tuple[list[str], list[list[str | float | None]]]:
    """Return the columns and rows of an evaluation for the tracker: a row per method and task."""
    columns = ["method", "task", "acceptance_length", "acceptance_rate", "tokens_per_second"]
    columns += ["speedup", "speedup_low", "speedup_high"]
    rows: list[list[str | float | None]] = []
    for method, part in report.drafting.items():
        for task, row in {**part.tasks, "all": part.summary}.items():
            low, high = row.speedup.ci95 or (None, None)
            values = [row.acceptance_length.micro, row.acceptance_rate]
            values += [row.tokens_per_second.speculative, row.speedup.value]
            rows.append([method, task, *values, low, high])
    return columns, rows
