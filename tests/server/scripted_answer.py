"""An answer that gives what a test wrote down: thinking, several calls, a failure half-way. The default model does none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, cast

from bough.prompting.ask import Ask
from bough.server.serving.answer import Answer, Delta, Event, Finished, Started, ToolCall
from bough.types import Completion, Usage

PLANNED = Usage(prompt_tokens=10, matched_tokens=7, cached_tokens=7)
USAGE = replace(PLANNED, cached_tokens=6, computed_tokens=4, completion_tokens=3)
"""What came of it: one token that was known could not be read from disk."""


class ScriptedAnswer:
    """Gives these events, then raises the failure if there is one."""

    def __init__(self, events: Sequence[Event], *, num_choices: int = 1, failure: Exception | None = None) -> None:
        self.ask = Ask(model="scripted", num_choices=num_choices)
        self.started = Started(PLANNED, digest="0123456789abcdef")
        self._events = events
        self._failure = failure

    async def __aiter__(self) -> AsyncIterator[Event]:
        async for events in self.batches():
            for event in events:
                yield event

    async def batches(self) -> AsyncIterator[list[Event]]:
        for event in self._events:
            yield [event]
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Nothing to release."""


def script(events: Sequence[Event], **options: Any) -> Answer:
    """A scripted answer where an answer is wanted."""
    return cast(Answer, ScriptedAnswer(events, **options))


def finish(choice: int = 0, text: str = "", thinking: str = "", calls: tuple[ToolCall, ...] = (), **more: Any) -> Finished:
    """The end of a choice of three tokens. Choices after the first reuse the whole prompt but a token."""
    usage = USAGE if choice == 0 else replace(USAGE, cached_tokens=9, computed_tokens=1)
    completion = Completion(text, (1, 2, 3), "stop", usage)
    reason = more.get("reason", "tool_calls" if calls else "stop")
    return Finished(choice, text, thinking, calls, reason, completion)


LOOP = finish(reason="loop")
LOOP = replace(LOOP, completion=replace(LOOP.completion, finish_reason="loop", cycle_tokens=4))
"""The end of a choice that repeated four tokens."""


def collect(pieces: AsyncIterator[str]) -> list[str]:
    """All pieces of a stream."""

    async def read() -> list[str]:
        return [piece async for piece in pieces]

    return asyncio.run(read())


def parse(pieces: Sequence[str]) -> list[Any]:
    """The data of each event, read as JSON; comments and the end mark are left out."""
    lines = [line for piece in pieces for line in piece.splitlines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]


WEATHER = ToolCall("call_1", "weather", {"city": "Oslo"})
THOUGHT = (Delta(thinking="Hm. "), Delta(thinking="Yes."), Delta(text="It "), Delta(text="rains."))
