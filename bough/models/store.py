"""The local model folder: one directory per model, each with a `bough.json` that says where it came from.

A model's name is its directory's, `org/name` being kept as `org--name`; `name` and `name:latest` are the same. Always true:
- every directory with a `bough.json` and no leading dot is a whole model: it is made beside, synced, then renamed;
- one process at a time makes a given model; another waits for it;
- no name leads out of the folder.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock

from bough.errors import ModelNotFound, UnsupportedModel
from bough.models.download import sync_file
from bough.models.files import ModelFiles, read_json

RECORD_FILE = "bough.json"
_FORMAT = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")


def plain_name(name: str) -> str:
    """The name without `:latest`. Raises ModelNotFound for anything that is not a name, such as a path."""
    plain = name.removesuffix(":latest")
    if not _NAME.fullmatch(plain) or "--" in plain:
        raise ModelNotFound(
            f"{name!r} is not a model name: letters, digits, '.', '_' and '-', with at most one '/' between"
        )
    return plain


class Store:
    """The models in one folder, which need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def list(self) -> list[ModelFiles]:
        """Every whole model, by name. A directory whose record cannot be read is left out."""
        if not self.folder.is_dir():
            return []
        found = (self._read(folder) for folder in self.folder.iterdir() if not folder.name.startswith("."))
        return sorted((model for model in found if model), key=lambda model: model.name)

    def find(self, name: str) -> ModelFiles | None:
        """The model of that name, or None."""
        return self._read(self._folder_of(name))

    def find_made_from(self, sha256: str) -> ModelFiles | None:
        """A model that was converted from the file with this hash, or None."""
        return next((model for model in self.list() if model.sha256 == sha256), None)

    def remove(self, name: str) -> int:
        """Delete the model for good; returns the bytes that it held. Raises ModelNotFound if there is none."""
        model = self.find(name)
        if model is None:
            raise ModelNotFound(f"no local model {name!r}; {self.describe()}")
        size_bytes = model.size_bytes
        with self._lock(name):
            shutil.rmtree(_set_aside(model.folder), ignore_errors=True)
        return size_bytes

    def describe(self) -> str:
        """What there is, as the end of a sentence."""
        names = ", ".join(model.name for model in self.list())
        return f"local models: {names}" if names else "there are no local models yet"

    @contextmanager
    def making(self, name: str, keep_leftovers: bool = False) -> Iterator[Making]:
        """A place to make the model `name` in; `Making.commit` puts it in place.

        Waits for another process that makes the same model: look for it again inside. A killed run's leftovers are deleted
        first, or handed over as they are with `keep_leftovers`; they stay after an error only then.
        """
        final = self._folder_of(name)
        folder = final.with_name(f".making-{final.name}")
        with self._lock(name):
            if not keep_leftovers:
                shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
            try:
                yield Making(plain_name(name), folder, final, self)
            finally:
                if not keep_leftovers or (folder.exists() and not any(folder.iterdir())):
                    shutil.rmtree(folder, ignore_errors=True)

    def _lock(self, name: str) -> FileLock:
        self.folder.mkdir(parents=True, exist_ok=True)
        return FileLock(self.folder / f".lock-{self._folder_of(name).name}")

    def _folder_of(self, name: str) -> Path:
        return self.folder / plain_name(name).replace("/", "--")

    def _read(self, folder: Path) -> ModelFiles | None:
        try:
            record = read_json(folder / RECORD_FILE)
            created = datetime.fromisoformat(record["created"])
            return ModelFiles(
                name=str(record["name"]),
                folder=folder,
                source=str(record["source"]),
                sha256=str(record["sha256"]),
                num_parameters=int(record["num_parameters"]),
                quantization=str(record["quantization"]),
                created=created,
            )
        except (UnsupportedModel, KeyError, TypeError, ValueError):
            return None


@dataclass(frozen=True)
class Making:
    """A model under way: fill `folder`, then commit."""

    name: str
    folder: Path
    final: Path
    store: Store

    def commit(self, source: str, sha256: str, num_parameters: int, quantization: str) -> ModelFiles:
        """Write the record, sync everything and rename the folder into place, over an older model of that name."""
        record = {
            "format": _FORMAT,
            "name": self.name,
            "source": source,
            "sha256": sha256,
            "num_parameters": num_parameters,
            "quantization": quantization,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        (self.folder / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        for file in self.folder.rglob("*"):
            if file.is_file():
                sync_file(file)
        old = _set_aside(self.final) if self.final.exists() else None
        self.folder.replace(self.final)
        if old:
            shutil.rmtree(old, ignore_errors=True)
        model = self.store.find(self.name)
        assert model is not None, f"{self.final} was just written"
        return model


def _set_aside(folder: Path) -> Path:
    """Rename a model so that it is no longer one: whoever looks sees all of it or nothing."""
    aside = folder.with_name(f".removed-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    return folder.replace(aside)
