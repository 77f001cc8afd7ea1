"""A model at replicas, as the service uses it: prompts are rendered and tokenized here, ids go to a replica.

The figures of replicas are read about once a second, so that `snapshot` never waits.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from bough.errors import BoughError, EngineError, RequestError, ShuttingDown, Unavailable
from bough.generate.request import Request
from bough.models.prompts import Prompts
from bough.prompting.prompt import ModelFacts
from bough.runtime.embedding import ComputedText, TextTokenizer
from bough.sampling_params import ModelDefaults
from bough.scheduling.job import Listener
from bough.server.serving.model.contract import PreparedRequest
from bough.server.serving.remote.replicas import Operation, RemoteRequest, ReplicaFacts, ReplicaLost, Replicas
from bough.server.serving.remote.request import FollowedRequest
from bough.server.serving.remote.tree import RemoteTrees, sum_figures
from bough.system.tasks import end_tasks
from bough.tokens import Tokens

log = logging.getLogger(__name__)

FIGURES_S = 1.0

DigestPages = Callable[[Tokens, str], Sequence[bytes]]
"""The digests of a prompt's whole pages under a salt, for the router."""


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
    """A loaded model whose engines are replicas. Implements `Generator`. Construct it on the server's event loop."""

    def __init__(
        self,
        name: str,
        replicas: Replicas,
        facts: ReplicaFacts,
        prompts: Prompts,
        defaults: ModelDefaults,
        digest_pages: DigestPages = lambda tokens, salt: (),
    ) -> None:
        self.engine = facts
        self.facts = ModelFacts(name, prompts, facts.context_tokens, facts.max_tokens, defaults)
        self.stores_answers = facts.stores_answers
        self.worker = RemoteWorker()
        self.tree = RemoteTrees(replicas, prompts, lambda: self.worker.figures)
        self._replicas = replicas
        self._digest_pages = digest_pages
        self._loop = asyncio.get_running_loop()
        self._running: set[FollowedRequest] = set()
        self._texts: set[asyncio.Task[ComputedText]] = set()
        self._watching = asyncio.create_task(self._watch(), name="bough-replica-figures")

    @property
    def embedder(self) -> RemoteEmbedder:
        if not self.engine.state_size:
            raise RequestError(f"{self.engine.info.model} has no embeddings: it has no output layer that is known")
        return RemoteEmbedder(self.facts.prompts, self.engine, self._replicas, self._texts)

    def prepare(self, request: Request, listener: Listener) -> FollowedRequest:
        digests = self._digest_pages(request.tokens, request.salt)
        remote = RemoteRequest(request, secrets.token_hex(8), digests=digests)
        return FollowedRequest(self._replicas, remote, listener, self._running)

    def submit(self, prepared: PreparedRequest) -> None:
        assert isinstance(prepared, FollowedRequest)
        prepared.submit()

    def close(self) -> None:
        """End the running requests and close the replicas. Called on another thread than the event loop's."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()

    async def _close(self) -> None:
        for request in tuple(self._running):
            request.fail(ShuttingDown("the model was unloaded; ask again"))
        await end_tasks(self._watching, *self._texts)
        await self._replicas.close()

    async def _watch(self) -> None:
        while True:
            try:
                self.worker.figures = dict(await self._replicas.read_figures())
            except Exception as error:
                log.warning("the figures of the replicas cannot be read: %s", error)
            await asyncio.sleep(FIGURES_S)


class RemoteEmbedder(TextTokenizer):
    """Implements `ServedEmbedder`: texts are tokenized here, and computed at replicas as tasks in `running`."""

    def __init__(
        self, prompts: Prompts, facts: ReplicaFacts, replicas: Replicas, running: set[asyncio.Task[ComputedText]]
    ) -> None:
        super().__init__(prompts, facts.context_tokens)
        self.dimensions = facts.state_size
        self._replicas = replicas
        self._running = running

    async def compute(self, ids: Sequence[int], salt: str, tenant: str) -> ComputedText:
        work = asyncio.create_task(self._ask(Operation("", "embed", (list(ids), salt, tenant))))
        self._running.add(work)
        work.add_done_callback(self._running.discard)
        try:
            await asyncio.wait([work])
        finally:
            work.cancel()
        if work.cancelled():
            raise ShuttingDown("the model was unloaded; ask again")
        return work.result()

    async def _ask(self, operation: Operation) -> ComputedText:
        """The result of a replica, or of a second one if the first is lost."""
        for _ in range(2):
            try:
                computed: ComputedText = await self._replicas.call(operation)
                return computed
            except ReplicaLost:
                continue
            except BoughError:
                raise
            except Exception as error:
                log.exception("a text at a replica failed by a mistake of ours")
                raise EngineError(f"{type(error).__name__}: {error}") from error
        raise EngineError("the replica was lost twice")


async def read_facts(replicas: Replicas, timeout_s: float) -> ReplicaFacts:
    """The facts of a model when its first replica is ready. Raises Unavailable if that takes too long."""
    try:
        async with asyncio.timeout(timeout_s):
            return await replicas.read_facts()
    except TimeoutError as error:
        raise Unavailable(f"no replica was ready after {timeout_s:.0f} s") from error
