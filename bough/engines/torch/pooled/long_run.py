"""A long run of tokens on one lane: its rows are written to their slots, and its queries read contiguous keys and values.

A run from the first row on reads its own keys; a later one all rows that it needs, first gathered from their slots.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bough.engines.shared.pool.plan import find_places
from bough.engines.torch import attention as straight
from bough.engines.torch.attention import Scores
from bough.engines.torch.forward import TorchForward
from bough.engines.torch.layout import TorchRowLayout
from bough.engines.torch.pooled.attention.buffers import gather_rows, write_rows
from bough.engines.torch.pooled.lane import PooledTorchLane
from bough.engines.torch.pooled.wiring import attending

_cudnn: Any = torch.backends.cudnn  # which is not typed
_PADDED = 1024  # cuDNN plans each new length, which takes 60 ms: lengths are multiples of this
_LEAST_CUDNN = 2048


class LongRun:
    """The forward pass of `num_tokens` at a lane's offset, which has room for them."""

    def __init__(self, lane: PooledTorchLane, num_tokens: int, device: torch.device) -> None:
        self._start, self._end = lane.offset, lane.offset + num_tokens
        self._places: dict[int, tuple[int, Tensor]] = {}
        for rows in lane.row_groups():
            first = rows.group.first_needed(self._start)
            places = torch.frombuffer(find_places(rows.plan_pieces(), first, self._end), dtype=torch.int32)
            self._places[rows.group.index] = (first, places.to(device))

    def attend(self, group: int, query: Tensor, key: Tensor, value: Tensor, rows: Tensor, scores: Scores) -> Tensor:
        """Attend with each query to the rows up to its own."""
        first, places = self._places[group]
        write_rows(key, value, rows, places[self._start - first :])
        if self._start > first:
            key, value = gather_rows(rows, places)
        return _attend(query, key, value, scores).transpose(1, 2)


@torch.no_grad()
def run_nowhere(forward: TorchForward, num_tokens: int) -> None:
    """Run that many tokens without keeping their rows, so that everything is compiled or planned that first use needs."""
    ids = torch.zeros(1, num_tokens, dtype=torch.long, device=forward.device)
    positions = torch.arange(num_tokens, device=forward.device)[None]
    with attending(_Nowhere(num_tokens, forward.device)):
        forward.logits(ids, positions, None, 1)


def plan_lengths(rows: TorchRowLayout, shared: int, longest: int, device: torch.device) -> None:
    """Make cuDNN plan the lengths of runs up to the longest: 60 ms for each. `shared` query heads read each key head."""
    for num in range(_LEAST_CUDNN, longest + 1, _PADDED):
        query = torch.zeros(1, rows.heads * shared, num, rows.key_dim, dtype=rows.dtype, device=device)
        key = torch.zeros(1, rows.heads, num, rows.key_dim, dtype=rows.dtype, device=device)
        if _has_cudnn(query):
            _attend_by_cudnn(query, key, key, rows.key_dim**-0.5)


class _Nowhere:
    """A long run from the first row on that keeps no rows."""

    def __init__(self, num_tokens: int, device: torch.device) -> None:
        self._places = torch.full((num_tokens,), -1, dtype=torch.int32, device=device)

    def attend(self, group: int, query: Tensor, key: Tensor, value: Tensor, rows: Tensor, scores: Scores) -> Tensor:
        write_rows(key, value, rows, self._places)
        return _attend(query, key, value, scores).transpose(1, 2)


def _attend(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    num_queries, num_rows = query.shape[2], key.shape[2]
    is_plain = scores.is_plain and not (scores.window and num_rows > scores.window)
    if is_plain and num_queries == num_rows >= _LEAST_CUDNN and _has_cudnn(query):
        return _attend_by_cudnn(query, key, value, scores.scale)
    return straight.attend(query, key, value, scores)


def _has_cudnn(query: Tensor) -> bool:
    """Whether cuDNN's attention is available and faster: on Hopper and later, for heads of up to 128 numbers."""
    is_fit = query.is_cuda and query.shape[-1] <= 128 and query.shape[-1] % 8 == 0
    return is_fit and torch.cuda.get_device_capability(query.device) >= (9, 0) and bool(_cudnn.is_available())


def _attend_by_cudnn(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention from the first row on. Keys are not repeated for grouped heads."""
    num = query.shape[2]
    pad = -num % _PADDED
    if pad:
        query, key, value = (F.pad(each, (0, 0, 0, pad)) for each in (query, key, value))
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    output: Tensor = attend(query, key, value, None, False, 0.0, True, False, scale=scale)[0]
    return output[:, :, :num]
