"""What a created model adds to a request, and what the request keeps."""

from __future__ import annotations

import pytest

from bough.errors import RequestError
from bough.models.aliases import Overlay
from bough.models.tokenizer import Tokenizer
from bough.prompting.ask import Ask
from bough.server.serving.catalog.overlay import apply_overlay, check_overlay, merge_overlays
from bough.types import SamplingParams
from tests.models.tiny_tokenizer import CHATML, THINKS, byte_level

SYSTEM = {"role": "system", "content": "Be brief."}
SHOT = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"})
USER = {"role": "user", "content": "Hello"}


def ask(*messages, **fields) -> Ask:
    return Ask("created", messages=messages, **fields)


def test_the_system_prompt_and_the_messages_come_first():
    found = apply_overlay(ask(USER), Overlay(system="Be brief.", messages=SHOT))

    assert found.messages == [SYSTEM, *SHOT, USER]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_prompt_of_the_request_stays(role):
    own = {"role": role, "content": "Be long."}

    found = apply_overlay(ask(own, USER), Overlay(system="Be brief.", messages=SHOT))

    assert found.messages == [own, *SHOT, USER]


def test_what_continues_a_context_gets_no_second_beginning():
    found = apply_overlay(ask(USER, context=(1, 2)), Overlay(system="Be brief.", messages=SHOT))

    assert list(found.messages) == [USER]


def test_a_raw_text_has_no_messages():
    found = apply_overlay(Ask("created", text="Once"), Overlay(system="Be brief.", parameters={"num_predict": 3}))

    assert (found.messages, found.text, found.params.max_tokens) == (None, "Once", 3)


def test_parameters_fill_what_the_request_did_not_give():
    given = SamplingParams(temperature=0.8, top_k=40, seed=0, stop=("a",))
    parameters = {"temperature": 0.1, "top_k": -1, "top_p": 7.0, "seed": 5, "stop": ["b"], "num_predict": 9, "num_ctx": 64}

    found = apply_overlay(
        ask(USER, params=given, unset=frozenset({"temperature", "top_p"})), Overlay(parameters=parameters)
    )

    assert found.params == SamplingParams(temperature=0.1, top_k=40, top_p=1.0, seed=0, stop=("a",), max_tokens=9)
    assert found.unset == frozenset()
    assert found.context_tokens == 64
    assert apply_overlay(ask(USER, context_tokens=32), Overlay(parameters=parameters)).context_tokens == 32


def test_what_the_overlay_does_not_say_is_left_to_the_model():
    found = apply_overlay(ask(USER, unset=frozenset({"temperature", "top_k"})), Overlay(parameters={"temperature": 0.1}))

    assert found.unset == {"top_k"}


def test_one_overlay_over_another():
    base = Overlay(system="a", parameters={"seed": 1, "top_k": 2}, messages=SHOT, license="l")

    assert merge_overlays(base, Overlay(system="b", parameters={"seed": 3})) == Overlay(
        system="b", parameters={"seed": 3, "top_k": 2}, messages=SHOT, license="l"
    )


@pytest.mark.parametrize(("template", "capabilities"), [(CHATML, ()), (THINKS, ("tools", "thinking"))])
def test_a_template_is_rendered_to_see_what_it_can(template, capabilities):
    checked = check_overlay(Overlay(template=template), lambda: Tokenizer(byte_level(CHATML)))

    assert checked.capabilities == ("completion", *capabilities)


@pytest.mark.parametrize(
    ("overlay", "text"),
    [
        (Overlay(parameters={"temperature": -1}), "temperature is -1"),
        (Overlay(parameters={"num_ctx": 0}), "num_ctx is 0"),
        (Overlay(messages=({"role": "wizard", "content": "x"},)), "wizard"),
        (Overlay(template="{% for message in messages %}{{ message"), "template refuses"),
        (Overlay(template="{% for message in messages %}{{ 1 / 0 }}{% endfor %}"), "division by zero"),
        (Overlay(template="{{ messages[0].content }}"), "leaves out messages"),
        (Overlay(template="{{ range .Messages }}x{{ end }}"), "range .Messages"),
    ],
)
def test_what_cannot_be_used_is_refused(overlay, text):
    with pytest.raises(RequestError, match=text):
        check_overlay(overlay, lambda: Tokenizer(byte_level(CHATML)))
