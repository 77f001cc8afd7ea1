"""The table of the rows of a GGUF file that are a model's weights: `packed.json` in the model's folder.

The table has the weights whose rows are exactly rows of that file, under the names that the transformers model gives them.
Every other weight is small, and is in `floats.safetensors` beside the table.

    {"format": 2, "files": [{"path": "/models/x.gguf", "num_bytes": 98362432, "sha256": "b179…"}],
     "tensors": {"lm_head.weight": {"type": "Q8_0", "shape": [49152, 576], "rows": [[1763904, 612, 49152, 0]]}, …}}

The path of a user's own file is absolute; that of a file which Bough fetched is relative to the folder. A weight with two
names, such as a tied embedding and head, is in the table under both, with equal entries. An entry of `rows` is a run: the
offset of its first row, the bytes from one row to the next, the number of rows, and the number of their file. The runs in
order are the rows of the weight, whose columns are the last axis.

A table without files belongs to a model that was converted to safetensors; `reason` says why.

Reading the table takes milliseconds and needs no package. Everything in it is checked against the sizes of the files; the
content of the files is compared by `fingerprint.check_packed`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from bough.errors import UnsupportedModel
from bough.models.files import PACKED_FILE, PACKED_FORMAT, read_json
from bough.models.weights.gguf_header import TYPES

_AXES = (2, 3)
BLOCKS: Mapping[str, tuple[int, int]] = {name: (columns, num_bytes) for name, columns, num_bytes in TYPES.values()}
"""By type, the columns and the bytes of a block."""


@dataclass(frozen=True)
class GgufPart:
    """A GGUF file that has weights of a model."""

    path: Path
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class RowRun:
    """`count` rows of file number `file`: the first at byte `offset`, each `step_bytes` after the one before."""

    offset: int
    step_bytes: int
    count: int
    file: int = 0


@dataclass(frozen=True)
class PackedTensor:
    """A weight of two or three axes, as rows of blocks of one type. Equal ones are the same bytes of the file."""

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
    """The GGUF files of a model, and the weights that are rows of them, by their names in the transformers model."""

    files: tuple[GgufPart, ...]
    tensors: Mapping[str, PackedTensor]

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self.files)


def row_bytes(type_name: str, num_columns: int) -> int:
    """The bytes of a row. Raises ValueError if the type is not known or the columns are not whole blocks."""
    if type_name not in BLOCKS:
        raise ValueError(f"its type is {type_name!r}, and can be {', '.join(BLOCKS)}")
    columns, num_bytes = BLOCKS[type_name]
    if num_columns % columns:
        raise ValueError(f"its rows have {num_columns:,} columns, and blocks of {type_name} hold {columns}")
    return num_columns // columns * num_bytes


def write_packed(folder: Path, files: Sequence[GgufPart], tensors: Mapping[str, PackedTensor], reason: str = "") -> None:
    """Write the table of a model's folder. Raises OSError."""
    table = {
        "format": PACKED_FORMAT,
        "files": [{"path": str(each.path), "num_bytes": each.num_bytes, "sha256": each.sha256} for each in files],
        "tensors": {
            name: {"type": each.type, "shape": each.shape, "rows": [astuple(run) for run in each.rows]}
            for name, each in tensors.items()
        },
        "reason": reason,
    }
    (folder / PACKED_FILE).write_text(json.dumps(table, separators=(",", ":")) + "\n", encoding="utf-8")


def read_packed(folder: Path) -> PackedFile | None:
    """Read the table of a model's folder; None without a table of this format that names files.

    Raises UnsupportedModel, with the numbers, if the table is damaged or a file is missing or has another size.
    """
    table = folder / PACKED_FILE
    if not table.is_file():
        return None
    try:
        content = read_json(table)
        is_ours = content.get("format") == PACKED_FORMAT and content.get("files")
        return _parse(folder, content) if is_ours else None
    except (UnsupportedModel, ValueError) as error:
        raise UnsupportedModel(f"the model in {folder} cannot be used: {error}") from error


def _parse(folder: Path, content: Mapping[str, Any]) -> PackedFile:
    files, tensors = content["files"], content.get("tensors")
    if not isinstance(files, list) or not isinstance(tensors, dict):
        raise ValueError(f"{PACKED_FILE} is damaged: it has no list of files, or no tensors")
    parts = tuple(_parse_part(folder, each) for each in files)
    found = {}
    for name, entry in tensors.items():
        try:
            found[name] = _parse_tensor(entry, parts)
        except ValueError as error:
            raise ValueError(f"{PACKED_FILE} is damaged: {name}: {error}") from error
    return PackedFile(parts, found)


def _parse_part(folder: Path, entry: Any) -> GgufPart:
    fields: Mapping[str, Any] = entry if isinstance(entry, dict) else {}
    path, size, sha256 = fields.get("path"), fields.get("num_bytes"), fields.get("sha256")
    if not (isinstance(path, str) and isinstance(sha256, str) and type(size) is int):
        raise ValueError(f"{PACKED_FILE} is damaged: a file is {entry!r}")
    if not Path(path).is_absolute() and Path(path).name != path:
        raise ValueError(f"{PACKED_FILE} is damaged: the file {path!r} is neither in its folder nor an absolute path")
    file = folder / path
    try:
        found = file.stat().st_size
    except OSError as error:
        raise ValueError(
            f"its GGUF file {file} is not there ({type(error).__name__}): give the file where it is now"
        ) from error
    if found != size:
        raise ValueError(f"{file} has {found:,} bytes, and had {size:,} when it was first used")
    return GgufPart(file, size, sha256)


def _parse_tensor(entry: Any, files: Sequence[GgufPart]) -> PackedTensor:
    fields: Mapping[str, Any] = entry if isinstance(entry, dict) else {}
    shape, rows = fields.get("shape", []), fields.get("rows", [])
    if not (_is_numbers(shape) and len(shape) in _AXES and all(shape)):
        raise ValueError(f"its shape is {shape!r}, and must be two or three sizes")
    if not (isinstance(rows, list) and all(_is_numbers(run) and len(run) == 4 for run in rows)):
        raise ValueError("its rows must be lists of offset, step, count and file")
    tensor = PackedTensor(str(fields.get("type")), tuple(shape), tuple(RowRun(*run) for run in rows))
    _check_runs(tensor, files)
    return tensor


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)


def _check_runs(tensor: PackedTensor, files: Sequence[GgufPart]) -> None:
    size = tensor.row_bytes
    num_rows = sum(run.count for run in tensor.rows)
    if num_rows != tensor.num_rows:
        raise ValueError(f"it has {num_rows:,} rows, and its shape {list(tensor.shape)} needs {tensor.num_rows:,}")
    for run in tensor.rows:
        file_bytes = files[run.file].num_bytes if run.file < len(files) else 0
        end = run.offset + run.step_bytes * (run.count - 1) + size
        if run.count < 1 or run.step_bytes < size or end > file_bytes:
            raise ValueError(
                f"{run.count:,} rows of {size:,} bytes from byte {run.offset:,}, {run.step_bytes:,} apart, "
                f"are not in file {run.file} of {len(files)}, which has {file_bytes:,} bytes"
            )
