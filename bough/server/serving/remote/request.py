"""A request at the replicas: when its replica is lost, another one continues it.

The other replica gets the tokens so far, as generated ones: so a greedy or seeded answer continues with the tokens that it
would have had. The listener gets nothing twice. A request that has lost `MOST_LOST` replicas fails, because it may be the
cause. If a replica refuses, the others are asked; if all refuse, so is the client, unless it has a part of its answer: then
the request waits and asks again, `MOST_MOVES` times.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace

from bough.errors import BoughError, EngineError, EngineStuck, ShuttingDown, TimedOut, Unavailable
from bough.scheduling.job import Listener, PromptAdvanced, PromptLoaded, RequestBegan
from bough.server.serving.remote.replicas import Message, RemoteRequest, ReplicaLost, Replicas, RequestAccepted
from bough.types import Chunk, Completion, TokenLogprob

log = logging.getLogger(__name__)

MOST_LOST = 2
MOST_MOVES = 16  # to another replica or to the same again, for any reason: that takes a minute
MOVE_S, LONGEST_MOVE_S = 0.1, 5.0  # the wait before a move, which doubles from one to the next
LATE_S = 2.0  # replicas end requests at their deadline; if one does not, the request is ended here this much later


class FollowedRequest:
    """Implements `PreparedRequest` over replicas. Everything here runs on the event loop, except making it.

    It is in `running` from `submit` to its end.
    """

    is_loading = False  # known at the replica: a watch reads it there

    def __init__(
        self,
        replicas: Replicas,
        request: RemoteRequest,
        listener: Listener,
        running: set[FollowedRequest],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._running = running
        self._replicas = replicas
        self._request = request
        self._listener = listener
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._ids: list[int] = list(request.request.resumed_ids)
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: list[TokenLogprob] = []
        self._num_scored = 0  # log-probabilities of the prompt that this replica has sent
        self._num_flushed = 0  # characters that came without tokens: they come again if the replica is lost then
        self._num_skipped = 0  # characters still to be dropped
        self._has_begun = False
        self._is_resumed = False
        self.replica = ""  # that has accepted the request
        self._lost: list[str] = []
        self._num_moves = 0
        self._avoid: set[str] = set()
        self.request_id = ""

    def submit(self) -> None:
        self._task = asyncio.create_task(self._run(), name="bough-remote-request")
        self._running.add(self)
        self._task.add_done_callback(lambda _: self._running.discard(self))

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def fail(self, error: BoughError) -> None:
        """End the request with this error, if it has not ended."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            self._listener(error)

    async def _run(self) -> None:
        try:
            async with asyncio.timeout(self._left_s(LATE_S)) as scope:
                await self._follow()
        except BoughError as error:
            self._listener(error)
        except Exception as error:
            if scope.expired():
                self._listener(TimedOut("the request took longer than it may, and no replica has answered"))
                return
            log.exception("a request at a replica failed by a mistake of ours")
            self._listener(EngineError(f"{type(error).__name__}: {error}"))

    def _left_s(self, late_s: float = 0.0) -> float | None:
        """Seconds until `late_s` after the deadline; None without a deadline."""
        deadline_s = self._request.request.deadline_s
        return None if math.isinf(deadline_s) else deadline_s + late_s - self._clock()

    async def _follow(self) -> None:
        while True:
            try:
                if await self._try():
                    return
                raise ReplicaLost(f"{self.replica} ended the stream of a request in its middle")
            except ReplicaLost as error:
                self._note_lost(error)
            except Unavailable as error:
                self._note_refused(error)
            await asyncio.sleep(min(MOVE_S * 2**self._num_moves, LONGEST_MOVE_S))
            self._num_moves += 1

    def _note_lost(self, error: Exception) -> None:
        """Raise the client's error if the request is not tried again."""
        name = self.replica
        if not name:  # no replica had accepted the request
            if self._num_moves >= MOST_MOVES:
                raise Unavailable(f"{MOST_MOVES + 1} times in turn no replica could be reached; try again soon") from error
            return
        self._lost.append(name)
        self._avoid.add(name)
        if len(self._lost) >= MOST_LOST:
            lost = " and ".join(self._lost)
            raise EngineError(
                f"the request was lost with {len(self._lost)} replicas ({lost}): it is not tried again"
            ) from error
        log.warning("%s was lost after %d tokens of an answer: it goes on elsewhere", name, len(self._ids))

    def _note_refused(self, error: Unavailable) -> None:
        """Note a replica that is full, stuck or shutting down. Raise the error if the request is not tried again."""
        was_asked = not self.replica or self.replica in self._avoid
        self._avoid |= {self.replica} - {""}
        if isinstance(error, EngineStuck) and not was_asked:
            self._note_lost(error)
        can_wait = self._has_part or isinstance(error, ShuttingDown)
        if isinstance(error, TimedOut) or self._num_moves >= MOST_MOVES or (was_asked and not can_wait):
            raise error
        log.info("%s takes no requests now: one goes on elsewhere", self.replica)

    @property
    def _has_part(self) -> bool:
        """Whether the client has a part of its answer."""
        return len(self._ids) > len(self._request.request.resumed_ids)

    async def _try(self) -> bool:
        """Run the rest of the request on one replica; returns whether it has ended."""
        self.replica, self._num_scored, self._num_skipped = "", 0, self._num_flushed
        async with aclosing(self._replicas.generate(self._next())) as stream:
            async for messages in stream:
                for message in messages:
                    if self._read(message):
                        return True
        return False

    def _next(self) -> RemoteRequest:
        """The request with the tokens that it has so far."""
        request, timeout_s = self._request.request, self._left_s()
        if timeout_s is not None and timeout_s <= 0:
            raise TimedOut("the request took longer than it may: its replica was lost")
        self._is_resumed = self._has_part
        if self._is_resumed:
            request = replace(request, resumed_ids=tuple(self._ids), scores_prompt=False)
        request = replace(request, deadline_s=math.inf)  # of this machine's clock
        self.request_id = f"{self._request.request_id}-{self._num_moves}"
        return replace(
            self._request,
            request=request,
            request_id=self.request_id,
            timeout_s=timeout_s,
            avoid=frozenset(self._avoid),
        )

    def _read(self, message: Message) -> bool:
        """Pass a message on, unless the listener has it already; returns whether it is the last."""
        match message:
            case Chunk():
                self._read_chunk(message)
            case RequestAccepted():
                self.replica = message.replica
            case RequestBegan() if not self._has_begun:
                self._has_begun = True
                self._listener(message)
            case PromptLoaded() | PromptAdvanced() if not self._is_resumed:
                self._listener(message)
            case Completion():
                self._listener(self._complete(message))
                return True
            case Unavailable():
                raise message
            case BoughError():
                self._listener(message)
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
            self._listener(chunk)

    def _complete(self, completion: Completion) -> Completion:
        if not self._avoid:
            return completion
        return replace(completion, logprobs=tuple(self._logprobs), prompt_logprobs=tuple(self._prompt_logprobs))
