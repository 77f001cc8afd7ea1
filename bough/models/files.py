"""A model's files on this machine: one folder as Hugging Face lays it out, and where it came from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from bough.errors import ModelError, UnsupportedModel

CONFIG_FILE = "config.json"
GGUF_FILE = "model.gguf"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "tiktoken.model")


@dataclass(frozen=True)
class ModelFiles:
    """A folder with `config.json`, safetensors weights and, mostly, a tokenizer. The files are never changed.

    In place of safetensors there may be one GGUF file, for an engine that reads those.

    What follows `folder` is known only of models that Bough fetched or converted: `source` says where from, `sha256` is
    that of the file it was made of (of a hub model: the commit), `quantization` how that file held the weights, `stamp`
    the `stamp_of` the user's own file that it was made of.
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
        """Whether the weights are a GGUF file, which not every engine can read."""
        return any(file.suffix == ".gguf" for file in self.weights)

    @property
    def has_tokenizer(self) -> bool:
        return any((self.folder / name).is_file() for name in _TOKENIZER_FILES)

    @property
    def size_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())


def share(file: Path, target: Path) -> None:
    """Let `target` be the same file, or else a copy of it. Raises OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.hardlink_to(file.resolve())
    except OSError:  # another file system, or one without such links
        shutil.copyfile(file, target)


def stamp_of(file: Path) -> str:
    """Path, size and time of a file: the same again means that nobody wrote to it. Raises OSError."""
    stat = file.stat()
    return f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}"


@contextmanager
def reaching(path: Path) -> Iterator[None]:
    """Turn what the file system refuses into a ModelError that names `path`."""
    try:
        yield
    except OSError as error:
        raise ModelError(f"cannot use {path}: {type(error).__name__}: {error}") from error


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises UnsupportedModel if there is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"cannot read {file}: {error}") from error
    if not isinstance(found, dict):
        raise UnsupportedModel(f"{file} holds {type(found).__name__}, and must hold an object")
    return found
