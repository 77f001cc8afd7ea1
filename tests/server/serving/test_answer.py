"""An answer on its way: what is told apart, what is recorded of it, and that it ends once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bough.errors import EngineError
from bough.models.prompts import Encoded
from bough.server.serving.answer import Answer, Ear
from bough.server.serving.ask import Ask, Delta, Finished, ToolChoice
from bough.server.serving.loaded import LoadedModel
from bough.server.serving.prompting.prompt import Prepared
from bough.server.serving.record import RequestRecord
from bough.types import Chunk, Completion, SamplingParams, Usage

LOADED = cast(LoadedModel, SimpleNamespace(name="m"))
STARTED = Usage(prompt_tokens=10, matched_tokens=6, cached_tokens=6)
CALLS = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'


def listen(scene: Callable[[Answer, Ear], Coroutine[Any, Any, None]], **ask: Any) -> list[RequestRecord]:
    """Play a scene with an answer of one choice; returns what was recorded of it."""
    records: list[RequestRecord] = []

    async def play() -> None:
        answer = Answer(Ask("m", **ask), LOADED, 0.0, records.append, lambda: 0.0)
        tools: dict[str, Any] = {"add": None} if "tool_choice" in ask else {}
        answer.expect(Prepared(Encoded([1, 2, 3]), SamplingParams(), tools, splits_thinking=True))
        ear = Ear(answer.mailbox, 0)
        ear.on_start(STARTED, 0.5)
        await answer.start()
        try:
            await scene(answer, ear)
        finally:
            answer.close()
            answer.close()

    asyncio.run(play())
    return records


def test_what_was_heard_of_an_answer_that_is_broken_off_is_recorded_once() -> None:
    async def scene(answer: Answer, ear: Ear) -> None:
        ear.on_progress(9, 10)
        ear.on_chunk(Chunk("Hi", (1, 2)))
        async for event in answer:
            if isinstance(event, Delta):
                break

    (record,) = listen(scene)

    assert record.usage is not None
    assert (record.usage.cached_tokens, record.usage.computed_tokens, record.completion_tokens) == (6, 3, 2)


def test_thinking_text_and_calls_are_told_apart_and_of_several_calls_one_is_taken_if_asked() -> None:
    async def scene(answer: Answer, ear: Ear) -> None:
        for piece in ("<thi", "nk>hm</think>", "\n\nWell.", CALLS, CALLS):
            ear.on_chunk(Chunk(piece, (1,)))
        ear.on_end(Completion("", (1,) * 5, "stop"))
        (finished,) = [event async for event in answer if isinstance(event, Finished)]
        assert (finished.thinking, finished.text, finished.finish_reason) == ("hm", "Well.", "tool_calls")
        assert [call.name for call in finished.tool_calls] == ["add"]

    listen(scene, tool_choice=ToolChoice(is_single=True))


def test_an_error_on_the_way_is_raised_and_recorded() -> None:
    async def scene(answer: Answer, ear: Ear) -> None:
        ear.on_error(EngineError("broken"))
        with pytest.raises(EngineError):
            async for _ in answer:
                pass

    (record,) = listen(scene)

    assert record.error == "broken"
