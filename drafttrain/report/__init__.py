"""The report: statistics with definitions and intervals, as JSON, Markdown, HTML and a table."""
