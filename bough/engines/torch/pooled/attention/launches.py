"""Launches of the attention kernels: the size of their tiles on a card, and their arguments.

Importing this module needs triton, which comes with torch for CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from bough.engines.shared.pool.plan import PAGE
from bough.engines.torch.attention import Scores
from bough.engines.torch.pooled.attention import kernels
from bough.engines.torch.pooled.attention.bucket import PlanTensors, StepBucket, next_power_of_2

_RESERVED = 2048  # bytes of shared memory for a program: 1,024 are the card's own, the rest are barriers and reductions
_TILES = ((64, 3), (64, 2), (32, 3), (32, 2), (16, 2))  # rows of a tile and tiles on their way, the fastest first
_LARGEST_COORDINATE = 2**31 - 1


@dataclass(frozen=True)
class Card:
    """The properties of a device that tiles depend on. `shared_bytes` is the shared memory of one multiprocessor."""

    multiprocessors: int
    shared_bytes: int
    has_tma: bool

    @classmethod
    def of(cls, device: torch.device) -> Card:
        found = torch.cuda.get_device_properties(device)
        return cls(found.multi_processor_count, found.shared_memory_per_multiprocessor, found.major >= 9)


@dataclass(frozen=True)
class Tiles:
    """The shape of the attention kernel: rows of a tile, tiles on their way at a time, warps and programs."""

    rows: int
    stages: int
    warps: int
    programs: int


def choose_tiles(bucket: StepBucket, card: Card) -> Tiles:
    """The first known tiles with which a multiprocessor's programs fit into its shared memory, else the smallest.

    A program holds its queries (rows of the product x head size) and `stages` tiles of keys and of values. With four warps
    two programs run on a multiprocessor, with eight (for products of 128 rows) one.
    """
    queries = bucket.queries_of_item if bucket.has_shared or bucket.is_run else bucket.queries_of_lane
    warps, programs = (8, 1) if queries >= 128 else (4, 2)
    row_bytes = next_power_of_2(bucket.dim) * bucket.dtype.itemsize
    budget = card.shared_bytes // programs - _RESERVED
    for rows, stages in _TILES:
        if (queries + 2 * stages * rows) * row_bytes <= budget:
            break
    return Tiles(rows, stages, warps, programs * card.multiprocessors)


class TritonAttention:
    """Attention by a plan, for one bucket: one launch over the items and one that joins their parts."""

    def __init__(self, bucket: StepBucket, card: Card) -> None:
        self.tiles = choose_tiles(bucket, card)
        self.programs = self.tiles.programs
        self._bucket = bucket
        self._has_tma = card.has_tma and bucket.dim * bucket.dtype.itemsize % 16 == 0
        queries = bucket.heads * bucket.group
        shape = (bucket.entries, queries, bucket.max_parts)
        self._acc = torch.empty(*shape, bucket.dim, dtype=torch.float32, device=bucket.device)
        self._lse = torch.empty(shape, dtype=torch.float32, device=bucket.device)
        self._descriptors: dict[tuple[int, int], TensorDescriptor] = {}

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, pos: Tensor, plan: PlanTensors, scores: Scores
    ) -> Tensor:
        assert q.stride(3) == k.stride(3) == v.stride(3) == pos.stride(0) == 1
        assert rows.stride()[2:] == (PAGE * rows.shape[4], rows.shape[4], 1)
        if self._bucket.is_run:  # tokens of a run see each other's rows: these are written first
            write_rows(k.transpose(0, 2), v.transpose(0, 2), rows, plan.places)
        self._attend_items(q, k, v, rows, pos, plan, scores)
        return self._join_parts(q, plan, scores.sinks)

    def _attend_items(
        self, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, pos: Tensor, plan: PlanTensors, scores: Scores
    ) -> None:
        bucket, tiles = self._bucket, self.tiles
        kernels.attend_items[(tiles.programs,)](
            self._descriptor(rows) if self._has_tma else None,
            *(q, q.stride(0), q.stride(1)),
            *(k, k.stride(0), k.stride(1)),
            *(v, v.stride(0), v.stride(1)),
            *(rows, rows.stride(0), rows.stride(1)),
            *(plan.order, pos, plan.items),
            *(self._acc, self._lse, bucket.max_parts),
            *(scores.scale * kernels.LOG2E, scores.softcap),
            HEADS=bucket.heads, HQ=bucket.heads * bucket.group, G=bucket.group,
            D=bucket.dim, D_PAD=next_power_of_2(bucket.dim), M=bucket.queries_of_item, M1=bucket.queries_of_lane,
            N=tiles.rows, N_GROWING=min(32, tiles.rows), PAGE=PAGE, STAGES=tiles.stages, num_warps=tiles.warps,
            WINDOW=scores.window, SOFTCAP=scores.softcap > 0, TMA=self._has_tma,
            HAS_SHARED=bucket.has_shared or bucket.is_run, IS_RUN=bucket.is_run,
        )  # fmt: skip

    def _join_parts(self, q: Tensor, plan: PlanTensors, sinks: Tensor | None) -> Tensor:
        entries, queries, _, dim = q.shape
        out = torch.empty(entries, 1, queries, dim, dtype=q.dtype, device=q.device)
        parts, warps = (64, 4) if entries == 1 else (16, 1)  # a single lane has many parts and few programs
        kernels.join_parts[(entries, queries)](
            self._acc, self._lse, plan.parts, plan.parts if sinks is None else sinks, out, self._bucket.max_parts,
            HQ=queries, D=dim, D_PAD=next_power_of_2(dim), P=parts, SINKS=sinks is not None, num_warps=warps,
        )  # fmt: skip
        return out

    def _descriptor(self, rows: Tensor) -> TensorDescriptor:
        """The rows of a layer in all slots as one tall matrix, which is read by tiles."""
        key = (rows.data_ptr(), rows.shape[0])
        if key not in self._descriptors:
            slots, _, heads, page, dim = rows.shape
            num = ((slots - 1) * rows.stride(0) + rows.stride(1)) // dim + heads * page
            assert num <= _LARGEST_COORDINATE, f"a pool of {num:,} rows and {slots:,} slots is too large for its index"
            tall = torch.as_strided(rows, (num, dim), (dim, 1))
            tile = [self.tiles.rows, next_power_of_2(dim)]
            self._descriptors[key] = TensorDescriptor.from_tensor(tall, tile)
        return self._descriptors[key]


def write_rows(k: Tensor, v: Tensor, rows: Tensor, places: Tensor) -> None:
    assert k.stride(3) == v.stride(3) == 1
    _, heads, num, dim = k.shape
    options = _options(dim, num)
    kernels.write_rows[(triton.cdiv(num, options["T"]), heads)](
        *(k, k.stride(1), k.stride(2)),
        *(v, v.stride(1), v.stride(2)),
        *(rows, rows.stride(0), rows.stride(1)),
        *(places, num),
        **options,
    )


def gather_rows(rows: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    heads, dim, num = rows.shape[2], rows.shape[4], places.shape[0]
    k, v = (torch.empty(1, heads, num, dim, dtype=rows.dtype, device=rows.device) for _ in range(2))
    options = _options(dim, num)
    kernels.gather_rows[(triton.cdiv(num, options["T"]), heads)](
        *(rows, rows.stride(0), rows.stride(1)), *(places, num, k, v), **options
    )
    return k, v


def _options(dim: int, num: int) -> dict[str, int]:
    """The constants of `write_rows` and `gather_rows`; a program takes T of the `num` rows."""
    return {"D": dim, "D_PAD": next_power_of_2(dim), "PAGE": PAGE, "T": 32 if num > 512 else 8, "num_warps": 4}
