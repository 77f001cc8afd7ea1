"""The fixed properties of a bucket of a step's entries, the device's copy of its plan, and the interface of attention.

A graph that was captured over a bucket serves any lanes, lengths and sharing: all of that is in the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bough.engines.shared.pool.plan import FIELDS, PlanShape
from bough.engines.torch.attention import Scores

HALF_TYPES = (torch.bfloat16, torch.float16)
FEWEST_QUERIES = 16  # the smallest matrix product of a GPU
_LONG_RUN = 256  # tokens from which on a run is bound by products, not by reading rows
_LARGEST_RESULT = 128 * 128  # numbers of a product that a program holds in registers


@dataclass(frozen=True)
class StepBucket:
    """Entries of a step for the layers of one row group: lanes with one token each, or the tokens of one lane if `is_run`.

    There are `heads` key heads with `group` query heads each. A bucket without `has_shared` takes only plans whose items
    have one lane each, and is faster for them.
    """

    entries: int
    heads: int
    group: int
    dim: int
    dtype: torch.dtype
    device: torch.device
    is_run: bool = False
    has_shared: bool = True
    max_parts: int = 40
    max_items: int = 4096

    @property
    def queries_of_lane(self) -> int:
        return max(FEWEST_QUERIES, next_power_of_2(self.group))

    @property
    def queries_of_item(self) -> int:
        """Rows of the product for an item of several lanes: as measured best, 128 for long runs and otherwise up to 64."""
        if self.is_run and self.entries >= _LONG_RUN and 128 * next_power_of_2(self.dim) <= _LARGEST_RESULT:
            return max(self.queries_of_lane, 128)
        return max(self.queries_of_lane, min(64, next_power_of_2(self.group * self.entries)))

    @property
    def lanes_of_item(self) -> int:
        return self.queries_of_item // self.group if self.has_shared or self.is_run else 1


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least `number`, which is positive."""
    return 1 << (number - 1).bit_length()


@dataclass(frozen=True)
class PlanTensors:
    """A packed plan on the device, in one piece of memory; the other tensors are views of it.

    `places` has the place of each row of a run: slot * 256 + row % 256, or -1 for padding.
    """

    packed: Tensor
    places: Tensor
    order: Tensor
    parts: Tensor
    items: Tensor

    @classmethod
    def empty(cls, bucket: StepBucket, shape: PlanShape) -> PlanTensors:
        num_places = bucket.entries if bucket.is_run else 0
        num_items = bucket.max_items + -(-shape.programs // shape.heads) + 1  # those beyond the last are zeros
        sizes = [num_places, bucket.entries, bucket.entries, num_items * FIELDS]
        packed = torch.zeros(sum(sizes), dtype=torch.int32, device=bucket.device)
        places, order, parts, items = torch.split(packed, sizes)
        return cls(packed, places.fill_(-1), order, parts, items)


class ItemAttention(Protocol):
    """Computes attention for a bucket, by a plan on the device. `programs` share the work, for the plan's estimate."""

    programs: int

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, pos: Tensor, plan: PlanTensors, scores: Scores
    ) -> Tensor:
        """Write the new rows to their slots; returns [entries, 1, query heads, dim], zeros for entries not in the plan.

        q is [entries, query heads, 1, dim], k and v are [entries, key heads, 1, dim], `rows` is one layer of the pool,
        [slots, 2, key heads, 256, dim], and `pos` [entries, 1].
        """
