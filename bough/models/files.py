"""A model's files on this machine: one folder as Hugging Face lays it out, and where it came from.

Also here: hashes, stamps and syncing of single files, and notes. Notes are small JSON files in the cache folder that keep
results which are slow to compute. A file of notes is written whole or not at all, and a reader checks every entry.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from bough.errors import ModelError, UnsupportedModel
from bough.system.folders import write_private

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
GGUF_FILE = "model.gguf"
PACKED_FILE = "packed.json"
FLOATS_FILE = "floats.safetensors"
PACKED_FORMAT = 2
_LONGEST_LINE = 300
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "tiktoken.model")


@dataclass(frozen=True)
class ModelFiles:
    """A folder with `config.json`, weights and usually a tokenizer. The files are never changed.

    The weights are safetensors in the folder, or a GGUF file in one or several parts, in the folder or where the user has
    it. The torch engine needs the table `packed.json` for a GGUF file (see weights.packed); MLX reads one without.

    The fields after `folder` are known only for models that Bough fetched or made from a file. `sha256` is the hash of the
    file it was made from (for a hub model the commit), `quantization` the format of the weights in that file, and `stamp`
    the `stamp_of` a local file that it was made from.
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

    @cached_property
    def table(self) -> dict[str, Any] | None:
        """The table of the rows of a GGUF file, unchecked; None if there is none of this version."""
        with suppress(UnsupportedModel):
            found = read_json(self.folder / PACKED_FILE)
            return found if found.get("format") == PACKED_FORMAT else None
        return None

    @cached_property
    def _packed(self) -> list[Path]:
        """The GGUF files that the table names."""
        entries = (self.table or {}).get("files")
        paths = [each.get("path") for each in entries if isinstance(each, dict)] if isinstance(entries, list) else []
        return [self.folder / path for path in paths if isinstance(path, str)]

    @property
    def weights(self) -> list[Path]:
        """The files that the table names, or else the safetensors files, or else the GGUF file."""
        if self._packed:
            return self._packed
        files = sorted(file for file in self.folder.glob("*.safetensors") if file.name != FLOATS_FILE)
        return files or sorted(self.folder.glob("*.gguf"))

    @property
    def is_gguf(self) -> bool:
        return self.is_packed or any(file.suffix == ".gguf" for file in self.weights)  # a link's target may have any name

    @property
    def is_packed(self) -> bool:
        """Whether the weights are a GGUF file whose rows are known, as the torch engine needs it."""
        return bool(self._packed)

    @property
    def has_tokenizer(self) -> bool:
        return any((self.folder / name).is_file() for name in _TOKENIZER_FILES)

    @property
    def tokenizer_problem(self) -> str:
        """Why the model has no tokenizer; empty if it has one."""
        if self.has_tokenizer:
            return ""
        return f"{self.folder} has no tokenizer: there is none of {', '.join(_TOKENIZER_FILES)}"

    @property
    def size_bytes(self) -> int:
        """The size of the model: its folder, or its GGUF file wherever it is."""
        if self.is_packed:
            return sum(file.stat().st_size for file in self.weights if file.is_file())
        return self.folder_bytes

    @property
    def folder_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())


def is_model_path(path: Path) -> bool:
    """Whether a model is at this path: its folder, or a GGUF file. Any other file or folder may have a model's name."""
    return (path / CONFIG_FILE).is_file() or (path.suffix == ".gguf" and path.is_file())


def link_or_copy(file: Path, target: Path) -> None:
    """Make `target` a hard link to the file, or else a copy. Raises OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.hardlink_to(file.resolve())
    except OSError:  # another file system, or one without such links
        shutil.copyfile(file, target)


def stamp_of(file: Path) -> str:
    """Path, size and time of a file: an equal stamp means the same content. Raises OSError."""
    stat = file.stat()
    return f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}"


def one_line(error: BaseException) -> str:
    """The first line of an error's text, shortened, for libraries whose errors fill a page."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0] if len(lines[0]) <= _LONGEST_LINE else f"{lines[0][:_LONGEST_LINE]}…"


@contextmanager
def translate_os_errors(path: Path) -> Iterator[None]:
    """Raise a ModelError that names `path` instead of an OSError."""
    try:
        yield
    except OSError as error:
        raise ModelError(f"cannot use {path}: {type(error).__name__}: {error}") from error


def read_json(file: Path) -> dict[str, Any]:
    """Read the object in a JSON file. Raises UnsupportedModel if there is no file or no object in it."""
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
    """Wait until the file's bytes are on the disk."""
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
    with suppress(OSError):
        kept = {path: entry for path, entry in notes.items() if Path(path).exists()}
        file.parent.mkdir(parents=True, exist_ok=True)
        write_private(file, json.dumps(kept, indent=1))


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Turn off transformers' progress bars and log lines inside this context."""
    from transformers.utils import logging as library_logging

    library: Any = library_logging
    had_bars, level = library.is_progress_bar_enabled(), library.get_verbosity()
    library.disable_progress_bar()
    library.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        library.set_verbosity(level)
        if had_bars:
            library.enable_progress_bar()
