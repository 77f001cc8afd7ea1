"""`/api/cache/tree` of a tree of 10,000 nodes is asked for ten times a second while answers stream."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.gaps.figures import GapCase, GapFigures
from benchmarks.gaps.server import TIMEOUT_S, running_server
from benchmarks.gaps.stored import TreeFacts, write_branches
from benchmarks.gaps.streams import GapStreams

PART = "tree"
NUM_NODES = 10_000
EVERY_S = 0.1
NUM_VIEWS = 150
QUIET_S = 15.0

_SALT = "branches"


@dataclass(frozen=True)
class _View:
    """One answer. The status is 0 if none had come when the asking ended."""

    status: int
    seconds: float
    num_bytes: int


def measure_views(model: str, folder: Path, facts: TreeFacts) -> Iterator[GapCase]:
    """Ask on time, whether or not earlier questions have been answered."""
    write_branches(folder, facts, _SALT, NUM_NODES)
    with running_server(model, folder) as server:
        num_nodes = server.figures()["nodes"]
        with GapStreams(server.url, model) as streams:
            quiet, gaps = streams.rest(QUIET_S), list[float]()
            with streams.watch(gaps):
                views = asyncio.run(_ask_on_time(f"{server.url}/api/cache/tree"))
            name = f"view of {num_nodes:,} nodes, {1 / EVERY_S:.0f} a second"
            yield GapCase(PART, name, quiet, GapFigures.of(gaps), _note(views), streams.add_facts(_describe(views)))


async def _ask_on_time(url: str) -> list[_View]:
    views: list[_View] = []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=16)
    async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client:
        started_s, asked = time.monotonic(), list[asyncio.Task[None]]()
        for number in range(NUM_VIEWS):
            asked.append(asyncio.create_task(_ask(client, url, views)))
            await asyncio.sleep(max(0.0, started_s + (number + 1) * EVERY_S - time.monotonic()))
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    return views


async def _ask(client: httpx.AsyncClient, url: str, views: list[_View]) -> None:
    started_s, status, num_bytes = time.monotonic(), 0, 0
    try:
        async with client.stream("GET", url) as answer:
            async for piece in answer.aiter_raw():
                num_bytes += len(piece)
            status = answer.status_code
    finally:
        views.append(_View(status, time.monotonic() - started_s, num_bytes))


def _note(views: Sequence[_View]) -> str:
    num_answered = sum(view.status == 200 for view in views)
    return f"{num_answered} of {len(views)} answered"


def _describe(views: Sequence[_View]) -> dict[str, Any]:
    answered = [view for view in views if view.status == 200]
    found: dict[str, Any] = {"asked": len(views), "statuses": dict(Counter(str(view.status or "none") for view in views))}
    if not answered:
        return found
    seconds = [view.seconds for view in answered]
    median_s, longest_s = round(statistics.median(seconds), 2), round(max(seconds), 2)
    return found | {"answer_bytes": answered[0].num_bytes, "median_s": median_s, "longest_s": longest_s}
