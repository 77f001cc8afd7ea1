"""Records what workers change on disk: builds recorder.c, and reads the log that it writes."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

_RECORD = struct.Struct("<IiIIIq")


class Kind(Enum):
    """What a call did."""

    OPEN = "O"
    WRITE = "W"
    TRUNCATE = "T"
    SYNC = "S"
    RENAME = "R"
    UNLINK = "U"
    MAKE_FOLDER = "D"
    MARK = "M"


@dataclass(frozen=True)
class Record:
    """One call. `data` is what was written or told; `path` and `new_path` are whole. A descriptor is of the last open."""

    kind: Kind
    descriptor: int
    flags: int
    offset: int
    data: bytes
    path: str
    new_path: str


def build_recorder(folder: Path) -> Path:
    """The library that records, for LD_PRELOAD."""
    library = folder / "recorder.so"
    source = Path(__file__).with_name("recorder.c")
    command = ["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl", "-lpthread"]
    subprocess.run(command, check=True)
    return library


def read_log(file: Path) -> Iterator[Record]:
    """The records of a log, in the order of the calls."""
    log, at = file.read_bytes(), 0
    while at < len(log):
        kind, descriptor, flags, first_bytes, second_bytes, offset = _RECORD.unpack_from(log, at)
        middle = at + _RECORD.size + first_bytes
        first, second = log[at + _RECORD.size : middle], log[middle : middle + second_bytes]
        at = middle + second_bytes
        is_data = Kind(chr(kind)) in (Kind.WRITE, Kind.MARK)
        data, path = (first, "") if is_data else (b"", first.decode())
        yield Record(Kind(chr(kind)), descriptor, flags, offset, data, path, second.decode())
