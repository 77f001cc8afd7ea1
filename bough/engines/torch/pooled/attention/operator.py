"""Attention over a pool, as transformers calls it: one operator, which the run under way carries out.

The operator is opaque to the compiler. What differs from layer to layer, the rows of the layer, is a buffer of its
attention module, so that one compiled graph serves all layers of a kind.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from bough.engines.torch.pooled.attention.bucket import Scores

NAME = "bough_pool"
ROWS = "bough_rows"
_GROUP = "bough_group"
_WINDOW = "bough_window"


class Attending(Protocol):
    """A forward pass: it knows where the rows of its entries lie."""

    def attend(self, group: int, query: Tensor, key: Tensor, value: Tensor, rows: Tensor, scores: Scores) -> Tensor:
        """Take in the new rows of a row group's layer; returns the result [entries, run, query heads, dim]."""
        ...


class _Running(threading.local):
    """The forward pass of this thread."""

    attending: Attending | None = None


_running = _Running()


@contextmanager
def attending(by: Attending) -> Iterator[None]:
    """Attention inside this context, on this thread, is carried out by the given pass."""
    before, _running.attending = _running.attending, by
    try:
        yield
    finally:
        _running.attending = before


@torch.library.custom_op("bough::pool_attend", mutates_args=())  # it writes rows, which nothing else of a pass looks at
def _pool_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    group: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    by = _running.attending
    assert by is not None, "attention outside of a pass"
    return by.attend(group, query, key, value, rows, Scores(scale, window, softcap, sinks)).contiguous()


@_pool_attend.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    group: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


def give_rows(module: nn.Module, rows: Tensor, group: int, window: int) -> None:
    """Let an attention module look at these rows from now on."""
    module.register_buffer(ROWS, rows, persistent=False)
    setattr(module, _GROUP, group)
    setattr(module, _WINDOW, window)


def take_rows(module: nn.Module) -> None:
    """Undo `give_rows`."""
    for name in (ROWS, _GROUP, _WINDOW):
        if hasattr(module, name):
            delattr(module, name)


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
    """What transformers calls in each attention layer. Raises if it cannot do it; the self-check then falls back."""
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not is_causal or attention_mask is not None or position_bias is not None:
        raise NotImplementedError("bough attends causally, without a mask and without a position bias")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    output = _pool_attend(
        query, key, value, module.bough_rows, module.bough_group, scale, module.bough_window, softcap or 0.0, s_aux
    )
    return output, None


def register() -> None:
    """Make the attention known to transformers. Without a mask function of this name, no mask is made."""
    AttentionInterface.register(NAME, attention)
