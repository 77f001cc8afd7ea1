"""How the server reaches the replicas of a model: a protocol for any transport, and the messages, which can be pickled."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from bough.engines.contract import EngineInfo
from bough.errors import Unavailable
from bough.generate.request import Request
from bough.routing import Copy
from bough.scheduling.job import RequestNews


@dataclass(frozen=True)
class RemoteRequest:
    """A request for a replica. `timeout_s` is the time that is left: clocks of machines differ.

    With its seed another replica can continue it. The other fields are for the router: `digests` are
    those of the prompt's whole pages, `avoid` are replicas that it should not choose. It may add a `copy`: a prefix that
    the store should copy to the replica first.
    """

    request: Request
    request_id: str = ""
    timeout_s: float | None = None
    digests: Sequence[bytes] = ()
    avoid: frozenset[str] = frozenset()
    copy: Copy | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.request.tokens) + len(self.request.resumed_ids)


@dataclass(frozen=True)
class Operation:
    """A named operation on the tree of one replica; "" is any replica."""

    replica: str
    name: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class RequestAccepted:
    """The first message of every stream: the replica that has the request."""

    replica: str


Message = RequestAccepted | RequestNews
"""A message of a stream. The last is a completion or an error."""


@dataclass(frozen=True)
class ReplicaFacts:
    """The facts of a model's engine that the server needs. They are the same at every replica."""

    info: EngineInfo
    context_tokens: int
    vocab_size: int
    state_size: int
    has_host: bool
    described: Mapping[str, str] = field(default_factory=dict)
    max_tokens: int = 0
    stores_answers: bool = True

    def describe(self) -> dict[str, str]:
        return dict(self.described)


class ReplicaLost(Exception):
    """The connection to a replica broke: its process ended, or its machine cannot be reached."""


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
        """The recent figures of every living replica, by its name."""
        ...

    async def close(self) -> None: ...


async def call_replica(replicas: Replicas, replica: str, operation: str, *arguments: Any) -> Any:
    """Do an operation at one replica. Raise Unavailable if the replica is lost."""
    try:
        return await replicas.call(Operation(replica, operation, arguments))
    except ReplicaLost as error:
        raise Unavailable(f"{replica} was lost; try again soon") from error
