"""The runs of a comparison: reading them, which are comparable, which are seeds of one method."""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations, takewhile
from pathlib import Path
from typing import Any

from drafttrain.core.types import brief
from drafttrain.report.metrics import Columns, Measured, measured_of
from drafttrain.report.phrases import things
from drafttrain.report.results import SCHEMA_VERSION, Measurement, Report, TimingInfo
from drafttrain.report.totals import Key
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


@dataclass(frozen=True)
class ComparedRun:
    """One run: what it was and where it came from."""

    name: str  # short and unique among the runs
    folder: str
    drafter: str
    depth: int
    seed: int | None
    drafter_parameters: int | None
    training_tokens: int | None
    lossless: str
    timing: TimingInfo
    provenance: Mapping[str, Any]


@dataclass(frozen=True)
class RunReport(ComparedRun):
    """One run's evaluation and what is known of its training.

    `identity` stands for all settings of training and evaluation except the seed: runs that share
    it are seeds of one method. It and `seed` are None if no training is on record.
    """

    report: Report
    measured: Mapping[str, Measured]  # by drafting method
    identity: str | None

    @property
    def summary(self) -> ComparedRun:
        """The part that a comparison records."""
        return ComparedRun(**{each.name: getattr(self, each.name) for each in fields(ComparedRun)})

    @property
    def plain(self) -> Mapping[Key, Measurement]:
        """The plain loop's measurements, in the order of the prompts."""
        return next(iter(self.measured.values())).plain


@dataclass(frozen=True)
class Method:
    """One row: a method, and the runs that measured it."""

    label: str
    reference: bool  # measured together with the runs' own drafters
    drafter: str
    runs: tuple[RunReport, ...]

    def columns(self, keys: Sequence[Key]) -> list[Columns]:
        """Return the columns of these prompts by run."""
        return [run.measured[self.drafter].on(keys) for run in self.runs]


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
        drafter=report.drafter,
        depth=report.depth,
        seed=config.get("run", {}).get("seed") if config is not None and trained else None,
        drafter_parameters=parameters,
        training_tokens=tokens,
        lossless=report.lossless.statement,
        timing=report.timing,
        provenance=report.provenance,
        report=report,
        measured=measured,
        identity=_identity(config, report) if config is not None and trained else None,
    )


def _sizes(checkpoint: Path) -> tuple[int | None, int | None]:
    """Return a checkpoint's parameters and trained tokens; None if the run has deleted it.

    Integers are not weights but maps.
    """
    file = checkpoint / WEIGHTS_FILE
    try:
        entries = [entry for entry in header_of(file).values() if entry.dtype in FLOATS]
        return sum(math.prod(entry.shape) for entry in entries), load_state(checkpoint).tokens
    except (OSError, CheckpointError, UntrustedError):
        if file.is_file():
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


TEMPLATE = ("template", "template_kwargs")


def conditions(report: Report) -> dict[str, Any]:
    """Return the conditions, by name, that comparable reports must have in common."""
    prompts = report.prompts
    return {
        "target fingerprint": report.provenance["target_fingerprint"],
        **{f"eval.{key}": value for key, value in vars(report.sampling).items()},
        "eval.batch_size": report.batch_size,
        "eval.prompts": prompts["source"],
        **{f"data.{key}": prompts[key] for key in TEMPLATE},
    }


def check_comparable(runs: Sequence[RunReport]) -> None:
    """Raise ValueError if two runs differ in more than the drafter, naming both."""
    for run, other in combinations(runs, 2):
        wanted, got = conditions(run.report), conditions(other.report)
        told = [each.report.prompts for each in (run, other)]
        digests = [prompts["sha256"] for prompts in told]
        if digests[0] == digests[1]:  # the same texts, by whatever path
            got["eval.prompts"] = wanted["eval.prompts"]
        for key in wanted:
            if wanted[key] != got[key]:
                pair = [str("none" if one is None else one) for one in (wanted[key], got[key])]
                one, two = map(brief, pair) if "fingerprint" in key else pair
                raise ValueError(
                    f"runs must have the same {key} to be compared, but {run.folder} has {one} "
                    f"and {other.folder} has {two}; evaluate both in the same way, or compare them "
                    "separately"
                )
        # The digest is of all prompts: if they are not the same ones, it tells nothing of those
        # that are shared.
        counts = [prompts["num_prompts"] for prompts in told]
        alike = list(run.plain) == list(other.plain) and counts[0] == counts[1]
        if alike and digests[0] != digests[1]:
            raise ValueError(
                f"runs must have the same texts under eval.prompts to be compared, but "
                f"{run.folder} has {str(digests[0])[:16]} and {other.folder} has "
                f"{str(digests[1])[:16]} (sha256); evaluate both on the same prompts, or compare "
                "them separately"
            )


def shared_prompts(runs: Sequence[RunReport]) -> list[Key]:
    """Return the prompts that every run decoded, by task and id, in the first run's order."""
    keys = [key for key in runs[0].plain if all(key in run.plain for run in runs)]
    if not keys:
        counts = ", ".join(f"{run.folder} {len(run.plain)}" for run in runs)
        raise ValueError(
            f"runs must share prompts (task and id) to be compared, got none in common: {counts}; "
            "evaluate them on the same eval.prompts and eval.prompts_per_task"
        )
    return keys


def methods_of(runs: Sequence[RunReport]) -> list[Method]:
    """Return the rows: runs that differ only in their seed as one, then the reference methods.

    A seed that occurs twice is a repeated measurement, and gets a row of its own. A reference
    measured in several runs at the same depth, under the same rule and for the same target is one
    row.
    """
    groups: dict[tuple[str, int], list[RunReport]] = {}
    for run in runs:
        identity = run.identity if run.identity is not None else f"\0{run.folder}"
        seen = [group for (key, _), group in groups.items() if key == identity]
        again = sum(run.seed in [other.seed for other in group] for group in seen)
        groups.setdefault((identity, again), []).append(run)
    references: dict[tuple[str, ...], list[RunReport]] = {}
    for run in runs:
        check = run.report.lossless
        shape = run.report.tree or f"depth {run.report.depth}"
        how = (shape, f"rule {check.rule}")
        for drafter in run.measured:
            if drafter != run.report.drafter:
                references.setdefault((drafter, *how), []).append(run)
    methods: list[Method] = []
    taken = {run.name for run in runs}  # a label that is a run's name means that run

    def add(options: Sequence[str], reference: bool, drafter: str, group: list[RunReport]) -> None:
        label = group[0].name if len(group) == 1 and not reference else ""
        label = label or next(text for text in options if text and text not in taken)
        taken.add(label)
        methods.append(Method(label, reference, drafter, tuple(group)))

    for group in groups.values():
        names = [run.name for run in group]
        add([_common(names), " + ".join(names)], False, group[0].report.drafter, group)
    for (drafter, *told), group in references.items():
        alike = [key[1:] for key in references if key[0] == drafter]
        apart = [one for place, one in enumerate(told) if len({key[place] for key in alike}) > 1]
        full = ", ".join((drafter, *told, "reference"))
        names = [", ".join((drafter, *apart)), full, f"{full} of {group[0].folder}"]
        add(names, True, drafter, group)
    return methods


def _common(names: Sequence[str]) -> str:
    """Return what names such as demo-seed0 and demo-seed1, or a/x and b/x, have in common."""
    parts = zip(*(name.split("/") for name in names), strict=False)
    return "/".join(alike for part in parts if (alike := _beginning(part)) or not any(part))


def _beginning(names: Sequence[str]) -> str:
    """Return the common prefix of names, without "-seed"; a name itself where all are the same."""
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    found = "".join(letters[0] for letters in alike)
    return found if {found} == set(names) else re.sub(r"[-_. ]+(seed|s)?[-_. ]*$", "", found)


def find_method(methods: Sequence[Method], baseline: str | None) -> Method:
    """Return the row called `baseline`, or the one with the run of that name; None: the first."""
    if baseline is None:
        return methods[0]
    for method in methods:
        folders = [] if method.reference else [(run.name, run.folder) for run in method.runs]
        if baseline in (method.label, *(text for pair in folders for text in pair)):
            return method
    known = ", ".join(method.label for method in methods)
    raise ValueError(
        f"compare.baseline must be one of the runs or of the methods beside them, got "
        f"{baseline!r}; they are: {known}"
    )


def training_statement(method: Method) -> str:
    """Return a phrase for the number of training runs behind a row."""
    count = len(method.runs)
    if method.reference:
        return f"reference, measured beside {things(count, 'run')}"
    seeds = [run.seed for run in method.runs]
    if None in seeds:
        return "single run, no training on record"
    if count == 1:
        return f"single run (seed {seeds[0]})"
    return f"{count} training seeds ({', '.join(map(str, seeds))})"
