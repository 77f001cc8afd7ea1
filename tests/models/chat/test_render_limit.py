"""Templates that never end, or make more than memory holds, as a real tokenizer applies them."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

from bough.models.chat.render_limit import MAX_CHARS, RenderTimeout, Watchdog, render_within_limits
from tests.models.tiny_tokenizer import ALTERNATES, CHATML, THINKS, byte_level

MESSAGES = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "So?"},
]
LIMIT_S = 0.3

ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "loops over messages": "{% set m = messages * 99 %}{% for a in m %}{% for b in m %}{% for c in m %}{% for d in m %}"
    "{% endfor %}{% endfor %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a filter": "{% for i in range(99999) %}{% set x = range(99999) | map('string') | list %}{% endfor %}",
    "a function": "{{ lipsum(n=9999999) }}",
}
HUGE = {
    "output": "{% set x = 'x' * 1000000 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "a macro": "{% set x = 'x' * 1000000 %}{% macro f() %}{% for i in range(9999) %}{{ x }}{% endfor %}{% endmacro %}"
    "{{ f() }}",
    "a product": "{{ 'x' * 10000000000 }}",
    "a list": "{{ 10000000000 * [0] }}",
    "a power": "{{ 9 ** 9 ** 9 }}",
    "a product of numbers": "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "a sum": "{% set n = namespace(x='x' * 999) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "joined texts": "{% set n = namespace(x='x' * 999) %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "a remainder": "{{ '%9999999999d' % 1 }}",
    "a format": "{{ '{:9999999999}'.format(1) }}",
    "a padding": "{{ 'x'.ljust(9999999999) }}",
    "a padding by a filter": "{{ 'x' | center(9999999999) }}",
    "a replacement": "{{ ('x' * 999999).replace('x', 'y' * 999999) }}",
    "a replacement by a filter": "{{ ('x' * 999999) | replace('x', 'y' * 999999) }}",
    "a join": "{{ ''.join(['x' * 999999] * 9999) }}",
    "a join by a filter": "{% set x = 'x' * 999999 %}{{ range(9999) | map('replace', '', x) | join }}",
}


def apply(template: str, messages: Any = MESSAGES, **options: Any) -> str:
    hf = byte_level(template)
    return str(hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options))


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_does_not_end_is_interrupted(template: str) -> None:
    with pytest.raises(RenderTimeout, match=r"longer than 0\.3 s"):
        render_within_limits(lambda: apply(template), LIMIT_S)


@pytest.mark.parametrize("template", HUGE.values(), ids=HUGE)
def test_a_template_that_makes_too_much_is_refused(template: str) -> None:
    with pytest.raises(SecurityError, match=f"more than {MAX_CHARS:,} characters"):
        render_within_limits(lambda: apply(template))


@pytest.mark.parametrize("template", [CHATML, ALTERNATES, THINKS])
def test_other_templates_say_what_they_say_without_limits(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said = render_within_limits(lambda: apply(template))

    monkeypatch.setattr(chat_template_utils, "ImmutableSandboxedEnvironment", ImmutableSandboxedEnvironment)
    assert said == apply(template + "{# compiled anew #}")


def test_templates_still_pad_format_and_join() -> None:
    template = (
        "{{ 'a'.ljust(3) }}|{{ 'b' | center(3) }}|{{ '%3d' % 7 }}|{{ '{:>3}'.format(7) }}|{{ 'ab'.replace('b', 'c') }}|"
        "{{ messages | map(attribute='role') | join(',') }}|{{ 1700000000 | string ~ 2 * 3 ~ 'x' * 2 ~ 2 ** 10 }}|"
        "{{ ([1] + [2]) | length }}|{{ [3, 4] | join('-') }}|{{ messages | tojson | length > 9 }}"
    )

    said = render_within_limits(lambda: apply(template))

    assert said == "a  | b |  7|  7|ac|user,assistant,user|17000000006xx1024|2|3-4|True"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ('\\t' * 2000).expandtabs(100000) }}",
        "{{ ('x' * 2**24).join('abcdefghijklmnop') }}",
        "{{ ('{0}' * 20).format('x' * 2**24) }}",
        "{{ ('%s' * 12) % (['x' * 2**24] * 12) }}",
        "{{ '{:{}}'.format('x', 2000000000) }}",
        "{{ (['x' * 2**24] * 16) | string }}",
        "{{ (['x' * 2**24] * 16) | tojson }}",
        "{{ ([1] * 2000) | tojson(indent=1000000) }}",
        "{{ (['x' * 2**24] * 16) ~ '' }}",
        "{{ ['x' * 2**24] * 16 }}",
        "{{ ('a\\n' * 2000) | indent(100000) }}",
        "{{ ('a' * 20).translate({97: 'x' * 2**24}) }}",
        "{{ ('\"' * 2**26) | escape }}",
        "{{ ('a ' * 2**16) | wordwrap(1, wrapstring='x' * 2**16) }}",
    ],
)
def test_nothing_is_made_larger_than_allowed_by_one_step(template: str) -> None:
    with pytest.raises(SecurityError, match="more than"):
        render_within_limits(lambda: apply(template))


@pytest.mark.parametrize(
    "template",
    ["{{ '{}: {}'.format(role, text) }}", "{{ '%s: %s' % (role, text) }}", "{{ '%s: %s' | format(role, text) }}"],
)
def test_formats_take_texts_with_long_numbers(template: str) -> None:
    named = "{% set role, text = 'user', 'call 491701234567 on 20261116' %}" + template

    assert render_within_limits(lambda: apply(named)) == "user: call 491701234567 on 20261116"


def test_many_at_once_are_each_interrupted_in_their_own_thread() -> None:
    def render(number: int) -> str:
        try:
            return render_within_limits(lambda: apply(ENDLESS["macros"] if number % 2 else CHATML), LIMIT_S)
        except RenderTimeout:
            return "interrupted"

    with ThreadPoolExecutor(4) as pool:
        said = list(pool.map(render, range(4)))

    assert said == [apply(CHATML), "interrupted"] * 2


def test_nothing_is_interrupted_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bough.models.chat.render_limit._CHECK_S", 0.0)
    watchdog, until_s = Watchdog(), time.monotonic() + 0.5
    while time.monotonic() < until_s:  # the end comes just when the time is over
        with suppress(RenderTimeout):
            watchdog.run(lambda: str(sum(range(100))), 0.0)
        assert sum(range(100)) == 4950
