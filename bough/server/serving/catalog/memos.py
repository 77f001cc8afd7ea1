"""What is known of models' files as long as they stay the same: descriptions with digests, and fingerprints.

Digests and fingerprints read all weights. So they are computed once, and valid while the stamp of the files is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from threading import Lock
from typing import Any

from bough.config import Settings
from bough.errors import ModelError
from bough.models import ModelFiles, ModelInfo, describe
from bough.models.files import read_notes, stamp_of, translate_os_errors, write_notes
from bough.models.fingerprint import fingerprint, hash_weights

_FORMAT = 3
_MEMO_FILE = "digests.json"


class InfoMemo:
    """The descriptions of models by folder, kept in a small file in the cache folder."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._file = settings.cache_folder / _MEMO_FILE
        self._lock = Lock()
        self._entries: dict[str, dict[str, Any]] | None = None

    def find(self, files: ModelFiles) -> ModelInfo:
        """The description of a model, which is computed the first time. Raises ModelError."""
        with self._lock:  # so that two threads do not read the same model
            if self._entries is None:
                self._entries = read_notes(self._file)
            key = str(files.folder)
            with translate_os_errors(files.folder):
                stamp = _stamp(files)
            entry = self._entries.get(key, {})
            info = _read_info(entry.get("info")) if entry.get("stamp") == stamp else None
            if info is None:
                with translate_os_errors(files.folder):
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
        """Of the models whose files equal these, the one that was made first. Costs a look at each model's weights."""
        try:
            sizes = _sizes(files)
            alike = [each for each in others if each.folder != files.folder and _sizes(each) == sizes]
            if not sizes or not alike:
                return files
            wanted = self._fingerprint(files)
            equal = [files, *(each for each in alike if self._fingerprint(each) == wanted)]
        except (ModelError, OSError):  # using the model tells what is wrong with it
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
    stamps = sorted(stamp_of(file) for file in files.folder.iterdir() if file.is_file())
    return "\n".join([f"format {_FORMAT}", files.name, *stamps])


def _read_info(plain: Any) -> ModelInfo | None:
    if not isinstance(plain, dict) or set(plain) != {each.name for each in fields(ModelInfo)}:
        return None
    if not isinstance(plain["sampling"], dict):
        return None
    return ModelInfo(**plain | {"capabilities": tuple(map(str, plain["capabilities"]))})
