"""Compare runs: read the measurements of their evaluations, and refuse incomparable ones."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafttrain.report.comparison import Comparison, build_comparison
from drafttrain.report.config import CompareSettings
from drafttrain.report.pairs import measured_of
from drafttrain.report.results import NOT_COMPARED, SCHEMA_VERSION, Report
from drafttrain.report.runs import RunReport
from drafttrain.runtime.disk import refuse_links
from drafttrain.runtime.run_folder import CHECKPOINTS, CONFIG, call, load_config
from drafttrain.runtime.untrusted_input import (
    MAX_JSON_BYTES,
    Count,
    UntrustedError,
    header_of,
    read_bytes,
    shown,
    typed,
)
from drafttrain.training.checkpoint import NAME, WEIGHTS_FILE, CheckpointError, load_state

# Sections in which two seeds of one method may differ: names, places, and what by contract changes
# no result. The machine that timed them is compared by their reports.
UNSCIENTIFIC = ("run", "tracker", "hardware")
# What of these changes the drafter all the same.
DECISIVE = (("run", "init_from"), ("hardware", "weights_dtype"))
TIMED_WITH = ("dtype", "draft_dtype", "device", "threads")
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")


@dataclass(frozen=True)
class _RunProvenance:
    target_fingerprint: str | None
    checkpoint: str | None = None
    hardware: dict[str, Any] | None = None


@dataclass(frozen=True)
class _Prompts:
    source: str
    sha256: str
    num_prompts: Count
    template: str
    template_kwargs: dict[str, Any]


@dataclass(frozen=True)
class _Origins:
    """The free-form parts of a report that a comparison reads."""

    schema_version: Any
    prompts: _Prompts
    provenance: _RunProvenance


def compare_runs(config: CompareSettings, provenance: Mapping[str, Any]) -> Comparison:
    """Return the comparison of the runs' evaluations.

    Raises ValueError in one line for a run without that evaluation or with a broken one, for runs
    that were evaluated differently, and for an unknown baseline.
    """
    places = [Path(run).resolve() for run in config.runs]
    short, root = [place.name for place in places], os.path.commonpath(places)
    runs = [
        read_run(
            Path(run),
            os.path.relpath(place, root) if short.count(place.name) > 1 else place.name,
            config.evaluation,
        )
        for run, place in zip(config.runs, places, strict=True)
    ]
    return build_comparison(runs, config, provenance)


def read_run(folder: Path, name: str, evaluation: str) -> RunReport:
    """Return a run's evaluation, and its training as config.yaml and checkpoint record it."""
    named = [] if evaluation == "default" else [f"eval.name={evaluation}"]
    again = call("evaluate", f"run.dir={folder}", *named)
    file = _find_report(folder, evaluation, again)
    try:
        content = read_bytes(file, MAX_JSON_BYTES)
        origins = typed(_Origins, content, "it")
        if origins.schema_version != SCHEMA_VERSION:
            version = shown(origins.schema_version)
            raise ValueError(f"it has schema_version {version}, not {SCHEMA_VERSION}")
        report = typed(Report, content, "it")
        measured = measured_of(report.measurements)
        if report.drafter not in measured:
            raise ValueError(f"it has no measurements of {shown(report.drafter)}")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{file} must be a report that `evaluate` wrote, but cannot be used: "
            f"{shown(error, 400)}; make it again: {again}"
        ) from error
    config = load_config(folder, "runs") if (folder / CONFIG).is_file() else None
    # By its name, as the run may have moved; training may have deleted it since.
    recorded = Path(origins.provenance.checkpoint or "").name
    parameters, tokens = None, None
    if NAME.fullmatch(recorded):
        parameters, tokens = _sizes(folder / CHECKPOINTS / recorded)
    trained = config is not None and origins.provenance.checkpoint not in (None, "None")  # as ngram
    return RunReport(
        name=name,
        folder=str(folder),
        report=report,
        measured=measured,
        identity=_identity(config, report) if config is not None and trained else None,
        seed=config.get("run", {}).get("seed") if config is not None and trained else None,
        parameters=parameters,
        training_tokens=tokens,
    )


def _sizes(checkpoint: Path) -> tuple[int | None, int | None]:
    """Return a checkpoint's parameters and trained tokens; None if the run has deleted it."""
    try:
        return num_parameters(checkpoint), load_state(checkpoint).tokens
    except (OSError, CheckpointError, UntrustedError):
        if (checkpoint / WEIGHTS_FILE).is_file():
            raise
        return None, None


def _find_report(folder: Path, evaluation: str, again: str) -> Path:
    if not os.path.isdir(folder):
        state = "is a file" if os.path.exists(folder) else "does not exist"
        raise ValueError(f"runs must name folders of runs, got {shown(folder, 400)}, which {state}")
    refuse_links(folder)
    file = folder / "evaluations" / evaluation / "report.json"
    if not file.is_file():
        others = sorted(path.parent.name for path in folder.glob("evaluations/*/report.json"))
        known = f" (it has {', '.join(others)}: compare.evaluation=...)" if others else ""
        raise ValueError(f"{folder} has no evaluation called {evaluation}{known}; make it: {again}")
    return file


def num_parameters(checkpoint: Path) -> int:
    """Return the number of parameters in a checkpoint; integers are not weights but maps."""
    entries = header_of(checkpoint / WEIGHTS_FILE).values()
    return sum(math.prod(entry.shape) for entry in entries if entry.dtype in FLOATS)


def _identity(config: Mapping[str, Any], report: Report) -> str:
    """Return the settings of training and evaluation, without the seed and the run's name."""
    trained = {key: value for key, value in config.items() if key not in UNSCIENTIFIC}
    trained |= {key: config.get(section, {}).get(key) for section, key in DECISIVE}
    measured = {key: getattr(report.timing, key) for key in TIMED_WITH}
    depths = report.verdicts["all"].of_depths  # of which each seed takes its fastest
    evaluated: list[Any] = [report.drafter, depths, report.lossless.rule, measured]
    evaluated.append(report.draft_sampling and vars(report.draft_sampling))
    if report.tree:
        evaluated.append(report.tree)
    return json.dumps([trained, evaluated], sort_keys=True, default=str)


def comparison_table(
    comparison: Comparison,
) -> tuple[Sequence[str], list[list[str | float | None]]]:
    """Return the columns and rows of a comparison for the tracker: a row per method and task."""
    columns = ["method", "training", "task", "num_prompts"]
    for name in ("acceptance_length", "speedup"):
        for kind in (name, f"{name}_difference"):
            columns += [kind, f"{kind}_low", f"{kind}_high"]
    columns += ["draft_ms", "drafter_parameters", "training_tokens", "lossless"]
    rows: list[list[str | float | None]] = []
    for row in comparison.rows:
        pair = comparison.versus.get(row.method)
        for task, part in row.by_name.items():
            cells: list[str | float | None] = [row.method, row.training, task]
            cells.append(float(part.num_prompts))
            for name in ("acceptance_length", "speedup"):
                for side in (part, pair.by_name[task] if pair else None):
                    found = getattr(side, name) if side else NOT_COMPARED
                    cells += [found.value, *(found.ci95 or (None, None))]
            sizes = (row.drafter_parameters, row.training_tokens)
            cells += [part.draft_ms, *(None if size is None else float(size) for size in sizes)]
            cells.append(row.lossless.statement)
            rows.append(cells)
    return columns, rows
