"""Which rows of a GGUF file the weights of a converted model are: `packed.json`, beside `model.gguf` and the safetensors.

A converted folder has each weight twice: as floats in the safetensors, which its fingerprint covers, and in the blocks of
the GGUF file that it was made from. The table has the weights whose rows are exactly rows of that file, so that an engine
can use the blocks instead of the floats. It is written after every row was compared, bit by bit. A weight that is not in
the table has only its floats.

    {"format": 1, "file": "model.gguf", "file_bytes": 98362432, "sha256": "b179…",
     "tensors": {"lm_head.weight": {"type": "Q8_0", "shape": [49152, 576], "rows": [[1763904, 612, 49152]]}, …}}

Names are those of the transformers model. A weight that has two names, such as a tied embedding and head, is in the table
under both, with equal entries. An entry of `rows` is a run: the offset of its first row in the file, the bytes from one row
to the next, and the number of rows. The runs in order are the rows of the weight, whose columns are the last axis.

Reading the table takes milliseconds and needs no package. Everything in it is checked against the size of the file; the
content of the file is compared by `fingerprint.check_packed`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bough.errors import UnsupportedModel
from bough.models.files import GGUF_FILE, hash_file, read_json

PACKED_FILE = "packed.json"
_FORMAT = 1
_AXES = (2, 3)
BLOCKS: Mapping[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
"""How many columns a block of each type holds, in how many bytes."""


@dataclass(frozen=True)
class RowRun:
    """Rows at equal distances: `count` of them, the first at byte `offset`, each `step_bytes` after the one before."""

    offset: int
    step_bytes: int
    count: int


@dataclass(frozen=True)
class PackedTensor:
    """A weight of two or three axes, as rows of blocks of one type. Equal weights are the same bytes of the file."""

    type: str
    shape: tuple[int, ...]
    rows: tuple[RowRun, ...]

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.type, self.shape[-1])


@dataclass(frozen=True)
class PackedFile:
    """A GGUF file of `num_bytes`, and the weights that are rows of it, by their names in the transformers model."""

    path: Path
    num_bytes: int
    sha256: str
    tensors: Mapping[str, PackedTensor]


def row_bytes(type_name: str, num_columns: int) -> int:
    """The bytes of a row of this many columns. Raises ValueError if the type is not known or the blocks do not fit."""
    if type_name not in BLOCKS:
        raise ValueError(f"its type is {type_name!r}, and can be {', '.join(BLOCKS)}")
    columns, num_bytes = BLOCKS[type_name]
    if num_columns % columns:
        raise ValueError(f"its rows have {num_columns:,} columns, and blocks of {type_name} hold {columns}")
    return num_columns // columns * num_bytes


def write_packed(folder: Path, tensors: Mapping[str, PackedTensor]) -> PackedFile:
    """Write the table of `model.gguf` in the folder. Raises OSError."""
    file = folder / GGUF_FILE
    num_bytes = file.stat().st_size
    table = {
        "format": _FORMAT,
        "file": file.name,
        "file_bytes": num_bytes,
        "sha256": hash_file(file),
        "tensors": {name: _entry_of(tensor) for name, tensor in tensors.items()},
    }
    (folder / PACKED_FILE).write_text(json.dumps(table, separators=(",", ":")) + "\n", encoding="utf-8")
    return PackedFile(file, num_bytes, str(table["sha256"]), tensors)


def _entry_of(tensor: PackedTensor) -> dict[str, Any]:
    runs = [[run.offset, run.step_bytes, run.count] for run in tensor.rows]
    return {"type": tensor.type, "shape": tensor.shape, "rows": runs}


def read_packed(folder: Path) -> PackedFile | None:
    """The table of a model's folder; None if there is none, or one of another format.

    Raises UnsupportedModel, with the numbers, if the table is damaged or the file is missing or has another size.
    """
    table = folder / PACKED_FILE
    if not table.is_file():
        return None
    try:
        content = read_json(table)
        return _parse(folder, content) if content.get("format") == _FORMAT else None
    except (UnsupportedModel, ValueError) as error:
        raise UnsupportedModel(
            f"{table} is damaged: {error}; `bough pull` repairs it, and with the setting weights=float32 it is not read"
        ) from error


def _parse(folder: Path, content: Mapping[str, Any]) -> PackedFile:
    name, sha256, tensors = content.get("file"), content.get("sha256"), content.get("tensors")
    if not isinstance(name, str) or Path(name).name != name or not isinstance(sha256, str):
        raise ValueError(f"its file is {name!r} with the SHA-256 {sha256!r}, and both must be names")
    if not isinstance(tensors, dict):
        raise ValueError("it has no tensors")
    file_bytes = _size_of(folder / name, content.get("file_bytes"))
    found = {each: _parse_tensor(each, entry, file_bytes) for each, entry in tensors.items()}
    return PackedFile(folder / name, file_bytes, sha256, found)


def _size_of(file: Path, expected: Any) -> int:
    if not file.is_file():
        raise ValueError(f"there is no {file.name} beside it")
    size = file.stat().st_size
    if size != expected:
        had = f"{expected:,}" if isinstance(expected, int) else repr(expected)
        raise ValueError(f"{file.name} has {size:,} bytes, and had {had} when the table was made")
    return size


def _parse_tensor(name: str, entry: Any, file_bytes: int) -> PackedTensor:
    try:
        tensor = _tensor_of(entry)
        _check_runs(tensor, file_bytes)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return tensor


def _tensor_of(entry: Any) -> PackedTensor:
    fields: Mapping[str, Any] = entry if isinstance(entry, dict) else {}
    shape, rows = fields.get("shape", []), fields.get("rows", [])
    if not (_is_numbers(shape) and len(shape) in _AXES and all(shape)):
        raise ValueError(f"its shape is {shape!r}, and must be two or three sizes")
    if not (isinstance(rows, list) and all(_is_numbers(run) and len(run) == 3 for run in rows)):
        raise ValueError("its rows must be lists of offset, step and count")
    return PackedTensor(str(fields.get("type")), tuple(shape), tuple(RowRun(*run) for run in rows))


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)


def _check_runs(tensor: PackedTensor, file_bytes: int) -> None:
    size = tensor.row_bytes
    num_rows = sum(run.count for run in tensor.rows)
    if num_rows != tensor.num_rows:
        raise ValueError(f"it has {num_rows:,} rows, and its shape {list(tensor.shape)} needs {tensor.num_rows:,}")
    for run in tensor.rows:
        end = run.offset + run.step_bytes * (run.count - 1) + size
        if run.count < 1 or run.step_bytes < size or end > file_bytes:
            raise ValueError(
                f"{run.count:,} rows of {size:,} bytes from byte {run.offset:,}, {run.step_bytes:,} apart, "
                f"are not in a file of {file_bytes:,} bytes"
            )
