"""Attention over the slots of a pool: the static buffers of a bucket, and rows in and out of slots.

On CUDA the kernels of `kernels.py` compute, elsewhere plain torch does, by the same plan.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from bough.engines.shared.pool.plan import Plan, PlanShape
from bough.engines.torch.attention import Scores
from bough.engines.torch.pooled.attention import reference
from bough.engines.torch.pooled.attention.bucket import HALF_TYPES, ItemAttention, PlanTensors, StepBucket

_TURNS = 3  # host buffers that take turns: the copy out of one ends long before it is filled again


class HostNumbers:
    """Sends integers to the start of one device tensor through pinned memory, in the order of the current stream."""

    def __init__(self, target: Tensor) -> None:
        self._target = target.view(-1)
        is_cuda = target.is_cuda
        self._buffers = [torch.zeros(target.numel(), dtype=target.dtype, pin_memory=is_cuda) for _ in range(_TURNS)]
        self._sent = [torch.cuda.Event() for _ in range(_TURNS)] if is_cuda else []  # type: ignore[no-untyped-call]
        self._turn = 0

    def put(self, numbers: Sequence[int]) -> None:
        """Set the first of the target's numbers; does not wait for the copy."""
        self._turn = (self._turn + 1) % _TURNS
        if self._sent:
            self._sent[self._turn].synchronize()
        buffer = self._buffers[self._turn][: len(numbers)]
        buffer.numpy()[:] = numbers
        self._target[: len(numbers)].copy_(buffer, non_blocking=True)
        if self._sent:
            self._sent[self._turn].record()


class PlanBuffers:
    """The static buffers of one bucket. Make plans with its `shape`, put them, and attend once in each layer."""

    def __init__(self, bucket: StepBucket, attention: ItemAttention | None = None) -> None:
        self.bucket = bucket
        self.attention = attention or _choose_attention(bucket)
        self.shape = PlanShape(
            bucket.heads, bucket.lanes_of_item, bucket.max_parts, bucket.max_items, self.attention.programs
        )
        self.plan = PlanTensors.empty(bucket, self.shape)
        self._numbers = HostNumbers(self.plan.packed)

    def put(self, plan: Plan, places: Sequence[int] = ()) -> None:
        """Send a plan to the device, in the order of the current stream; does not wait for the copy.

        A run also needs the places of its tokens' rows. Entries beyond those of the plan are padding: they get zeros.
        """
        self._check(plan, places)
        numbers = array("i", places)
        numbers.extend([-1] * (self.plan.places.numel() - len(places)))
        numbers.extend(plan.pack(self.bucket.entries))
        self._numbers.put(numbers)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, pos: Tensor, scores: Scores) -> Tensor:
        """Compute one layer of a step, as `ItemAttention.attend` says, by the plan that was put last."""
        return self.attention.attend(q, k, v, rows, pos, self.plan, scores)

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
    """Write keys and values [1, heads, num, dim] to their places (int32 [num]; -1: nowhere) in a layer of the pool."""
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


def _choose_attention(bucket: StepBucket) -> ItemAttention:
    """Kernels for half precision on CUDA. They would round float32 to ten bits, and only the self-check has float32."""
    if bucket.device.type != "cuda" or bucket.dtype not in HALF_TYPES:
        return reference.PlainAttention(bucket)
    from bough.engines.torch.pooled.attention.launches import Card, TritonAttention

    return TritonAttention(bucket, Card.of(bucket.device))
