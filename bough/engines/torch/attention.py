"""Bough's own attention for transformers models: causal, aligned to the lower right, without masks over the whole sequence.

A lane hands the model only the rows that its queries may look at, newest last, so the alignment follows from the shapes
alone: of k rows and q queries, query i stands at row k - q + i. Grouped heads are never repeated in memory.

Keys may carry the rows of several lanes (`attach_lanes`): then each batch entry attends to the rows of its own lane, and a
lane's result does not depend on its neighbours. Where there is a table of them, one kernel serves all lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

NAME = "bough"
_LANES = "_bough_lanes"
_WINDOW = "_bough_window"
_HALF_TYPES = (torch.float16, torch.bfloat16)
_LARGEST_FLASH_DIM = 256
_BLOCK = 512  # queries that are looked at together where a mask is needed, so that no mask covers the whole sequence


def register() -> None:
    """Make the name "bough" known to transformers. No mask is registered for it, and so models pass none."""
    AttentionInterface.register(NAME, attention)


Rows = Sequence[tuple[Tensor, Tensor]]
"""Keys and values of each lane."""


class Table(Protocol):
    """Where the rows of each lane of a batch lie, and the kernels that find them there."""

    def write(self, layer_in_group: int, keys: Tensor, values: Tensor) -> None: ...
    def attend(self, layer_in_group: int, query: Tensor, heads: int, scaling: float | None) -> Tensor: ...


@dataclass(frozen=True)
class LaneRows:
    """The rows of one layer on each lane of a batch: in a table, by the layer's number in its group, or as tensors."""

    table: Table | None
    layer_in_group: int
    tensors: Callable[[], Rows]


def attach_lanes(keys: Tensor, lanes: LaneRows) -> Tensor:
    """The same keys, carrying the keys and values of each lane of a batch."""
    setattr(keys, _LANES, lanes)
    return keys


def attach_window(keys: Tensor, window: int) -> Tensor:
    """The same keys, carrying the window of the group that they come from."""
    setattr(keys, _WINDOW, window)
    return keys


@dataclass(frozen=True)
class _AttentionOptions:
    """How a layer attends. A window of 0 is none."""

    scaling: float | None
    window: int
    softcap: float | None
    sinks: Tensor | None

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks is None


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each attention layer. Raises if it cannot do it; the self-check then falls back."""
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not is_causal or attention_mask is not None or kwargs.get("position_bias") is not None:
        raise NotImplementedError("bough attends causally, without a mask and without a position bias")
    options = _AttentionOptions(scaling, getattr(key, _WINDOW, None) or sliding_window or 0, softcap, s_aux)
    lanes = getattr(key, _LANES, None)
    output = _attend(query, key, value, options) if lanes is None else _attend_lanes(query, key.shape[1], lanes, options)
    return output.transpose(1, 2).contiguous(), None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    window: int = 0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Queries over straight keys and values, which end with their own: causal, aligned to the last row."""
    return _attend(query, key, value, _AttentionOptions(scaling, window, softcap, sinks))


def _attend_lanes(query: Tensor, heads: int, lanes: LaneRows, options: _AttentionOptions) -> Tensor:
    """Each batch entry over the rows of its own lane, with as few kernel launches as possible: lanes may be many."""
    is_plain = options.is_plain and query.shape[2] == 1
    if is_plain and lanes.table is not None:
        return lanes.table.attend(lanes.layer_in_group, query, heads, options.scaling)
    rows = lanes.tensors()
    if not is_plain or options.window:
        pairs = zip(query.chunk(len(rows)), rows, strict=True)
        return torch.cat([_attend(each, keys, values, options) for each, (keys, values) in pairs])
    attend = _attend_one if _has_flash(query, *rows[0]) else _attend_one_anywhere
    batch, num_heads, _, dim = query.shape
    folded = query.reshape(batch, heads, -1, dim).chunk(batch)
    outputs = [attend(each, *pair, options.scaling) for each, pair in zip(folded, rows, strict=True)]
    return torch.cat(outputs).view(batch, num_heads, 1, -1)


def _attend(query: Tensor, key: Tensor, value: Tensor, options: _AttentionOptions) -> Tensor:
    """All queries at once where a kernel has a causal mode, else block by block, each over the rows that it may see."""
    num_queries, num_rows = query.shape[2], key.shape[2]
    if options.is_plain and not (options.window and num_rows > options.window):
        if num_queries == 1:
            return _attend_folded(query, key, value, None, options)
        if num_queries == num_rows:
            return _attend_causally(query, key, value, options)
        if query.device.type == "cuda":
            from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler, which takes a second

            return _attend_causally(query, key, value, options, causal_lower_right(num_queries, num_rows))
    blocks = [(start, min(start + _BLOCK, num_queries)) for start in range(0, num_queries, _BLOCK)]
    outputs = [_attend_block(query, key, value, start, end, options) for start, end in blocks]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _attend_block(query: Tensor, key: Tensor, value: Tensor, start: int, end: int, options: _AttentionOptions) -> Tensor:
    """Queries [start, end) over the rows from the first that any of them may see to the last one's own."""
    past = key.shape[2] - query.shape[2]
    first = max(0, past + start - options.window + 1) if options.window else 0
    query = query[:, :, start:end]
    key, value = key[:, :, first : past + end], value[:, :, first : past + end]
    mask = _mask(end - start, key.shape[2], options.window, query.dtype, query.device) if end - start > 1 else None
    if not options.is_plain:
        return _attend_eagerly(query, key, value, mask, options)
    if mask is not None and query.device.type == "cpu":  # the kernel there takes a mask and grouped heads together
        is_grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, mask, scale=options.scaling, enable_gqa=is_grouped)
    return _attend_folded(query, key, value, mask, options)


def _attend_causally(
    query: Tensor, key: Tensor, value: Tensor, options: _AttentionOptions, bias: Tensor | None = None
) -> Tensor:
    return F.scaled_dot_product_attention(
        query, key, value, bias, is_causal=bias is None, scale=options.scaling, enable_gqa=query.shape[1] != key.shape[1]
    )


def _attend_folded(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: _AttentionOptions) -> Tensor:
    """The heads that share one key head become further queries of it, so that each row is read once for all of them."""
    batch, num_heads, num_queries, dim = query.shape
    num_shared = num_heads // key.shape[1]
    folded = query.reshape(batch, key.shape[1], num_shared * num_queries, dim)
    if mask is not None:
        mask = mask.repeat(num_shared, 1)
    if mask is None and num_queries == 1 and _has_flash(folded, key, value):
        output = _attend_one(folded, key, value, options.scaling)
    else:
        output = F.scaled_dot_product_attention(folded, key, value, mask, scale=options.scaling)
    return output.reshape(batch, num_heads, num_queries, value.shape[3])


def _has_flash(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether flash attention can run, which splits a long sequence into parts. The kernel that torch prefers on Hopper
    does not, and takes ten times longer for a single token."""
    dim = query.shape[-1]
    is_fit = query.is_cuda and query.dtype in _HALF_TYPES and dim % 8 == 0 and dim <= _LARGEST_FLASH_DIM
    return is_fit and value.shape[-1] == dim


def _attend_one(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Flash attention of queries that may see all rows."""
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, scale=scaling)[0]  # type: ignore[no-any-return]


def _attend_one_anywhere(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, scale=scaling)


def _attend_eagerly(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: _AttentionOptions) -> Tensor:
    """Scores, softmax in float32, weighted sum: for soft-capped scores and for attention sinks."""
    batch, num_heads, num_queries, dim = query.shape
    num_rows = key.shape[2]
    grouped = query.reshape(batch, key.shape[1], -1, num_queries, dim)
    scores = torch.matmul(grouped, key.unsqueeze(2).transpose(3, 4)) * (options.scaling or dim**-0.5)
    scores = scores.reshape(batch, num_heads, num_queries, num_rows)
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if mask is not None:
        scores = scores + mask
    weights = _softmax_with_sinks(scores.float(), options.sinks).to(value.dtype)
    output = torch.matmul(weights.reshape(batch, key.shape[1], -1, num_queries, num_rows), value.unsqueeze(2))
    return output.reshape(batch, num_heads, num_queries, value.shape[3])


def _softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None:
        return scores.softmax(-1)
    extra = sinks.float().reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
    return torch.cat([scores, extra], dim=-1).softmax(-1)[..., :-1]


@lru_cache(maxsize=2)  # all layers of one kind ask for the same one
def _mask(num_queries: int, num_rows: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zero where query i, at row num_rows - num_queries + i, may look; minus infinity elsewhere."""
    rows = torch.arange(num_rows, device=device)
    own = torch.arange(num_rows - num_queries, num_rows, device=device)[:, None]
    hidden = rows > own
    if window:
        hidden |= rows <= own - window
    return torch.zeros(num_queries, num_rows, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
