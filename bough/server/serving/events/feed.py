"""The feed of one loaded model: it looks at the model again and again while there are readers, and tells them what is new.

A feed never keeps a model loaded. While requests run it looks once an interval, else about once a second; it looks at once
when a request begins or ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence

from bough.cache.tree.tokens import pack
from bough.errors import BoughError
from bough.server.serving.events.frames import (
    NodePieces,
    describe_figures,
    describe_own_figures,
    describe_request,
    to_json,
    write_nodes,
)
from bough.server.serving.events.look import Look, Seen, Sought, look
from bough.server.serving.events.reader import Reader
from bough.server.serving.loaded_model import LoadedModel
from bough.server.serving.progress import LiveRequests, RequestProgress

log = logging.getLogger(__name__)

IDLE_S = 1.0
"""How often a model is looked at while no request runs."""

_SETTLE_S = 0.02  # after a request has begun or ended: others may do so with it
_FIGURES_S = 1.0
_FIGURES_AT_LEAST_S = 10.0


class ModelFeed:
    """Looks at one model until it is unloaded or `stop` is called. `readers` gives those who are there now."""

    def __init__(
        self,
        loaded: LoadedModel,
        requests: LiveRequests,
        readers: Callable[[], Sequence[Reader]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.loaded = loaded
        self._requests = requests
        self._readers = readers
        self._clock = clock
        self._watch = loaded.generator.cache.watch()
        self._mirror: NodePieces = {}  # every node as it was told last
        self._packed: dict[RequestProgress, Sought] = {}
        self._told: dict[RequestProgress, str] = {}  # without what changes all the time
        self._figures: dict[str | None, tuple[str, float]] = {}  # by salt: what was told, and when
        self._num_ended = requests.num_ended
        self._wakes = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"bough-events-{loaded.name}")

    def welcome(self, reader: Reader) -> None:
        """Tell a new reader all that is known; the rest comes with the next look."""
        reader.tell_tree(self.loaded.name, self._mirror, is_reset=True)
        self._told, self._figures = {}, {}
        self._wakes.set()

    async def stop(self) -> None:
        """Look no more, and let the tree note no more changes."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        with contextlib.suppress(BoughError):  # the model is being unloaded: its tree goes anyway
            self.loaded.worker.call(self._watch.close)

    async def _run(self) -> None:
        with self._requests.waking(self._wakes):
            while True:
                self._wakes.clear()
                try:
                    await self._look()
                except BoughError as error:  # it is stuck, too busy, or being unloaded
                    log.debug("the model %s cannot be looked at now: %s", self.loaded.name, error)
                except Exception:
                    log.exception("the model %s is not watched any more, by a mistake of ours", self.loaded.name)
                    return
                await self._wait_for_next()

    async def _wait_for_next(self) -> None:
        """Wait until it is time for the next look."""
        is_busy = any(each.model == self.loaded.name for each in self._requests.running)
        interval_s = min((each.interval_s for each in self._readers()), default=IDLE_S)
        try:
            async with asyncio.timeout(interval_s if is_busy else max(interval_s, IDLE_S)):
                await self._wakes.wait()
            await asyncio.sleep(_SETTLE_S)
        except TimeoutError:
            pass

    async def _look(self) -> None:
        sought, runtime = self._seek(), self.loaded.generator
        salts = {each.salt for each in self._readers() if each.salt is not None}
        found = await asyncio.wrap_future(
            self.loaded.worker.run_in_slices(lambda: look(runtime.prefix_cache, self._watch, sought, salts))
        )
        if found.changes.is_reset or found.changes.roots:
            self._tell_tree(
                found.changes.is_reset, await asyncio.to_thread(write_nodes, found.changes, runtime.cache.decode)
            )
        for each, seen in zip(sought, found.seen, strict=True):
            self._tell_request(each.progress, seen)
        self._tell_figures(found)

    def _seek(self) -> list[Sought]:
        """The requests to look for: those that run, and once more those that have ended since the last look."""
        ended = self._requests.ended_since(self._num_ended)
        self._num_ended = self._requests.num_ended
        wanted = [each for each in (*ended, *self._requests.running) if each.model == self.loaded.name]
        self._packed = {each: self._sought(each) for each in wanted}
        self._told = {each: told for each, told in self._told.items() if each in self._packed}
        return list(self._packed.values())

    def _sought(self, progress: RequestProgress) -> Sought:
        known = self._packed.get(progress)
        if known is None or progress.answer_ids or not known.packed:
            return Sought(progress, pack([*progress.prompt_ids, *progress.answer_ids]))
        return known

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
        for reader in self._readers():
            reader.tell_tree(self.loaded.name, pieces, is_reset=is_reset)

    def _tell_request(self, progress: RequestProgress, seen: Seen) -> None:
        runtime = self.loaded.generator
        described = describe_request(
            progress, seen, self._clock(), is_enabled=runtime.prefix_cache.is_enabled, decode=runtime.cache.decode
        )
        total_s = described["total_s"]
        steady = to_json({**described, "total_s": 0 if progress.end is None else total_s})
        if self._told.get(progress) == steady:
            return
        self._told[progress] = steady
        written = to_json(described)
        for reader in self._readers():
            reader.tell_request(self.loaded.name, progress.salt, progress.request_id, written)

    def _tell_figures(self, found: Look) -> None:
        name, now = self.loaded.name, self._clock()
        readers = [each for each in self._readers() if each.sees(name)]
        for salt in {each.salt for each in readers}:
            figures = to_json(self._describe_figures(salt, found))
            before, told_s = self._figures.get(salt, ("", -math.inf))
            if now - told_s >= (_FIGURES_S if figures != before else _FIGURES_AT_LEAST_S):
                self._figures[salt] = (figures, now)
                for reader in readers:
                    if reader.salt == salt:
                        reader.tell_figures(name, figures)

    def _describe_figures(self, salt: str | None, found: Look) -> dict[str, object]:
        name = self.loaded.name
        totals, rate = self._requests.totals(name, salt), found.prefill_tokens_per_s
        if salt is None:
            return describe_figures(name, self.loaded.worker.snapshot(), totals, rate)
        return describe_own_figures(name, found.stats.get(salt, {"tree_bytes": 0, "nodes": 0, "tokens": 0}), totals, rate)
