"""Go templates of the simple kind render as Ollama renders them; others are refused by name."""

from __future__ import annotations

import pytest

from bough.errors import RequestError
from bough.models.chat.go_template import to_jinja
from bough.models.tokenizer import Tokenizer
from tests.models.tiny_tokenizer import CHATML, byte_level

GO_CHATML = """{{ if .System }}<|im_start|>system
{{ .System }}<|im_end|>
{{ end }}{{ if .Prompt }}<|im_start|>user
{{ .Prompt }}<|im_end|>
{{ end }}<|im_start|>assistant
{{ .Response }}<|im_end|>
"""
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": 'A "quote", {{ braces }}, é🙂 and <|im_end|>'}
ANSWER = {"role": "assistant", "content": "Yes."}
OTHER = {"role": "user", "content": "TURN OPEN"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level(CHATML))


def render(tokenizer: Tokenizer, template: str, *messages: dict[str, str]) -> str:
    return tokenizer.with_template(to_jinja(template)).template.render(messages).text


@pytest.mark.parametrize(
    "messages", [(SYSTEM, USER), (SYSTEM, USER, ANSWER, OTHER), (SYSTEM, USER, ANSWER, OTHER, ANSWER, USER)]
)
def test_the_same_template_in_go_and_in_jinja_gives_the_same_tokens(tokenizer, messages):
    translated = tokenizer.with_template(to_jinja(GO_CHATML))

    assert translated.template.render(messages).ids == tokenizer.template.render(messages).ids


def test_what_is_asked_twice_is_one_turn(tokenizer):
    assert render(tokenizer, "<{{ .Prompt }}>{{ .Response }};", OTHER, OTHER, ANSWER, OTHER) == (
        "<TURN OPEN\n\nTURN OPEN>Yes.;<TURN OPEN>"
    )


def test_a_template_without_a_place_for_the_answer_ends_with_it(tokenizer):
    assert render(tokenizer, "[{{ .Prompt }}]", OTHER, ANSWER, OTHER) == "[TURN OPEN]Yes.[TURN OPEN]"


def test_branches_comments_and_trim_markers(tokenizer):
    branches = "{{ if .System }}[{{ .System }}]{{ else if .Prompt }}-{{ else }}!{{ end }}"
    template = f"A {{{{- /* a comment */ -}}}} {branches}\n{{{{- .Prompt }}}}"

    assert render(tokenizer, template, SYSTEM, OTHER) == "A[Be brief.]TURN OPEN"
    assert render(tokenizer, template, OTHER) == "A-TURN OPEN"


def test_an_if_around_the_answer_opens_the_last_turn(tokenizer):
    template = "U:{{ .Prompt }}\n{{ if .Response }}A:{{ .Response }}\n{{ end }}"

    assert render(tokenizer, template, OTHER, ANSWER, OTHER) == "U:TURN OPEN\nA:Yes.\nU:TURN OPEN\nA:"


def test_jinja_stays_as_it_is():
    assert to_jinja(CHATML) == CHATML


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ("{{ range .Messages }}{{ .Content }}{{ end }}", "range .Messages"),
        ("{{ if and .System .Prompt }}x{{ end }}", "if and .System .Prompt"),
        ("{{ .Prompt }}{{ .Suffix }}", ".Suffix"),
        ("{{ .Prompt }}{{ if .System }}", "without `end`"),
        ("{{ .Prompt }}{{ end }}", "`end` without `if`"),
        ("{{ if .System }}a{{ else }}b{{ else }}c{{ end }}{{ .Prompt }}", "without `end`"),
        ("{{ .Prompt }}" + "{{ if .System }}" * 1000, "more than 20"),
        ("Hello", r"neither `\.Prompt`"),
        ("{{" + " " * 100_000, r"neither `\.Prompt`"),  # reading costs the length, not its square or cube
        ("{{" * 50_000, r"neither `\.Prompt`"),
    ],
)
def test_other_constructs_are_refused_by_name(template, named):
    with pytest.raises(RequestError, match=named):
        to_jinja(template)
