"""Triton kernels for one token of many lanes: each lane's rows are found by their address, nothing is gathered.

The rows of a lane are cut into parts of `PART_ROWS`, and the parts are joined by log-sum-exp: so a lane's result does not
depend on its neighbours. Importing this module needs triton, which comes with torch for CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.cache.tree.state import Group
from bough.engines.torch.lanes.buffers import TorchRowBuffer
from bough.engines.torch.lanes.lane import TorchLane
from bough.engines.torch.layout import TorchLayout, TorchRowLayout

PART_ROWS = 512
_BLOCK_ROWS = 64
_FEWEST_QUERIES = 16  # of a matrix product on the device
_COLUMNS = 5  # of the table: address of the keys, of the values, bytes to the next layer, elements to the next head, rows
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_DIMS = (32, 64, 128, 256)


class LaneTable:
    """The addresses of one group's rows on each lane of a batch, for one step."""

    def __init__(self, buffers: Sequence[TorchRowBuffer], device: torch.device) -> None:
        entries = [buffer.addresses() for buffer in buffers]
        self._longest = max(entry[-1] for entry in entries)
        self._table = torch.tensor(entries, dtype=torch.int64).to(device, non_blocking=True)
        self._element = _TYPES[buffers[0].layout.dtype]
        self._dim = buffers[0].layout.key_dim

    def write(self, layer_in_group: int, keys: Tensor, values: Tensor) -> None:
        """Write the new row [lanes, heads, 1, dim] of each lane, for this layer of the group."""
        keys, values = _rows_last(keys), _rows_last(values)
        _write[keys.shape[:2]](
            self._table, keys, values, layer_in_group, *keys.stride()[:2], *values.stride()[:2],
            COLUMNS=_COLUMNS, DIM=self._dim, ELEMENT=self._element, num_warps=1,
        )  # fmt: skip

    def attend(self, layer_in_group: int, query: Tensor, heads: int, scale: float) -> Tensor:
        """Each query [lanes, query heads, 1, dim] over all rows of its own lane."""
        query = _rows_last(query)
        lanes, num_queries, _, dim = query.shape
        shared = num_queries // heads
        queries = max(_FEWEST_QUERIES, triton.next_power_of_2(shared))
        scale *= 1.4426950408889634  # log2(e): the device computes powers of two fastest
        num_parts = triton.cdiv(self._longest, PART_ROWS)
        sums = torch.empty(lanes, num_queries, num_parts, dim, dtype=torch.float32, device=query.device)
        scores = torch.empty(lanes, num_queries, num_parts, 2, dtype=torch.float32, device=query.device)
        output = torch.empty(lanes, num_queries, 1, dim, dtype=query.dtype, device=query.device)
        _attend_part[(lanes, heads, num_parts)](
            self._table, query, sums, scores, layer_in_group, scale, *query.stride()[:2],
            COLUMNS=_COLUMNS, DIM=dim, ELEMENT=self._element, SHARED=shared, QUERIES=queries,
            BLOCK=_BLOCK_ROWS, PART=PART_ROWS, num_warps=4,
        )  # fmt: skip
        _join_parts[(lanes, num_queries)](
            self._table, sums, scores, output, num_parts, COLUMNS=_COLUMNS, DIM=dim, PART=PART_ROWS, num_warps=1
        )
        return output


class TritonKernels:
    """The kernels for one model, for the groups whose rows have a known shape."""

    def __init__(self, layout: TorchLayout, device: torch.device) -> None:
        self._groups = [group for group, rows in layout.rows.items() if _can_serve(rows)]
        self._device = device

    def tables(self, lanes: Sequence[TorchLane]) -> dict[Group, LaneTable]:
        return {group: LaneTable([lane.rows_of(group) for lane in lanes], self._device) for group in self._groups}


def _can_serve(rows: TorchRowLayout) -> bool:
    return not rows.is_rounded and rows.dtype in _TYPES and rows.key_dim == rows.value_dim and rows.key_dim in _DIMS


def _rows_last(rows: Tensor) -> Tensor:
    return rows if rows.stride(3) == 1 else rows.contiguous()


@triton.jit
def _write(
    table, keys, values, layer_in_group, key_lane, key_head, value_lane, value_head,
    COLUMNS: tl.constexpr, DIM: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    lane, head = tl.program_id(0), tl.program_id(1)
    entry = table + lane * COLUMNS
    layer = layer_in_group * tl.load(entry + 2)
    own_keys = (tl.load(entry) + layer).to(tl.pointer_type(ELEMENT))
    own_values = (tl.load(entry + 1) + layer).to(tl.pointer_type(ELEMENT))
    dims = tl.arange(0, DIM)
    at = head * tl.load(entry + 3) + (tl.load(entry + 4) - 1) * DIM + dims
    tl.store(own_keys + at, tl.load(keys + lane * key_lane + head * key_head + dims))
    tl.store(own_values + at, tl.load(values + lane * value_lane + head * value_head + dims))


@triton.jit
def _attend_part(
    table, query, sums, scores, layer_in_group, scale, query_lane, query_head,
    COLUMNS: tl.constexpr, DIM: tl.constexpr, ELEMENT: tl.constexpr, SHARED: tl.constexpr, QUERIES: tl.constexpr,
    BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Queries that share one key head, over one part of their lane's rows: weighted sum, largest score, sum of weights."""
    lane, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    entry = table + lane * COLUMNS
    num_rows = tl.load(entry + 4)
    start = part * PART
    if start < num_rows:
        layer = layer_in_group * tl.load(entry + 2)
        from_head = head * tl.load(entry + 3)
        keys = (tl.load(entry) + layer).to(tl.pointer_type(ELEMENT)) + from_head
        values = (tl.load(entry + 1) + layer).to(tl.pointer_type(ELEMENT)) + from_head
        end = tl.minimum(start + PART, num_rows)
        numbers = tl.arange(0, QUERIES)
        dims = tl.arange(0, DIM)
        is_query = numbers < SHARED
        first = head * SHARED + numbers
        asked = tl.load(
            query + lane * query_lane + first[:, None] * query_head + dims[None, :], mask=is_query[:, None], other=0.0
        )
        largest = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        result = tl.zeros([QUERIES, DIM], tl.float32)
        for row in range(start, end, BLOCK):
            rows = row + tl.arange(0, BLOCK)
            is_row = rows < end
            key = tl.load(keys + rows[None, :] * DIM + dims[:, None], mask=is_row[None, :], other=0.0)
            score = tl.where(is_row[None, :], tl.dot(asked, key) * scale, float("-inf"))
            highest = tl.maximum(largest, tl.max(score, 1))
            shrink = tl.exp2(largest - highest)
            weight = tl.exp2(score - highest[:, None])
            value = tl.load(values + rows[:, None] * DIM + dims[None, :], mask=is_row[:, None], other=0.0)
            result = result * shrink[:, None] + tl.dot(weight.to(ELEMENT), value)
            total = total * shrink + tl.sum(weight, 1)
            largest = highest
        num_parts = tl.num_programs(2)
        at = ((lane * tl.num_programs(1) * SHARED + first) * num_parts + part).to(tl.int64)
        tl.store(sums + at[:, None] * DIM + dims[None, :], result, mask=is_query[:, None])
        tl.store(scores + at * 2, largest, mask=is_query)
        tl.store(scores + at * 2 + 1, total, mask=is_query)


@triton.jit
def _join_parts(table, sums, scores, output, num_parts, COLUMNS: tl.constexpr, DIM: tl.constexpr, PART: tl.constexpr):
    """One query's parts, in their order, as one result."""
    lane, number = tl.program_id(0), tl.program_id(1)
    num_rows = tl.load(table + lane * COLUMNS + 4)
    own = (lane * tl.num_programs(1) + number).to(tl.int64)
    dims = tl.arange(0, DIM)
    largest = float("-inf")
    total = 0.0
    result = tl.zeros([DIM], tl.float32)
    for part in range(tl.cdiv(num_rows, PART)):
        at = own * num_parts + part
        score = tl.load(scores + at * 2)
        highest = tl.maximum(largest, score)
        shrink, weight = tl.exp2(largest - highest), tl.exp2(score - highest)
        result = result * shrink + tl.load(sums + at * DIM + dims) * weight
        total = total * shrink + tl.load(scores + at * 2 + 1) * weight
        largest = highest
    tl.store(output + own * DIM + dims, (result / total).to(output.dtype.element_ty))
