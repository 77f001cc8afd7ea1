"""Bough's own attention for transformers models: causal, aligned to the lower right, without masks over the whole sequence.

A lane passes the model only the rows that its queries may look at, newest last, so the alignment follows from the shapes
alone: of k rows and q queries, query i is at row k - q + i. Grouped heads are never repeated in memory.

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
    """Register the name "bough" with transformers. No mask is registered for it, and so models pass none."""
    AttentionInterface.register(NAME, attention)


Rows = Sequence[tuple[Tensor, Tensor]]
"""Keys and values of each lane."""


class Table(Protocol):
    """The places of the rows of each lane of a batch, and the kernels that read them there."""

    def write(self, layer_in_group: int, keys: Tensor, values: Tensor) -> None: ...
    def attend(self, layer_in_group: int, query: Tensor, heads: int, scale: float) -> Tensor: ...


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
class Scores:
    """How a layer computes its scores: `window` and `softcap` are 0 for none, `sinks` has a number for each query head."""

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        return not self.softcap and self.sinks is None


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
    """The function that transformers calls in each attention layer. If it raises, the self-check falls back."""
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not is_causal or attention_mask is not None or kwargs.get("position_bias") is not None:
        raise NotImplementedError("bough attends causally, without a mask and without a position bias")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    scores = Scores(scale, getattr(key, _WINDOW, None) or sliding_window or 0, softcap or 0.0, s_aux)
    lanes = getattr(key, _LANES, None)
    output = attend(query, key, value, scores) if lanes is None else _attend_lanes(query, key.shape[1], lanes, scores)
    return output.transpose(1, 2).contiguous(), None


def _attend_lanes(query: Tensor, heads: int, lanes: LaneRows, scores: Scores) -> Tensor:
    """Each batch entry over the rows of its own lane, with as few kernel launches as possible: lanes may be many."""
    is_plain = scores.is_plain and query.shape[2] == 1
    if is_plain and lanes.table is not None:
        return lanes.table.attend(lanes.layer_in_group, query, heads, scores.scale)
    rows = lanes.tensors()
    if not is_plain or scores.window:
        pairs = zip(query.chunk(len(rows)), rows, strict=True)
        return torch.cat([attend(each, keys, values, scores) for each, (keys, values) in pairs])
    batch, num_heads, _, dim = query.shape
    has_flash = _has_flash(query, *rows[0])
    folded = query.reshape(batch, heads, -1, dim).chunk(batch)
    outputs = [_attend_all(each, *pair, scores.scale, has_flash) for each, pair in zip(folded, rows, strict=True)]
    return torch.cat(outputs).view(batch, num_heads, 1, -1)


def attend(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    """Queries over contiguous keys and values, which end with their own: causal, aligned to the last row.

    All queries at once where a kernel has a causal mode, else block by block, each over the rows that it may see.
    """
    num_queries, num_rows = query.shape[2], key.shape[2]
    if scores.is_plain and not (scores.window and num_rows > scores.window):
        if num_queries == 1:
            return _attend_folded(query, key, value, None, scores)
        bias = None
        if num_queries != num_rows and query.device.type == "cuda":
            from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler, which takes a second

            bias = causal_lower_right(num_queries, num_rows)
        if num_queries == num_rows or bias is not None:
            is_grouped = query.shape[1] != key.shape[1]
            return F.scaled_dot_product_attention(
                query, key, value, bias, is_causal=bias is None, scale=scores.scale, enable_gqa=is_grouped
            )
    blocks = [(start, min(start + _BLOCK, num_queries)) for start in range(0, num_queries, _BLOCK)]
    outputs = [_attend_block(query, key, value, start, end, scores) for start, end in blocks]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _attend_block(query: Tensor, key: Tensor, value: Tensor, start: int, end: int, scores: Scores) -> Tensor:
    """Queries [start, end) over the rows from the first that any of them may see to the last one's own."""
    past = key.shape[2] - query.shape[2]
    first = max(0, past + start - scores.window + 1) if scores.window else 0
    query = query[:, :, start:end]
    key, value = key[:, :, first : past + end], value[:, :, first : past + end]
    mask = _mask(end - start, key.shape[2], scores.window, query.dtype, query.device) if end - start > 1 else None
    if not scores.is_plain:
        return _attend_eagerly(query, key, value, mask, scores)
    if mask is not None and query.device.type == "cpu":  # the kernel there takes a mask and grouped heads together
        is_grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scores.scale, enable_gqa=is_grouped)
    return _attend_folded(query, key, value, mask, scores)


def _attend_folded(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """The heads that share one key head become further queries of it, so that each row is read once for all of them."""
    batch, num_heads, num_queries, dim = query.shape
    num_shared = num_heads // key.shape[1]
    folded = query.reshape(batch, key.shape[1], num_shared * num_queries, dim)
    if mask is not None:
        output = F.scaled_dot_product_attention(folded, key, value, mask.repeat(num_shared, 1), scale=scores.scale)
    else:
        output = _attend_all(folded, key, value, scores.scale, num_queries == 1 and _has_flash(folded, key, value))
    return output.reshape(batch, num_heads, num_queries, value.shape[3])


def _has_flash(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether flash attention can run. It splits a long sequence; the kernel that torch prefers on Hopper does not, and is
    ten times slower for a single token.
    """
    dim = query.shape[-1]
    is_fit = query.is_cuda and query.dtype in _HALF_TYPES and dim % 8 == 0 and dim <= _LARGEST_FLASH_DIM
    return is_fit and value.shape[-1] == dim


def _attend_all(query: Tensor, key: Tensor, value: Tensor, scale: float, has_flash: bool) -> Tensor:
    """Attention of queries that may see all rows."""
    if has_flash:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, scale=scale)[0]  # type: ignore[no-any-return]
    return F.scaled_dot_product_attention(query, key, value, scale=scale)


def _attend_eagerly(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Scores) -> Tensor:
    """Scores, softmax in float32, weighted sum: for soft-capped scores and for attention sinks."""
    batch, num_heads, num_queries, dim = query.shape
    num_rows = key.shape[2]
    grouped = query.reshape(batch, key.shape[1], -1, num_queries, dim)
    scores = torch.matmul(grouped, key.unsqueeze(2).transpose(3, 4)) * options.scale
    scores = scores.reshape(batch, num_heads, num_queries, num_rows)
    if options.softcap:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if mask is not None:
        scores = scores + mask
    scores = scores.float()
    if options.sinks is not None:  # one more column, whose weight no value gets
        column = options.sinks.float().reshape(1, -1, 1, 1).expand(batch, -1, num_queries, 1)
        weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1].to(value.dtype)
    else:
        weights = scores.softmax(-1).to(value.dtype)
    output = torch.matmul(weights.reshape(batch, key.shape[1], -1, num_queries, num_rows), value.unsqueeze(2))
    return output.reshape(batch, num_heads, num_queries, value.shape[3])


@lru_cache(maxsize=2)  # all layers of one kind have the same one
def _mask(num_queries: int, num_rows: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zero where query i, at row num_rows - num_queries + i, may look; minus infinity elsewhere."""
    rows = torch.arange(num_rows, device=device)
    own = torch.arange(num_rows - num_queries, num_rows, device=device)[:, None]
    hidden = rows > own
    if window:
        hidden |= rows <= own - window
    return torch.zeros(num_queries, num_rows, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
