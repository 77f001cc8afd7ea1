"""A request at the replicas: it goes on at another one when the first is lost.

The tokens that have come so far go with it: they count as generated, so a greedy or seeded answer goes on with the tokens
that it would have had. What the listener was told is never told again. A request that has lost `MOST_LOST` replicas is
refused, because it may be what ends them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace

from bough.errors import BoughError, EngineError, ShuttingDown, TimedOut, Unavailable
from bough.server.serving.model.contract import ChoiceListener, GenerateRequest
from bough.server.serving.remote.messages import Accepted, Advanced, Began, Loaded, Message, RemoteRequest
from bough.server.serving.remote.replicas import ReplicaLost, Replicas
from bough.types import Chunk, Completion, TokenLogprob

log = logging.getLogger(__name__)

MOST_LOST = 2
MOST_UNHEARD = 4  # replicas that had gone before they took the request
MOST_MOVES = 8  # to other replicas, because those before were full or shutting down
MOVE_S = 0.1


class FollowedRequest:
    """Implements `PreparedRequest` over replicas. Everything here runs on the event loop, except making it."""

    is_loading = False  # a watch over its replica tells it

    def __init__(
        self,
        replicas: Replicas,
        request: RemoteRequest,
        listener: ChoiceListener,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replicas = replicas
        self._request = request
        self._listener = listener
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._ids: list[int] = list(request.request.resumed_ids)
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: list[TokenLogprob] = []
        self._num_scored = 0  # log-probabilities of the prompt that this replica has told
        self._num_flushed = 0  # characters that came without tokens: they come again if the replica is lost then
        self._num_skipped = 0  # characters still to be dropped
        self._has_begun = False
        self._is_resumed = False
        self._replica = ""
        self._lost: list[str] = []
        self._num_unheard = 0
        self._avoid: set[str] = set()
        self.request_id = ""

    @property
    def replica(self) -> str:
        return self._replica

    def submit(self) -> None:
        self._task = asyncio.create_task(self._run(), name="bough-remote-request")

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            await self._follow()
        except BoughError as error:
            self._listener.on_error(error)
        except Exception as error:
            log.exception("a request at a replica failed by a mistake of ours")
            self._listener.on_error(EngineError(f"{type(error).__name__}: {error}"))

    async def _follow(self) -> None:
        while True:
            try:
                if await self._try():
                    return
                raise ReplicaLost(f"{self._replica} ended the stream of a request in its middle")
            except ReplicaLost as error:
                self._note_lost(error)
                await asyncio.sleep(MOVE_S)
            except ShuttingDown:
                self._avoid.add(self._replica)
                if len(self._avoid) > MOST_MOVES or not self._replica:
                    raise
                log.info("%s takes no requests now: one goes on elsewhere", self._replica)
                await asyncio.sleep(MOVE_S)

    def _note_lost(self, error: ReplicaLost) -> None:
        name = self._replica
        if not name:  # it had gone before the request came there
            self._num_unheard += 1
            if self._num_unheard > MOST_UNHEARD:
                raise Unavailable(f"{self._num_unheard} replicas in turn could not be reached; try again soon") from error
            return
        self._lost.append(name)
        self._avoid.add(name)
        if len(self._lost) >= MOST_LOST:
            lost = " and ".join(self._lost)
            raise EngineError(
                f"the request was lost with {len(self._lost)} replicas ({lost}): it is not tried again"
            ) from error
        log.warning("%s was lost after %d tokens of an answer: it goes on elsewhere", name, len(self._ids))

    async def _try(self) -> bool:
        """Run what is left of the request on one replica; returns whether it has ended."""
        self._replica, self._num_scored, self._num_skipped = "", 0, self._num_flushed
        async with aclosing(self._replicas.generate(self._next())) as stream:
            async for messages in stream:
                for message in messages:
                    if self._read(message):
                        return True
        return False

    def _next(self) -> RemoteRequest:
        """The request with what has come of it so far."""
        request = self._request.request
        timeout_s = None if math.isinf(request.deadline_s) else request.deadline_s - self._clock()
        if timeout_s is not None and timeout_s <= 0:
            raise TimedOut("the request took longer than it may: its replica was lost")
        self._is_resumed = len(self._ids) > len(request.resumed_ids)
        if self._is_resumed:
            request = replace(request, resumed_ids=tuple(self._ids), scores_prompt=False)
        request = replace(request, deadline_s=math.inf)  # of this machine's clock
        self.request_id = f"{self._request.request_id}-{len(self._avoid)}"
        return replace(
            self._request,
            request=request,
            request_id=self.request_id,
            timeout_s=timeout_s,
            avoid=frozenset(self._avoid),
        )

    def _read(self, message: Message) -> bool:
        """Pass a message on, unless the listener knows it already; returns whether it is the last."""
        listener = self._listener
        if isinstance(message, Chunk):
            self._read_chunk(message)
        elif isinstance(message, Accepted):
            self._replica = message.replica
        elif isinstance(message, Began):
            if not self._has_begun:
                self._has_begun = True
                listener.on_start(message.usage, message.waited_s)
        elif isinstance(message, Loaded):
            if not self._is_resumed:
                listener.on_loaded(message.usage)
        elif isinstance(message, Advanced):
            if not self._is_resumed:
                listener.on_progress(message.done_tokens, message.total_tokens)
        elif isinstance(message, ShuttingDown):
            raise message
        elif isinstance(message, Unavailable) and self._is_resumed and not isinstance(message, TimedOut):
            self._avoid.add(self._replica)  # it is full or stuck; the client has a part of its answer already
            raise ShuttingDown(str(message)) from message
        elif isinstance(message, BoughError):
            listener.on_error(message)
            return True
        else:
            listener.on_end(self._complete(message))
            return True
        return False

    def _read_chunk(self, chunk: Chunk) -> None:
        if chunk.prompt_logprobs:
            known = len(self._prompt_logprobs) - self._num_scored
            self._num_scored += len(chunk.prompt_logprobs)
            fresh = chunk.prompt_logprobs[max(0, known) :]
            self._prompt_logprobs += fresh
            chunk = replace(chunk, prompt_logprobs=fresh)
            if not fresh:
                return
        if self._num_skipped:
            skipped = min(self._num_skipped, len(chunk.text))
            self._num_skipped -= skipped
            chunk = replace(chunk, text=chunk.text[skipped:])
        if not chunk.token_ids:
            self._num_flushed += len(chunk.text)
        self._ids += chunk.token_ids
        self._logprobs += chunk.logprobs
        if chunk.text or chunk.token_ids or chunk.prompt_logprobs:
            self._listener.on_chunk(chunk)

    def _complete(self, completion: Completion) -> Completion:
        if not self._avoid:
            return completion
        return replace(completion, logprobs=tuple(self._logprobs), prompt_logprobs=tuple(self._prompt_logprobs))


def with_seed(request: GenerateRequest, seed: int) -> GenerateRequest:
    """The request with this seed, if it has none."""
    if request.params.seed is not None:
        return request
    return replace(request, params=replace(request.params, seed=seed))
