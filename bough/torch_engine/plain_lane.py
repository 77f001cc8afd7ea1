"""A lane without groups on PyTorch: what is particular is only how its memory is counted."""

from __future__ import annotations

from typing import Any

import torch

from bough.engine_parts.plain_lane import PlainLane, tensors_in

__all__ = ["PlainLane", "make_plain_lane"]


def make_plain_lane() -> PlainLane:
    """A lane that holds nothing yet."""
    return PlainLane(_bytes_of)


def _bytes_of(cache: Any) -> int:
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors_in(cache, torch.Tensor)}.values())
