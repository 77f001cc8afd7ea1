"""The replicas of an application on Ray Serve, as the server uses them: by one handle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextvars import Context
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle

from bough.errors import BoughError, EngineError, Unavailable
from bough.ray.first_tokens import note_first_token
from bough.ray.holdings import Report, find_holdings
from bough.server.serving.remote.messages import Message, Operation, RemoteRequest, ReplicaFacts
from bough.server.serving.remote.replicas import ReplicaLost
from bough.types import Chunk

CALL_S = 60.0
"""How long an operation may take. Those on a whole tree take seconds."""

FRESH_S = 2.0
"""What was read of the replicas counts for so long when one is looked for by its name."""

READ_S = 5.0
"""How long the figures of all replicas may take: they are read from one actor, which may just be started anew."""

_COMPUTING = frozenset(("embed", "warm"))  # they take as long as requests do


class RayReplicas:
    """Implements `Replicas` over a handle of Ray Serve. `end` is called when they are closed, on a thread of its own."""

    def __init__(self, handle: DeploymentHandle, application: str, end: Callable[[], None] = lambda: None) -> None:
        self._handle = handle
        self._generate = handle.options(method_name="generate", stream=True)
        self._call = handle.options(method_name="call")
        self._end = end
        self._holdings = find_holdings(application)
        self._known: dict[str, Report] = {}
        self._read_s = 0.0

    async def read_facts(self) -> ReplicaFacts:
        facts: ReplicaFacts = await _apart(self._handle.facts.remote)
        return facts

    async def read_secret(self) -> bytes:
        """The secret under which pages are named."""
        secret: bytes = await self._holdings.read_secret.remote()
        return secret

    async def generate(self, request: RemoteRequest) -> AsyncGenerator[list[Message], None]:
        response = _apart(self._generate.remote, self._with_ids(request))
        is_over = has_token = False
        try:
            async for messages in response:
                if not has_token and any(isinstance(each, Chunk) for each in messages):
                    has_token = True
                    note_first_token(request.request_id)
                yield messages
            is_over = True
        except (RayError, RayServeException) as error:
            is_over = True
            raise _translate(error) from error
        except asyncio.CancelledError:
            _require_own_cancelling()
            raise
        finally:
            if not is_over:
                response.cancel()
            note_first_token(request.request_id)

    def _with_ids(self, request: RemoteRequest) -> RemoteRequest:
        """The request with the ids at Serve of the replicas to avoid, instead of their names."""
        if not request.avoid:
            return request
        ids = {self._known[name].replica_id for name in request.avoid if name in self._known}
        return RemoteRequest(**{**vars(request), "avoid": frozenset(ids)})

    async def call(self, operation: Operation) -> Any:
        replica_id = await self._find_id(operation.replica) if operation.replica else ""
        response = _apart(self._call.remote, operation, replica_id=replica_id)
        is_over = False
        try:
            async with asyncio.timeout(None if operation.name in _COMPUTING else CALL_S):
                result = await response
            is_over = True
            return result
        except TimeoutError as error:
            raise Unavailable(f"{operation.replica or 'no replica'} did not answer within {CALL_S:.0f} s") from error
        except (RayError, RayServeException) as error:
            is_over = True
            raise _translate(error) from error
        except asyncio.CancelledError:
            _require_own_cancelling()
            raise
        finally:
            if not is_over:  # Serve leaves it to us to cancel what is no longer awaited
                response.cancel()

    async def _find_id(self, name: str) -> str:
        if name not in self._known or time.monotonic() - self._read_s > FRESH_S:
            await self.read_figures()
        if name not in self._known:
            raise ReplicaLost(f"there is no {name}")
        return self._known[name].replica_id

    async def read_figures(self) -> Mapping[str, dict[str, Any]]:
        try:
            async with asyncio.timeout(READ_S):
                self._known = await self._holdings.read.remote()
        except (RayError, TimeoutError) as error:
            raise Unavailable("the figures of the replicas cannot be read now; try again soon") from error
        self._read_s = time.monotonic()
        return {name: known.figures for name, known in sorted(self._known.items())}

    async def close(self) -> None:
        await asyncio.to_thread(self._end)


def _translate(error: Exception) -> Exception:
    """What an error of Ray or Serve says of a replica: it was lost, it raised something, or none can be reached."""
    line = str(error).partition("\n")[0]
    if isinstance(error, RayTaskError):
        return (
            error.cause if isinstance(error.cause, BoughError) else EngineError(f"a replica failed: {error.cause!r:.500}")
        )
    if isinstance(error, ReplicaUnavailableError) or not isinstance(error, RayServeException):
        return ReplicaLost(line)
    return Unavailable(f"no replica can be reached now; try again soon ({line})")


def _require_own_cancelling() -> None:
    """Raise ReplicaLost unless somebody has cancelled this task: Serve raises the same for a call that its replica ends."""
    task = asyncio.current_task()
    if task is not None and not task.cancelling():
        raise ReplicaLost("the replica has cancelled a request") from None


def _apart(start: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Start a call as one of its own. In an ingress, Serve takes all calls of one HTTP request for the same one: of two
    that wait for a replica at the same time, one would wait for ever.
    """
    return Context().run(start, *args, **kwargs)
