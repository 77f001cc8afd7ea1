"""An answer on its way: what is told apart, what is recorded of it, and that it ends once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from bough.errors import EngineError
from bough.generate.request import Request
from bough.models.prompts import Prompts
from bough.models.tokenizer import Tokenizer
from bough.prompting.ask import Ask, ToolChoice
from bough.prompting.prompt import AnswerFormat, ModelFacts
from bough.scheduling.job import Listener, PromptAdvanced, PromptLoaded, RequestBegan
from bough.server.serving.answer import Answer, ChoiceNews, Delta, Finished, ScoredToken, make_listener
from bough.server.serving.loaded.progress import LiveRequests, RequestRecord
from bough.system.inbox import Inbox, Mailbox
from bough.tokens import Tokens
from bough.types import Alternative, Chunk, Completion, TokenLogprob, Usage
from tests.models.tiny_tokenizer import byte_level

TOKENIZER = Tokenizer(byte_level())
LOADED: Any = SimpleNamespace(
    name="m",
    info=SimpleNamespace(digest="0123"),
    generator=SimpleNamespace(
        facts=ModelFacts("m", Prompts(TOKENIZER, 500), 100), stores_answers=True, submit=lambda request: None
    ),
)
STARTED = Usage(prompt_tokens=10, matched_tokens=6, cached_tokens=6)
CALLS = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'


def listen(scene: Callable[..., Coroutine[Any, Any, None]], **ask: Any) -> list[RequestRecord]:
    """Play a scene with an answer and the listeners of its choices; returns what was recorded of it."""
    records: list[RequestRecord] = []

    async def play() -> None:
        wanted = Ask("m", **ask)
        inbox, mailbox = Inbox[ChoiceNews](asyncio.get_running_loop()), Mailbox[ChoiceNews]()
        listeners = [make_listener(choice, mailbox, inbox) for choice in range(wanted.num_choices)]
        tools: dict[str, Any] = {"add": None} if "tool_choice" in ask else {}
        answer_format = AnswerFormat(tools, splits_thinking=True)
        requests: Any = [SimpleNamespace(cancel=lambda: None) for _ in listeners]
        progress = LiveRequests().begin("", "m", "", 0.0)
        answer = Answer(
            wanted,
            LOADED,
            Request(Tokens.of([1, 2, 3])),
            answer_format,
            requests,
            mailbox,
            progress,
            lambda record, is_complete: records.append(record),
            clock=lambda: 0.0,
        )
        listener = listeners[0]
        listener(PromptAdvanced(STARTED.cached_tokens, STARTED.prompt_tokens))
        listener(RequestBegan(STARTED, 0.5))
        await answer.start()
        try:
            await scene(answer, *listeners)
        finally:
            answer.close()
            answer.close()

    asyncio.run(play())
    return records


def test_what_was_heard_of_an_answer_that_is_broken_off_is_recorded_once() -> None:
    async def scene(answer: Answer, listener: Listener) -> None:
        listener(PromptAdvanced(9, 10))
        listener(Chunk("Hi", (1, 2)))
        async for event in answer:
            if isinstance(event, Delta):
                break

    (record,) = listen(scene)

    assert record.usage is not None
    assert (record.usage.cached_tokens, record.usage.computed_tokens, record.completion_tokens) == (6, 3, 2)


@pytest.mark.parametrize(
    ("done_tokens", "is_loaded", "expected"),
    [
        ([], False, (6, 0)),
        ([0, 4], False, (0, 0)),  # while it loads, nothing is reused yet
        ([0, 4, 2], True, (2, 0)),  # loading was given up, and less is reused than was planned
        ([0, 4, 2, 9], True, (2, 7)),
    ],
)
def test_of_an_answer_that_is_broken_off_no_token_counts_as_cached_that_was_not(
    done_tokens: list[int], is_loaded: bool, expected: tuple[int, int]
) -> None:
    async def scene(answer: Answer, listener: Listener) -> None:
        for done in done_tokens:
            listener(PromptAdvanced(done, 10))
        if is_loaded:
            listener(PromptLoaded(replace(STARTED, cached_tokens=2)))
        listener(Chunk("", ()))
        async for event in answer:
            if isinstance(event, Delta):
                break

    (record,) = listen(scene)

    assert record.usage is not None
    assert (record.usage.cached_tokens, record.usage.computed_tokens) == expected


def test_the_prompt_of_several_choices_is_recorded_as_the_first_one_found_it() -> None:
    found, found_by_other = replace(STARTED, cached_tokens=2), replace(STARTED, cached_tokens=9)

    async def scene(answer: Answer, listener: Listener, other: Listener) -> None:
        listener(PromptLoaded(found))
        other(PromptLoaded(found_by_other))
        other(Completion("", (), "stop", found_by_other))
        listener(Completion("", (), "stop", found))
        assert [event.choice async for event in answer if isinstance(event, Finished)] == [1, 0]
        assert answer.started.usage == found

    (record,) = listen(scene, num_choices=2)

    assert record.usage == found


def test_thinking_text_and_calls_are_told_apart_and_of_several_calls_one_is_taken_if_asked() -> None:
    async def scene(answer: Answer, listener: Listener) -> None:
        for piece in ("<thi", "nk>hm</think>", "\n\nWell.", CALLS, CALLS):
            listener(Chunk(piece, (1,)))
        listener(Completion("", (1,) * 5, "stop"))
        (finished,) = [event async for event in answer if isinstance(event, Finished)]
        assert (finished.thinking, finished.text, finished.finish_reason) == ("hm", "Well.", "tool_calls")
        assert [call.name for call in finished.tool_calls] == ["add"]
        assert finished.thinking_tokens == len(TOKENIZER.encode("hm"))

    listen(scene, tool_choice=ToolChoice(is_single=True), counts_thinking=True)


def test_thinking_is_not_counted_where_nobody_asks_for_the_number() -> None:
    async def scene(answer: Answer, listener: Listener) -> None:
        listener(Chunk("<think>hm</think>Well.", (1,)))
        listener(Completion("", (1,) * 5, "stop"))
        (finished,) = [event async for event in answer if isinstance(event, Finished)]
        assert (finished.thinking, finished.thinking_tokens) == ("hm", 0)

    listen(scene)


def test_an_error_on_the_way_is_raised_and_recorded() -> None:
    async def scene(answer: Answer, listener: Listener) -> None:
        listener(EngineError("broken"))
        with pytest.raises(EngineError):
            async for _ in answer:
                pass

    (record,) = listen(scene)

    assert record.error == "broken"


def test_tokens_with_probabilities_come_as_their_bytes_piece_by_piece_and_whole() -> None:
    first, second = TOKENIZER.encode("a")[0], TOKENIZER.encode("b")[0]

    async def scene(answer: Answer, listener: Listener) -> None:
        listener(Chunk("a", (first,), (TokenLogprob(first, "a", -0.5, (Alternative(second, -2.0),)),)))
        listener(Chunk("b", (second,), (TokenLogprob(second, "b", -0.25),)))
        listener(Completion("ab", (first, second), "stop"))
        *deltas, finished = [event async for event in answer]
        scores = (ScoredToken(b"a", -0.5, (ScoredToken(b"b", -2.0),)), ScoredToken(b"b", -0.25))
        assert [delta.logprobs for delta in deltas if isinstance(delta, Delta) and delta.text] == [scores[:1], scores[1:]]
        assert isinstance(finished, Finished) and finished.logprobs == scores

    listen(scene)


def test_what_has_come_together_is_read_together_and_an_error_after_it() -> None:
    async def scene(answer: Answer, listener: Listener) -> None:
        for text in ("one ", "two ", "three"):
            listener(Chunk(text, (1,)))
        listener(EngineError("no more"))
        batches = answer.batches()
        assert len(await anext(batches)) == 3
        with pytest.raises(EngineError):
            await anext(batches)

    (record,) = listen(scene)

    assert (record.completion_tokens, record.error) == (3, "no more")


def test_what_comes_with_the_start_of_an_answer_is_not_lost() -> None:
    async def scene(answer: Answer, listener: Listener) -> None:
        listener(RequestBegan(STARTED, 0.5))
        listener(Chunk("Hi", (1,)))
        await answer.start()
        async for events in answer.batches():
            assert isinstance(events[0], Delta)
            break

    (record,) = listen(scene)

    assert record.completion_tokens == 1
