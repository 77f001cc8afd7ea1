"""Reads rows of a model's GGUF files into memory. No file stays mapped or open."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bough.errors import UnsupportedModel
from bough.models.weights.packed import PackedFile, PackedTensor, RowRun

_UNPACKED_VALUES = 4 * 2**20  # at a time
_LARGEST_SPAN = 4  # times the bytes that are needed: rows that are taken in turns from one place are read together


@dataclass(frozen=True)
class _Piece:
    """Rows [first, first + run.count) of what is read."""

    run: RowRun
    first: int


def read_rows(packed: PackedFile, tensor: PackedTensor, first: int, last: int) -> Tensor:
    """Rows [first, last) of a weight as bytes [rows, bytes of a row], in memory of their own.

    Raises UnsupportedModel if a file ends before, or cannot be read.
    """
    assert 0 <= first <= last <= tensor.num_rows, f"rows [{first}, {last}) of {tensor.num_rows}"
    out: Any = torch.empty(last - first, tensor.row_bytes, dtype=torch.uint8, device="cpu").numpy()
    pieces = list(_select_rows(tensor.rows, first, last))
    for number in sorted({piece.run.file for piece in pieces}):
        _read_file(packed.files[number].path, [piece for piece in pieces if piece.run.file == number], out)
    return torch.from_numpy(out)


def unpack_rows(packed: PackedFile, tensor: PackedTensor, out: Tensor) -> None:
    """Fill `out`, of the weight's shape and on any device, with its values, a few megabytes at a time."""
    import gguf

    kind, values = gguf.GGMLQuantizationType[tensor.type], out.view(tensor.num_rows, tensor.shape[-1])
    most = max(1, _UNPACKED_VALUES // tensor.shape[-1])
    for first in range(0, tensor.num_rows, most):
        last = min(first + most, tensor.num_rows)
        rows: Any = read_rows(packed, tensor, first, last).numpy()
        values[first:last] = torch.from_numpy(gguf.dequantize(rows, kind)).to(out.device, out.dtype)


def _select_rows(runs: Sequence[RowRun], first: int, last: int) -> Iterator[_Piece]:
    """The parts of the runs that are the rows [first, last)."""
    start = 0
    for run in runs:
        begin, end = max(first, start), min(last, start + run.count)
        if begin < end:
            offset = run.offset + run.step_bytes * (begin - start)
            yield _Piece(replace(run, offset=offset, count=end - begin), begin - first)
        start += run.count


def _read_file(path: Path, pieces: Sequence[_Piece], out: Any) -> None:
    """Read rows of one file to their places in `out` [rows, bytes of a row]."""
    try:
        with path.open("rb", buffering=0) as file:
            for group in _group_pieces(pieces, out.shape[1]):
                _read_pieces(file.fileno(), path, group, out)
    except OSError as error:
        raise UnsupportedModel(f"cannot read {path}: {error}") from error


def _group_pieces(pieces: Sequence[_Piece], size: int) -> Iterator[list[_Piece]]:
    """Pieces in groups to read at once: neighbours whose bytes overlap, or nearly."""
    group: list[_Piece] = []
    for piece in pieces:
        wider = [*group, piece]
        start, end = _bounds(wider, size)
        if group and end - start > _LARGEST_SPAN * size * sum(each.run.count for each in wider):
            yield group
            wider = [piece]
        group = wider
    if group:
        yield group


def _bounds(pieces: Sequence[_Piece], size: int) -> tuple[int, int]:
    """The bytes [start, end) of a file that contain all pieces."""
    runs = [piece.run for piece in pieces]
    return min(run.offset for run in runs), max(run.offset + run.step_bytes * (run.count - 1) + size for run in runs)


def _read_pieces(descriptor: int, path: Path, pieces: Sequence[_Piece], out: Any) -> None:
    import numpy as np

    size, only = out.shape[1], pieces[0]
    if len(pieces) == 1 and only.run.step_bytes == size:
        _read_bytes(descriptor, path, only.run.offset, out[only.first : only.first + only.run.count].reshape(-1))
        return
    start, end = _bounds(pieces, size)
    content = np.empty(end - start, np.uint8)
    _read_bytes(descriptor, path, start, content)
    for piece in pieces:
        run = piece.run
        shape, strides = (run.count, size), (run.step_bytes, 1)
        rows = np.lib.stride_tricks.as_strided(content[run.offset - start :], shape, strides, writeable=False)
        out[piece.first : piece.first + run.count] = rows


def _read_bytes(descriptor: int, path: Path, offset: int, target: Any) -> None:
    """Read bytes of a file to an array of bytes in one piece."""
    view, found = memoryview(target), 0
    while found < len(view):
        num_bytes = os.preadv(descriptor, [view[found : found + 2**30]], offset + found)
        if not num_bytes:
            raise UnsupportedModel(
                f"{path} ends at byte {offset + found:,}, and rows up to byte {offset + len(view):,} are needed"
            )
        found += num_bytes
