"""What a loaded model is to the service, whether its engine runs in this process or elsewhere.

Everything that crosses this border is plain data: requests in token ids, what listeners are told, and named operations on
the tree. No function that reads a cache crosses it, so that another process can be asked the same.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bough.cache.admin.archive import Imported
from bough.cache.admin.nodes import EvictedNodes, KeptNode, NodeDetails
from bough.cache.admin.view import Lookup, TreeView
from bough.engines.contract import EngineInfo
from bough.models.defaults import ModelDefaults
from bough.models.prompts import Encoded, Prompts
from bough.runtime.embedding import Embedder
from bough.scheduling.job import Listener
from bough.server.serving.model.look import Look, Sought
from bough.types import Completion, SamplingParams

ROOT_SEPARATOR = ":"
"""Stands between the name of a replica and that of a root there."""


@dataclass(frozen=True)
class GenerateRequest:
    """One choice of an answer, ready to run. `deadline_s` is a time of this process's monotonic clock.

    `resumed_ids` are tokens that were generated of it before: the answer goes on after them.
    """

    encoded: Encoded
    params: SamplingParams = field(default_factory=SamplingParams)
    salt: str = ""
    choice: int = 0
    tenant: str = ""
    deadline_s: float = math.inf
    scores_prompt: bool = False
    resumed_ids: Sequence[int] = ()


class ChoiceListener(Listener, Protocol):
    """A listener that is told how far the prompt is, too. Any thread may call it."""

    def on_progress(self, done_tokens: int, total_tokens: int) -> None: ...


class PreparedRequest(Protocol):
    """A request that was checked. It runs when it is submitted, until it ends or is cancelled."""

    @property
    def is_loading(self) -> bool:
        """Whether parts of its prefix are still being read from disk. One at a replica does not know."""
        ...

    @property
    def replica(self) -> str:
        """The replica that has it; "" without replicas, and before one has taken it."""
        ...

    @property
    def request_id(self) -> str:
        """Its id at the replica that has it; "" without replicas."""
        ...

    def submit(self) -> None:
        """Queue it; from now on its listener is told what happens. Raises Unavailable."""
        ...

    def cancel(self) -> None:
        """End it soon, keeping what was computed. Never waits; a second call does nothing."""
        ...


class ServedWatch(Protocol):
    """Looks at a tree again and again. What changes in the tree is noted only while a watch is open."""

    async def look(self, sought: Sequence[Sought], salts: Collection[str]) -> Look:
        """What has changed since the last look, and where these requests are. The first one tells the whole tree.

        Roots from disk get their names by `salts`. After an error, which may be a BoughError, the watch is of no more use.
        """
        ...

    async def close(self) -> None:
        """Look no more. A second call does nothing."""
        ...


def root_at(replica: str, root: str) -> str:
    """The name of a root at a replica; without replicas, its own."""
    return f"{replica}{ROOT_SEPARATOR}{root}" if replica else root


class ServedTree(Protocol):
    """The tree of a model, by named operations. Those who run several replicas name each: `replica-0`, `replica-1`, …

    Results by replica have one entry with the name "" if there are no replicas.
    """

    async def stats(self, salt: str | None) -> dict[str, Any]:
        """Exact figures of all trees, or of one salt's."""
        ...

    async def view(self, salt: str | None) -> TreeView:
        """The whole tree, or that of one salt."""
        ...

    async def look_up(self, prompt: bytes, salt: str) -> Mapping[str, Lookup]:
        """What is known of the packed tokens of a prompt, by replica."""
        ...

    async def keep(self, prefix: bytes, kept: bool, salt: str) -> Mapping[str, Lookup]:
        """Keep a prefix where it is known, or keep it no longer; what is known of it then, by replica."""
        ...

    async def warm(self, prefix: Encoded, salt: str, tenant: str) -> Completion:
        """Compute a prefix and keep it. Raises DoesNotFit."""
        ...

    def own_root(self, root: str, salt: str) -> str:
        """The root of a salt in the same tree as `root`, which need not be of that salt. Who may see a salt may see it."""
        ...

    def watch(self) -> ServedWatch:
        """A new watch over the tree."""
        ...

    async def read_node(self, root: str, key: int) -> NodeDetails: ...
    async def keep_node(self, root: str, key: int, kept: bool) -> KeptNode: ...
    async def evict_node(self, root: str, key: int) -> EvictedNodes: ...

    async def clear(self, salt: str | None) -> None:
        """Forget all that no running request uses, of one salt if given."""
        ...

    async def export_file(self, file: Path, salt: str) -> None:
        """Write the tree of a salt into a file. None is left if the caller ends. Raises DiskError, RequestError."""
        ...

    async def import_file(self, file: Path, salt: str) -> Imported:
        """Add an archive to the tree of a salt. Raises DiskError, RequestError."""
        ...


class Generator(Protocol):
    """A model that generates text, and so has a tree."""

    @property
    def prompts(self) -> Prompts: ...

    @property
    def defaults(self) -> ModelDefaults:
        """The sampling that the model recommends."""
        ...

    @property
    def context_tokens(self) -> int: ...

    @property
    def max_tokens(self) -> int:
        """The most tokens of an answer without a limit of its own; 0: by the context."""
        ...

    @property
    def stores_answers(self) -> bool:
        """Whether the state of answers is kept for reuse."""
        ...

    @property
    def tree(self) -> ServedTree: ...

    def prepare(self, request: GenerateRequest, listener: ChoiceListener) -> PreparedRequest:
        """Check a request. Any thread may call it. Raises RequestError or PromptTooLong."""
        ...


class ServedEngine(Protocol):
    """Facts about the engine of a loaded model."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def context_tokens(self) -> int: ...

    @property
    def has_host(self) -> bool: ...

    def describe(self) -> dict[str, str]: ...


class ServedWorker(Protocol):
    """The state of what computes for a loaded model. Reading it never waits."""

    @property
    def is_stuck(self) -> bool: ...

    def snapshot(self) -> dict[str, Any]:
        """Recent figures. Those who run several replicas have sums, and the figures of each under `replicas`."""
        ...


class ServedRuntime(Protocol):
    """A loaded model, as far as it is loaded, watched and unloaded."""

    @property
    def engine(self) -> ServedEngine: ...

    @property
    def worker(self) -> ServedWorker: ...

    @property
    def embedder(self) -> Embedder:
        """What turns texts into vectors. Raises RequestError if the model has none."""
        ...

    def close(self) -> None:
        """Unload it. It may wait long."""
        ...
