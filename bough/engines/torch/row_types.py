"""The types in which lanes and pages keep rows of keys and values: the setting `kv`.

A row is rounded once, when it is written, and each for itself: it never depends on its neighbours. Every reader sees the
rounded row, the run that wrote it too. "int8" is ggml's Q8_0: blocks of a float16 scale and 32 numbers of 8 bits, of which
the last may be shorter. What float16 cannot hold is clipped, and counted.
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int8": torch.uint8}
"""The element in memory of each type of row."""

LARGEST_HALF = 65_504.0
_BLOCK = 32  # numbers with one scale
_SCALE_BYTES = 2

log = logging.getLogger(__name__)


class ClippedNumbers:
    """How many numbers of rows were too large for their type. Kernels add to it by its address."""

    def __init__(self, device: torch.device) -> None:
        self._count = torch.zeros(1, dtype=torch.int64, device=device)
        self._was_logged = False

    @property
    def address(self) -> int:
        return self._count.data_ptr()

    @property
    def count(self) -> int:
        return int(self._count)

    def add(self, rows: Tensor) -> None:
        """Count those of these rows that float16 cannot hold; does not wait for the device."""
        self._count += (rows.abs() > LARGEST_HALF).sum()

    def log_once(self) -> None:
        """Warn at the first number that was clipped."""
        if not self._was_logged and self.count:
            self._was_logged = True
            log.warning(
                "keys or values of this model exceed %s, which float16 and int8 cannot hold; they were clipped, and "
                "answers may be wrong: set kv=bfloat16",
                f"{LARGEST_HALF:,.0f}",
            )


def name_of(dtype: torch.dtype) -> str:
    """The type of rows that are kept in this element."""
    return next(name for name, each in ROW_TYPES.items() if each == dtype)


def kept_width(dtype: torch.dtype, dim: int) -> int:
    """The elements that `dim` numbers of one head take."""
    return dim if dtype != torch.uint8 else dim + _SCALE_BYTES * -(-dim // _BLOCK)


def encode(rows: Tensor, kept: Tensor, clipped: ClippedNumbers) -> None:
    """Write rows [..., dim] into memory [..., width] of another type."""
    if kept.dtype in (torch.float16, torch.uint8):
        clipped.add(rows)
        rows = rows.clamp(-LARGEST_HALF, LARGEST_HALF)
    kept.copy_(_to_blocks(rows) if kept.dtype == torch.uint8 else rows)


def decode(kept: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Rows [..., dim] in the type that the model computes with; without a copy if they are kept in it."""
    return _from_blocks(kept, dim).to(dtype) if kept.dtype == torch.uint8 else kept.to(dtype)


def _to_blocks(rows: Tensor) -> Tensor:
    dim = rows.shape[-1]
    blocks = _split(rows.float(), -dim % _BLOCK, _BLOCK)
    scales = (blocks.abs().amax(-1, keepdim=True) / 127).to(torch.float16)
    factors = scales.float()
    numbers = (blocks * torch.where(factors > 0, 1 / factors, 0)).round().clamp(-127, 127).to(torch.int8)
    joined = torch.cat([scales.view(torch.uint8), numbers.view(torch.uint8)], -1)
    return joined.flatten(-2)[..., : kept_width(torch.uint8, dim)]


def _from_blocks(kept: Tensor, dim: int) -> Tensor:
    blocks = _split(kept, -dim % _BLOCK, _SCALE_BYTES + _BLOCK)
    scales = blocks[..., :_SCALE_BYTES].contiguous().view(torch.float16).float()
    numbers = blocks[..., _SCALE_BYTES:].contiguous().view(torch.int8)
    rows: Tensor = numbers * scales
    return rows.flatten(-2)[..., :dim]


def _split(rows: Tensor, missing: int, size: int) -> Tensor:
    """Rows [..., blocks, size], after filling up the last block with zeros."""
    return F.pad(rows, (0, missing)).view(*rows.shape[:-1], -1, size)
