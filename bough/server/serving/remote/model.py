"""A model at replicas, as the service uses it: prompts are rendered and tokenized here, ids go to a replica.

The figures of replicas are read again about once a second, so that reading them never waits.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from bough.errors import BoughError, EngineError, RequestError, ShuttingDown, Unavailable
from bough.generate.request import SEED_BITS
from bough.models.defaults import ModelDefaults
from bough.models.prompts import Prompts
from bough.runtime.embedding import Embedded, OnEmbedded
from bough.runtime.lane_embedder import TextTokenizer
from bough.server.serving.model.contract import ChoiceListener, GenerateRequest
from bough.server.serving.remote.messages import Operation, RemoteRequest, ReplicaFacts
from bough.server.serving.remote.replicas import ReplicaLost, Replicas
from bough.server.serving.remote.request import FollowedRequest, with_seed
from bough.server.serving.remote.tree import RemoteTrees, sum_figures

log = logging.getLogger(__name__)

FIGURES_S = 1.0
CANCELLED_S = 0.2  # how often it is asked whether a text is still wanted

DigestPages = Callable[[Sequence[int], str], Sequence[bytes]]
"""The digests of the whole pages of a prompt under a salt, by which a router knows them."""


class RemoteWorker:
    """The figures of all replicas, as they were about a second ago."""

    def __init__(self) -> None:
        self.figures: dict[str, dict[str, Any]] = {}

    @property
    def is_stuck(self) -> bool:
        """Whether every replica is stuck in a step."""
        return bool(self.figures) and all(figure.get("is_stuck") for figure in self.figures.values())

    def snapshot(self) -> dict[str, Any]:
        return sum_figures(self.figures)


class RemoteModel:
    """Implements `ServedRuntime` and `Generator` over replicas. Make it with `connect`, on the server's event loop."""

    def __init__(
        self,
        replicas: Replicas,
        facts: ReplicaFacts,
        prompts: Prompts,
        defaults: ModelDefaults,
        digest_pages: DigestPages = lambda ids, salt: (),
    ) -> None:
        self.engine = facts
        self.prompts = prompts
        self.defaults = defaults
        self.context_tokens = facts.context_tokens
        self.max_tokens = facts.max_tokens
        self.stores_answers = facts.stores_answers
        self.worker = RemoteWorker()
        self.tree = RemoteTrees(replicas, prompts, lambda: self.worker.figures)
        self._replicas = replicas
        self._digest_pages = digest_pages
        self._loop = asyncio.get_running_loop()
        self._running: set[FollowedRequest] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._watching = asyncio.create_task(self._watch(), name="bough-replica-figures")

    @property
    def embedder(self) -> RemoteEmbedder:
        if not self.engine.state_size:
            raise RequestError(f"{self.engine.info.model} has no embeddings: it has no output layer that is known")
        return RemoteEmbedder(self.prompts, self.engine, self._replicas, self._start)

    def prepare(self, request: GenerateRequest, listener: ChoiceListener) -> FollowedRequest:
        request = with_seed(request, secrets.randbits(SEED_BITS))
        digests = self._digest_pages(request.encoded.ids, request.salt)
        remote = RemoteRequest(request, secrets.token_hex(8), digests=digests)
        return FollowedRequest(self._replicas, remote, listener, self._running)

    def close(self) -> None:
        """End the running requests, and let the replicas go. Another thread than that of the event loop calls it."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()

    async def _close(self) -> None:
        for request in tuple(self._running):
            request.fail(ShuttingDown("the model was unloaded; ask again"))
        tasks = [self._watching, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._replicas.close()

    async def _watch(self) -> None:
        while True:
            try:
                self.worker.figures = dict(await self._replicas.read_figures())
            except Exception as error:
                log.warning("the figures of the replicas cannot be read: %s", error)
            await asyncio.sleep(FIGURES_S)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something on the event loop. Any thread may call it."""

        def start() -> None:
            task = self._loop.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._loop.call_soon_threadsafe(start)


class RemoteEmbedder(TextTokenizer):
    """Implements `Embedder`: texts are tokenized here, and their states are computed at replicas, one after another."""

    def __init__(
        self,
        prompts: Prompts,
        facts: ReplicaFacts,
        replicas: Replicas,
        start: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        super().__init__(prompts, facts.context_tokens)
        self.dimensions = facts.state_size
        self._replicas = replicas
        self._start = start

    def start(
        self,
        ids: Sequence[int],
        on_embedded: OnEmbedded,
        *,
        is_cancelled: Callable[[], bool],
        salt: str = "",
        tenant: str = "",
    ) -> None:
        self._start(self._embed(list(ids), on_embedded, is_cancelled, salt, tenant))

    async def _embed(
        self, ids: list[int], on_embedded: OnEmbedded, is_cancelled: Callable[[], bool], salt: str, tenant: str
    ) -> None:
        work = asyncio.ensure_future(self._ask(Operation("", "embed", (ids, salt, tenant))))
        try:
            while not work.done():
                if is_cancelled():
                    return
                await asyncio.wait([work], timeout=CANCELLED_S)
            on_embedded(work.result())
        except asyncio.CancelledError:
            on_embedded(ShuttingDown("the model was unloaded; ask again"))
            raise
        finally:
            work.cancel()

    async def _ask(self, operation: Operation) -> Embedded | BoughError:
        """What a replica says, or a second one if the first is lost."""
        for _ in range(2):
            try:
                embedded: Embedded = await self._replicas.call(operation)
                return embedded
            except ReplicaLost:
                continue
            except BoughError as error:
                return error
            except Exception as error:
                log.exception("a text at a replica failed by a mistake of ours")
                return EngineError(f"{type(error).__name__}: {error}")
        return EngineError("the replica was lost twice")


async def read_facts(replicas: Replicas, timeout_s: float) -> ReplicaFacts:
    """The facts of a model when its first replica is ready. Raises Unavailable if that takes too long."""
    try:
        async with asyncio.timeout(timeout_s):
            return await replicas.read_facts()
    except TimeoutError as error:
        raise Unavailable(f"no replica was ready after {timeout_s:.0f} s") from error
