"""A separate process that renders chat templates: they come with a target, and may be anyone's.

Run by path, without torch and without the environment's secrets. A template that computes without
end or fills the memory ends this process and nothing else: the kernel limits its time, in C code
too, and its memory.
"""

import datetime
import json
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils

SECONDS = 3.0  # of CPU time for one conversation; a long one takes milliseconds
MEMORY = 512 << 20  # bytes of this process
TOO_MUCH = "too much memory"


class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for other tools; here it prints its body."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 wants it)

    def parse(self, parser: Any) -> Any:
        """Return the body as a block of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class Namespace(jinja2.utils.Namespace):
    """A namespace without names that begin with an underscore, as in Transformers."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be one of its names
        own, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            Namespace._check(name)
        jinja2.utils.Namespace.__init__(own, values)

    def __setitem__(self, name: str, value: Any) -> None:
        Namespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")


class Dict:
    """`dict` as a template may call it, without its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


@lru_cache(maxsize=4)
def compiled(template: str, date: str) -> jinja2.Template:
    """Compile a template as Transformers does, except for the clock: today is `date`."""
    today = datetime.datetime.fromisoformat(date)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, **options: Any) -> str:
        known = {"ensure_ascii": False, "indent": None, "separators": None, "sort_keys": False}
        return json.dumps(value, **{**known, **options})

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(
        raise_exception=refuse, strftime_now=today.strftime, dict=Dict(), namespace=Namespace
    )
    return environment.from_string(template)


@contextmanager
def limited() -> Iterator[None]:
    """End this process if the block computes for more than `SECONDS`."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # unhandled, SIGPROF kills the process
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def answer(request: dict[str, Any]) -> dict[str, str]:
    """Return the text of a conversation, or why there is none."""
    try:
        with limited():
            template = compiled(request["template"], request["date"])
            text = template.render(**request["variables"])
            text.encode()  # no tokenizer accepts half a surrogate pair
            return {"text": text}
    except MemoryError:
        return {"limit": TOO_MUCH}
    except Exception as error:  # whatever the template does, it is reported
        return {"error": str(error)[:500] or type(error).__name__}


def main() -> None:
    """Answer requests, a line of JSON each, until their sender is gone."""
    # These are meant for the command.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        try:
            text = json.dumps(answer(json.loads(line)))
        except MemoryError:
            text = json.dumps({"limit": TOO_MUCH})
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
