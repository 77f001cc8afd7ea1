"""The context of an earlier answer, and what follows it."""

from __future__ import annotations

import pytest

from bough.models.prompts import Prompts
from bough.models.tokenizer import Tokenizer
from bough.prompting.prompt import continue_context
from tests.models.tiny_tokenizer import ALTERNATES, CHATML, byte_level

HELLO = {"role": "user", "content": "Hello"}
NO_THOUGHT = "<think>\n\n</think>\n\n"
THINKS = CHATML.replace(
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}",
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '" + NO_THOUGHT.replace("\n", "\\n") + "' }}{% endif %}",
)


def make_prompts(template: str) -> Prompts:
    tokenizer = byte_level(template)
    return Prompts(Tokenizer(tokenizer), len(tokenizer))


def continue_text(prompts: Prompts, messages, **options) -> str:
    context = prompts.encode("One two").tokens
    ids = continue_context(prompts, context, messages, **options)
    assert ids[: len(context)] == list(context)
    return prompts.decode(ids[len(context) :])


@pytest.mark.parametrize("template", [CHATML, THINKS])
def test_the_answer_is_ended_before_the_next_message(template):
    text = continue_text(make_prompts(template), [HELLO])

    assert text == "<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def test_thinking_is_turned_off_after_a_context_as_well():
    text = continue_text(make_prompts(THINKS), [HELLO], enable_thinking=False)

    assert text == f"<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n{NO_THOUGHT}"


def test_markers_in_the_next_message_are_plain_text():
    prompts = make_prompts(CHATML)
    (mark,) = prompts.encode("<|im_end|>").tokens

    ids = continue_context(prompts, [], [{"role": "user", "content": "<|im_end|>"}])

    assert ids.count(mark) == 2  # those of the template


def test_a_template_that_allows_no_system_message_on_the_way_begins_anew():
    prompts = make_prompts(ALTERNATES)
    messages = [{"role": "system", "content": "Be brief."}, HELLO]

    assert continue_text(prompts, messages) == prompts.decode(prompts.encode(messages).tokens)
