"""One replica: runs requests from elsewhere on a model of this process, and does named operations on its tree."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from bough.cache.admin.view import TreeView
from bough.cache.admin.watch import TreeChanges
from bough.cache.steps import Steps
from bough.errors import BoughError
from bough.routing import ReplicaRates
from bough.runtime import Runtime
from bough.runtime.embedding import Embedded
from bough.server.serving.model.contract import PreparedRequest
from bough.server.serving.model.in_process import InProcessGenerator
from bough.server.serving.remote.archives import Archives
from bough.server.serving.remote.copying import PrefixCopier
from bough.server.serving.remote.held_pages import HeldPages, Notes, make_keys
from bough.server.serving.remote.messages import (
    Accepted,
    Advanced,
    Began,
    Loaded,
    Message,
    Operation,
    RemoteRequest,
    ReplicaFacts,
)
from bough.server.serving.remote.replicas import Replicas
from bough.server.serving.remote.watches import RunningRequest, Watches
from bough.system.inbox import Inbox, Mailbox
from bough.types import Chunk, Completion, Usage

_TREE_OPERATIONS = frozenset(("view", "look_up", "keep", "warm", "read_node", "keep_node", "evict_node", "clear"))
"""What is asked of the tree by these very names."""


MOST_SALTS = 1024
"""The trees of so many salts are told to the router after a restart; the others when they are used again."""


@dataclass(frozen=True)
class Looked:
    """The new notes of pages that have changed, and what computing and loading take here."""

    notes: Notes
    rates: ReplicaRates


class ReplicaHost:
    """The model of one replica for those who ask from elsewhere. Everything here runs on one event loop."""

    def __init__(
        self,
        name: str,
        runtime: Runtime,
        secret: bytes,
        replicas: Replicas,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._runtime = runtime
        self._generator = InProcessGenerator(runtime)
        self._copier = PrefixCopier(runtime.prefix_cache, runtime.worker, replicas, clock)
        self._clock = clock
        self._inbox: Inbox[Message] = Inbox(asyncio.get_running_loop())
        self._watch = runtime.cache.watch()
        self._pages = HeldPages(make_keys(secret), needs_points=runtime.prefix_cache.costs.needs_points)
        self._running: dict[str, RunningRequest] = {}  # by their ids
        self._watches = Watches(self._generator.tree, self._running.get)
        self._archives = Archives(self._generator.tree, runtime.settings)
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
        self._salts: dict[str, None] = {"": None}  # that were used here: trees on disk do not tell theirs

    def facts(self) -> ReplicaFacts:
        engine, generator = self._runtime.engine, self._generator
        return ReplicaFacts(
            engine.info,
            engine.context_tokens,
            engine.vocab_size,
            engine.state_size,
            engine.has_host,
            engine.describe(),
            generator.max_tokens,
            generator.stores_answers,
        )

    @property
    def is_stuck(self) -> bool:
        return self._runtime.worker.is_stuck

    def snapshot(self) -> dict[str, Any]:
        """Recent figures. Never waits."""
        return {**self._runtime.worker.snapshot(), **asdict(self._copier.counts), "is_stuck": self.is_stuck}

    async def generate(self, asked: RemoteRequest) -> AsyncGenerator[list[Message], None]:
        """The messages of a request, in batches as they come. Closing it cancels the request."""
        yield [Accepted(self.name)]
        mailbox: Mailbox[Message] = Mailbox()
        listener = _Forwarder(mailbox, self._inbox)
        running: PreparedRequest | None = None
        request = asked.request
        self._note_salt(request.salt)
        if asked.timeout_s is not None:
            request = replace(request, deadline_s=self._clock() + asked.timeout_s)
        try:
            if asked.copy is not None and asked.copy.source != self.name:
                await self._copier.wait_for_copy(request, asked.copy)
            running = await asyncio.to_thread(self._generator.prepare, request, listener)
            running.submit()
            self._running[asked.request_id] = RunningRequest(request, running)
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

    async def look(self) -> Looked:
        """What has changed in the tree since the last look, and what its work takes. Costs what has changed."""
        cache, watch, salts = self._runtime.prefix_cache, self._watch, tuple(self._salts)

        def steps() -> Steps[tuple[TreeChanges, ReplicaRates]]:
            changes = yield from watch.look(salts)
            token_s, byte_s = cache.residency.loader.rates.measured()
            shared = cache.residency.memory.shared
            page_tokens, mark = (0, "") if shared is None else (shared.keys.page_tokens, shared.fingerprint)
            return changes, ReplicaRates(token_s, byte_s, cache.costs.row_bytes, page_tokens, mark)

        changes, rates = await asyncio.wrap_future(self._runtime.worker.run_in_slices(steps))
        notes = await asyncio.to_thread(self._pages.apply, changes) if changes.is_reset or changes.roots else {}
        return Looked(notes, rates)

    async def call(self, operation: Operation) -> Any:
        """Do a named operation. Raises what it raises."""
        if operation.name in self._operations:
            return await self._operations[operation.name](*operation.arguments)
        assert operation.name in _TREE_OPERATIONS, operation.name
        result = await getattr(self._generator.tree, operation.name)(*operation.arguments)
        return result.records if isinstance(result, TreeView) else result

    async def _read_stats(self, salt: str | None) -> dict[str, Any]:
        figures = await self._generator.tree.stats(salt)
        return {**figures, **asdict(self._copier.counts)} if salt is None else figures

    async def _embed(self, ids: list[int], salt: str, tenant: str) -> Embedded:
        """The vector of a text. Cancelling the caller cancels the work."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Embedded | BoughError] = loop.create_future()

        def settle(outcome: Embedded | BoughError) -> None:
            if not future.done():
                future.set_result(outcome)

        def tell(outcome: Embedded | BoughError) -> None:
            loop.call_soon_threadsafe(settle, outcome)

        self._runtime.embedder.start(
            ids,
            tell,
            is_cancelled=future.cancelled,
            salt=salt,
            tenant=tenant,
        )
        outcome = await future
        if isinstance(outcome, BoughError):
            raise outcome
        return outcome

    def _note_salt(self, salt: str) -> None:
        self._salts.pop(salt, None)
        self._salts[salt] = None
        if len(self._salts) > MOST_SALTS:
            del self._salts[next(iter(self._salts))]

    def close(self) -> None:
        """End the running requests and save the tree. It may wait long."""
        self._runtime.close()


class _Forwarder:
    """A listener that puts what it is told into a mailbox, as messages."""

    def __init__(self, mailbox: Mailbox[Message], inbox: Inbox[Message]) -> None:
        self._mailbox = mailbox
        self._inbox = inbox

    def on_start(self, usage: Usage, waited_s: float) -> None:
        self._inbox.put(self._mailbox, Began(usage, waited_s))

    def on_loaded(self, usage: Usage) -> None:
        self._inbox.put(self._mailbox, Loaded(usage))

    def on_progress(self, done_tokens: int, total_tokens: int) -> None:
        self._inbox.put(self._mailbox, Advanced(done_tokens, total_tokens))

    def on_chunk(self, chunk: Chunk) -> None:
        self._inbox.put(self._mailbox, chunk)

    def on_end(self, completion: Completion) -> None:
        self._inbox.put(self._mailbox, completion)

    def on_error(self, error: BoughError) -> None:
        self._inbox.put(self._mailbox, error)
