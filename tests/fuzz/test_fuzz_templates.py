"""Whatever a chat template computes, it gives text or is refused, soon and in little memory."""

import resource
import time
from pathlib import Path

import pytest
from fences import EXAMPLES, FUZZ
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_chat import LLAMA2, LLAMA3, MISTRAL, QWEN3, R1, TURNS, chat, config, tiny

from drafttrain.data.chat import encode, prompt_tokens
from drafttrain.data.template import RENDERING, Template

pytestmark = pytest.mark.slow

BUSY_S = 30.0  # of three that a template may compute, on a machine that others use
TOKENIZER = tiny()
PIECES = (
    *(
        "{{ bos_token }}",
        "{{ m.content }}",
        "{{ m['content'] | trim }}",
        "{{ m.role }}",
        "{% else %}",
    ),
    *("{% for m in messages %}", "{% endfor %}", "{% if add_generation_prompt %}", "{% endif %}"),
    *(
        "{% generation %}",
        "{% endgeneration %}",
        "{% break %}",
        "<|user|>",
        "<|end|>",
        "\n",
        "{{",
        "%}",
    ),
    *("{% macro a(n) %}{{ a(n) }}{% endmacro %}", "{{ a(1) }}", "{{ messages.__class__ }}"),
    *("{{ ''.__class__.__mro__ }}", "{{ raise_exception('no') }}", "{{ strftime_now('%Y') }}"),
    *("{% set x = namespace(v='aa') %}", "{% set x.v = x.v ~ x.v %}", "{{ x.v }}", "{{ x }}"),
    *("{{ messages | tojson }}", "{{ dict(a=1) }}", "{{ range(99999) | list | length }}"),
    *("{% include 'a' %}", "{% import '/etc/passwd' as p %}", "{{ cycler.__init__.__globals__ }}"),
    *("{{ lipsum(n=9) }}", "{{ m.content * 3 }}", "{{ 1 // 0 }}", "{{ ('a' | center(99)) }}"),
    *("{{ '\\ud800' }}", "{{ '%s' % messages }}", "{{ '{0.__class__}'.format(messages) }}"),
)
BOMBS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10000000000 }}",
    "{{ 'a' * 200000000 }}",
    "{{ '%999999999d' % 1 }}",
    "{{ 'a'.ljust(9999999999) }}",
    "{{ (messages | length) ** (10 ** 9) }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{% for i in range(64) %}{% set x.v = x.v ~ x.v %}{% endfor %}{{ x.v }}",
    "{{ lipsum(n=10000000) }}",
    "{{ range(99999) | map('string') | join('a' * 99999) }}",
    "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "{{ strftime_now('%999999999d') }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ " + "[" * 200 + "]" * 200 + " }}",
    "{% if a %}" * 400 + "{% endif %}" * 400,
)


def templates() -> st.SearchStrategy[str]:
    """Draw templates of families, with pieces put in or cut out, and templates of pieces alone."""
    return st.one_of(
        st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
        _altered(st.sampled_from(PIECES)),
        st.text(max_size=40),
    )


@st.composite
def _altered(draw: st.DrawFn, pieces: st.SearchStrategy[str]) -> str:
    text = draw(st.sampled_from((LLAMA2, LLAMA3, MISTRAL, QWEN3, R1)))
    for _ in range(draw(st.integers(0, 3))):
        place, size = draw(st.integers(0, len(text))), draw(st.sampled_from((0, 0, 1, 9)))
        text = text[:place] + draw(pieces) + text[place + size :]
    return text


def render(template: str, answer: str) -> None:
    tokenizer = TOKENIZER
    tokenizer.chat_template = template
    for work in (
        lambda: encode([chat(*TURNS), chat("Hi", answer)], tokenizer, config()),
        lambda: prompt_tokens(chat("Hi").messages, tokenizer, Template("chat", {}, "2024-07-26")),
    ):
        started, said = time.monotonic(), ""
        try:
            work()
        except ValueError as error:
            said = str(error)
        assert said.isprintable(), said
        assert len(said) < 2000
        assert time.monotonic() - started < BUSY_S
    if RENDERING.process is not None:
        status = Path(f"/proc/{RENDERING.process.pid}/status").read_text()
        peak = next(line for line in status.splitlines() if line.startswith("VmPeak"))
        assert int(peak.split()[1]) < 1_000_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 3_000_000  # torch is in it


@FUZZ
@given(template=templates(), answer=st.sampled_from(("Yes", "a</think>b", "<|end|>", "\n")))
def test_templates(template: str, answer: str) -> None:
    render(template, answer)


@settings(FUZZ, max_examples=max(40, EXAMPLES // 50), suppress_health_check=list(HealthCheck))
@given(template=_altered(st.sampled_from(BOMBS)))
def test_templates_that_loop_and_multiply(template: str) -> None:
    render("{% set x = namespace(v='aa') %}" + template, "Yes")
