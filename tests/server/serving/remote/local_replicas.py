"""Replicas in this process, whose connections break when a test says so. What they tell is pickled on its way."""

from __future__ import annotations

import pickle
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

from bough.runtime import Runtime
from bough.scheduling.job import RequestBegan
from bough.server.serving.remote.host import ReplicaHost
from bough.server.serving.remote.replicas import (
    Message,
    Operation,
    RemoteRequest,
    ReplicaFacts,
    ReplicaLost,
    RequestAccepted,
)
from bough.types import Chunk
from tests.gates import Gate, Notes

SECRET = bytes(32)


class LocalReplicas:
    """Takes the first replica that is not to be avoided. `breaks` are the numbers of chunks after which streams break.

    No stream goes on beyond its beginning while `may_go_on` is closed.
    """

    def __init__(self) -> None:
        self.hosts: dict[str, ReplicaHost] = {}
        self.runtimes: list[Runtime] = []
        self.breaks: list[int] = []
        self.requests: list[RemoteRequest] = []
        self.calls: Notes[Operation] = Notes()
        self.reads: Notes[dict[str, dict[str, Any]]] = Notes()  # figures that were read
        self.may_go_on = Gate()
        self.may_go_on.open()
        self.hold: Callable[[Operation], Awaitable[None]] | None = None  # waits before an operation is done

    def add(self, runtime: Runtime, secret: bytes) -> ReplicaHost:
        self.runtimes.append(runtime)
        name = f"replica-{len(self.hosts)}"
        host = self.hosts[name] = ReplicaHost(name, runtime, secret, self)
        return host

    async def read_facts(self) -> ReplicaFacts:
        return _copy(next(iter(self.hosts.values())).facts())

    async def generate(self, request: RemoteRequest) -> AsyncGenerator[list[Message], None]:
        self.requests.append(request)
        free = [host for name, host in self.hosts.items() if name not in request.avoid]
        host = (free or list(self.hosts.values()))[0]
        left = self.breaks.pop(0) if self.breaks else None
        async with aclosing(host.generate(_copy(request))) as stream:
            async for messages in stream:
                for message in messages:  # one by one, so that a stream breaks where it should
                    if left == 0 and not isinstance(message, RequestAccepted):
                        raise ReplicaLost(f"{host.name} was killed")
                    yield [_copy(message)]
                    if isinstance(message, RequestBegan):
                        await self.may_go_on.passed()
                    if left is not None and isinstance(message, Chunk):
                        left -= 1

    async def call(self, operation: Operation) -> Any:
        self.calls.append(operation)
        if self.hold is not None:
            await self.hold(operation)
        if operation.replica and operation.replica not in self.hosts:
            raise ReplicaLost(f"there is no {operation.replica}")
        host = self.hosts[operation.replica] if operation.replica else next(iter(self.hosts.values()))
        return _copy(await host.call(_copy(operation)))

    async def read_figures(self) -> Mapping[str, dict[str, Any]]:
        figures = {name: host.snapshot() for name, host in self.hosts.items()}
        self.reads.append(figures)
        return figures

    async def close(self) -> None:
        for host in self.hosts.values():
            host.close()


def _copy(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))
