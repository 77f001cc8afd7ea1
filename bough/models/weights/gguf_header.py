"""The header of a GGUF file, checked against the size of the file. No weight is read, and no package is needed.

The file begins with `GGUF`, a version, the number of weights and the number of keys; then come the keys with their values,
the names, shapes, types and offsets of the weights, and after padding the weights. Everything is little-endian.

A large model may be split into files `X-00001-of-00003.gguf`. The first has the keys, and each has some of the weights.

Always true of a header: every weight is of a known type, has whole blocks in its rows, and ends inside its file; no two
keys and no two weights have the same name.
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from bough.errors import UnsupportedModel

TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
"""By number, the name of a type, the columns of one of its blocks, and the bytes of a block."""

_VERSIONS = (2, 3)
_FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MODEL_KEYS = ("block_count", "embedding_length")
_TOKENIZER_KEYS = ("tokenizer.ggml.model", "tokenizer.ggml.tokens")
_ENCODERS = re.compile(
    "bert|eurobert|gemma-embedding|jina-bert-v2|jina-bert-v3|modern-bert|neo-bert|nomic-bert|nomic-bert-moe|t5encoder"
)
_ALIGNMENT_KEY = "general.alignment"
_ALIGNMENT = 32
_LEAST_BYTES = {"keys": 13, "weights": 24, "texts": 8, "arrays": 12, "numbers": 1}  # of one entry
_MAX_AXES = 4  # as in GGML
_MAX_NESTING = 4  # arrays in arrays; no file is known that has any
_MAX_ENTRIES = 2**24  # of one array; the largest vocabularies have 2**18
_READ_BYTES = 8 * 2**20
_SHOWN = 60
_PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_LENGTH = struct.Struct("<Q")  # before each text


@dataclass(frozen=True)
class GgufTensor:
    """A weight in a file: `shape` has the columns last, and `offset` counts from the beginning of file number `file`."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    num_bytes: int
    file: int = 0

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class GgufHeader:
    """The values of a file by their keys, and its weights in the order of the header."""

    values: Mapping[str, Any]
    tensors: Sequence[GgufTensor]

    @property
    def architecture(self) -> str:
        return self._text("general.architecture")

    @property
    def kind(self) -> str:
        return self._text("general.type") or "model"

    @cached_property
    def num_parameters(self) -> int:
        return sum(each.num_values for each in self.tensors)

    @property
    def main_type(self) -> str:
        """The type of most of the weights."""
        counts: Counter[str] = Counter()
        for tensor in self.tensors:
            counts[tensor.type] += tensor.num_values
        return counts.most_common(1)[0][0]

    def _text(self, key: str) -> str:
        value = self.values.get(key, "")
        return value if isinstance(value, str) else ""


@dataclass(frozen=True)
class GgufModel:
    """A model in one file or several. The tensors of the header say in which of `files` they are."""

    files: tuple[Path, ...]
    header: GgufHeader

    @property
    def file(self) -> Path:
        """The first file, which has the keys."""
        return self.files[0]


def read_gguf_header(file: Path) -> GgufHeader:
    """Read the header. Raises UnsupportedModel, in one line, if the file is damaged, truncated or no GGUF file."""
    try:
        with file.open("rb") as stream:
            return _HeaderReader(file, stream).read()
    except OSError as error:
        raise UnsupportedModel(f"cannot read {file}: {error}") from error


def read_gguf(file: Path) -> GgufModel:
    """Read the headers of a model in a file and, if the model is split, in all parts beside it.

    Raises UnsupportedModel as `read_gguf_header`, or if a part is missing or belongs to another model.
    """
    files = find_parts(file)
    headers = [read_gguf_header(each) for each in files]
    _check_parts(files, headers)
    tensors = [replace(each, file=number) for number, header in enumerate(headers) for each in header.tensors]
    _require_once(files[0], [each.name for each in tensors], "weight")
    return GgufModel(files, GgufHeader(headers[0].values, tensors))


def part_names(name: str) -> list[str]:
    """The names of all parts of a split model, in order, from the name of one; the name itself if it is no part."""
    found = _PART_NAME.fullmatch(name)
    if not found:
        return [name]
    return [f"{found[1]}-{number:05}-of-{found[3]}.gguf" for number in range(1, int(found[3]) + 1)]


def find_parts(file: Path) -> tuple[Path, ...]:
    """All files of the model that a file is part of. Raises UnsupportedModel if one is missing."""
    files = tuple(file.with_name(name) for name in part_names(file.name))
    missing = [each.name for each in files if not each.is_file()]
    if missing and len(files) > 1:
        raise UnsupportedModel(
            f"{file} is part of a model in {len(files)} files, and {len(missing)} of them are not in {file.parent}: "
            f"the first that is missing is {missing[0]}"
        )
    return files or (file,)


def _check_parts(files: Sequence[Path], headers: Sequence[GgufHeader]) -> None:
    """Raise UnsupportedModel unless the files say that they are all parts of one model, in this order."""
    for number, (file, header) in enumerate(zip(files, headers, strict=True)):
        said = header.values.get("split.no", 0), header.values.get("split.count", 0) or 1
        if said != (number, len(files)):
            raise UnsupportedModel(
                f"{file} says that it is part {_shown(said[0], 1)} of {_shown(said[1])}, and by its name it is part "
                f"{number + 1} of {len(files)}"
            )
    wanted = headers[0].values.get("split.tensors.count")
    found = sum(len(each.tensors) for each in headers)
    if len(files) > 1 and wanted not in (None, found):
        raise UnsupportedModel(
            f"the {len(files)} parts of {files[0]} have {found:,} weights, and {_shown(wanted)} are wanted"
        )


def _shown(value: Any, add: int = 0) -> str:
    return f"{value + add:,}" if isinstance(value, int) else repr(value)[:_SHOWN]


def _one_line(name: str) -> str:
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in name[:_SHOWN])


def _require_once(file: Path, names: Sequence[str], what: str) -> None:
    repeated = next((name for name, count in Counter(names).items() if count > 1), None)
    if repeated is not None:
        raise UnsupportedModel(f"{file} is damaged: it has the {what} {_one_line(repeated)} twice")


def require_model_keys(file: Path, header: GgufHeader) -> None:
    """Raise UnsupportedModel if the file is no language model, or lacks a key that all language models have."""
    if header.kind != "model":
        raise UnsupportedModel(f"{file} holds no model: its general.type is {header.kind!r}")
    if _ENCODERS.fullmatch(header.architecture):
        raise UnsupportedModel(
            f"{file} holds an encoder of the architecture {header.architecture!r}: encoders run from folders with "
            "safetensors, and not from GGUF files"
        )
    own = [f"{header.architecture}.{name}" for name in _MODEL_KEYS] if header.architecture else ["general.architecture"]
    missing = [key for key in (*own, *_TOKENIZER_KEYS) if key not in header.values]
    if missing:
        raise UnsupportedModel(f"{file} lacks the key {missing[0]}, among its {len(header.values)} keys")
    if not header.tensors:
        raise UnsupportedModel(f"{file} has no weights")


class _HeaderReader:
    """Reads the header from the beginning to the end. `_part` names the current part of the file in messages."""

    def __init__(self, file: Path, stream: BinaryIO) -> None:
        self._file = file
        self._stream = stream
        self._size = stream.seek(0, 2)
        stream.seek(0)
        self._data = bytearray()
        self._at = 0
        self._part = "its first bytes"

    def read(self) -> GgufHeader:
        self._check_kind()
        num_weights, num_keys = self._number("Q"), self._number("Q")
        self._check_count(num_keys, "keys")
        pairs = [self._read_pair(index, num_keys) for index in range(num_keys)]
        _require_once(self._file, [name for name, _ in pairs], "key")
        values = dict(pairs)
        self._check_count(num_weights, "weights")
        tensors = [self._read_tensor(index, num_weights) for index in range(num_weights)]
        return GgufHeader(values, self._place(tensors, self._alignment_of(values)))

    def _check_kind(self) -> None:
        if not self._size:
            raise UnsupportedModel(f"{self._file} is empty: it is not a GGUF file")
        self._need(min(4, self._size))
        first = bytes(self._data[:4])
        if first != b"GGUF":
            raise UnsupportedModel(f"{self._file} is not a GGUF file: it begins with {first!r} instead of b'GGUF'")
        self._at = 4
        version = self._number("I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            why = "it is big-endian" if swapped in _VERSIONS else f"its version is {version:,}"
            raise UnsupportedModel(f"{self._file} cannot be read: {why}, and little-endian files of version 2 or 3 can")

    def _check_count(self, count: int, what: str) -> None:
        if count * _LEAST_BYTES[what] > self._size - self._at:
            raise UnsupportedModel(
                f"{self._file} is damaged or truncated in {self._part}: it announces {count:,} {what}, "
                f"and {self._size - self._at:,} bytes follow"
            )
        if count > _MAX_ENTRIES:
            raise UnsupportedModel(
                f"{self._file} cannot be read: {self._part} announces {count:,} {what}, "
                f"and at most {_MAX_ENTRIES:,} are read"
            )

    def _read_pair(self, index: int, count: int) -> tuple[str, Any]:
        self._part = f"key {index + 1} of {count}"
        name = self._text()
        self._part += f" ({_one_line(name)})"
        return name, self._value(self._number("I"), 0)

    def _value(self, kind: int, nesting: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            return self._array(self._number("I"), self._number("Q"), nesting + 1)
        return self._numbers(kind, 1)[0]

    def _array(self, kind: int, count: int, nesting: int) -> list[Any]:
        if nesting > _MAX_NESTING:
            raise UnsupportedModel(
                f"{self._file} cannot be read: {self._part} has arrays in more than {_MAX_NESTING} others, "
                f"at byte {self._at:,}"
            )
        self._check_count(count, {_STRING: "texts", _ARRAY: "arrays"}.get(kind, "numbers"))
        if kind == _STRING:
            return self._texts(count)
        return [self._value(kind, nesting) for _ in range(count)] if kind == _ARRAY else self._numbers(kind, count)

    def _numbers(self, kind: int, count: int) -> list[Any]:
        if kind not in _FORMS:
            raise UnsupportedModel(f"{self._file} is damaged in {self._part}, at byte {self._at:,}: no type is {kind}")
        return list(self._unpack(f"<{count}{_FORMS[kind]}"))

    def _texts(self, count: int) -> list[str]:
        """As `_text`, `count` times, in a faster loop: a vocabulary has some 100,000."""
        found: list[str] = []
        while len(found) < count:
            found.append(self._text())  # reads more of the file if needed
            data, at, last, read = bytes(self._data), self._at, len(self._data) - 8, _LENGTH.unpack_from
            for _ in range(count - len(found)):
                if at > last:
                    break
                end = at + 8 + read(data, at)[0]
                if end > last:
                    break
                found.append(str(data[at + 8 : end], "utf-8", "replace"))
                at = end
            self._at = at
        return found

    def _read_tensor(self, index: int, count: int) -> GgufTensor:
        """A weight whose offset still counts from the first weight."""
        self._part = f"the description of weight {index + 1} of {count}"
        name = self._text()
        self._part += f" ({_one_line(name)})"
        num_axes = self._number("I")
        if num_axes > _MAX_AXES:
            raise UnsupportedModel(
                f"{self._file} is damaged in {self._part}: it has {num_axes:,} axes, and a weight has at most {_MAX_AXES}"
            )
        shape = tuple(reversed(self._numbers(10, num_axes)))
        kind, offset = self._number("I"), self._number("Q")
        if kind not in TYPES:
            raise UnsupportedModel(
                f"the weight {_one_line(name)} in {self._file} has the type {kind}, which cannot be read"
            )
        type_name, columns, block_bytes = TYPES[kind]
        if not all(shape) or (shape[-1] if shape else 1) % columns:
            raise UnsupportedModel(
                f"{self._file} is damaged in {self._part}: its shape is {list(shape)}, "
                f"and blocks of {type_name} hold {columns}"
            )
        return GgufTensor(name, shape, type_name, offset, math.prod(shape) // columns * block_bytes)

    def _alignment_of(self, values: Mapping[str, Any]) -> int:
        alignment = values.get(_ALIGNMENT_KEY, _ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= self._size or alignment & (alignment - 1):
            raise UnsupportedModel(f"{self._file} is damaged: its {_ALIGNMENT_KEY} is {_shown(alignment)}")
        return alignment

    def _place(self, tensors: Sequence[GgufTensor], alignment: int) -> list[GgufTensor]:
        """The weights with their offsets in the file. Raises UnsupportedModel if one ends after the file."""
        start = -(-self._at // alignment) * alignment
        _require_once(self._file, [each.name for each in tensors], "weight")
        placed = [replace(each, offset=start + each.offset) for each in tensors]
        ends = {each.name: each.offset + each.num_bytes for each in placed}
        last = max(ends.values(), default=0)
        if last > self._size:
            name = min((name for name, end in ends.items() if end > self._size), key=ends.__getitem__)
            raise UnsupportedModel(
                f"{self._file} is truncated: the weight {_one_line(name)} ends at byte {ends[name]:,}, and the file has "
                f"{self._size:,} bytes; missing bytes: {last - self._size:,}"
            )
        return placed

    def _text(self) -> str:
        length = self._number("Q")
        self._need(length)
        start, self._at = self._at, self._at + length
        return self._data[start : self._at].decode("utf-8", errors="replace")

    def _number(self, form: str) -> int:
        return int(self._unpack("<" + form)[0])

    def _unpack(self, form: str) -> tuple[Any, ...]:
        num_bytes = struct.calcsize(form)
        self._need(num_bytes)
        found = struct.unpack_from(form, self._data, self._at)
        self._at += num_bytes
        return found

    def _need(self, num_bytes: int) -> None:
        """Have the next bytes in `_data`. Raises UnsupportedModel, before any memory is taken, if the file has fewer."""
        end = self._at + num_bytes
        if len(self._data) < end <= self._size:
            self._data += self._stream.read(max(_READ_BYTES, end - len(self._data)))
        if end > len(self._data):
            raise UnsupportedModel(
                f"{self._file} is truncated or damaged in {self._part}: {num_bytes:,} bytes are needed at byte "
                f"{self._at:,}, and the file has {self._size:,} bytes"
            )
