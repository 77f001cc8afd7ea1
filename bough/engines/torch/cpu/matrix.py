"""Matrices as the kernels see them: rows of weights in blocks of one type, somewhere in memory.

A matrix refers to the tensor that its rows lie in. Where the rows are not at equal distances, a list of offsets says where
each one starts.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bough.errors import UnsupportedModel
from bough.models.weights.packed import PackedTensor, row_bytes

TYPES = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "BF16": 30,
}
"""The numbers that ggml gives these types."""

_FLOATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class MatrixStruct(ctypes.Structure):
    """`Matrix` of kernels.c."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("type", ctypes.c_int32),
        ("num_rows", ctypes.c_int32),
        ("num_columns", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


@dataclass(frozen=True)
class Matrix:
    """`num_rows` rows of `num_columns` weights of one ggml type.

    Row i starts `start + i * stride` bytes into `memory`, or `start + offsets[i]` where there are offsets.
    """

    type: str
    num_rows: int
    num_columns: int
    memory: Tensor
    start: int
    stride: int
    offsets: Tensor | None = None

    @classmethod
    def of_tensor(cls, tensor: Tensor) -> Matrix:
        """The rows of a contiguous float tensor; its last axis is the columns."""
        assert tensor.is_contiguous(), f"a weight of shape {tuple(tensor.shape)} is not in one piece"
        columns = tensor.shape[-1]
        return cls(_FLOATS[tensor.dtype], tensor.numel() // columns, columns, tensor, 0, columns * tensor.element_size())

    @classmethod
    def of_blocks(cls, blocks: Tensor, type_name: str, num_columns: int) -> Matrix:
        """The rows of a tensor of bytes [rows, bytes of a row]."""
        return cls(type_name, blocks.shape[0], num_columns, blocks, 0, blocks.shape[1])

    @classmethod
    def of_file(cls, file: Tensor, tensor: PackedTensor) -> Matrix:
        """The rows that a table names, of a file that was mapped by `map_file`."""
        columns = tensor.shape[-1]
        if len(tensor.rows) == 1:
            (run,) = tensor.rows
            return cls(tensor.type, run.count, columns, file, run.offset, run.step_bytes)
        runs = [run.offset + run.step_bytes * torch.arange(run.count, dtype=torch.int64) for run in tensor.rows]
        return cls(tensor.type, tensor.num_rows, columns, file, 0, 0, torch.cat(runs))

    @property
    def nbytes(self) -> int:
        return self.num_rows * row_bytes(self.type, self.num_columns)

    def slice(self, first: int, last: int) -> Matrix:
        """Rows [first, last) of the same memory."""
        assert 0 <= first <= last <= self.num_rows, f"rows [{first}, {last}) of {self.num_rows}"
        offsets = None if self.offsets is None else self.offsets[first:last]
        start = self.start + first * self.stride
        return Matrix(self.type, last - first, self.num_columns, self.memory, start, self.stride, offsets)

    def as_struct(self, bias: Tensor | None = None) -> MatrixStruct:
        """What the kernels take. The caller keeps this matrix and the bias alive as long as they use it."""
        rows = None if self.offsets is None else self.offsets.data_ptr()
        address, kind = self.memory.data_ptr() + self.start, TYPES[self.type]
        bias_at = None if bias is None else bias.data_ptr()
        return MatrixStruct(address, rows, bias_at, self.stride, kind, self.num_rows, self.num_columns, 0)


def map_file(path: Path, num_bytes: int) -> Tensor:
    """The bytes of a file, read when they are used. Raises UnsupportedModel if it does not have so many now.

    If the file is truncated later, using a byte beyond its end kills the process (SIGBUS).
    """
    found_bytes = path.stat().st_size
    if found_bytes != num_bytes:
        raise UnsupportedModel(f"{path} has {found_bytes:,} bytes, and its packed weights need {num_bytes:,}")
    mapped: Any = torch.from_file(str(path), shared=False, size=num_bytes, dtype=torch.uint8)
    return mapped  # type: ignore[no-any-return]
