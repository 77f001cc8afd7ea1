"""Attention over the slots of a pool: the buffers of a bucket that a captured step reads, and rows in and out of slots.

On CUDA the kernels of `kernels.py` compute, elsewhere plain torch does, by the same plan: no other module has to know.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from bough.engines.shared.pool.plan import Plan, PlanShape
from bough.engines.torch.pooled.attention import reference
from bough.engines.torch.pooled.attention.bucket import HALF_TYPES, Bucket, ItemAttention, PlanTensors, Scores
from bough.engines.torch.pooled.attention.staging import HostNumbers


class PlanBuffers:
    """The static buffers of one bucket. Make plans with its `shape`, put them, and attend once in each layer."""

    def __init__(self, bucket: Bucket, attention: ItemAttention | None = None) -> None:
        self.bucket = bucket
        self.attention = attention or _choose_attention(bucket)
        self.shape = PlanShape(
            bucket.heads, bucket.lanes_of_item, bucket.max_parts, bucket.max_items, self.attention.programs
        )
        self.plan = PlanTensors.empty(bucket, self.shape)
        self._staging = HostNumbers(self.plan.packed)

    def put(self, plan: Plan, places: Sequence[int] = ()) -> None:
        """Send a plan to the device, in the order of the current stream; the caller does not wait for it.

        A run also needs the places of its tokens' rows. Entries beyond those of the plan are padding: they get zeros.
        """
        self._check(plan, places)
        numbers = array("i", places)
        numbers.extend([-1] * (self.plan.places.numel() - len(places)))
        numbers.extend(plan.pack(self.bucket.entries))
        self._staging.put(numbers)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: Tensor,
        pos: Tensor,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """One layer of a step: its new rows go to their slots; returns [entries, 1, query heads, dim].

        q is [entries, query heads, 1, dim], k and v are [entries, key heads, 1, dim], `rows` is [slots, 2, key heads, 256,
        dim], a view of one layer of the pool, and `pos` is [entries, 1] int64.
        """
        return self.attention.attend(q, k, v, rows, pos, self.plan, Scores(scale, window, softcap, sinks))

    def _check(self, plan: Plan, places: Sequence[int]) -> None:
        bucket, shape = self.bucket, self.shape
        assert (plan.shape.heads, plan.shape.programs) == (shape.heads, shape.programs), "a plan for another bucket"
        assert len(places) == (len(plan.order) if bucket.is_run else 0), f"{len(places)} places"
        assert bucket.is_run or bucket.has_shared or not plan.has_shared, "a plan with shared items in a bucket without"
        size = (len(plan.order), max(plan.parts, default=0), len(plan.items))
        if any(used > most for used, most in zip(size, (bucket.entries, bucket.max_parts, bucket.max_items), strict=True)):
            raise ValueError(
                f"a plan of {size[0]} entries, {size[1]} parts and {size[2]} items: "
                f"the bucket takes {bucket.entries}, {bucket.max_parts} and {bucket.max_items}"
            )


def write_rows(k: Tensor, v: Tensor, rows: Tensor, places: Tensor) -> None:
    """Put keys and values [1, heads, num, dim] to their places (int32 [num]; -1: nowhere) in a layer of the pool."""
    if rows.is_cuda:
        from bough.engines.torch.pooled.attention import launches

        launches.write_rows(k, v, rows, places)
    else:
        reference.write_rows(k, v, rows, places)


def gather_rows(rows: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and values at these places (int32 [num]; -1: zeros) of a layer of the pool, each [1, heads, num, dim]."""
    if rows.is_cuda:
        from bough.engines.torch.pooled.attention import launches

        return launches.gather_rows(rows, places)
    return reference.gather_rows(rows, places)


def _choose_attention(bucket: Bucket) -> ItemAttention:
    if not _has_kernels(bucket.device, bucket.dtype):
        return reference.PlainAttention(bucket)
    from bough.engines.torch.pooled.attention.launches import Card, TritonAttention

    return TritonAttention(bucket, Card.of(bucket.device))


def _has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Kernels compute in half precision. In float32 they would round to ten bits, and only the self-check asks for it."""
    return device.type == "cuda" and dtype in HALF_TYPES
