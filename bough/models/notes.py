"""Small JSON files in the cache folder that save finding something out again: by name, whole or not there, not trusted."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_notes(file: Path) -> dict[str, dict[str, Any]]:
    """What was noted before, by path; nothing if the file cannot be read. Entries that are no objects are left out."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    entries = found.items() if isinstance(found, dict) else ()
    return {path: entry for path, entry in entries if isinstance(entry, dict)}


def write_notes(file: Path, notes: Mapping[str, Mapping[str, Any]]) -> None:
    """Keep the notes on what still exists, readable by the user alone; a folder that takes nothing only costs time."""
    with contextlib.suppress(OSError):
        kept = {path: entry for path, entry in notes.items() if Path(path).exists()}
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                json.dump(kept, stream, indent=1)
                stream.flush()
                os.fsync(stream.fileno())
            Path(name).replace(file)
        finally:
            Path(name).unlink(missing_ok=True)
