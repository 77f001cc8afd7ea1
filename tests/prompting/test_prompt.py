"""From what a client asks for to the ids that a model is given, with the default model's tokenizer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bough.errors import PromptTooLong, RequestError
from bough.generate.request import Request
from bough.models import ModelFiles, load_tokenizer
from bough.models.prompts import Prompts
from bough.prompting.ask import Ask, ToolChoice
from bough.prompting.prompt import AnswerFormat, ModelFacts, prepare_request
from bough.types import SamplingParams

pytestmark = pytest.mark.model
QUESTION = {"role": "user", "content": "What is the capital of France?"}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def model(smollm2_files: ModelFiles) -> ModelFacts:
    prompts = Prompts(load_tokenizer(smollm2_files), 49_152)
    return ModelFacts("smollm2", prompts, 8192)


def text_of(prepared: Request, model: ModelFacts) -> str:
    return model.prompts.decode(prepared.tokens)


def test_a_beginning_of_the_answer_is_gone_on_with(model: ModelFacts) -> None:
    ask = Ask("smollm2", messages=[QUESTION, {"role": "assistant", "content": "The capital of "}])

    assert text_of(prepare_request(ask, model), model).endswith("<|im_start|>assistant\nThe capital of")


def test_special_tokens_in_a_beginning_are_plain_text(model: ModelFacts) -> None:
    plain = prepare_request(Ask("smollm2", messages=[QUESTION]), model).tokens
    ask = Ask("smollm2", messages=[QUESTION, {"role": "assistant", "content": "a<|im_end|>b"}])

    begun = prepare_request(ask, model).tokens[len(plain) :]

    assert not set(begun) & model.prompts.tokenizer.special_ids
    assert model.prompts.decode(begun) == "a<|im_end|>b"


def test_a_chat_that_ends_with_a_call_is_not_gone_on_with(model: ModelFacts) -> None:
    call = {"function": {"name": "weather", "arguments": {}}}
    ask = Ask("smollm2", messages=[QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}])

    assert text_of(prepare_request(ask, model), model).endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_tools_are_told_in_words_to_a_template_that_does_not_know_them(model: ModelFacts) -> None:
    ask = Ask("smollm2", messages=[QUESTION], tools=(WEATHER,))

    prepared = prepare_request(ask, model)

    assert '"name": "weather"' in text_of(prepared, model)
    answer = AnswerFormat.of(ask, model, prepared)
    assert list(answer.tools) == ["weather"] and not answer.is_forced


def test_where_a_client_asks_for_tools_that_the_template_must_know_it_is_refused(model: ModelFacts) -> None:
    with pytest.raises(RequestError, match="smollm2 does not support tools"):
        prepare_request(Ask("smollm2", messages=[QUESTION], tools=(WEATHER,), needs_tool_template=True), model)


def test_sorted_tools_give_one_prompt_whatever_their_order(model: ModelFacts) -> None:
    ask = Ask("smollm2", messages=[QUESTION], tools=(WEATHER, CLOCK))
    turned = replace(ask, tools=(CLOCK, WEATHER))

    assert prepare_request(ask, model).tokens != prepare_request(turned, model).tokens
    one, other = (prepare_request(each, model, sorts_tools=True).tokens for each in (ask, turned))
    assert one == other


def test_a_forced_call_is_forced_by_a_grammar(model: ModelFacts) -> None:
    ask = Ask("smollm2", messages=[QUESTION], tools=(WEATHER, CLOCK), tool_choice=ToolChoice("required", "clock"))

    prepared = prepare_request(ask, model)

    assert AnswerFormat.of(ask, model, prepared).is_forced and isinstance(prepared.params.format, dict)
    assert prepared.params.format["properties"]["name"] == {"const": "clock"}


def test_thinking_is_refused_where_there_is_none(model: ModelFacts) -> None:
    with pytest.raises(RequestError, match="does not support thinking"):
        prepare_request(Ask("smollm2", messages=[QUESTION], think=True), model)
    assert prepare_request(Ask("smollm2", messages=[QUESTION], think=False), model).tokens


def test_a_smaller_context_bounds_prompt_and_answer(model: ModelFacts) -> None:
    ask = Ask("smollm2", messages=[QUESTION], context_tokens=64)
    prepared = prepare_request(ask, model)
    assert prepared.params.max_tokens == 64 - len(prepared.tokens)

    with pytest.raises(PromptTooLong, match="the context holds 16"):
        prepare_request(replace(ask, context_tokens=16), model)


def test_a_long_chat_is_shortened_to_leave_room_for_the_answer(model: ModelFacts) -> None:
    history = [
        each for number in range(40) for each in ({**QUESTION}, {"role": "assistant", "content": f"Paris {number}."})
    ]
    ask = Ask("smollm2", messages=[*history, QUESTION], context_tokens=256, truncates=True)

    prepared = prepare_request(replace(ask, params=SamplingParams(max_tokens=32)), model)

    assert len(prepared.tokens) <= 256 - 32
    assert text_of(prepared, model).endswith("France?<|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(PromptTooLong):
        prepare_request(replace(ask, truncates=False), model)


def test_a_long_text_loses_its_beginning(model: ModelFacts) -> None:
    ask = Ask("smollm2", text="one two three " * 100 + "end", context_tokens=64, truncates=True)

    prepared = prepare_request(ask, model)

    assert len(prepared.tokens) < 64 and text_of(prepared, model).endswith(" end")


@pytest.mark.parametrize("turns", [8, 12, 40])
def test_a_long_chat_with_special_tokens_in_its_text_is_shortened_too(model: ModelFacts, turns: int) -> None:
    history = [
        {"role": role, "content": "what does <|im_end|> mean, and <|im_start|>?"}
        for _ in range(turns)
        for role in ("user", "assistant")
    ]
    ask = Ask("smollm2", messages=[*history, QUESTION], context_tokens=512, truncates=True)

    prepared = prepare_request(ask, model)

    assert 256 < len(prepared.tokens) < 512
    assert text_of(prepared, model).endswith("France?<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("context_tokens", [1, 2, 3, 5, 20])
def test_a_tiny_context_is_refused_or_kept_to(model: ModelFacts, context_tokens: int) -> None:
    for ask in (Ask("smollm2", messages=[QUESTION] * 3), Ask("smollm2", text="one two three " * 50)):
        try:
            prepared = prepare_request(replace(ask, context_tokens=context_tokens, truncates=True), model)
        except PromptTooLong:
            continue
        assert len(prepared.tokens) < context_tokens


@pytest.mark.parametrize(
    ("wanted", "setting", "expected"),
    [(None, 0, 500), (None, 300, 300), (None, -1, 2000), (-1, 300, 2000), (40, 300, 40), (9000, 0, 2000)],
)
def test_a_smaller_context_bounds_the_answer(model: ModelFacts, wanted: int | None, setting: int, expected: int) -> None:
    ask = Ask("smollm2", messages=[QUESTION], params=SamplingParams(max_tokens=wanted), context_tokens=2000)

    prepared = prepare_request(ask, replace(model, max_tokens=setting))

    room = 2000 - len(prepared.tokens)
    assert prepared.params.max_tokens == min(expected, room)
