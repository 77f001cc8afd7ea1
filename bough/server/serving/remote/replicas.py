"""How the server reaches the replicas of a model, whatever connects them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

from bough.server.serving.remote.messages import Message, Operation, RemoteRequest, ReplicaFacts


class ReplicaLost(Exception):
    """The connection to a replica broke off: its process ended, or its machine cannot be reached."""


class Replicas(Protocol):
    """The replicas of one model. Everything here runs on the server's event loop."""

    async def read_facts(self) -> ReplicaFacts:
        """The facts of the model, when the first replica is ready."""
        ...

    def generate(self, request: RemoteRequest) -> AsyncGenerator[list[Message], None]:
        """The messages of a request, in batches as they come. Closing it cancels the request. Raises ReplicaLost."""
        ...

    async def call(self, operation: Operation) -> Any:
        """The result of an operation at one replica. Raises ReplicaLost, Unavailable, or what the operation raises."""
        ...

    async def read_figures(self) -> Mapping[str, dict[str, Any]]:
        """The recent figures of every replica that lives, by its name."""
        ...

    async def close(self) -> None: ...
