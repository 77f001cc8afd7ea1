"""The header of a GGUF file, checked against the size of the file. No weight is read.

The file begins with `GGUF`, a version, the number of weights and the number of keys; then come the keys with their values,
the names, shapes, types and offsets of the weights, and after padding the weights. Everything is little-endian.

The `gguf` package reads such files too. It does not check where they end, so a truncated file gives it an error about the
shape of an array.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bough.errors import UnsupportedModel

_VERSIONS = (2, 3)
_SIZE_OF = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_KEPT_KEYS = ("general.architecture", "general.type")
_MODEL_KEYS = ("block_count", "embedding_length")
_TOKENIZER_KEYS = ("tokenizer.ggml.model", "tokenizer.ggml.tokens")
_ENCODERS = (
    "bert",
    "eurobert",
    "gemma-embedding",
    "jina-bert-v2",
    "jina-bert-v3",
    "modern-bert",
    "neo-bert",
    "nomic-bert",
    "nomic-bert-moe",
    "t5encoder",
)
_ALIGNMENT_KEY = "general.alignment"
_LEAST_BYTES = {"keys": 13, "weights": 24, "texts": 8, "arrays": 12}  # of one entry
_MAX_AXES = 4  # as in GGML
_MAX_NESTING = 4  # arrays in arrays; no file is known that has any
_SHOWN = 60


@dataclass(frozen=True)
class GgufHeader:
    """The keys of a file, the texts of some of them, and how many weights it has."""

    keys: frozenset[str]
    texts: Mapping[str, str]
    num_weights: int
    num_parameters: int

    @property
    def architecture(self) -> str:
        return self.texts.get("general.architecture", "")


def read_gguf_header(file: Path) -> GgufHeader:
    """The header of the file. Raises UnsupportedModel, in one line, if the file is damaged, truncated or no GGUF file."""
    try:
        with file.open("rb") as stream:
            if not stream.read(1):
                raise UnsupportedModel(f"{file} is empty: it is not a GGUF file")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _HeaderReader(file, data).read()
    except OSError as error:
        raise UnsupportedModel(f"cannot read {file}: {error}") from error


def require_model_keys(file: Path, header: GgufHeader) -> None:
    """Raise UnsupportedModel if the file is no language model or an encoder, or lacks a key that every one has."""
    kind = header.texts.get("general.type", "model")
    if kind != "model":
        raise UnsupportedModel(f"{file} holds no model: its general.type is {kind!r}")
    if header.architecture in _ENCODERS:
        raise UnsupportedModel(
            f"{file} holds an encoder of the architecture {header.architecture!r}: encoders run from folders with "
            "safetensors, and not from GGUF files"
        )
    own = [f"{header.architecture}.{name}" for name in _MODEL_KEYS] if header.architecture else ["general.architecture"]
    missing = [key for key in (*own, *_TOKENIZER_KEYS) if key not in header.keys]
    if missing:
        raise UnsupportedModel(f"{file} lacks the key {missing[0]}, among its {len(header.keys)} keys")
    if not header.num_weights:
        raise UnsupportedModel(f"{file} has no weights")


@dataclass(frozen=True)
class _Weight:
    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


class _HeaderReader:
    """Reads the header from the beginning to the end. `_part` is what it reads at the moment, for messages."""

    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self._file = file
        self._data = data
        self._size = len(data)
        self._at = 0
        self._part = "its first bytes"
        self._texts: dict[str, str] = {}
        self._alignment = 32

    def read(self) -> GgufHeader:
        self._check_kind()
        num_weights, num_keys = self._number("Q"), self._number("Q")
        self._check_count(num_keys, "keys")
        keys = frozenset(self._read_key(index, num_keys) for index in range(num_keys))
        self._check_count(num_weights, "weights")
        weights = [self._read_weight(index, num_weights) for index in range(num_weights)]
        self._check_ends(weights)
        return GgufHeader(keys, self._texts, num_weights, sum(math.prod(each.shape) for each in weights))

    def _check_kind(self) -> None:
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

    def _read_key(self, index: int, count: int) -> str:
        self._part = f"key {index + 1} of {count}"
        name = self._text()
        self._part += f" ({name[:_SHOWN]})"
        kind = self._number("I")
        if name == _ALIGNMENT_KEY and kind == 4:
            self._alignment = self._number("I") or self._alignment
        elif name in _KEPT_KEYS and kind == _STRING:
            self._texts[name] = self._text()
        else:
            self._skip_value(kind)
        return name

    def _skip_value(self, kind: int, nesting: int = 0) -> None:
        if kind == _STRING:
            self._skip(self._number("Q"))
        elif kind == _ARRAY:
            self._skip_array(self._number("I"), self._number("Q"), nesting + 1)
        else:
            self._skip(self._size_of(kind))

    def _skip_array(self, kind: int, count: int, nesting: int) -> None:
        if nesting > _MAX_NESTING:
            raise UnsupportedModel(
                f"{self._file} cannot be read: {self._part} has arrays in more than {_MAX_NESTING} others, "
                f"at byte {self._at:,}"
            )
        if kind not in (_STRING, _ARRAY):
            return self._skip(count * self._size_of(kind))
        self._check_count(count, "texts" if kind == _STRING else "arrays")
        for _ in range(count):
            self._skip_value(kind, nesting)
        return None

    def _size_of(self, kind: int) -> int:
        if kind not in _SIZE_OF:
            raise UnsupportedModel(f"{self._file} is damaged in {self._part}, at byte {self._at:,}: no type is {kind}")
        return _SIZE_OF[kind]

    def _read_weight(self, index: int, count: int) -> _Weight:
        self._part = f"the description of weight {index + 1} of {count}"
        name = self._text()
        self._part += f" ({name[:_SHOWN]})"
        num_axes = self._number("I")
        if num_axes > _MAX_AXES:
            raise UnsupportedModel(
                f"{self._file} is damaged in {self._part}: it has {num_axes:,} axes, and a weight has at most {_MAX_AXES}"
            )
        shape = tuple(self._number("Q") for _ in range(num_axes))
        return _Weight(name, shape, self._number("I"), self._number("Q"))

    def _check_ends(self, weights: list[_Weight]) -> None:
        """Raise UnsupportedModel if a weight is of an unknown type, or ends after the file."""
        start = -(-self._at // self._alignment) * self._alignment
        ends = {each.name: start + each.offset + self._size_of_weight(each) for each in weights}
        last = max(ends.values(), default=0)
        if last > self._size:
            name = min((name for name, end in ends.items() if end > self._size), key=ends.__getitem__)
            raise UnsupportedModel(
                f"{self._file} is truncated: the weight {name} ends at byte {ends[name]:,}, and the file has "
                f"{self._size:,} bytes; missing bytes: {last - self._size:,}"
            )

    def _size_of_weight(self, weight: _Weight) -> int:
        sizes = _block_sizes()
        if weight.kind not in sizes:
            raise UnsupportedModel(
                f"the weight {weight.name} in {self._file} has the type {weight.kind}, which the package gguf does not know"
            )
        block, block_bytes = sizes[weight.kind]
        return math.prod(weight.shape) // block * block_bytes

    def _text(self) -> str:
        length = self._number("Q")
        self._need(length)
        start, self._at = self._at, self._at + length
        return bytes(self._data[start : self._at]).decode("utf-8", errors="replace")

    def _number(self, form: str) -> int:
        size = struct.calcsize("<" + form)
        self._need(size)
        (value,) = struct.unpack_from("<" + form, self._data, self._at)
        self._at += size
        return int(value)

    def _skip(self, num_bytes: int) -> None:
        self._need(num_bytes)
        self._at += num_bytes

    def _need(self, num_bytes: int) -> None:
        if self._at + num_bytes > self._size:
            raise UnsupportedModel(
                f"{self._file} is truncated or damaged in {self._part}: {num_bytes:,} bytes are needed at byte "
                f"{self._at:,}, and the file has {self._size:,} bytes"
            )


def _block_sizes() -> Mapping[int, tuple[int, int]]:
    """How many weights a block of each type holds, in how many bytes. Raises UnsupportedModel without the gguf package."""
    try:
        import gguf
    except ImportError as error:
        raise UnsupportedModel(f"GGUF files need the package gguf: pip install gguf ({error})") from error
    return {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
