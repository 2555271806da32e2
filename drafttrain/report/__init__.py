"""The report: statistics with definitions and intervals, as JSON, Markdown, HTML and a table."""

from drafttrain.report.build import LosslessCheck, Report, TimingInfo, build_report
from drafttrain.report.write import summary_table, write_report

__all__ = [
    "LosslessCheck",
    "Report",
    "TimingInfo",
    "build_report",
    "summary_table",
    "write_report",
]
