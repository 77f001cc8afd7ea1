"""The ways of running a model on lanes, as the self-check and the engines see them.

A model without groups has a `PlainLane`, which holds the tokens, and the model's own cache if that cache is correct. It can
only be extended or reset; nothing of it can be published or captured.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from bough.cache.tree.state import Group, GroupSource, Incoming
from bough.engines.shared.lane import UnsharedLane
from bough.engines.shared.pages import PageAllocator

Logits = TypeVar("Logits")
LaneT = TypeVar("LaneT")
Tensor = TypeVar("Tensor")
Found = TypeVar("Found", covariant=True)

_DEPTH = 3  # a cache, its layers, and the parts of a layer


class RunResult(Enum):
    """The result of an evaluated run."""

    LAST_LOGITS = auto()
    ALL_LOGITS = auto()
    LAST_STATE = auto()


class Compute(ABC, Generic[LaneT, Logits]):
    """Makes lanes and runs tokens on them. `Logits` are tensors of the engine's library."""

    @abstractmethod
    def make_lane(self) -> LaneT: ...

    @abstractmethod
    def run(self, lane: LaneT, ids: Sequence[int], result: RunResult) -> Logits:
        """Append a run to the lane. Logits are [vocabulary] or [run, vocabulary], a state is [hidden] in float32."""

    def evaluate(self, lane: LaneT, ids: Sequence[int]) -> Logits:
        """Append a run to the lane and return the logits after its last token."""
        return self.run(lane, ids, RunResult.LAST_LOGITS)

    def step(self, lanes: Sequence[LaneT], ids: Sequence[int]) -> list[Logits]:
        """Append one token to each lane: here one by one."""
        return [self.evaluate(lane, [token_id]) for lane, token_id in zip(lanes, ids, strict=True)]


class Shapes(Protocol):
    """The part of a layout that needs no tensor library."""

    @property
    def groups(self) -> Sequence[Group]: ...

    @property
    def vocab_size(self) -> int: ...


class GroupCompute(Compute[LaneT, Logits]):
    """Runs a model whose groups are known: the content of its lanes can be published, captured and adopted."""

    layout: Shapes
    pages: PageAllocator


class RunMode(StrEnum):
    """Where the state of a sequence is kept while a model runs."""

    LANES = "lanes"
    """In Bough's own lanes: it can be reused."""
    LIBRARY = "library"
    """In the cache that the model's library makes."""
    RECOMPUTE = "recompute"
    """Nowhere: every step starts from the first token."""


@dataclass(frozen=True)
class Verdict:
    """How to run a model, and what it can do that way, as the self-check found.

    `whole_step`: a step is one call of our own kernels, not of the model's modules; else `why_no_whole_step` says why.
    `kv` is the type in which rows are kept; empty if that is the model's own.
    `is_pooled`: lanes and pages share the slots of one pool; else `why_not_pooled` has the reason, if that was tried.
    Verdicts are kept as JSON files, so the names of these fields must not change.
    """

    attention: str
    way: RunMode = RunMode.LANES
    can_chunk: bool = True
    can_reuse: bool = True
    can_batch: bool = False
    reason: str = ""
    differences: dict[str, float] = field(default_factory=dict)
    whole_step: bool = False
    why_no_whole_step: str = ""
    is_pooled: bool = False
    why_not_pooled: str = ""
    kv: str = ""

    @property
    def worth(self) -> tuple[bool, bool, bool]:
        """The better of two verdicts has the larger worth."""
        return self.can_reuse, self.can_chunk, self.way is RunMode.LANES


class PlainLane(UnsharedLane):
    """Implements `bough.cache.tree.state.Lane` for a model without groups. `bytes_of` measures a cache."""

    def __init__(self, bytes_of: Callable[[Any], int]) -> None:
        self.ids: list[int] = []
        self.cache: Any = None
        self._bytes_of = bytes_of

    @property
    def offset(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        return self._bytes_of(self.cache)

    def bytes_for(self, num_tokens: int, incoming: Incoming | None = None) -> int:
        """The present size of the cache: how it grows is not known."""
        return self.nbytes

    peak_for = bytes_for

    def bytes_after_clear(self, num_tokens: int, incoming: Incoming | None = None) -> int:
        return 0

    def reserve(self, num_tokens: int, incoming: Incoming | None = None) -> None:
        """Nothing to do: the model's cache makes room as it grows."""

    def adopt(self, offset: int, sources: Mapping[Group, GroupSource]) -> None:
        """Reset to 0 or stay: a lane without groups has no other offset to go to."""
        if offset == 0:
            self.clear()
        assert offset == self.offset, f"a lane without groups stands at {self.offset}, and cannot move to {offset}"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError("a model without groups has no rows and no states")

    first_row = spans = publish = capture = _refuse

    def clear(self) -> None:
        self.ids = []
        self.cache = None

    @contextmanager
    def extending(self, ids: Sequence[int]) -> Iterator[None]:
        """The model evaluates `ids` within this context. If it fails, its cache is unknown, and the lane is reset."""
        try:
            yield
        except BaseException:
            self.clear()
            raise
        self.ids = [*self.ids, *ids]


class PlainForward(Protocol[Found]):
    """Calls a model with the cache that its library makes, or without any state."""

    def continue_cache(self, ids: Sequence[int], first: int, cache: Any, result: RunResult) -> tuple[Found, Any]:
        """The result of `ids`, whose positions begin at `first`, and the cache that was made (for None) or extended."""
        ...

    def run_anew(self, ids: Sequence[int], num_new: int, result: RunResult) -> Found:
        """The result of the last `num_new` of `ids`, which are a whole sequence."""
        ...

    def cache_bytes(self, cache: Any) -> int: ...


class PlainCompute(Compute[PlainLane, Tensor]):
    """Runs a model without groups, one lane after the other.

    Without `keeps_cache` every token costs the whole sequence: slow, and right for every model.
    """

    def __init__(self, forward: PlainForward[Tensor], *, keeps_cache: bool) -> None:
        self._forward = forward
        self._keeps_cache = keeps_cache

    def make_lane(self) -> PlainLane:
        return PlainLane(self._forward.cache_bytes)

    def run(self, lane: PlainLane, ids: Sequence[int], result: RunResult) -> Tensor:
        with lane.extending(ids):
            if not self._keeps_cache:
                return self._forward.run_anew([*lane.ids, *ids], len(ids), result)
            found, lane.cache = self._forward.continue_cache(ids, lane.offset, lane.cache, result)
            return found


def tensors_in(cache: Any, kind: type[Tensor], depth: int = _DEPTH) -> Iterator[Tensor]:
    """Every tensor of the given type inside a cache, in its containers and in the attributes of its objects."""
    if isinstance(cache, kind):
        yield cache
    elif depth and isinstance(cache, dict | list | tuple):
        for each in cache.values() if isinstance(cache, dict) else cache:
            yield from tensors_in(each, kind, depth)
    elif depth and hasattr(cache, "__dict__"):
        yield from tensors_in(vars(cache), kind, depth - 1)
