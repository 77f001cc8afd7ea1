"""One replica: runs requests from elsewhere on a model of this process, and does named operations on its tree."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

from bough.cache.admin.view import TreeView
from bough.errors import BoughError
from bough.runtime import Runtime
from bough.runtime.embedding import Embedded
from bough.server.serving.model.contract import PreparedRequest
from bough.server.serving.model.in_process import InProcessGenerator
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
from bough.system.inbox import Inbox, Mailbox
from bough.types import Chunk, Completion, Usage

_OPERATIONS = frozenset(
    ("stats", "view", "look_up", "keep", "warm", "read_node", "keep_node", "evict_node", "clear", "embed")
)


class ReplicaHost:
    """The model of one replica for those who ask from elsewhere. Everything here runs on one event loop."""

    def __init__(self, name: str, runtime: Runtime, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self._runtime = runtime
        self._generator = InProcessGenerator(runtime)
        self._clock = clock
        self._inbox: Inbox[Message] = Inbox(asyncio.get_running_loop())

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
        return {**self._runtime.worker.snapshot(), "is_stuck": self.is_stuck}

    async def generate(self, asked: RemoteRequest) -> AsyncGenerator[list[Message], None]:
        """The messages of a request, in batches as they come. Closing it cancels the request."""
        yield [Accepted(self.name)]
        mailbox: Mailbox[Message] = Mailbox()
        listener = _Forwarder(mailbox, self._inbox)
        running: PreparedRequest | None = None
        request = asked.request
        if asked.timeout_s is not None:
            request = replace(request, deadline_s=self._clock() + asked.timeout_s)
        try:
            running = await asyncio.to_thread(self._generator.prepare, request, listener)
            running.submit()
            while True:
                messages = await mailbox.take()
                yield messages
                if isinstance(messages[-1], Completion | BoughError):
                    return
        except BoughError as error:
            yield [error]
        finally:
            if running is not None:
                running.cancel()

    async def call(self, operation: Operation) -> Any:
        """Do a named operation on the tree. Raises what it raises."""
        assert operation.name in _OPERATIONS, operation.name
        if operation.name == "embed":
            return await self._embed(*operation.arguments)
        result = await getattr(self._generator.tree, operation.name)(*operation.arguments)
        return result.records if isinstance(result, TreeView) else result

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
