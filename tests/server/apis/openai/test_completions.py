"""OpenAI's plain completions, by their translation and with the official client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from bough.errors import RequestError
from bough.server.apis.openai.completions import CompletionRequest, LogprobList, read_prompts, to_asks, write_whole
from bough.server.serving.ask import Answered, ScoredToken
from tests.server.scripted_answer import LOOP, finish, script
from tests.server.servers import Server


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]])],
)
def test_a_prompt_is_a_text_or_tokens_or_several(prompt: Any, expected: Any) -> None:
    assert read_prompts(prompt) == expected


@pytest.mark.parametrize("prompt", [None, 5, [], ["a", 1], [True], [[1], "a"], {"a": 1}])
def test_any_other_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(RequestError, match=r"^prompt is"):
        read_prompts(prompt)


def test_an_answer_has_sixteen_tokens_unless_told_otherwise() -> None:
    (ask,) = to_asks(CompletionRequest(model="m", prompt="a"), "")

    assert ask.params.max_tokens == 16


@pytest.mark.parametrize("field", [{"echo": True}, {"suffix": "end"}, {"best_of": 2}])
def test_what_is_not_supported_is_refused_by_name(field: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(field))):
        to_asks(CompletionRequest.model_validate({"model": "m", "prompt": "a", **field}), "")


def test_a_token_that_is_part_of_a_character_is_told_by_its_bytes() -> None:
    first, second = (bytes([each]) for each in "é".encode())

    written = LogprobList().write([ScoredToken(first, -0.5, (ScoredToken(second, float("-inf")),))])

    assert written["tokens"] == ["bytes:\\xc3"]
    assert written["top_logprobs"] == [{"bytes:\\xa9": -9999.0, "bytes:\\xc3": -0.5}]


def test_every_token_of_a_character_begins_where_the_character_does() -> None:
    tokens = [bytes([each]) for each in "é!é".encode()]

    written = LogprobList().write([ScoredToken(each, -0.5) for each in tokens])

    assert written["text_offset"] == [0, 0, 1, 2, 2]


def test_usage_is_the_sum_of_what_the_first_choice_of_each_prompt_really_reused() -> None:
    body = CompletionRequest(model="m", prompt=["a", "b"], n=2)
    answered = Answered(script([]).started, (finish(0), finish(1)))

    usage = write_whole([answered, answered], body)["usage"]

    assert usage["prompt_tokens_details"]["cached_tokens"] == 12
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (20, 12)


def test_an_answer_that_repeats_itself_is_cut_off_and_the_details_say_why() -> None:
    (choice,) = write_whole([Answered(script([]).started, (LOOP,))], CompletionRequest(model="m", prompt="a"))["choices"]

    assert (choice["finish_reason"], choice["finish_details"]) == ("length", {"type": "loop", "cycle_tokens": 4})


@pytest.fixture
def complete(client: openai.OpenAI, server: Server) -> Any:
    """Asks for a short greedy continuation, unless told otherwise."""

    def create(prompt: Any = "One, two, three,", **fields: Any) -> Any:
        return client.completions.create(
            prompt=prompt, **{"model": server.model, "temperature": 0, "max_tokens": 4, **fields}
        )

    return create


@pytest.mark.model
def test_a_text_is_continued_as_it_stands(complete: Any) -> None:
    answer = complete()

    assert answer.object == "text_completion"
    assert "four" in answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.model
def test_a_repeated_prompt_tells_what_was_cached(complete: Any) -> None:
    prompt = "The quick brown fox jumps over the lazy dog, and then"
    cold, warm = complete(prompt), complete(prompt)

    assert warm.choices[0].text == cold.choices[0].text
    assert 0 < warm.usage.prompt_tokens_details.cached_tokens < warm.usage.prompt_tokens == cold.usage.prompt_tokens


@pytest.mark.model
def test_several_prompts_have_their_choices_in_order(complete: Any) -> None:
    alone = [complete(prompt).choices[0].text for prompt in ("One, two, three,", "Red, green,")]

    answer = complete(["One, two, three,", "Red, green,"], n=2)

    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [alone[0], alone[0], alone[1], alone[1]]
    assert answer.usage.completion_tokens == 16


@pytest.mark.model
def test_several_prompts_stream_to_the_same_texts(complete: Any) -> None:
    prompts = ["One, two, three,", "Red, green,"]
    whole = complete(prompts)

    texts = ["", ""]
    for chunk in complete(prompts, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.text

    assert texts == [choice.text for choice in whole.choices]
    assert chunk.usage.prompt_tokens == whole.usage.prompt_tokens


@pytest.mark.model
def test_logprobs_stand_side_by_side_with_where_each_token_begins(complete: Any) -> None:
    choice = complete(logprobs=2).choices[0]

    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:i])) for i in range(4)]
    assert [
        top[token] for top, token in zip(logprobs.top_logprobs, logprobs.tokens, strict=True)
    ] == logprobs.token_logprobs


@pytest.mark.model
def test_token_ids_are_a_prompt(complete: Any) -> None:
    assert complete([504, 2988, 295]).usage.prompt_tokens == 3


@pytest.mark.model
@pytest.mark.parametrize("prompt", ["", [10**9], [-1], ["a", 1]])
def test_a_prompt_that_cannot_be_read_is_refused(complete: Any, prompt: Any) -> None:
    with pytest.raises(openai.BadRequestError):
        complete(prompt)


@pytest.mark.model
@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_later_prompt_that_is_too_long_is_refused_before_any_answer(complete: Any, is_streamed: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(["One, two,", "x " * 9000], stream=is_streamed)

    assert caught.value.code == "context_length_exceeded"


@pytest.mark.model
def test_an_unknown_model_is_not_found(complete: Any) -> None:
    with pytest.raises(openai.NotFoundError):
        complete(model="nowhere", stream=True)
