"""Finds, and proves, which rows of a GGUF file the weights of its transformers model are.

On the way from the file to the model the library permutes the rows of some weights, merges others, transposes or changes
some, each architecture in its own way. So it gets marks instead of the rows' values, and the marks in the result say which
row went where. A weight that is changed by arithmetic has no valid marks. Weights of one axis get their real values, and so
do small ones that are no rows, in a second run. No large weight is read.

`prove_rows` compares the values bit by bit. The library reads the file one tensor at a time for it, so that no float copy
of the whole model is made.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np

from bough.models.files import quiet_transformers
from bough.models.gguf.reading import (
    RowsNotFound,
    ValuesOf,
    make_empty_model,
    opened_once,
    read_bytes,
    read_weights,
    unpack_tensor,
)
from bough.models.weights.gguf_header import GgufModel, GgufTensor
from bough.models.weights.packed import BLOCKS, PackedFile, PackedTensor, RowRun, row_bytes

LARGEST_FLOATS = 2**20
"""The most bytes in float32 of a weight that is no rows of the file."""

_SPACING, _REST = 1024, 7  # row n has the mark 1024 n + 7: no sum or product of marks with a small number is one
_COMPARED_VALUES = 4 * 2**20  # at a time


@dataclass(frozen=True)
class WeightTable:
    """The weights of a model, by name: rows of the file, and small ones as arrays of float32."""

    rows: Mapping[str, PackedTensor]
    floats: Mapping[str, Any]


@dataclass(frozen=True)
class Proof:
    """The number of rows that are equal, and the weights with rows that differ or are in no tensor."""

    num_equal: int
    wrong: tuple[str, ...]


def map_weights(model: GgufModel, empty: Any) -> WeightTable:
    """Find all weights of `empty`, the file's model on the meta device. Raises RowsNotFound, or a library's error."""
    state: dict[str, Any] = empty.state_dict(keep_vars=True)
    row_map = _RowMap.of(model.header.tensors)
    rows: dict[str, PackedTensor] = {}
    floats: dict[str, Any] = {}
    marks = _read(model, empty, lambda each: unpack_tensor(model, each) if len(each.shape) < 2 else row_map.mark(each))
    for name, values in marks.items():
        if name in state:
            tensor = row_map.locate(values, tuple(state[name].shape))
            if tensor is not None:
                rows[name] = tensor
            elif state[name].dim() == 1:
                floats[name] = values
    lacking = _find_lacking(state, {*rows, *floats})
    if any(_is_small(state[name].numel()) for name in lacking):
        floats |= _read_small(model, empty, lacking)
    _require_all(state, rows, floats)
    by_weight = {id(state[name]): tensor for name, tensor in rows.items()}
    return WeightTable(
        {name: by_weight[id(each)] for name, each in state.items() if id(each) in by_weight},
        {name: np.ascontiguousarray(each, np.float32) for name, each in floats.items()},
    )


def _read(model: GgufModel, empty: Any, values_of: ValuesOf) -> dict[str, Any]:
    with np.errstate(all="ignore"):
        return {name: each.numpy() for name, each in read_weights(model, empty, values_of).items()}


def _is_small(num_values: int) -> bool:
    return 4 * num_values <= LARGEST_FLOATS


def _read_small(model: GgufModel, empty: Any, names: Collection[str]) -> dict[str, Any]:
    """The values of those weights that the library makes of small tensors: of large ones it gets no values."""

    def values_of(tensor: GgufTensor) -> Any:
        is_small = _is_small(tensor.num_values)
        return unpack_tensor(model, tensor) if is_small else np.broadcast_to(np.float32(np.nan), tensor.shape)

    found = _read(model, empty, values_of)
    return {name: found[name] for name in names if name in found and not np.isnan(found[name]).any()}


def _find_lacking(state: Mapping[str, Any], found: Collection[str]) -> list[str]:
    """The weights that were not found under any of their names."""
    there = {id(state[name]) for name in found}
    return sorted(name for name, each in state.items() if id(each) not in there)


def _require_all(state: Mapping[str, Any], rows: Mapping[str, Any], floats: Mapping[str, Any]) -> None:
    lacking = _find_lacking(state, {*rows, *floats})
    if lacking:
        raise RowsNotFound(
            f"{len(lacking)} of {len(state)} weights are not rows of the file, such as {lacking[0]} "
            f"of the shape {list(state[lacking[0]].shape)}"
        )
    for name, each in floats.items():
        if each.shape != tuple(state[name].shape):
            raise RowsNotFound(f"{name} has the shape {list(each.shape)} instead of {list(state[name].shape)}")


@dataclass(frozen=True)
class _RowMap:
    """The number of each row. The arrays have an entry for each tensor, whose rows have the numbers [start, end)."""

    starts: Any
    ends: Any
    tensors: tuple[GgufTensor, ...]
    by_name: Mapping[str, int]

    @classmethod
    def of(cls, tensors: Any) -> _RowMap:
        ends = np.cumsum([math.prod(each.shape[:-1]) if len(each.shape) > 1 else 0 for each in tensors])
        starts = np.concatenate([[0], ends[:-1]])
        return cls(starts, ends, tuple(tensors), {each.name: number for number, each in enumerate(tensors)})

    def mark(self, tensor: GgufTensor) -> Any:
        """The marks of the rows of a tensor, as an array like it with one column."""
        number, rows = self.by_name[tensor.name], tensor.shape[:-1]
        numbers = self.starts[number] + np.arange(math.prod(rows), dtype=np.float64)
        return (numbers * _SPACING + _REST).reshape(*rows, 1)

    def locate(self, marks: Any, shape: tuple[int, ...]) -> PackedTensor | None:
        """The weight of this shape whose rows have these marks; None if they are not rows of one type and length."""
        if len(shape) not in (2, 3) or marks.shape != (*shape[:-1], 1):
            return None
        numbers = (marks.reshape(-1) - _REST) / _SPACING
        if not np.all((numbers >= 0) & (numbers < self.ends[-1]) & (numbers == np.floor(numbers))):
            return None
        rows = numbers.astype(np.int64)
        owners = np.searchsorted(self.ends, rows, "right")  # a tensor of one axis has no rows, and is never found
        involved = [self.tensors[each] for each in np.unique(owners)]
        kinds = {(each.type, each.shape[-1]) for each in involved}
        if kinds != {(involved[0].type, shape[-1])} or involved[0].type not in BLOCKS:
            return None
        size = row_bytes(involved[0].type, shape[-1])
        offsets = np.array([each.offset for each in self.tensors])[owners] + (rows - self.starts[owners]) * size
        files = np.array([each.file for each in self.tensors])[owners]
        return PackedTensor(involved[0].type, shape, tuple(_find_runs(offsets, files, size)))


def _find_runs(offsets: Any, files: Any, size: int) -> Iterator[RowRun]:
    """Rows that follow each other at equal distances in one file, as runs. Each run is as long as possible."""
    steps = np.where(np.diff(files) == 0, np.diff(offsets), 0)
    ends = np.append(np.flatnonzero(np.diff(steps)) + 1, len(steps))  # of equal steps
    at = 0
    while at < len(offsets):
        if at == len(steps) or steps[at] < size:
            yield RowRun(int(offsets[at]), size, 1, int(files[at]))
            at += 1
        else:
            end = int(ends[np.searchsorted(ends, at, "right")])
            yield RowRun(int(offsets[at]), int(steps[at]), end - at + 1, int(files[at]))
            at = end + 1


def prove_rows(model: GgufModel, packed: PackedFile) -> Proof:
    """Compare all rows that the table names with transformers' own reading of the file. Raises what the library raises."""
    from transformers import modeling_gguf_pytorch_utils

    library: Any = modeling_gguf_pytorch_utils
    processor = library.TENSOR_PROCESSORS.get(model.header.architecture, library.TensorProcessor)
    equal: Counter[str] = Counter()
    with quiet_transformers(), opened_once(model):
        empty = make_empty_model(model)
        names = library.get_gguf_hf_weights_map(empty, processor(config={}))  # of a model with all tensors
        with patch.object(library, "get_gguf_hf_weights_map", lambda *_, **__: names):
            for tensor in (each for each in model.header.tensors if len(each.shape) > 1):
                content = read_bytes(model.files[tensor.file], tensor.offset, tensor.num_bytes)
                blocks = np.frombuffer(content, np.uint8).reshape(tensor.num_values // tensor.shape[-1], -1)
                one = GgufModel(model.files, replace(model.header, tensors=[tensor]))
                for name, values in read_weights(one, empty).items():
                    if known := packed.tensors.get(name):
                        equal[name] += _count_equal(known, tensor, blocks, values.numpy().reshape(-1, known.shape[-1]))
    wrong = [name for name, num_rows in equal.items() if num_rows != packed.tensors[name].num_rows]
    return Proof(equal.total(), tuple(sorted(wrong)))


def _count_equal(known: PackedTensor, tensor: GgufTensor, blocks: Any, values: Any) -> int:
    """The number of a weight's rows in the runs inside this tensor all of whose values are equal."""
    first, num_equal = 0, 0
    for run in known.rows:
        if run.file == tensor.file and tensor.offset <= run.offset < tensor.offset + tensor.num_bytes:
            start, step = (run.offset - tensor.offset) // known.row_bytes, run.step_bytes // known.row_bytes
            numbers = start + step * np.arange(run.count)
            if _is_equal(blocks, numbers, values[first : first + run.count], tensor.type):
                num_equal += run.count
        first += run.count
    return num_equal


def _is_equal(blocks: Any, numbers: Any, values: Any, type_name: str) -> bool:
    """Whether the rows of these numbers have these values, bit by bit."""
    import gguf

    most = max(1, _COMPARED_VALUES // values.shape[1])
    kind = gguf.GGMLQuantizationType[type_name]
    for at in range(0, len(numbers), most):
        found = gguf.dequantize(blocks[numbers[at : at + most]], kind).astype(np.float32, copy=False)
        expected = np.ascontiguousarray(values[at : at + most], np.float32)
        if not np.array_equal(found.view(np.int32), expected.view(np.int32)):
            return False
    return True
