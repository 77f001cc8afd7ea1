"""The interface of a loaded model to the service, whether its engine runs in this process or elsewhere.

Everything that crosses it is plain data: requests in token ids, news of them, named operations on the tree, and looks at
what has changed there. So another process can do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from bough.cache.admin.archive import ImportResult
from bough.cache.admin.view import Lookup, TreeView
from bough.cache.admin.watch import TreeChanges, TreePosition
from bough.cache.prefix_cache import PrefixCache
from bough.cache.steps import Steps
from bough.generate.request import Request
from bough.models.prompts import EncodedPrompt
from bough.prompting.prompt import ModelFacts
from bough.scheduling.job import Listener
from bough.types import Completion

Result = TypeVar("Result")
NodeWork = Callable[[PrefixCache, str, int], Steps[Result]]
"""A function of `cache/admin/nodes.py`, with its further arguments bound: it can be pickled."""

ROOT_SEPARATOR = ":"  # between the name of a replica and that of a root there


TEXT_TOKENS = 128  # the most tokens of an edge that are shown; a look from elsewhere has no more of them

_NOWHERE = TreePosition(None, 0)


@dataclass(frozen=True)
class WatchedRequest:
    """A request to find in the tree: its packed tokens as far as they are known, and how many of them it has reused.

    No two requests of a watch have the same `number`. Over replicas, `replica` is the one that has it, and `request_id` its
    id there; "" when it has ended.
    """

    number: int
    packed: bytes
    salt: str
    cached_tokens: int = 0
    replica: str = ""
    request_id: str = ""


@dataclass(frozen=True)
class RequestPosition:
    """One request in the tree: how far its tokens reach, and an estimate.

    `reused_s` is what computing the tokens that it has reused would have taken; None if nothing was measured yet.
    `is_loading` says that it still reads from disk at its replica; a request of this process knows that itself.
    """

    place: TreePosition = _NOWHERE
    reused_s: float | None = None
    is_loading: bool = False


@dataclass(frozen=True)
class Look:
    """The result of one look: `seen` by the numbers of requests, without those that could not be found; `stats` by salt."""

    changes: TreeChanges
    seen: Mapping[int, RequestPosition]
    stats: Mapping[str, Mapping[str, int]]
    prefill_tokens_per_s: float | None


class PreparedRequest(Protocol):
    """A request that was checked. It runs when it is submitted, until it ends or is cancelled."""

    @property
    def is_loading(self) -> bool:
        """Whether parts of its prefix are still being read from disk. One at a replica does not know."""

    @property
    def replica(self) -> str:
        """The replica that has it; "" without replicas, and before one has taken it."""

    @property
    def request_id(self) -> str:
        """Its id at the replica that has it; "" without replicas."""

    def cancel(self) -> None:
        """End it soon, keeping what was computed. Never waits; a second call does nothing."""


class ServedWatch(Protocol):
    """Looks at a tree again and again. What changes in the tree is noted only while a watch is open."""

    async def look(self, sought: Sequence[WatchedRequest], salts: Collection[str]) -> Look:
        """The changes since the last look, and where these requests are. The first look has the whole tree.

        Roots from disk get their names by `salts`. After an error, which may be a BoughError, the watch cannot be used.
        """

    async def close(self) -> None:
        """Look no more. A second call does nothing."""


def root_at(replica: str, root: str) -> str:
    """The name of a root at a replica; without replicas, its own."""
    return f"{replica}{ROOT_SEPARATOR}{root}" if replica else root


class ServedTree(Protocol):
    """The tree of a model. Results by replica have an entry for each; without replicas, one with the name ""."""

    async def stats(self, salt: str | None) -> dict[str, Any]:
        """Exact figures of all trees, or of one salt's."""

    async def view(self, salt: str | None) -> TreeView: ...

    async def look_up(self, prompt: bytes, salt: str) -> Mapping[str, Lookup]: ...

    async def keep(self, prefix: bytes, kept: bool, salt: str) -> Mapping[str, Lookup]:
        """Keep a prefix where it is known, or keep it no longer; returns the known part then, by replica."""

    async def warm(self, prefix: EncodedPrompt, salt: str, tenant: str) -> Completion:
        """Compute a prefix and keep it. Raises DoesNotFit."""

    def own_root(self, root: str, salt: str) -> str:
        """The root of a salt in the same tree as `root`, which need not be of that salt."""

    def watch(self) -> ServedWatch: ...

    async def at_node(self, root: str, key: int, work: NodeWork[Result]) -> Result:
        """Do something at one node, on the engine's thread. Raises NodeNotFound, and what the work raises."""

    async def clear(self, salt: str | None) -> None:
        """Forget all that no running request uses, of one salt if given."""

    async def export_file(self, file: Path, salt: str) -> None:
        """Write the tree of a salt into a file; if the caller ends, none is left. Raises DiskError, RequestError."""

    async def import_file(self, file: Path, salt: str) -> ImportResult:
        """Add an archive to the tree of a salt. Raises DiskError, RequestError."""


class Generator(Protocol):
    """A model that generates text: a runtime of this process, or one at replicas."""

    @property
    def facts(self) -> ModelFacts: ...

    @property
    def stores_answers(self) -> bool:
        """Whether the state of answers is kept for reuse."""

    def prepare(self, request: Request, listener: Listener) -> PreparedRequest:
        """Check a request. Any thread may call it. Raises RequestError or PromptTooLong."""

    def submit(self, prepared: PreparedRequest) -> None:
        """Queue a request that was prepared here; from now on its listener is called. Raises Unavailable."""
