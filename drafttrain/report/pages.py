"""Pages from the templates: one HTML file each, every text escaped, nothing loaded."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from drafttrain.report.markdown import LONGEST_TEXT
from drafttrain.runtime.untrusted_input import shown


def page(template: str, **values: Any) -> str:
    """Return a template filled in; a value that it misses is an error."""
    environment = Environment(
        loader=PackageLoader("drafttrain.report"),
        autoescape=True,
        finalize=_text,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)


def _text(value: Any) -> Any:
    """Return a text without the characters that turn a line around, or that no file can hold."""
    return shown(value, LONGEST_TEXT) if type(value) is str else value
