"""Finds where the rows of a converted model's weights lie in its GGUF file, and proves it.

On the way from the file to the model the library permutes the rows of some weights, merges others, transposes or changes
some. What it does depends on the architecture. So it reads the file a second time, and gets the numbers of rows instead of
their values: where the numbers come out tells which row went where. Then every row that was found is unpacked from the file
and compared with the model, bit by bit. What does not agree is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bough.models.files import one_line
from bough.models.gguf.reading import counted_tensors, replaced_values
from bough.models.weights.packed import BLOCKS, PackedTensor, RowRun, row_bytes

log = logging.getLogger(__name__)

_CHECKED_VALUES = 4 * 2**20  # that are unpacked and compared at a time

Count = Callable[[int], None]


def find_packed(file: Path, reader: Any, model: Any, count: Count) -> dict[str, PackedTensor]:
    """The weights of the model that are rows of the file, by name. `count` is told the bytes that were compared.

    The model is the one that transformers made from this file, with its weights. A weight that has several names is found
    under each of them.
    """
    content = np.asarray(np.memmap(file, np.uint8, "r"))
    weights = dict(model.named_parameters(remove_duplicate=False))
    map_of_rows, found = _RowMap.of(reader), {}
    for name, numbers in _number_rows(file, reader, model).items():
        tensor = map_of_rows.locate(numbers, tuple(weights[name].shape)) if name in weights else None
        if tensor is not None:
            if _is_equal(content, tensor, weights[name]):
                found[name] = tensor
            count(tensor.num_rows * tensor.row_bytes)
    return _with_tied_names(found, weights)


def _number_rows(file: Path, reader: Any, model: Any) -> dict[str, Any]:
    """For each weight of the model the numbers of its rows, as an array like the weight with one column.

    The rows of all tensors of two and more axes are numbered in the order of the file. A tensor of one axis is all zeros.
    Empty, with a line in the log, if the library cannot handle tensors with one column.
    """
    from transformers import modeling_gguf_pytorch_utils as library

    starts = iter(_RowMap.of(reader).starts.tolist())

    def number(data: Any, _: Any) -> Any:
        start, rows = next(starts), data.shape[:-1]
        if not rows:
            return np.zeros(data.shape)
        return start + np.arange(np.prod(rows), dtype=np.float64).reshape(*rows, 1)

    read: Any = library.load_gguf_checkpoint
    try:
        with np.errstate(all="ignore"), counted_tensors(lambda _: None), replaced_values(number):
            found: dict[str, Any] = read(str(file), return_tensors=True, model_to_load=model)["tensors"]
    except Exception as error:  # such as a reshape to the full width
        log.warning("the weights of %s stay in float32: %s: %s", file.name, type(error).__name__, one_line(error))
        return {}
    return {name: numbers.numpy() for name, numbers in found.items()}


@dataclass(frozen=True)
class _RowMap:
    """Where each row of the file lies. The arrays have an entry for each tensor; its rows have the numbers [start, end)."""

    starts: Any
    ends: Any
    offsets: Any
    types: tuple[str, ...]
    columns: Any

    @classmethod
    def of(cls, reader: Any) -> _RowMap:
        tensors = reader.tensors
        num_rows = np.array([int(np.prod(each.shape[1:])) if len(each.shape) > 1 else 0 for each in tensors])
        ends = np.cumsum(num_rows)
        return cls(
            starts=ends - num_rows,
            ends=ends,
            offsets=np.array([int(each.data_offset) for each in tensors]),
            types=tuple(each.tensor_type.name for each in tensors),
            columns=np.array([int(each.shape[0]) for each in tensors]),
        )

    def locate(self, numbers: Any, shape: tuple[int, ...]) -> PackedTensor | None:
        """The weight of this shape whose rows have these numbers; None if they are not rows of one type and length."""
        if len(shape) not in (2, 3) or numbers.shape != (*shape[:-1], 1) or not self._are_rows(numbers):
            return None
        rows = numbers.reshape(-1).astype(np.int64)
        owners = np.searchsorted(self.ends, rows, "right")  # a tensor of one axis has no rows, and is never found
        kinds = {(self.types[each], int(self.columns[each])) for each in np.unique(owners)}
        kind, columns = kinds.pop()
        if kinds or kind not in BLOCKS or columns != shape[-1]:
            return None
        size = row_bytes(kind, columns)
        offsets = self.offsets[owners] + (rows - self.starts[owners]) * size
        return PackedTensor(kind, shape, tuple(_find_runs(offsets, size)))

    def _are_rows(self, numbers: Any) -> bool:
        """Whether these are whole numbers of rows: a weight whose values the library changes has others."""
        return bool(np.all((numbers >= 0) & (numbers < self.ends[-1]) & (numbers == np.floor(numbers))))


def _find_runs(offsets: Any, size: int) -> Iterator[RowRun]:
    """Rows that follow each other at equal distances, as runs. Each run is as long as possible."""
    steps = np.diff(offsets)
    ends = np.append(np.flatnonzero(np.diff(steps)) + 1, len(steps))  # of equal steps
    at = 0
    while at < len(offsets):
        if at == len(steps) or steps[at] < size:
            yield RowRun(int(offsets[at]), size, 1)
            at += 1
        else:
            end = int(ends[np.searchsorted(ends, at, "right")])
            yield RowRun(int(offsets[at]), int(steps[at]), end - at + 1)
            at = end + 1


def _is_equal(content: Any, tensor: PackedTensor, weight: Any) -> bool:
    """Whether the rows, unpacked, are the weight bit by bit."""
    values = weight.detach().reshape(-1, tensor.shape[-1])
    at = 0
    for unpacked in _unpack(content, tensor):
        expected = values[at : at + len(unpacked)].float().numpy()
        if not np.array_equal(unpacked.view(np.int32), expected.view(np.int32)):
            return False
        at += len(unpacked)
    return at == len(values)


def _unpack(content: Any, tensor: PackedTensor) -> Iterator[Any]:
    """The rows as float32, some at a time, so that little memory is used."""
    import gguf

    kind = gguf.GGMLQuantizationType[tensor.type]
    most = max(1, _CHECKED_VALUES // tensor.shape[-1])
    for run in tensor.rows:
        for first in range(0, run.count, most):
            count = min(most, run.count - first)
            start = run.offset + first * run.step_bytes
            rows = np.lib.stride_tricks.as_strided(content[start:], (count, tensor.row_bytes), (run.step_bytes, 1))
            yield np.asarray(gguf.dequantize(np.ascontiguousarray(rows), kind), np.float32)


def _with_tied_names(found: Mapping[str, PackedTensor], weights: Mapping[str, Any]) -> dict[str, PackedTensor]:
    """The same weights under every name that they have in the model."""
    by_weight = {id(weights[name]): tensor for name, tensor in found.items()}
    return {name: by_weight[id(weight)] for name, weight in weights.items() if id(weight) in by_weight}
