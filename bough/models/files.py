"""A model's files on this machine: one folder as Hugging Face lays it out, and where it came from.

Also here: hashes, stamps and syncing of single files, and notes. Notes are small JSON files in the cache folder that keep
results which are slow to find out. A file of notes is written whole or not at all, and a reader checks every entry.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from bough.errors import ModelError, UnsupportedModel

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
GGUF_FILE = "model.gguf"
_LONGEST_LINE = 300
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "tiktoken.model")


@dataclass(frozen=True)
class ModelFiles:
    """A folder with `config.json`, safetensors weights and usually a tokenizer. The files are never changed.

    Instead of safetensors there may be one GGUF file, for an engine that reads those.

    The fields after `folder` are known only for models that Bough fetched or converted. `source` says where it came from.
    `sha256` is the hash of the file it was made from (for a hub model the commit), `quantization` the format of the weights
    in that file, and `stamp` the `stamp_of` a local file that it was made from.
    """

    name: str
    folder: Path
    source: str = ""
    sha256: str = ""
    num_parameters: int = 0
    quantization: str = ""
    created: datetime | None = None
    stamp: str = ""

    @cached_property
    def config(self) -> dict[str, Any]:
        return read_json(self.folder / CONFIG_FILE)

    @property
    def weights(self) -> list[Path]:
        """The safetensors files, by name; where there are none, the GGUF file."""
        return sorted(self.folder.glob("*.safetensors")) or sorted(self.folder.glob("*.gguf"))

    @property
    def is_gguf(self) -> bool:
        """Whether the weights are a GGUF file. Not every engine can read one."""
        return any(file.suffix == ".gguf" for file in self.weights)

    @property
    def has_tokenizer(self) -> bool:
        return any((self.folder / name).is_file() for name in _TOKENIZER_FILES)

    @property
    def tokenizer_problem(self) -> str:
        """Why the model has no tokenizer, in words; empty if it has one."""
        if self.has_tokenizer:
            return ""
        return f"{self.folder} has no tokenizer: there is none of {', '.join(_TOKENIZER_FILES)}"

    @property
    def size_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())


def link_or_copy(file: Path, target: Path) -> None:
    """Make `target` a hard link to the file, or else a copy. Raises OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.hardlink_to(file.resolve())
    except OSError:  # another file system, or one without such links
        shutil.copyfile(file, target)


def stamp_of(file: Path) -> str:
    """Path, size and time of a file. While the stamp is the same, the content is too. Raises OSError."""
    stat = file.stat()
    return f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}"


def one_line(error: BaseException) -> str:
    """The first line of an error's text, cut where it is long, for errors of libraries that write a page."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0] if len(lines[0]) <= _LONGEST_LINE else f"{lines[0][:_LONGEST_LINE]}…"


@contextmanager
def translate_os_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into a ModelError that names `path`."""
    try:
        yield
    except OSError as error:
        raise ModelError(f"cannot use {path}: {type(error).__name__}: {error}") from error


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises UnsupportedModel if there is no file or no object in it."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"cannot read {file}: {error}") from error
    if not isinstance(found, dict):
        raise UnsupportedModel(f"{file} holds {type(found).__name__}, and must hold an object")
    return found


def hash_file(file: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sync_file(file: Path) -> None:
    """Return once the file's bytes are on the disk."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def read_notes(file: Path) -> dict[str, dict[str, Any]]:
    """The notes by path; none if the file cannot be read. Entries that are not objects are left out."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    entries = found.items() if isinstance(found, dict) else ()
    return {path: entry for path, entry in entries if isinstance(entry, dict)}


def write_notes(file: Path, notes: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the notes on paths that still exist, readable by the user alone. A folder that cannot be written is ignored."""
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


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Turn off transformers' progress bars and log lines inside this context."""
    from transformers.utils import logging as library_logging

    library: Any = library_logging
    had_bars = library.is_progress_bar_enabled()
    level = library.get_verbosity()
    library.disable_progress_bar()
    library.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        library.set_verbosity(level)
        if had_bars:
            library.enable_progress_bar()
