"""Pages from the templates: one HTML file each, every text escaped, nothing loaded."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def page(template: str, **values: Any) -> str:
    """Return a template filled in; a value that it misses is an error."""
    environment = Environment(
        loader=PackageLoader("drafttrain.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)
