"""The report: statistics with definitions and intervals, as JSON, Markdown, HTML and a table."""

from drafttrain.report.adaptation import adaptation_table, with_adaptation
from drafttrain.report.build import LosslessCheck, Report, TimingInfo, build_report
from drafttrain.report.certificate import Check, certificate, certificate_rows
from drafttrain.report.sweep import sweep_point, sweep_table
from drafttrain.report.tables import Table
from drafttrain.report.verdict import ExtraMemory, VerdictSettings
from drafttrain.report.witness import with_witness, witness_table
from drafttrain.report.write import REPORT_FILES, summary_table, write_report

__all__ = [
    "REPORT_FILES",
    "Check",
    "ExtraMemory",
    "LosslessCheck",
    "Report",
    "Table",
    "TimingInfo",
    "VerdictSettings",
    "adaptation_table",
    "build_report",
    "certificate",
    "certificate_rows",
    "summary_table",
    "sweep_point",
    "sweep_table",
    "with_adaptation",
    "with_witness",
    "witness_table",
    "write_report",
]
