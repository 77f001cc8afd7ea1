"""OpenAI's plain completions, by their translation and with the official client."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from bough.errors import RequestError
from bough.prompting.ask import Ask
from bough.prompting.echo import EchoedPrompt
from bough.server.apis.openai.completions import (
    CompletionRequest,
    LogprobList,
    to_asks,
    write_events,
    write_whole,
)
from bough.server.apis.openai.wire import read_texts
from bough.server.serving.answer import Answered, Delta, Finished, ScoredToken
from tests.server.scripted_answer import LOOP, collect, finish, parse, script
from tests.server.servers import Address, StartServer


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]])],
)
def test_a_prompt_is_a_text_or_tokens_or_several(prompt: Any, expected: Any) -> None:
    assert read_texts(prompt, "prompt", 2) == expected


@pytest.mark.parametrize("prompt", [None, 5, [], ["a", 1], [True], [[1], "a"], {"a": 1}])
def test_any_other_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(RequestError, match=r"^prompt is"):
        read_texts(prompt, "prompt", 2)


def test_an_answer_has_sixteen_tokens_unless_told_otherwise() -> None:
    (ask,) = to_asks(CompletionRequest(model="m", prompt="a"), "")

    assert ask.params.max_tokens == 16


def ask_of(**fields: Any) -> Ask:
    (ask,) = to_asks(CompletionRequest.model_validate({"model": "m", "prompt": "a", **fields}), "")
    return ask


@pytest.mark.parametrize(
    "fields",
    [
        {"best_of": 2},
        {"best_of": 3, "n": 2},
        {"max_tokens": 0},
        {"echo": True, "suffix": "end"},
        {"suffix": "end", "prompt": [1, 2]},
        {"logit_bias": {"a": 1}},
        {"stop": ["a"] * 65},
    ],
)
def test_what_is_not_supported_or_not_together_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"^{next(iter(fields))}"):
        ask_of(**fields)


def test_an_answer_goes_on_past_the_end_of_text_if_asked_for() -> None:
    assert ask_of(ignore_eos=True).params.ignore_eos
    assert not ask_of(ignore_eos=False).params.ignore_eos and not ask_of().params.ignore_eos


def test_fields_that_go_together_are_taken() -> None:
    assert ask_of(n=2, best_of=2, user="me", stop=["."], suffix="end").suffix == "end"
    assert ask_of(best_of=1, n=2, echo=True, max_tokens=0).params.max_tokens == 0
    assert ask_of(suffix="", echo=True).suffix is None


def test_a_prompt_is_scored_if_it_is_repeated_with_logprobs() -> None:
    asked = [ask_of(**fields) for fields in ({}, {"echo": True}, {"logprobs": 0}, {"echo": True, "logprobs": 0})]

    assert [ask.echoes for ask in asked] == [False, True, False, True]
    assert [ask.scores_prompt for ask in asked] == [False, False, False, True]


ECHO = EchoedPrompt("Hi é", (b"Hi", b" ", b"\xc3", b"\xa9"), (0, 2, 3, 3))
SCORES = (ScoredToken(b" ", -1.0, (ScoredToken(b"!", -0.5),)), ScoredToken(b"\xc3", -2.0), ScoredToken(b"\xa9", -3.0))


def finish_scored(choice: int) -> Finished:
    """The end of a choice of one token; the first one has the scores of the prompt."""
    return replace(finish(choice, "x"), logprobs=(ScoredToken(b"x", -4.0),), prompt_logprobs=SCORES if choice == 0 else ())


def test_a_repeated_prompt_stands_before_each_choice_with_its_logprobs_of_which_the_first_is_null() -> None:
    body = CompletionRequest(model="m", prompt="Hi é", n=2, echo=True, logprobs=1)
    answered = Answered(replace(script([]).started, echo=ECHO), (finish_scored(0), finish_scored(1)))

    for choice in write_whole([answered], body)["choices"]:
        assert choice["text"] == "Hi éx"
        assert choice["logprobs"] == {
            "tokens": ["Hi", " ", "bytes:\\xc3", "bytes:\\xa9", "x"],
            "token_logprobs": [None, -1.0, -2.0, -3.0, -4.0],
            "top_logprobs": [None, {"!": -0.5, " ": -1.0}, *({"bytes:\\xc3": -2.0}, {"bytes:\\xa9": -3.0}, {"x": -4.0})],
            "text_offset": [0, 2, 3, 3, 4],
        }


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_streamed_choices_wait_until_the_repeated_prompt_is_scored(order: tuple[int, int]) -> None:
    """The second choice may be computed before the first has scored the prompt."""
    body = CompletionRequest(model="m", prompt="Hi é", n=2, echo=True, logprobs=1, stream=True)
    own = [Delta(choice, "x", logprobs=(ScoredToken(b"x", -4.0),)) for choice in range(2)]
    scored = [Delta(0, prompt_logprobs=SCORES[:2]), Delta(0, prompt_logprobs=SCORES[2:])]
    of_choice = {0: [*scored, own[0], finish_scored(0)], 1: [own[1], finish_scored(1)]}
    answer = script([event for choice in order for event in of_choice[choice]], num_choices=2)
    answer.started = replace(answer.started, echo=ECHO)
    answer.ask = replace(answer.ask, echoes=True)
    answered = Answered(answer.started, (finish_scored(0), finish_scored(1)))

    events = parse(collect(write_events(answer, [], body, None)))  # type: ignore[arg-type]

    for choice in write_whole([answered], body)["choices"]:
        pieces = [each for event in events for each in event["choices"] if each["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        told = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
        assert {name: [value for each in told for value in each[name]] for name in told[0]} == choice["logprobs"]
        assert [piece["finish_reason"] for piece in pieces if piece["finish_reason"]] == ["stop"]


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


@pytest.fixture(scope="module")
def complete_tiny(tiny_server: StartServer) -> Iterator[Any]:
    """Asks a random model for a short greedy continuation, with OpenAI's client."""
    with openai.OpenAI(base_url=f"{tiny_server().url}/v1", api_key="any", max_retries=0, timeout=60) as client:

        def create(**fields: Any) -> Any:
            return client.completions.create(**{"model": "tiny", "temperature": 0, "max_tokens": 3, **fields})

        yield create


def read_stream(chunks: Any, num_choices: int) -> list[dict[str, Any]]:
    """The choices of a stream as wholes."""
    found: list[dict[str, Any]] = [{"text": "", "logprobs": None, "finish_reason": None} for _ in range(num_choices)]
    for chunk in chunks:
        for choice in chunk.choices:
            whole = found[choice.index]
            whole["text"] += choice.text
            whole["finish_reason"] = choice.finish_reason or whole["finish_reason"]
            if choice.logprobs is not None:
                told = choice.logprobs.model_dump()
                before = whole["logprobs"] or {name: [] for name in told}
                whole["logprobs"] = {name: before[name] + told[name] for name in told}
    return found


def test_a_prompt_is_repeated_and_scored_the_same_cold_warm_streamed_and_with_several_choices(complete_tiny: Any) -> None:
    prompt = "Hello there, Grüße aus Köln. " * 4
    fields = {"prompt": prompt, "echo": True, "logprobs": 2}

    cold = complete_tiny(**fields, n=2)
    warm = complete_tiny(**fields, n=2)
    streamed = read_stream(complete_tiny(**fields, n=2, stream=True), 2)
    alone = complete_tiny(**fields, max_tokens=0)

    choice = cold.choices[0]
    num_tokens, logprobs = cold.usage.prompt_tokens, choice.logprobs
    assert choice.text.startswith(prompt) and len(logprobs.tokens) == num_tokens + 3
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert all(each < 0 for each in logprobs.token_logprobs[1:])
    assert logprobs.text_offset[num_tokens] == len(prompt)
    for other in (cold.choices[1], *warm.choices):
        assert other.text == choice.text
        assert other.logprobs.token_logprobs[1:] == pytest.approx(logprobs.token_logprobs[1:], abs=1e-4)
    for whole in streamed:
        assert whole["text"] == choice.text and whole["finish_reason"] == "length"
        assert whole["logprobs"]["tokens"] == logprobs.tokens
        assert whole["logprobs"]["text_offset"] == logprobs.text_offset
        assert whole["logprobs"]["token_logprobs"][1:] == pytest.approx(logprobs.token_logprobs[1:], abs=1e-4)
    assert alone.choices[0].text == prompt and alone.choices[0].finish_reason == "length"
    assert alone.choices[0].logprobs.tokens == logprobs.tokens[:num_tokens]
    assert (warm.usage.prompt_tokens_details.cached_tokens, alone.usage.completion_tokens) == (0, 0)


def test_a_prompt_is_repeated_without_logprobs_and_then_reused(complete_tiny: Any) -> None:
    prompts = ["One two three, ", [5, 6, 7]]
    plain = [complete_tiny(prompt=prompt).choices[0].text for prompt in prompts]

    echoed = [complete_tiny(prompt=prompt, echo=True) for prompt in prompts]
    (streamed,) = read_stream(complete_tiny(prompt=prompts[0], echo=True, stream=True), 1)

    assert echoed[0].choices[0].text == prompts[0] + plain[0] == streamed["text"]
    assert echoed[1].choices[0].text.endswith(plain[1]) and len(echoed[1].choices[0].text) > len(plain[1])
    assert all(each.usage.prompt_tokens_details.cached_tokens > 0 for each in echoed)


def test_a_biased_token_is_banned_or_forced_beside_requests_without_bias(complete_tiny: Any) -> None:
    ids = [5, 6, 7]
    plain = complete_tiny(prompt=ids, logprobs=0).choices[0]

    forced = complete_tiny(prompt=ids, logit_bias={"70": 100}, logprobs=0).choices[0]

    assert len(set(forced.logprobs.tokens)) == 1
    assert forced.logprobs.tokens != plain.logprobs.tokens
    with pytest.raises(openai.BadRequestError, match="token id 99999"):
        complete_tiny(prompt=ids, logit_bias={"99999": 1})
    with pytest.raises(openai.BadRequestError, match="tiny does not support insert"):
        complete_tiny(prompt="a", suffix="b")


def test_an_answer_that_repeats_itself_is_cut_off_and_the_details_say_why() -> None:
    (choice,) = write_whole([Answered(script([]).started, (LOOP,))], CompletionRequest(model="m", prompt="a"))["choices"]

    assert (choice["finish_reason"], choice["finish_details"]) == ("length", {"type": "loop", "cycle_tokens": 4})


@pytest.fixture
def complete(client: openai.OpenAI, server: Address) -> Any:
    """Asks for a short greedy continuation, unless told otherwise."""

    def create(prompt: Any = "One, two, three,", **fields: Any) -> Any:
        return client.completions.create(
            prompt=prompt, **{"model": server.model, "temperature": 0, "max_tokens": 4, **fields}
        )

    return create


def test_several_prompts_have_their_choices_in_order(complete: Any) -> None:
    alone = [complete(prompt).choices[0].text for prompt in ("One, two, three,", "Red, green,")]

    answer = complete(["One, two, three,", "Red, green,"], n=2)

    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [alone[0], alone[0], alone[1], alone[1]]
    assert answer.usage.completion_tokens == 16


def test_several_prompts_stream_to_the_same_texts(complete: Any) -> None:
    prompts = ["One, two, three,", "Red, green,"]
    whole = complete(prompts)

    texts = ["", ""]
    for chunk in complete(prompts, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.text

    assert texts == [choice.text for choice in whole.choices]
    assert chunk.usage.prompt_tokens == whole.usage.prompt_tokens


def test_token_ids_are_a_prompt(complete: Any) -> None:
    assert complete([50, 29, 295]).usage.prompt_tokens == 3


@pytest.mark.parametrize("prompt", ["", [10**9], [-1], ["a", 1]])
def test_a_prompt_that_cannot_be_read_is_refused(complete: Any, prompt: Any) -> None:
    with pytest.raises(openai.BadRequestError):
        complete(prompt)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_later_prompt_that_is_too_long_is_refused_before_any_answer(complete: Any, is_streamed: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(["One, two,", "x " * 9000], stream=is_streamed)

    assert caught.value.code == "context_length_exceeded"


def test_an_unknown_model_is_not_found(complete: Any) -> None:
    with pytest.raises(openai.NotFoundError):
        complete(model="nowhere", stream=True)
