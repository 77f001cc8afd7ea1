"""The tree of a model whose engine runs in this process: work on it runs on the engine's thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from bough.cache.admin.archive import ImportResult
from bough.cache.admin.stats import salt_stats
from bough.cache.admin.view import Lookup, TreeView, take_records
from bough.cache.admin.watch import TreeWatch, locate
from bough.cache.prefix_cache import PrefixCache
from bough.cache.steps import Steps
from bough.errors import BoughError
from bough.generate.request import Request
from bough.models.prompts import EncodedPrompt
from bough.runtime import Runtime
from bough.scheduling.job import RequestNews
from bough.server.serving.model.contract import Look, NodeWork, RequestPosition, WatchedRequest
from bough.system.tasks import wait_for
from bough.system.threads import lower_priority, run_in_thread, write_in_thread
from bough.types import Completion, SamplingParams

Result = TypeVar("Result")

ONLY = ""  # the name of the only tree, where there are no replicas

_RATE_TOKENS = 1024


class InProcessTree:
    """Implements `ServedTree` for one runtime. What waits for the disk runs in other threads than the engine's."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._handle = runtime.cache
        self._cache = runtime.prefix_cache
        self._worker = runtime.worker

    async def stats(self, salt: str | None) -> dict[str, Any]:
        def steps() -> Steps[dict[str, Any]]:  # as work in slices, so as not to delay requests
            yield
            return self._handle.stats(salt)

        exact = await self._run(steps)
        return {**self._worker.snapshot(), **exact} if salt is None else exact

    async def view(self, salt: str | None) -> TreeView:
        return self._handle.view(await self._run(lambda: take_records(self._cache, self._cache.clock.now, salt)))

    async def look_up(self, prompt: bytes, salt: str) -> Mapping[str, Lookup]:
        return {ONLY: await self._call(lambda: self._handle.look_up(prompt, salt))}

    async def keep(self, prefix: bytes, kept: bool, salt: str) -> Mapping[str, Lookup]:
        return {ONLY: await self._call(lambda: self._handle.keep_prefix(prefix, kept, salt))}

    async def warm(self, prefix: EncodedPrompt, salt: str, tenant: str) -> Completion:
        request = Request.of(prefix, SamplingParams(max_tokens=0), salt=salt, tenant=tenant, keep=True)

        def start(hear: Callable[[Completion | BoughError], None], is_cancelled: Callable[[], bool]) -> None:
            def listen(news: RequestNews) -> None:
                if isinstance(news, Completion | BoughError):
                    hear(news)

            self._worker.submit(self._runtime.prepare(request, listen, is_cancelled))

        completion: Completion = await wait_for(start)
        await self._call(lambda: self._runtime.require_kept(prefix.tokens, salt))
        return completion

    def own_root(self, root: str, salt: str) -> str:
        return salt

    def watch(self) -> InProcessWatch:
        return InProcessWatch(self._runtime)

    async def at_node(self, root: str, key: int, work: NodeWork[Result]) -> Result:
        return await self._run(lambda: work(self._cache, root, key))

    async def clear(self, salt: str | None) -> None:
        await run_in_thread(self._handle.clear, salt)

    async def export_file(self, file: Path, salt: str) -> None:
        await write_in_thread(file, lambda is_wanted: self._handle.export_file(file, salt, is_wanted=is_wanted))

    async def import_file(self, file: Path, salt: str) -> ImportResult:
        def work() -> ImportResult:
            lower_priority()  # it yields to requests
            return self._handle.import_file(file, salt)

        return await run_in_thread(work)

    async def _call(self, work: Callable[[], Result]) -> Result:
        return await asyncio.wrap_future(self._worker.call(work))

    async def _run(self, work: Callable[[], Steps[Result]]) -> Result:
        return await asyncio.wrap_future(self._worker.run_in_slices(work))


class InProcessWatch:
    """Implements `ServedWatch` by looks on the engine's thread."""

    def __init__(self, runtime: Runtime) -> None:
        self._cache = runtime.prefix_cache
        self._worker = runtime.worker
        self._watch = TreeWatch(runtime.prefix_cache)

    async def look(self, sought: Sequence[WatchedRequest], salts: Collection[str]) -> Look:
        steps = partial(look, self._cache, self._watch, sought, salts)
        return await asyncio.wrap_future(self._worker.run_in_slices(steps))

    async def close(self) -> None:
        self._watch.close()


def look(cache: PrefixCache, watch: TreeWatch, sought: Sequence[WatchedRequest], salts: Collection[str]) -> Steps[Look]:
    """Look at a tree and at requests, on the engine's thread. Costs the changes, and a match for each request."""
    changes = yield from watch.look(salts)
    places = locate(cache, [(each.packed, each.salt) for each in sought])
    prefill_s = cache.residency.loader.rates.prefill_s
    rate_s = prefill_s(0, _RATE_TOKENS)
    return Look(
        changes,
        {
            each.number: RequestPosition(place, prefill_s(0, each.cached_tokens))
            for each, place in zip(sought, places, strict=True)
        },
        {salt: salt_stats(cache.forest, salt) for salt in salts},
        _RATE_TOKENS / rate_s if rate_s else None,
    )
