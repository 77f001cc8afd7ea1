"""The feed of one loaded model: it looks at the model again and again, and sends the changes to its readers.

A feed never keeps a model loaded. While requests run it looks once an interval, else about once a second, and soon after a
request has begun or ended. After a look that failed, because the engine is stuck or busy, the next sends the whole tree.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any

from bough.errors import BoughError
from bough.server.serving.events.frames import (
    NodePieces,
    describe_figures,
    describe_request,
    explain_request,
    to_json,
    usage_of,
    write_nodes,
)
from bough.server.serving.events.messages import MessageFinder
from bough.server.serving.events.reader import MOST_BEHIND, EventReader, TreeNews
from bough.server.serving.loaded import LoadedModel
from bough.server.serving.loaded.progress import FollowedRequests, LiveRequests, RequestProgress
from bough.server.serving.model.contract import Look, RequestPosition, WatchedRequest
from bough.system.tasks import end_tasks
from bough.tokens import Tokens, unpack

log = logging.getLogger(__name__)

IDLE_S = 1.0  # between two looks while no request runs
_LEAST_S = 0.1  # between two looks, however many requests begin and end
_SETTLE_S = 0.02  # after a request has begun or ended: others may do so with it
_FIGURES_S = 1.0
_FIGURES_AT_LEAST_S = 10.0
_MISTAKE_S = 10.0  # the wait after a mistake of ours
_MOST_TEXTS = 4096  # of edges that are kept: most nodes change without their text
_UNSEEN = RequestPosition()


@dataclass
class _Known:
    number: int
    packed: bytes = b""  # its tokens
    reused: tuple[bool, int, int] | None = None  # as when `reason` was written
    reason: str = ""
    sent: dict[str, Any] | None = None  # the last event, without times
    is_whole: bool = False  # the request had ended before the last look began


class ModelFeed:
    """Looks at one model until it is unloaded or `stop` is called. `readers` returns the present ones."""

    def __init__(
        self,
        loaded: LoadedModel,
        requests: LiveRequests,
        readers: Callable[[], Sequence[EventReader]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.loaded = loaded
        self._generator = loaded.generator
        self._tree = loaded.tree
        self._requests = requests
        self._followed = FollowedRequests(loaded.name)
        self._readers = readers
        self._clock = clock
        self._cached_decode = lru_cache(_MOST_TEXTS)(self._decode)
        self._finder = MessageFinder(self._generator.facts.prompts.tokenizer)
        self._watch = self._tree.watch()
        self._mirror = TreeNews(is_reset=True)  # every node as it was sent last
        self._known: dict[RequestProgress, _Known] = {}
        self._numbers = count(1)
        self._figures: dict[str | None, tuple[str, float]] = {}  # by salt: the last event, and its time
        self._task = asyncio.create_task(self._run(), name=f"bough-events-{loaded.name}")

    def welcome(self, reader: EventReader) -> None:
        """Send all that is known to a new reader; the rest comes with the next look."""
        self._send_all(reader)
        self._figures = {}
        for known in self._known.values():
            known.sent = None
        self._followed.wakes.set()

    async def stop(self) -> None:
        """Stop looking, and close the watch. Requests that have ended are still sent."""
        await end_tasks(self._task)

    async def _run(self) -> None:
        with self._requests.follow(self._followed):
            try:
                while True:
                    self._followed.wakes.clear()
                    await self._try_to_look()
                    await self._wait_for_next()
            finally:
                self._send_unseen(self._followed.take_ended())
                await self._watch.close()

    async def _wait_for_next(self) -> None:
        name = self.loaded.name
        interval_s = min((each.interval_s for each in self._readers() if each.sees(name)), default=IDLE_S)
        await asyncio.sleep(min(_LEAST_S, interval_s))
        longest_s = interval_s if self._requests.running(name) else max(interval_s, IDLE_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(longest_s - min(_LEAST_S, interval_s)):
                await self._followed.wakes.wait()
                await asyncio.sleep(_SETTLE_S)

    async def _try_to_look(self) -> None:
        self._choose_requests()
        try:
            await self._look()
        except BoughError as error:  # it is stuck, too busy, or being unloaded
            log.debug("the model %s cannot be looked at now: %s", self.loaded.name, error)
            await self._start_over()
        except Exception:
            log.exception("looking at the model %s failed by a mistake of ours; it is tried again", self.loaded.name)
            await self._start_over()
            await asyncio.sleep(_MISTAKE_S)

    async def _start_over(self) -> None:
        """After a look that failed, its changes are lost: make the next one send everything."""
        self._send_unseen([each for each in self._known if each.end is not None])
        await self._watch.close()
        self._watch = self._tree.watch()

    async def _look(self) -> None:
        known = dict(self._known)
        salts = {each.salt for each in self._readers() if each.salt is not None and each.sees(self.loaded.name)}
        found = await self._watch.look([_to_watch(*each) for each in known.items()], salts)
        if found.changes.is_reset or found.changes.roots:
            pieces = await asyncio.to_thread(write_nodes, found.changes, self._cached_decode, self._finder.find)
            self._send_tree(found.changes.is_reset, pieces)
        for progress, each in known.items():
            if each.is_whole or progress.end is None:  # what ended during this look has its last position in the next one
                self._send_request(progress, found.seen.get(each.number, _UNSEEN))
        self._send_figures(found)

    def _choose_requests(self) -> None:
        """Look for the requests that run, and once more for those that have ended since the last look."""
        wanted = [*self._followed.take_ended(), *self._requests.running(self.loaded.name)]
        self._known = {each: self._known.get(each) or _Known(next(self._numbers)) for each in wanted}
        for each, known in self._known.items():
            known.is_whole = each.end is not None
            if each.answer_ids or not known.packed:
                known.packed = (each.prompt + Tokens.of(each.answer_ids)).key

    def _decode(self, packed: bytes) -> str:
        return self._generator.facts.prompts.decode(unpack(packed))

    def _send_tree(self, is_reset: bool, pieces: NodePieces) -> None:
        if is_reset:
            self._mirror = TreeNews(is_reset=True)
        self._mirror.add(pieces)
        most = len(self._mirror) + MOST_BEHIND
        for reader in self._readers():
            reader.send_tree(self.loaded.name, pieces, is_reset=is_reset, own_root=self._tree.own_root)
            if reader.num_waiting(self.loaded.name) > most:
                self._send_all(reader)

    def _send_all(self, reader: EventReader) -> None:
        reader.send_tree(self.loaded.name, self._mirror.roots, is_reset=True, own_root=self._tree.own_root)

    def _send_unseen(self, ended: Sequence[RequestProgress]) -> None:
        """Send requests that have ended, without their position in the tree."""
        for progress in ended:
            self._send_request(progress, _UNSEEN)

    def _send_request(self, progress: RequestProgress, seen: RequestPosition) -> None:
        known = self._known.setdefault(progress, _Known(next(self._numbers)))
        described = describe_request(progress, seen, self._explain(progress, known), self._clock())
        steady = described if progress.end is not None else described | {"total_s": 0}
        if known.sent == steady:
            return
        known.sent = steady
        written = to_json(described)
        for reader in self._readers():
            reader.send_request(self.loaded.name, progress.salt, progress.request_id, written)

    def _explain(self, progress: RequestProgress, known: _Known) -> str:
        usage = usage_of(progress)
        reused = progress.has_lane, usage.matched_tokens, usage.cached_tokens
        if known.reused != reused:
            known.reused = reused
            known.reason = explain_request(progress, is_enabled=self._generator.stores_answers, decode=self._decode)
        return known.reason

    def _send_figures(self, found: Look) -> None:
        name, now = self.loaded.name, self._clock()
        readers = [each for each in self._readers() if each.sees(name)]
        snapshot = self.loaded.worker.snapshot()
        known = {*found.stats, *([None] if "nodes" in snapshot else [])}  # of lost replicas there are no figures
        salts = {each.salt for each in readers if each.salt in known}
        self._figures = {salt: sent for salt, sent in self._figures.items() if salt in salts}
        for salt in salts:
            before, sent_s = self._figures.get(salt, ("", -math.inf))
            if now - sent_s < _FIGURES_S:
                continue
            totals, rate = self._requests.totals(name, salt), found.prefill_tokens_per_s
            figures = to_json(describe_figures(name, snapshot if salt is None else found.stats[salt], totals, rate))
            if figures != before or now - sent_s >= _FIGURES_AT_LEAST_S:
                self._figures[salt] = (figures, now)
                for reader in readers:
                    if reader.salt == salt:
                        reader.send_figures(name, figures)


def _to_watch(progress: RequestProgress, known: _Known) -> WatchedRequest:
    request_id = progress.request.request_id if progress.request is not None else ""
    return WatchedRequest(
        known.number, known.packed, progress.salt, progress.usage.cached_tokens, progress.replica, request_id
    )
