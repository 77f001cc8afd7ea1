"""How attention of a transformers model reaches a pool: one operator for all layers, carried out by the current pass.

The operator is opaque to the compiler. What differs from layer to layer, the rows of the layer, is a buffer of its
attention module, so that one compiled graph serves all layers of a kind. `Wiring` finds these modules by running one
token: the attention function is given its module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from bough.cache.tree.state import Group
from bough.engines.torch.attention import Scores
from bough.engines.torch.forward import TorchForward
from bough.engines.torch.layout import TorchLayout
from bough.engines.torch.pooled.memory import PoolMemory

POOL_ATTENTION = "bough_pool"
ROWS = "bough_rows"
_GROUP = "bough_group"
_WINDOW = "bough_window"


class NotWired(Exception):
    """The model's attention cannot be connected to a pool; the text says why."""


class Attending(Protocol):
    """A forward pass: it knows which slots have the rows of its entries."""

    def attend(self, group: int, query: Tensor, key: Tensor, value: Tensor, rows: Tensor, scores: Scores) -> Tensor:
        """Write the new rows of a row group's layer; returns the result [entries, run, query heads, dim]."""


_current: ContextVar[Attending] = ContextVar("the pass of this thread")


@contextmanager
def attending(by: Attending) -> Iterator[None]:
    """Let this pass compute attention inside the context, on this thread."""
    token = _current.set(by)
    try:
        yield
    finally:
        _current.reset(token)


@torch.library.custom_op("bough::pool_attend", mutates_args=())  # it writes rows, which nothing else of a pass reads
def _pool_attend(
    query: Tensor, key: Tensor, value: Tensor, rows: Tensor, group: int, scale: float, window: int, softcap: float,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    by = _current.get(None)
    assert by is not None, "attention outside of a pass"
    return by.attend(group, query, key, value, rows, Scores(scale, window, softcap, sinks)).contiguous()


@_pool_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in each layer. Raise NotImplementedError for any but causal attention;
    the self-check then uses another.
    """
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not is_causal or attention_mask is not None or position_bias is not None:
        raise NotImplementedError("bough attends causally, without a mask and without a position bias")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    output = _pool_attend(
        query, key, value, module.bough_rows, module.bough_group, scale, module.bough_window, softcap or 0.0, s_aux
    )
    return output, None


def register_pool_attention() -> None:
    """Register the attention with transformers. No mask function has this name, so no mask is made."""
    AttentionInterface.register(POOL_ATTENTION, attention)


def _connect(module: nn.Module, rows: Tensor, group: int, window: int) -> None:
    """Make these rows the ones that an attention module reads and writes."""
    module.register_buffer(ROWS, rows, persistent=False)
    setattr(module, _GROUP, group)
    setattr(module, _WINDOW, window)


def _disconnect(module: nn.Module) -> None:
    for name in (ROWS, _GROUP, _WINDOW):
        if hasattr(module, name):
            delattr(module, name)


class Wiring:
    """The attention modules of a model, each with its row group and its place in that. Raise NotWired if one has none.

    `shared` has the number of query heads that read each key head, for every row group.
    """

    def __init__(self, forward: TorchForward, layout: TorchLayout) -> None:
        places = {layer: (group, place) for group, rows in layout.rows.items() for place, layer in enumerate(rows.layers)}
        self._places: list[tuple[nn.Module, Group, int]] = []
        queries: dict[Group, set[int]] = {}
        for module, num_queries in _find_modules(forward):
            layer = getattr(module, "layer_idx", None)
            if layer not in places:
                raise NotWired(f"{type(module).__name__} of layer {layer} has no rows of its own")
            group, place = places.pop(layer)
            self._places.append((module, group, place))
            queries.setdefault(group, set()).add(num_queries)
        if places:
            raise NotWired(f"layers {sorted(places)} keep rows and were not seen to attend")
        self.modules = [module for module, _, _ in self._places]
        self.shared: dict[Group, int] = {}
        for group, found in queries.items():
            heads = layout.rows[group].heads
            if len(found) != 1 or min(found) % heads:
                raise NotWired(f"{sorted(found)} query heads look at {heads} key heads")
            self.shared[group] = min(found) // heads

    def connect(self, memory: PoolMemory) -> None:
        """Give every module the rows of its layer."""
        for module, group, place in self._places:
            _connect(module, memory.layer_rows(group, place), group.index, group.window)

    def disconnect(self) -> None:
        for module in self.modules:
            _disconnect(module)


class _Probe:
    """A pass that records which modules attend, and the query heads of each. Each candidate module is a group here."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def attend(self, group: int, query: Tensor, key: Tensor, value: Tensor, rows: Tensor, scores: Scores) -> Tensor:
        self.seen.append((group, query.shape[1]))
        return torch.zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]).to(query)


def _find_modules(forward: TorchForward) -> list[tuple[nn.Module, int]]:
    """The modules that attend when one token is run, in that order, each with its number of query heads."""
    candidates = [module for module in forward.model.modules() if hasattr(module, "layer_idx")]
    probe, ids = _Probe(), torch.zeros(1, 1, dtype=torch.long, device=forward.device)
    for number, module in enumerate(candidates):
        _connect(module, torch.empty(0), number, 0)
    try:
        with attending(probe), torch.no_grad():
            forward.call(ids, ids, None, use_cache=False)
    finally:
        for module in candidates:
            _disconnect(module)
    return [(candidates[number], num_queries) for number, num_queries in probe.seen]
