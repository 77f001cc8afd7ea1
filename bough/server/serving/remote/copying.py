"""Copying a prefix from one replica to another, by the store that both share.

The replica that has the prefix, or is computing it, sees to it that the store gets it before all else that waits there. The
one that wants it waits for that, and then runs the request as always: it finds the pages in the store. It never waits
longer than the router allows, which is what computing the prefix would take; whatever fails costs that time only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from bough.cache.prefix_cache import PrefixCache
from bough.cache.residency.sharing import Offered
from bough.cache.store import SharedStore, StorePath
from bough.cache.tree.address import Address
from bough.cache.tree.tokens import cut, pack
from bough.errors import BoughError
from bough.routing import Copy
from bough.scheduling.worker import Worker
from bough.server.serving.model.contract import GenerateRequest
from bough.server.serving.remote.messages import Operation
from bough.server.serving.remote.replicas import ReplicaLost, Replicas

log = logging.getLogger(__name__)

LOOK_S = 0.02
"""How often it is looked whether a prefix is there."""


@dataclass
class CopyCounts:
    """Prefixes that were in the store in time, and those that were not."""

    copied_prefixes: int = 0
    missed_prefixes: int = 0


class PrefixCopier:
    """Uploads prefixes for the other replicas, and waits for theirs. `worker` runs what touches the cache."""

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

    async def wait_for_copy(self, request: GenerateRequest, copy: Copy) -> None:
        """Have the prefix of a request uploaded by the replica that has it, and wait for that as long as it is worth it."""
        if (shared := self._shared) is None:
            return
        prefix = cut(pack(request.encoded.ids), 0, copy.num_tokens)
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
        """Let the store have a prefix of packed tokens soon; returns how many of them it has, when it has them.

        If the prefix is coming, a request is computing it, and is waited for.
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

    async def _offer(self, path: StorePath, prefix: bytes, salt: str, first: int) -> Offered:
        """Offer the pages from `first` on that the tree has by now; it is touched on the engine's thread."""

        def offer() -> Offered:
            return self._cache.residency.sharer.share_prefix(self._cache.forest.find(salt), path, prefix, first)

        return await asyncio.wrap_future(self._worker.call(offer))
