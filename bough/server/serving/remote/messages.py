"""What goes between the server and the replicas of a model: plain data that can be pickled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bough.engines.contract import EngineInfo
from bough.errors import BoughError
from bough.routing import Copy
from bough.server.serving.model.contract import GenerateRequest
from bough.types import Chunk, Completion, Usage


@dataclass(frozen=True)
class RemoteRequest:
    """A request on its way to a replica. `timeout_s` is what is left of its time: clocks of machines differ.

    Its parameters have a seed, so that another replica can go on with it. The other fields are for the router: `digests`
    are those of the whole pages of the prompt, `avoid` are replicas that it should not choose. It may add a `copy`: what
    the store should bring to the replica first.
    """

    request: GenerateRequest
    request_id: str = ""
    timeout_s: float | None = None
    digests: Sequence[bytes] = ()
    avoid: frozenset[str] = frozenset()
    copy: Copy | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.request.encoded.ids) + len(self.request.resumed_ids)


@dataclass(frozen=True)
class Operation:
    """A named operation on the tree of one replica."""

    replica: str
    name: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Accepted:
    """The first message of every stream: this replica has the request."""

    replica: str


@dataclass(frozen=True)
class Began:
    usage: Usage
    waited_s: float


@dataclass(frozen=True)
class Loaded:
    usage: Usage


@dataclass(frozen=True)
class Advanced:
    done_tokens: int
    total_tokens: int


Message = Accepted | Began | Loaded | Advanced | Chunk | Completion | BoughError
"""A stream has any number of them. The last is a completion or an error."""


@dataclass(frozen=True)
class ReplicaFacts:
    """What the server must know of the engine of a model. It is the same at every replica."""

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
