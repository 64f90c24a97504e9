"""Templates come with checkpoints and are programs: none takes more than it may."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from engine.text.tokenizer import (
    TemplateLimitError,
    TemplateLimits,
    TemplateProcesses,
    TemplateRefusalError,
)

TIGHT = TemplateLimits(max_chars=10_000, seconds=0.3, num_bytes=2**28)
VALUES: dict[str, Any] = {"messages": [{"role": "user", "content": "Who?"}]}
GOOD = "{{ messages[0].content }}"


@pytest.fixture
def processes() -> Iterator[TemplateProcesses]:
    running = TemplateProcesses()
    yield running
    running.close()


ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in "
    "range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "loops with output": "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxxxx"
    "{% endfor %}{% endfor %}",
    "a width": "{{ '%999999999d' % 1 }}",
    "a width of format": "{{ '{:999999999}'.format(1) }}",
    "a repeated string": "{{ 'x' * 1000000000 }}",
    "a padded string": "{{ 'x'.ljust(1000000000) }}",
    "a centred string": "{{ 'x' | center(1000000000) }}",
    "an indented string": "{{ 'x\\ny' | indent(1000000000) }}",
    "a doubled string": "{% set ns = namespace(s='x') %}{% for a in range(60) %}"
    "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "a doubled list": "{% set ns = namespace(s=[1]) %}{% for a in range(60) %}"
    "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "a power": "{{ 7 ** (7 ** 12) }}",
    "a shower of words": "{{ lipsum(n=100000, min=90000, max=99999) }}",
    "json with an indent": "{{ [[1]] | tojson(indent=1000000000) }}",
    "recursion twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "a large text": "{{ 'x' * 20000 }}",
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_what_would_not_end_is_ended_and_the_next_one_renders(
    processes: TemplateProcesses, kind: str
):
    with pytest.raises(TemplateLimitError, match="chat template") as caught:
        processes.render(ENDLESS[kind], VALUES, TIGHT)
    assert "engine.limits." in str(caught.value)
    assert processes.render(GOOD, VALUES, TemplateLimits())[0] == "Who?"


@pytest.mark.parametrize(
    ("template", "told", "is_deliberate"),
    [
        ("{{ raise_exception('no') }}", "no", True),
        ("{% for %}", "Expected an expression", True),
        ("{{ messages[0].content + 1 }}", "concatenate", False),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion", False),
        ("{{ range(1000000000) | list }}", "Range too big", False),
        ("{{ ''.__class__.__mro__ }}", "unsafe", True),
        ("{{ messages.append(1) }}", "is unsafe", True),
        ("{% set ns = namespace(_x=1) %}", "begins with '_'", True),
        ("{{ cycler.__init__.__globals__ }}", "unsafe", True),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "", False),
    ],
)
def test_what_a_template_raises_is_told(
    processes: TemplateProcesses, template: str, told: str, is_deliberate: bool
):
    with pytest.raises(TemplateRefusalError) as caught:
        processes.render(template, VALUES, TemplateLimits())
    assert told in str(caught.value)
    assert caught.value.is_deliberate is is_deliberate
    assert processes.render(GOOD, VALUES, TemplateLimits())[0] == "Who?"


def test_values_that_json_does_not_know_are_only_named(processes: TemplateProcesses):
    values = {"messages": [{"content": object(), "when": {1, 2}}]}
    text, _ = processes.render("{{ messages[0].content }} {{ messages[0].when }}", values, TIGHT)
    assert text == "<object> <set>"
    circle: list[Any] = []
    circle.append(circle)
    for bad in ({"a": circle}, {"a": {(1, 2): 3}}):
        with pytest.raises(ValueError, match="no plain data"):
            processes.render(GOOD, bad, TIGHT)


def test_one_process_serves_one_prompt_after_the_other(processes: TemplateProcesses):
    for _ in range(3):
        processes.render(GOOD, VALUES, TemplateLimits())
    assert len(processes._idle) == 1
    kept = processes._idle[0]
    processes.render(GOOD, VALUES, TemplateLimits())
    assert processes._idle == [kept]


def test_a_process_that_was_ended_while_idle_is_replaced(processes: TemplateProcesses):
    processes.render(GOOD, VALUES, TemplateLimits())
    (kept,) = processes._idle
    os.kill(kept._process.pid, signal.SIGKILL)
    kept._process.wait()
    assert processes.render(GOOD, VALUES, TemplateLimits())[0] == "Who?"


def test_closing_ends_all_and_a_later_prompt_starts_anew(processes: TemplateProcesses):
    processes.render(GOOD, VALUES, TemplateLimits())
    (kept,) = processes._idle
    processes.close()
    assert kept._process.poll() == 0
    assert processes.render(GOOD, VALUES, TemplateLimits())[0] == "Who?"
