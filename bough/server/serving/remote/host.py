"""One replica: runs a server's requests on a model of this process, and does named operations on its tree."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from bough.cache.admin.view import TreeView
from bough.cache.admin.watch import TreeChanges, TreeWatch
from bough.cache.steps import Steps
from bough.errors import BoughError
from bough.routing import ReplicaRates
from bough.runtime import Runtime
from bough.runtime.embedding import ComputedText
from bough.scheduling.job import Job
from bough.server.serving.model.embedder import InProcessEmbedder
from bough.server.serving.model.in_process import InProcessTree
from bough.server.serving.remote.archives import Archives
from bough.server.serving.remote.copying import PrefixCopier
from bough.server.serving.remote.held_pages import HeldPages, Notes, make_keys
from bough.server.serving.remote.replicas import (
    Message,
    Operation,
    RemoteRequest,
    ReplicaFacts,
    Replicas,
    RequestAccepted,
)
from bough.server.serving.remote.watch import Watches
from bough.system.inbox import Inbox, Mailbox
from bough.types import Completion

_TREE_OPERATIONS = frozenset(("view", "look_up", "keep", "warm", "at_node", "clear"))
"""The operations that are methods of `ServedTree`."""

MOST_SALTS = 1024
"""How many salts' trees are reported to the router after a restart; the others are when they are used again."""


@dataclass(frozen=True)
class PageNotes:
    """The new notes of pages that have changed, and the rates of this replica."""

    notes: Notes
    rates: ReplicaRates


class ReplicaHost:
    """The model of one replica, for servers elsewhere. Everything here runs on one event loop."""

    def __init__(
        self, name: str, runtime: Runtime, secret: bytes, replicas: Replicas, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self._runtime = runtime
        self._tree = InProcessTree(runtime)
        self._copier = PrefixCopier(runtime.prefix_cache, runtime.worker, replicas, clock)
        self._clock = clock
        self._inbox: Inbox[Message] = Inbox(asyncio.get_running_loop())
        self._watch = TreeWatch(runtime.prefix_cache)
        self._pages = HeldPages(make_keys(secret), needs_points=runtime.prefix_cache.memory.needs_points)
        self._running: dict[str, Job] = {}  # by their ids
        self._watches = Watches(self._tree, self._running.get)
        self._archives = Archives(self._tree, runtime.settings)
        self._operations: dict[str, Callable[..., Awaitable[Any]]] = {
            "embed": self._embed,
            "stats": self._read_stats,
            "upload_prefix": self._copier.upload,
            "watch": self._watches.look,
            "unwatch": self._watches.close,
            "write_archive": self._archives.write,
            "read_archive": self._archives.read,
            "add_to_archive": self._archives.add,
            "import_archive": self._archives.take_up,
            "drop_archive": self._archives.drop,
        }
        self._salts: dict[str, None] = {"": None}  # used here: trees on disk do not store theirs

    def facts(self) -> ReplicaFacts:
        engine = self._runtime.engine
        return ReplicaFacts(
            engine.info,
            engine.context_tokens,
            engine.vocab_size,
            engine.state_size,
            engine.has_host,
            engine.describe(),
            self._runtime.settings.max_tokens,
            self._runtime.stores_answers,
        )

    @property
    def is_stuck(self) -> bool:
        return self._runtime.worker.is_stuck

    def snapshot(self) -> dict[str, Any]:
        """Recent figures. Never waits."""
        return {**self._runtime.worker.snapshot(), **asdict(self._copier.counts), "is_stuck": self.is_stuck}

    async def generate(self, asked: RemoteRequest) -> AsyncGenerator[list[Message], None]:
        """The messages of a request, in batches as they come. Closing it cancels the request."""
        yield [RequestAccepted(self.name)]
        mailbox: Mailbox[Message] = Mailbox()
        running: Job | None = None
        request = asked.request
        self._note_salt(request.salt)
        if asked.timeout_s is not None:
            request = replace(request, deadline_s=self._clock() + asked.timeout_s)
        try:
            if asked.copy is not None and asked.copy.source != self.name:
                await self._copier.wait_for_copy(request, asked.copy)
            listener = partial(self._inbox.put, mailbox)
            running = await asyncio.to_thread(self._runtime.prepare, request, listener)
            self._runtime.submit(running)
            self._running[asked.request_id] = running
            while True:
                messages = await mailbox.take()
                yield messages
                if isinstance(messages[-1], Completion | BoughError):
                    return
        except BoughError as error:
            yield [error]
        finally:
            self._running.pop(asked.request_id, None)
            if running is not None:
                running.cancel()

    async def look(self) -> PageNotes:
        """The changes of the tree since the last look, and its rates. O(changes)."""
        cache, watch, salts = self._runtime.prefix_cache, self._watch, tuple(self._salts)

        def steps() -> Steps[tuple[TreeChanges, ReplicaRates]]:
            changes = yield from watch.look(salts)
            token_s, byte_s = cache.residency.loader.rates.measured()
            shared = cache.residency.memory.shared
            page_tokens, mark = (0, "") if shared is None else (shared.keys.page_tokens, shared.keys.fingerprint)
            return changes, ReplicaRates(token_s, byte_s, cache.memory.row_bytes, page_tokens, mark)

        changes, rates = await asyncio.wrap_future(self._runtime.worker.run_in_slices(steps))
        notes = await asyncio.to_thread(self._pages.apply, changes) if changes.is_reset or changes.roots else {}
        return PageNotes(notes, rates)

    async def call(self, operation: Operation) -> Any:
        if operation.name in self._operations:
            return await self._operations[operation.name](*operation.arguments)
        assert operation.name in _TREE_OPERATIONS, operation.name
        result = await getattr(self._tree, operation.name)(*operation.arguments)
        return result.records if isinstance(result, TreeView) else result

    async def _read_stats(self, salt: str | None) -> dict[str, Any]:
        figures = await self._tree.stats(salt)
        return {**figures, **asdict(self._copier.counts)} if salt is None else figures

    async def _embed(self, ids: list[int], salt: str, tenant: str) -> ComputedText:
        return await InProcessEmbedder(self._runtime.embedder).compute(ids, salt, tenant)

    def _note_salt(self, salt: str) -> None:
        self._salts.pop(salt, None)
        self._salts[salt] = None
        if len(self._salts) > MOST_SALTS:
            del self._salts[next(iter(self._salts))]

    def close(self) -> None:
        """End the running requests and save the tree. It may wait long."""
        self._runtime.close()
