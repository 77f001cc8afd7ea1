"""A lane of a model without groups: it holds the tokens, and the model's own cache if that cache is correct.

Nothing of it can be published or captured. It can only be extended or reset.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NoReturn, TypeVar

from bough.cache.tree.state import Block, Group, Incoming, Page, Source, Span, State

Tensor = TypeVar("Tensor")
_DEPTH = 3  # a cache, its layers, and what a layer is made of


class PlainLane:
    """Implements `bough.cache.tree.state.Lane` for a model without groups. `bytes_of` tells what a cache occupies."""

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

    @property
    def own_bytes(self) -> int:
        return self.nbytes

    @property
    def shares_rows(self) -> bool:
        return False

    def blocks(self) -> Iterable[Block]:
        return ()

    def bytes_for(self, num_tokens: int, incoming: Incoming | None = None) -> int:
        """What the cache takes now: how it grows is not known."""
        return self.nbytes

    def bytes_after_clear(self, num_tokens: int, incoming: Incoming | None = None) -> int:
        return 0

    def peak_for(self, num_tokens: int, incoming: Incoming | None = None) -> int:
        return self.nbytes

    def reserve(self, num_tokens: int, incoming: Incoming | None = None) -> None:
        """Nothing to do: the model's cache makes room as it grows."""

    def drop_reserve(self) -> None:
        """Nothing to do: nothing was reserved."""

    def first_row(self, group: Group) -> NoReturn:
        raise ValueError("a model without groups has no rows")

    def adopt(self, offset: int, sources: Mapping[Group, Source]) -> None:
        """Reset to 0 or stay: a lane without groups has no other offset to go to."""
        if offset == 0:
            self.clear()
        assert offset == self.offset, f"a lane without groups stands at {self.offset}, and cannot move to {offset}"

    def spans(self, group: Group, start: int, end: int) -> list[Span]:
        raise ValueError("a model without groups has no rows")

    def publish(self, group: Group, start: int, end: int) -> Page:
        raise ValueError("a model without groups has no rows")

    def capture(self, group: Group) -> State:
        raise ValueError("a model without groups has no states")

    def clear(self) -> None:
        self.ids = []
        self.cache = None

    @contextmanager
    def extending(self, ids: Sequence[int]) -> Iterator[None]:
        """The model evaluates `ids`. If it fails, the content of its cache is unknown, and the lane is reset."""
        try:
            yield
        except BaseException:
            self.clear()
            raise
        self.ids = [*self.ids, *ids]


class PlainCompute(ABC, Generic[Tensor]):
    """Runs a model without groups, one lane after the other."""

    @abstractmethod
    def evaluate(self, lane: PlainLane, ids: Sequence[int]) -> Tensor:
        """Append a run to the lane; returns the logits after its last token."""

    @abstractmethod
    def evaluate_all(self, lane: PlainLane, ids: Sequence[int]) -> Tensor:
        """Append a run to the lane; returns the logits after each of its tokens, [run, vocabulary]."""

    @abstractmethod
    def evaluate_state(self, lane: PlainLane, ids: Sequence[int]) -> Tensor:
        """Append a run to the lane; returns what the head reads after its last token, [hidden], in float32."""

    def step(self, lanes: Sequence[PlainLane], ids: Sequence[int]) -> list[Tensor]:
        """Append one token to each lane, one by one."""
        return [self.evaluate(lane, [token_id]) for lane, token_id in zip(lanes, ids, strict=True)]

    def make_lane(self) -> PlainLane:
        return PlainLane(self._bytes_of)

    @abstractmethod
    def _bytes_of(self, cache: Any) -> int:
        """What a cache of the model's own occupies."""


def tensors_in(cache: Any, kind: type[Tensor], depth: int = _DEPTH) -> Iterator[Tensor]:
    """Every tensor of the given type inside a cache, in its containers and in the attributes of its objects."""
    if isinstance(cache, kind):
        yield cache
    elif depth and isinstance(cache, dict):
        for each in cache.values():
            yield from tensors_in(each, kind, depth)
    elif depth and isinstance(cache, list | tuple):
        for each in cache:
            yield from tensors_in(each, kind, depth)
    elif depth and hasattr(cache, "__dict__"):
        yield from tensors_in(vars(cache), kind, depth - 1)
