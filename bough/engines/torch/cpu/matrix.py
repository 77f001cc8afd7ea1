"""Matrices as the kernels see them: rows of weights of one type.

Floats are kept row by row. Weights of 4 to 8 bits are kept in panels of 16 rows (`kernels/panels.h`), which products read
in order; they have the bits of their GGUF file. A matrix refers to the memory that holds it.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bough.engines.torch.cpu.library import BLOCK_TYPES, TYPES
from bough.models.weights.packed import row_bytes

PANEL_ROWS = 16
_ALIGNMENT = 64  # of the panels of a matrix
_FLOATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class MatrixStruct(ctypes.Structure):
    """`Matrix` of the kernels."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("type", ctypes.c_int32),
        ("num_rows", ctypes.c_int32),
        ("num_columns", ctypes.c_int32),
        ("panels", ctypes.c_int32),
    )


@dataclass(frozen=True)
class Matrix:
    """`num_rows` rows of `num_columns` weights of one ggml type.

    The first row, or the first panel, starts `start` bytes into `memory`. `stride` is the number of bytes from one row to
    the next, or from one panel to the next. A matrix that is part of a model's structure has its bias, if there is one.
    """

    type: str
    num_rows: int
    num_columns: int
    memory: Tensor
    start: int
    stride: int
    bias: Tensor | None = None

    @classmethod
    def of_tensor(cls, tensor: Tensor) -> Matrix:
        """The rows of a contiguous float tensor; its last axis is the columns."""
        assert tensor.is_contiguous(), f"a weight of shape {tuple(tensor.shape)} is not in one piece"
        columns = tensor.shape[-1]
        return cls(_FLOATS[tensor.dtype], tensor.numel() // columns, columns, tensor, 0, columns * tensor.element_size())

    @property
    def is_panels(self) -> bool:
        return self.type in BLOCK_TYPES

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        if self.is_panels:
            return -(-self.num_rows // PANEL_ROWS) * self.stride
        return self.num_rows * row_bytes(self.type, self.num_columns)

    def can_slice(self, first: int) -> bool:
        """Whether `slice` can begin at this row: panels are not cut."""
        return not self.is_panels or first % PANEL_ROWS == 0

    def slice(self, first: int, last: int) -> Matrix:
        """Rows [first, last) of the same memory."""
        assert 0 <= first <= last <= self.num_rows, f"rows [{first}, {last}) of {self.num_rows}"
        assert self.can_slice(first), f"row {first} is not the first of a panel of {PANEL_ROWS}"
        steps = first // PANEL_ROWS if self.is_panels else first
        bias = None if self.bias is None else self.bias[first:last].contiguous()
        return replace(self, num_rows=last - first, start=self.start + steps * self.stride, bias=bias)

    def as_struct(self, bias: Tensor | None = None) -> MatrixStruct:
        """What the kernels take, with this bias or its own. The caller keeps both alive as long as they use it."""
        bias = self.bias if bias is None else bias
        address, bias_at = self.memory.data_ptr() + self.start, None if bias is None else bias.data_ptr()
        kind, panels = TYPES[self.type], int(self.is_panels)
        return MatrixStruct(address, bias_at, self.stride, kind, self.num_rows, self.num_columns, panels)


class PanelMemory:
    """One piece of memory for the panels of matrices of these sizes, in huge pages where the system gives them."""

    def __init__(self, sizes: Iterable[int]) -> None:
        self._buffer = mmap.mmap(-1, max(sum(map(_aligned, sizes)), 1))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._buffer.madvise(mmap.MADV_HUGEPAGE)
        self._memory = torch.frombuffer(self._buffer, dtype=torch.uint8)
        self._used_bytes = 0

    def take(self, num_bytes: int) -> Tensor:
        """The next piece, all zeros. The caller asked for enough memory in the beginning."""
        start, end = self._used_bytes, self._used_bytes + num_bytes
        assert end <= len(self._buffer), f"{end:,} of {len(self._buffer):,} bytes"
        self._used_bytes += _aligned(num_bytes)
        return self._memory[start:end]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
