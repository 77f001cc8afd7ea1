"""Models as the APIs describe them, read from their files.

Digests and fingerprints read all weights, so they are computed once, and are valid while the stamp of the files is the
same.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Any

from bough.config import Settings
from bough.errors import ModelError
from bough.models import ModelFiles, ModelInfo, describe
from bough.models.aliases import Overlay
from bough.models.files import CONFIG_FILE, read_notes, stamp_of, translate_os_errors, write_notes
from bough.models.fingerprint import fingerprint, hash_weights

_LICENSE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "COPYING")
_LICENSE_CHARS = 2**17
_SIZE_KEYS = ("hidden_size", "n_embd", "d_model")
_FORMAT = 3
_MEMO_FILE = "digests.json"
_SHORT_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}


@dataclass(frozen=True)
class CatalogEntry(ModelInfo):
    """A model as the APIs describe it. Texts are empty and numbers 0 if the files do not have them.

    `digest` is bare hexadecimal; `family` is the configuration's `model_type`, `architecture` the class in transformers.
    `capabilities` are of completion, tools, thinking, insert; or embedding, rerank.
    """

    family: str
    modified: datetime
    embedding_length: int
    template: str
    license: str
    stands_for: str = ""  # the model's own name, if this is an alias
    overlay: Overlay = field(default_factory=Overlay)


@dataclass(frozen=True)
class LoadedEntry:
    """A loaded model as the APIs describe it. `weights` and `step` are texts for people: how weights are kept, what
    computes.

    `expires_at` is None if it never expires.
    """

    entry: CatalogEntry
    num_bytes: int
    device_bytes: int  # of these, on an accelerator
    context_tokens: int
    engine: str
    weights: str
    step: str
    expires_at: datetime | None


def read_entry(files: ModelFiles, info: ModelInfo) -> CatalogEntry:
    """The entry of a model under its own name. Raises any exception if the configuration is invalid."""
    config = files.config | (files.config.get("text_config") or {})
    with translate_os_errors(files.folder):
        own = {
            "quantization": info.quantization or _SHORT_TYPES.get(info.dtype, info.dtype.upper()),
            "digest": info.digest.removeprefix("sha256:"),
            "capabilities": tuple(each for each in info.capabilities if each != "chat"),
        }
        return CatalogEntry(
            **vars(info) | own,
            family=str(files.config.get("model_type") or ""),
            modified=files.created or datetime.fromtimestamp((files.folder / CONFIG_FILE).stat().st_mtime, UTC),
            embedding_length=next((int(config[key]) for key in _SIZE_KEYS if config.get(key)), 0),
            template=_read_template(files),
            license=_read_license(files),
        )


def human_number(number: int) -> str:
    """A number of parameters as Ollama writes it: 134.52M, 7.6B."""
    for unit, size, digits in (("T", 10**12, 1), ("B", 10**9, 1), ("M", 10**6, 2), ("K", 10**3, 0)):
        if number >= size:
            return f"{number / size:.{0 if number % size == 0 else digits}f}{unit}"
    return str(number)


def _read_template(files: ModelFiles) -> str:
    """The chat template: a file of its own, or a part of the tokenizer's configuration."""
    own = files.folder / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8", errors="replace")
    try:
        found = json.loads((files.folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return ""
    if isinstance(found, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default") or next(iter(named.values()), None)
    return found if isinstance(found, str) else ""


def _read_license(files: ModelFiles) -> str:
    file = next((files.folder / name for name in _LICENSE_FILES if (files.folder / name).is_file()), None)
    return file.read_text(encoding="utf-8", errors="replace")[:_LICENSE_CHARS] if file else ""


class InfoMemo:
    """The descriptions of models by folder, kept in a small file in the cache folder."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._file = settings.cache_folder / _MEMO_FILE
        self._lock = Lock()
        self._entries: dict[str, dict[str, Any]] | None = None

    def find(self, files: ModelFiles) -> ModelInfo:
        """The description of a model, computed at the first call. Raises ModelError."""
        with self._lock:  # so that two threads do not read the same model
            if self._entries is None:
                self._entries = read_notes(self._file)
            key = str(files.folder)
            with translate_os_errors(files.folder):
                stamp = _stamp(files)
                entry = self._entries.get(key, {})
                info = _read_info(entry.get("info")) if entry.get("stamp") == stamp else None
                if info is not None:
                    return info
                info = describe(files, hash_weights(files, self._settings))
            self._entries[key] = {"stamp": stamp, "info": asdict(info)}
            write_notes(self._file, read_notes(self._file) | {key: self._entries[key]})
            return info


class TwinMemo:
    """Finds models with equal files. Their fingerprints are kept in memory."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._prints: dict[Path, tuple[str, str]] = {}  # stamp and fingerprint, by folder

    def oldest(self, files: ModelFiles, others: Sequence[ModelFiles]) -> ModelFiles:
        """Of the models whose files equal these, the one that was made first. Reads the sizes of each model's weights."""
        try:
            sizes = _sizes(files)
            alike = [each for each in others if each.folder != files.folder and _sizes(each) == sizes]
            if not sizes or not alike:
                return files
            wanted = self._fingerprint(files)
            equal = [files, *(each for each in alike if self._fingerprint(each) == wanted)]
        except (ModelError, OSError):  # which using the model reports
            return files
        return min(equal, key=lambda each: (each.created is None, each.created and each.created.timestamp(), each.name))

    def _fingerprint(self, files: ModelFiles) -> str:
        stamp = _stamp(files)
        known = self._prints.get(files.folder)
        if known is None or known[0] != stamp:
            known = self._prints[files.folder] = (stamp, fingerprint(files, self._settings))
        return known[1]


def _sizes(files: ModelFiles) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in files.weights}


def _stamp(files: ModelFiles) -> str:
    """A text that changes with every file of the model. Raises OSError."""
    there = {file for file in files.folder.iterdir() if file.is_file()}
    stamps = sorted(stamp_of(file) for file in there | set(files.weights))  # a GGUF file may be anywhere
    return "\n".join([f"format {_FORMAT}", files.name, *stamps])


def _read_info(plain: Any) -> ModelInfo | None:
    if not isinstance(plain, dict) or set(plain) != {each.name for each in fields(ModelInfo)}:
        return None
    if not isinstance(plain["sampling"], dict):
        return None
    return ModelInfo(**plain | {"capabilities": tuple(map(str, plain["capabilities"]))})
