"""The header of a safetensors file, checked against the size of the file. No weight is read.

The file begins with the length of a JSON header, in eight bytes, then the header, then the weights. The header has the
type, the shape and the range of bytes of each weight. The ranges follow each other without gaps, up to the file's end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bough.errors import UnsupportedModel

_LENGTH_BYTES = 8
_LARGEST_HEADER = 100_000_000  # the library's limit
_BITS_OF = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}


@dataclass(frozen=True)
class _Range:
    """The bytes [start, end) of one weight, counted from the end of the header."""

    name: str
    start: int
    end: int


def read_shapes(file: Path) -> dict[str, list[int]]:
    """The shapes of the weights, by name. Raises UnsupportedModel, in one line, if the file is damaged or truncated."""
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            length = _check_length(file, stream.read(_LENGTH_BYTES), size)
            text = stream.read(length)
    except OSError as error:
        raise UnsupportedModel(f"cannot read {file}: {error}") from error
    entries = _parse(file, text)
    ranges = [_check_entry(file, name, entry) for name, entry in entries.items()]
    _check_ranges(file, ranges, size, _LENGTH_BYTES + length)
    return {name: entry["shape"] for name, entry in entries.items()}


def _check_length(file: Path, first: bytes, size: int) -> int:
    if len(first) < _LENGTH_BYTES:
        raise UnsupportedModel(f"{file} is not a safetensors file: it has {size} bytes, and its header begins after 8")
    length = int.from_bytes(first, "little")
    if length > _LARGEST_HEADER:
        raise UnsupportedModel(
            f"{file} is not a safetensors file: its first 8 bytes announce a header of {length:,} bytes, "
            f"and the file has {size:,} bytes"
        )
    if _LENGTH_BYTES + length > size:
        raise UnsupportedModel(
            f"{file} is truncated inside its header, which ends at byte {_LENGTH_BYTES + length:,}: "
            f"the file has {size:,} bytes"
        )
    return length


def _parse(file: Path, text: bytes) -> dict[str, dict[str, Any]]:
    try:
        found = json.loads(text)
    except UnicodeDecodeError as error:
        raise UnsupportedModel(
            f"{file} is not a safetensors file: its header is not UTF-8 at byte {_LENGTH_BYTES + error.start:,}"
        ) from error
    except json.JSONDecodeError as error:
        raise UnsupportedModel(
            f"{file} is not a safetensors file: its header is not JSON at byte {_LENGTH_BYTES + error.pos:,} ({error.msg})"
        ) from error
    if not isinstance(found, dict):
        raise UnsupportedModel(f"{file} is not a safetensors file: its header holds {type(found).__name__}, no object")
    return {name: entry for name, entry in found.items() if name != "__metadata__"}


def _check_entry(file: Path, name: str, entry: Any) -> _Range:
    """The bytes of a weight. They must be as many as its type and shape need."""
    fields: Mapping[str, Any] = entry if isinstance(entry, Mapping) else {}
    dtype, shape, offsets = fields.get("dtype", ""), fields.get("shape", ""), fields.get("data_offsets", "")
    if not (_is_sizes(shape) and _is_sizes(offsets) and len(offsets) == 2 and isinstance(dtype, str)):
        raise UnsupportedModel(
            f"{file} is not a safetensors file: its header has no type, shape and bytes for the weight {name}"
        )
    if dtype not in _BITS_OF:
        raise UnsupportedModel(f"the weight {name} in {file} has the type {dtype}, which cannot be read")
    needed, held = (math.prod(shape) * _BITS_OF[dtype] + 7) // 8, offsets[1] - offsets[0]
    if needed != held:
        raise UnsupportedModel(
            f"the weight {name} in {file} has the shape {shape} as {dtype}, which needs {needed:,} bytes, "
            f"and the header gives it {held:,}"
        )
    return _Range(name, offsets[0], offsets[1])


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, int) and each >= 0 for each in value)


def _check_ranges(file: Path, ranges: list[_Range], size: int, data_start: int) -> None:
    end = 0
    for each in sorted(ranges, key=lambda each: (each.start, each.end)):
        if each.start != end:
            raise UnsupportedModel(
                f"{file} is damaged: the weight {each.name} begins at byte {data_start + each.start:,}, "
                f"and the one before it ends at byte {data_start + end:,}"
            )
        end = each.end
        if data_start + end > size:
            raise UnsupportedModel(
                f"{file} is truncated: the weight {each.name} ends at byte {data_start + end:,}, "
                f"and the file has {size:,} bytes; "
                f"missing bytes: {data_start + max(other.end for other in ranges) - size:,}"
            )
    if data_start + end < size:
        raise UnsupportedModel(
            f"{file} is damaged: its last weight ends at byte {data_start + end:,}, and the file has {size:,} bytes"
        )
