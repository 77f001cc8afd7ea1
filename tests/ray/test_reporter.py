"""A replica goes on telling its figures, whatever its engine and the actor that hears it do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")
pytestmark = pytest.mark.ray

from bough.cache.tree.state import Tier  # noqa: E402
from bough.ray import reporter as module  # noqa: E402
from bough.ray.holdings import ReplicaReport  # noqa: E402
from bough.ray.reporter import Reporter  # noqa: E402
from bough.routing import PageNote, ReplicaRates  # noqa: E402
from bough.routing.page_reports import unpack_message  # noqa: E402
from bough.server.serving.remote.host import PageNotes  # noqa: E402

PAGE = bytes(16)
NOTHING = PageNotes({}, ReplicaRates())


class Host:
    """A replica whose tree is looked at as a test says."""

    name = "replica-0"

    def __init__(self, look: Callable[[], Awaitable[PageNotes]]) -> None:
        self.look = look

    def snapshot(self) -> dict[str, Any]:
        return {"queue": 0, "is_stuck": False}


def hear(look: Callable[[], Awaitable[PageNotes]], most: int, failures: int = 0) -> list[ReplicaReport]:
    """The first reports of a replica, after so many that could not be told."""
    heard: list[ReplicaReport] = []
    failing = [RuntimeError("the actor is lost")] * failures

    async def run() -> None:
        enough = asyncio.Event()

        async def report(told: ReplicaReport) -> bool:
            if failing:
                raise failing.pop()
            heard.append(told)
            if len(heard) >= most:
                enough.set()
            return False

        holdings = SimpleNamespace(report=SimpleNamespace(remote=report))
        host: Any = Host(look)
        telling = asyncio.create_task(Reporter(host, holdings, "id").run())
        async with asyncio.timeout(10):
            await enough.wait()
        telling.cancel()

    asyncio.run(run())
    return heard


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPORT_S", 0.02)
    monkeypatch.setattr(module, "INTERVAL_S", 0.01)


def test_figures_are_told_while_a_step_of_the_engine_takes_long() -> None:
    async def look() -> PageNotes:
        await asyncio.Event().wait()
        return NOTHING

    assert [report.name for report in hear(look, most=3)] == ["replica-0"] * 3


def test_a_look_that_fails_is_not_the_last_one() -> None:
    failures = [AssertionError("a mistake")]

    async def look() -> PageNotes:
        if failures:
            raise failures.pop()
        return NOTHING

    assert len(hear(look, most=2)) == 2


def test_all_pages_are_told_after_a_report_was_lost() -> None:
    notes: list[Any] = [{PAGE: PageNote(Tier.DEVICE)}]

    async def look() -> PageNotes:
        return PageNotes(notes.pop() if notes else {}, ReplicaRates())

    messages = [unpack_message(data) for report in hear(look, most=9, failures=1) for data in report.messages]
    assert any(each.is_listing for each in messages)
    assert any(PAGE in each.notes for each in messages)
