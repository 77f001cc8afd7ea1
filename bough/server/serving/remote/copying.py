"""Copying a prefix from one replica to another through the store that both share.

The replica that has the prefix, or is computing it, uploads it before its other uploads. The one that needs it waits for
that, and then runs the request as always: it finds the pages in the store. It never waits longer than the router allows,
which is the time of computing the prefix; a failure costs only that time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from bough.cache.prefix_cache import PrefixCache
from bough.cache.residency.sharing import OfferedPath
from bough.cache.store import SharedStore, StorePath
from bough.cache.tree.address import Address
from bough.errors import BoughError
from bough.generate.request import Request
from bough.routing import Copy
from bough.scheduling.worker import Worker
from bough.server.serving.remote.replicas import Operation, ReplicaLost, Replicas

log = logging.getLogger(__name__)

LOOK_S = 0.02
"""The pause between two checks whether the store has a prefix."""


@dataclass
class CopyCounts:
    """Prefixes that were in the store in time, and those that were not."""

    copied_prefixes: int = 0
    missed_prefixes: int = 0


class PrefixCopier:
    """Uploads prefixes for other replicas, and waits for theirs. The cache is touched on the thread of `worker`."""

    def __init__(
        self, cache: PrefixCache, worker: Worker, replicas: Replicas, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.counts = CopyCounts()
        self._cache = cache
        self._worker = worker
        self._replicas = replicas
        self._clock = clock

    @property
    def _shared(self) -> SharedStore | None:
        return self._cache.residency.memory.shared

    async def wait_for_copy(self, request: Request, copy: Copy) -> None:
        """Have the replica `copy.source` upload the prefix of a request, and wait at most `copy.within_s`."""
        if (shared := self._shared) is None:
            return
        prefix = request.tokens[: copy.num_tokens].key
        arguments = (prefix, request.salt, copy.within_s, copy.is_coming)
        num_tokens = 0
        try:
            async with asyncio.timeout(copy.within_s):
                num_tokens = await self._replicas.call(Operation(copy.source, "upload_prefix", arguments))
        except (TimeoutError, ReplicaLost, BoughError) as error:
            why = str(error) or "there was no more time"
            log.info("%s did not upload a prefix of %d tokens: %s", copy.source, copy.num_tokens, why)
        if num_tokens < copy.num_tokens:
            self.counts.missed_prefixes += 1
        else:
            self.counts.copied_prefixes += 1
        path = shared.path(request.salt)
        path.add(prefix)
        shared.forget_missing(path)

    async def upload(self, prefix: bytes, salt: str, within_s: float, is_coming: bool) -> int:
        """Upload a prefix of packed tokens with priority; returns how many of them the store has then.

        If it `is_coming`, a request is computing it, and its pages are awaited.
        """
        if (shared := self._shared) is None:
            return 0
        path, until_s = shared.path(salt), self._clock() + within_s
        path.add(prefix)
        end, offered = 0, list[Address]()
        while True:
            if end < path.num_pages:
                found = await self._offer(path, prefix, salt, end)
                end, offered = found.end, [*offered, *found.addresses]
            is_sending = shared.uploader.prioritize(offered)
            is_over = not is_sending and (end == path.num_pages or not is_coming)
            if is_over or self._clock() >= until_s:
                return 0 if is_sending else end * path.page_tokens
            await asyncio.sleep(LOOK_S)

    async def _offer(self, path: StorePath, prefix: bytes, salt: str, first: int) -> OfferedPath:
        """Offer the pages from `first` on that the tree has now."""

        def offer() -> OfferedPath:
            sharer = self._cache.residency.sharer
            assert sharer is not None  # a replica without a store copies nothing
            return sharer.share_prefix(self._cache.forest.find(salt), path, prefix, first)

        return await asyncio.wrap_future(self._worker.call(offer))
