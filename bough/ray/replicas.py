"""The replicas of an application on Ray Serve, which the server reaches by one handle.

A handle's router is made by Serve, which pickles the router's class by value: it has copies of its module's globals. So
routers register in this module, with `register_router`, and requests report their first tokens to them here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context
from dataclasses import replace
from typing import Any, Protocol
from weakref import WeakSet

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle

from bough.errors import BoughError, EngineError, Unavailable
from bough.ray.holdings import ReplicaReport, find_holdings
from bough.server.serving.remote.replicas import Message, Operation, RemoteRequest, ReplicaFacts, ReplicaLost
from bough.types import Chunk

CALL_S = 60.0
"""How long an operation may take. Those on a whole tree take seconds."""

FRESH_S = 2.0
"""How long the ids of the replicas are used before they are read again."""

READ_S = 5.0
"""How long reading the figures of all replicas may take: their one actor may just be restarting."""

_COMPUTING = frozenset(("embed", "warm"))  # they take as long as requests do


class RegisteredRouter(Protocol):
    """What this process calls on a router of Serve. Any thread may call."""

    app_name: str

    def note_first_token(self, request_id: str) -> None:
        """Note that a request has its first token, or has ended without one. A second call does nothing."""

    def stop(self) -> None:
        """Stop using Ray. Called on another thread than the router's; waits for a moment."""


_ROUTERS: WeakSet[RegisteredRouter] = WeakSet()


def register_router(router: RegisteredRouter) -> None:
    _ROUTERS.add(router)


def stop_routers(application: str | None = None) -> None:
    """Stop the routers of an application that is deleted; or all, before the connection to Ray is closed.

    A router that used Ray afterwards would start a cluster of its own.
    """
    for router in list(_ROUTERS):
        if application in (None, router.app_name):
            router.stop()


class RayReplicas:
    """Implements `Replicas` over a handle of Ray Serve. `close` calls `end` in a thread."""

    def __init__(self, handle: DeploymentHandle, application: str, end: Callable[[], None] = lambda: None) -> None:
        self._handle = handle
        self._generate = handle.options(method_name="generate", stream=True)
        self._call = handle.options(method_name="call")
        self._end = end
        self._holdings = find_holdings(application)
        self._known: dict[str, ReplicaReport] = {}
        self._read_s = 0.0

    async def read_facts(self) -> ReplicaFacts:
        facts: ReplicaFacts = await _call_in_new_context(self._handle.facts.remote)
        return facts

    async def read_secret(self) -> bytes:
        """The secret of the application's page digests."""
        secret: bytes = await self._holdings.read_secret.remote()
        return secret

    async def generate(self, request: RemoteRequest) -> AsyncGenerator[list[Message], None]:
        avoid = frozenset(self._known[name].replica_id for name in request.avoid if name in self._known)
        response = _call_in_new_context(self._generate.remote, replace(request, avoid=avoid))
        has_token = False
        try:
            with _cancelling(response):
                async for messages in response:
                    if not has_token and any(isinstance(each, Chunk) for each in messages):
                        has_token = True
                        _note_first_token(request.request_id)
                    yield messages
        finally:
            _note_first_token(request.request_id)

    async def call(self, operation: Operation) -> Any:
        replica_id = await self._find_id(operation.replica) if operation.replica else ""
        response = _call_in_new_context(self._call.remote, operation, replica_id=replica_id)
        try:
            with _cancelling(response):
                async with asyncio.timeout(None if operation.name in _COMPUTING else CALL_S):
                    return await response
        except TimeoutError as error:
            raise Unavailable(f"{operation.replica or 'no replica'} did not answer within {CALL_S:.0f} s") from error

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


@contextmanager
def _cancelling(response: Any) -> Iterator[None]:
    """Translate errors of Ray, and cancel a call that is left before its end: Serve does not do that.

    Serve raises CancelledError also for a call that its replica ends. Unless this task is being cancelled, that becomes
    ReplicaLost.
    """
    try:
        yield
    except (RayError, RayServeException) as error:
        raise _translate(error) from error
    except BaseException as error:
        response.cancel()
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and not task.cancelling():
            raise ReplicaLost("the replica has cancelled a request") from None
        raise


def _translate(error: Exception) -> Exception:
    """The error that a replica raised, ReplicaLost, or Unavailable if no replica can be reached."""
    line = str(error).partition("\n")[0]
    if isinstance(error, RayTaskError):
        cause = error.cause
        return cause if isinstance(cause, BoughError) else EngineError(f"a replica failed: {cause!r:.500}")
    if isinstance(error, ReplicaUnavailableError) or not isinstance(error, RayServeException):
        return ReplicaLost(line)
    return Unavailable(f"no replica can be reached now; try again soon ({line})")


def _note_first_token(request_id: str) -> None:
    for router in list(_ROUTERS):
        router.note_first_token(request_id)


def _call_in_new_context(start: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Start a call in an empty context. Otherwise Serve takes all calls within one HTTP request for the same one: of two
    that wait for a replica at the same time, one would wait forever.
    """
    return Context().run(start, *args, **kwargs)
