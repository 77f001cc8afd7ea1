"""Reads a trace file of either format.

A file that begins with `[` is a JSON list of runs with messages; any other has a Mooncake request on each line. Both may be
gzipped.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from bough.errors import RequestError
from bough.replay.messages import read_runs
from bough.replay.mooncake import read_rows
from bough.replay.trace import Trace


def read_trace(file: Path) -> Trace:
    """Read the requests of a trace file. Raises RequestError, with the position, if it cannot be read."""
    text = _read_text(file)
    read = read_runs if text.lstrip().startswith("[") else read_rows
    trace = read(file.name, text)
    if not trace.num_blocks:
        raise RequestError(f"{file.name}: the trace has {len(trace.requests)} requests and no full block")
    return trace


def _read_text(file: Path) -> str:
    try:
        data = file.read_bytes()
        return (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8")
    except FileNotFoundError as error:
        raise RequestError(f"there is no file {file}") from error
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise RequestError(f"{file} cannot be read: {error}") from error
