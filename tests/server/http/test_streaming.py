"""Work for a client that may hang up: it ends with the client, and nothing that was opened stays open."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect

from bough.server.http.streaming import (
    EventFrame,
    cancel_on_disconnect,
    json_line,
    sse,
)
from bough.server.serving.answer import Answer
from tests.waiting import BOUND_S


class Opened(Answer):
    """An answer that notes whether it was closed."""

    def __init__(self) -> None:
        self.was_closed = False

    def close(self) -> None:
        self.was_closed = True


class FakeRequest:
    """A request whose client hangs up when told to."""

    def __init__(self, *, is_gone: bool) -> None:
        self.gone = asyncio.Event()
        if is_gone:
            self.gone.set()

    async def receive(self) -> dict[str, str]:
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def open_at_the_last_moment(answer: Opened) -> Opened:
    """Work that is told to stop and has its answer just then."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        return answer
    raise AssertionError


def play(scene: Any) -> None:
    asyncio.run(asyncio.wait_for(scene, BOUND_S))


def test_work_is_cancelled_when_the_client_hangs_up() -> None:
    async def scene() -> None:
        work = asyncio.ensure_future(asyncio.Event().wait())
        with pytest.raises(ClientDisconnect):
            await cancel_on_disconnect(FakeRequest(is_gone=True), work)  # type: ignore[arg-type]
        assert work.cancelled()

    play(scene())


def test_an_answer_that_was_opened_as_the_client_hung_up_is_closed() -> None:
    async def scene() -> None:
        answer = Opened()
        with pytest.raises(ClientDisconnect):
            await cancel_on_disconnect(FakeRequest(is_gone=True), open_at_the_last_moment(answer), Opened.close)  # type: ignore[arg-type]
        assert answer.was_closed

    play(scene())


def test_an_answer_that_nobody_took_because_the_server_ended_is_closed() -> None:
    async def scene() -> None:
        answer, has_begun, ready = Opened(), asyncio.Event(), asyncio.Event()

        async def open_soon() -> Opened:
            has_begun.set()
            await ready.wait()
            return answer

        waiting = asyncio.ensure_future(cancel_on_disconnect(FakeRequest(is_gone=False), open_soon(), Opened.close))  # type: ignore[arg-type]
        await has_begun.wait()
        ready.set()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert answer.was_closed

    play(scene())


def test_an_answer_that_was_taken_stays_open() -> None:
    async def scene() -> None:
        answer = Opened()

        async def open_now() -> Opened:
            return answer

        assert await cancel_on_disconnect(FakeRequest(is_gone=False), open_now(), Opened.close) is answer  # type: ignore[arg-type]
        assert not answer.was_closed

    play(scene())


@given(st.text(), st.text())
def test_a_frame_writes_the_same_bytes_as_the_whole_event(first: str, second: str) -> None:
    def write_one(text: str) -> str:
        return sse({"id": 7, "choices": [{"delta": {"content": text}, "logprobs": None}]})

    def write_two(time: str, text: str) -> str:
        return json_line({"model": 'a "model"', "at": time, "message": {"content": text}, "done": False})

    assert EventFrame(write_one).fill(first) == write_one(first)
    assert EventFrame(write_two, num_texts=2).fill(first, second) == write_two(first, second)
