"""The feed of one loaded model: it looks at the model again and again while there are readers, and tells them what is new.

A feed never keeps a model loaded. While requests run it looks once an interval, else about once a second, and soon after a
request has begun or ended. If a look fails, because the engine is stuck or busy, the next that works tells the whole tree.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any

from bough.cache.tree.tokens import pack, unpack
from bough.errors import BoughError
from bough.server.serving.events.frames import (
    NodePieces,
    describe_figures,
    describe_own_figures,
    describe_request,
    explain_request,
    to_json,
    usage_of,
    write_nodes,
)
from bough.server.serving.events.reader import MOST_BEHIND, Reader
from bough.server.serving.loaded_model import LoadedModel
from bough.server.serving.model.look import Look, Seen, Sought
from bough.server.serving.progress import Followed, LiveRequests, RequestProgress

log = logging.getLogger(__name__)

IDLE_S = 1.0
"""How often a model is looked at while no request runs."""

_LEAST_S = 0.1  # between two looks, however many requests begin and end
_SETTLE_S = 0.02  # after a request has begun or ended: others may do so with it
_FIGURES_S = 1.0
_FIGURES_AT_LEAST_S = 10.0
_MISTAKE_S = 10.0  # how long nothing is looked at after a mistake of ours
_MOST_TEXTS = 4096  # of edges that are remembered: most nodes change without their text
_UNSEEN = Seen()


@dataclass
class _Known:
    """What is remembered of a request from one look to the next."""

    number: int
    packed: bytes = b""  # its tokens
    reused: tuple[bool, int, int] | None = None  # what `reason` was written for
    reason: str = ""
    told: dict[str, Any] | None = None  # without what changes all the time


class ModelFeed:
    """Looks at one model until it is unloaded or `stop` is called. `readers` are those who are there."""

    def __init__(
        self,
        loaded: LoadedModel,
        requests: LiveRequests,
        readers: Callable[[], Sequence[Reader]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.loaded = loaded
        self._generator = loaded.generator
        self._tree = self._generator.tree
        self._requests = requests
        self._followed = Followed(loaded.name)
        self._readers = readers
        self._clock = clock
        self._cached_decode = lru_cache(_MOST_TEXTS)(self._decode)
        self._watch = self._tree.watch()
        self._mirror: dict[str, dict[int, str]] = {}  # every node as it was told last
        self._known: dict[RequestProgress, _Known] = {}
        self._numbers = count(1)
        self._figures: dict[str | None, tuple[str, float]] = {}  # by salt: what was told, and when
        self._task = asyncio.create_task(self._run(), name=f"bough-events-{loaded.name}")

    def welcome(self, reader: Reader) -> None:
        """Tell a new reader all that is known; the rest comes with the next look."""
        self._tell_all(reader)
        self._figures = {}
        for known in self._known.values():
            known.told = None
        self._followed.wakes.set()

    async def stop(self) -> None:
        """Look no more, and let the tree note no more changes. Requests that have ended are told."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        with self._requests.follow(self._followed):
            try:
                while True:
                    self._followed.wakes.clear()
                    await self._try_to_look()
                    await self._wait_for_next()
            finally:
                self._tell_unseen(self._followed.take_ended())
                await self._watch.close()

    async def _wait_for_next(self) -> None:
        """Wait until it is time for the next look."""
        name = self.loaded.name
        interval_s = min((each.interval_s for each in self._readers() if each.sees(name)), default=IDLE_S)
        await asyncio.sleep(min(_LEAST_S, interval_s))
        longest_s = interval_s if self._requests.running(name) else max(interval_s, IDLE_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(longest_s - min(_LEAST_S, interval_s)):
                await self._followed.wakes.wait()
                await asyncio.sleep(_SETTLE_S)

    async def _try_to_look(self) -> None:
        self._seek()
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
        """After a look that failed: what it had found is lost, so the next one tells everything."""
        self._tell_unseen([each for each in self._known if each.end is not None])
        await self._watch.close()
        self._watch = self._tree.watch()

    async def _look(self) -> None:
        known = dict(self._known)
        salts = {each.salt for each in self._readers() if each.salt is not None and each.sees(self.loaded.name)}
        found = await self._watch.look([_sought(*each) for each in known.items()], salts)
        if found.changes.is_reset or found.changes.roots:
            pieces = await asyncio.to_thread(write_nodes, found.changes, self._cached_decode)
            self._tell_tree(found.changes.is_reset, pieces)
        for progress, each in known.items():
            self._tell_request(progress, found.seen.get(each.number, _UNSEEN))
        self._tell_figures(found)

    def _seek(self) -> None:
        """Note the requests to look for: those that run, and once more those that have ended since the last look."""
        wanted = [*self._followed.take_ended(), *self._requests.running(self.loaded.name)]
        self._known = {each: self._known.get(each) or _Known(next(self._numbers)) for each in wanted}
        for each, known in self._known.items():
            if each.answer_ids or not known.packed:
                known.packed = pack([*each.prompt_ids, *each.answer_ids])

    def _decode(self, packed: bytes) -> str:
        return self._generator.prompts.decode(unpack(packed))

    def _tell_tree(self, is_reset: bool, pieces: NodePieces) -> None:
        if is_reset:
            self._mirror = {}
        for root, nodes in pieces.items():
            known = self._mirror.setdefault(root, {})
            for key, piece in nodes.items():
                if piece is None:
                    known.pop(key, None)
                else:
                    known[key] = piece
            if not known:
                del self._mirror[root]
        most = sum(map(len, self._mirror.values())) + MOST_BEHIND
        for reader in self._readers():
            reader.tell_tree(self.loaded.name, pieces, is_reset=is_reset, own_root=self._tree.own_root)
            if reader.num_waiting(self.loaded.name) > most:
                self._tell_all(reader)

    def _tell_all(self, reader: Reader) -> None:
        pieces: NodePieces = {root: dict(nodes) for root, nodes in self._mirror.items()}
        reader.tell_tree(self.loaded.name, pieces, is_reset=True, own_root=self._tree.own_root)

    def _tell_unseen(self, ended: Sequence[RequestProgress]) -> None:
        """Tell of requests that have ended, without a look at where they lie in the tree."""
        for progress in ended:
            self._tell_request(progress, _UNSEEN)

    def _tell_request(self, progress: RequestProgress, seen: Seen) -> None:
        known = self._known.setdefault(progress, _Known(next(self._numbers)))
        described = describe_request(progress, seen, self._explain(progress, known), self._clock())
        steady = described if progress.end is not None else described | {"total_s": 0}
        if known.told == steady:
            return
        known.told = steady
        written = to_json(described)
        for reader in self._readers():
            reader.tell_request(self.loaded.name, progress.salt, progress.request_id, written)

    def _explain(self, progress: RequestProgress, known: _Known) -> str:
        """Why the request reuses so much. It is worked out again when that has changed."""
        usage = usage_of(progress)
        reused = progress.has_lane, usage.matched_tokens, usage.cached_tokens
        if known.reused != reused:
            is_enabled = self._generator.stores_answers
            known.reused = reused
            known.reason = explain_request(progress, is_enabled=is_enabled, decode=self._decode)
        return known.reason

    def _tell_figures(self, found: Look) -> None:
        name, now = self.loaded.name, self._clock()
        readers = [each for each in self._readers() if each.sees(name)]
        snapshot = self.loaded.worker.snapshot()
        known = {*found.stats, *([None] if "nodes" in snapshot else [])}  # of lost replicas there are no figures
        salts = {each.salt for each in readers if each.salt in known}
        self._figures = {salt: told for salt, told in self._figures.items() if salt in salts}
        for salt in salts:
            before, told_s = self._figures.get(salt, ("", -math.inf))
            if now - told_s < _FIGURES_S:
                continue
            figures = to_json(self._describe_figures(salt, found, snapshot))
            if figures != before or now - told_s >= _FIGURES_AT_LEAST_S:
                self._figures[salt] = (figures, now)
                for reader in readers:
                    if reader.salt == salt:
                        reader.tell_figures(name, figures)

    def _describe_figures(self, salt: str | None, found: Look, snapshot: Mapping[str, Any]) -> dict[str, object]:
        name = self.loaded.name
        totals, rate = self._requests.totals(name, salt), found.prefill_tokens_per_s
        if salt is None:
            return describe_figures(name, snapshot, totals, rate)
        return describe_own_figures(name, found.stats[salt], totals, rate)


def _sought(progress: RequestProgress, known: _Known) -> Sought:
    request_id = progress.request.request_id if progress.request is not None else ""
    return Sought(known.number, known.packed, progress.salt, progress.usage.cached_tokens, progress.replica, request_id)
