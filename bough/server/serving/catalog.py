"""The catalog: the models on this machine as the APIs list them.

These are the models in the model folder, and the model that the server was started with, which may lie elsewhere. No name
reaches other files. The digest reads all weights, so it is computed once and kept in a small file in the cache folder, with
a stamp of the model's files. Calls may come from any thread.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Any

from bough import models
from bough.cache.admin.trees import list_trees, remove_tree
from bough.cache.disk import DiskError
from bough.config import Settings
from bough.errors import ModelError, ModelNotFound, RequestError, UnsupportedModel
from bough.models import ModelFiles, ModelInfo, Store, describe
from bough.models.files import CONFIG_FILE, read_notes, stamp_of, translate_os_errors, write_notes
from bough.models.fingerprint import hash_weights
from bough.models.store import plain_name
from bough.runner import gguf_support
from bough.types import Progress

log = logging.getLogger(__name__)

_FORMAT = 1
_MEMO_FILE = "digests.json"
_LICENSE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "COPYING")
_LICENSE_CHARS = 2**17
_SIZE_KEYS = ("hidden_size", "n_embd", "d_model")
_SHORT_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}


@dataclass(frozen=True)
class CatalogEntry:
    """A model as the APIs describe it. `digest` is bare hexadecimal; `family` is what the configuration calls `model_type`,
    `architecture` the class in transformers. Texts are empty and numbers 0 if the files do not have them."""

    name: str
    family: str
    families: tuple[str, ...]
    format: str
    architecture: str
    num_parameters: int
    parameter_size: str
    quantization: str
    digest: str
    size_bytes: int
    modified: datetime
    context_tokens: int
    embedding_length: int
    capabilities: tuple[str, ...]  # of completion, tools, thinking
    template: str
    license: str
    sampling: Mapping[str, Any]  # the model's own defaults, by the names of SamplingParams; empty if it has none


@dataclass(frozen=True)
class LoadedEntry:
    """A loaded model as the APIs describe it. `expires_at` is None if it never expires."""

    entry: CatalogEntry
    num_bytes: int
    device_bytes: int  # of these, on an accelerator
    context_tokens: int
    engine: str
    expires_at: datetime | None


class Catalog:
    """The models of the model folder, and `named`, the files of the model that the server was started with."""

    def __init__(self, settings: Settings, named: ModelFiles | None = None) -> None:
        self.store = Store(settings.models_folder)
        self._settings = settings
        self._trees_folder = settings.trees_folder
        self._outside = named if named is not None and named.folder.parent != self.store.folder else None
        self._infos = _InfoMemo(settings)

    def list(self) -> list[CatalogEntry]:
        """Every model, sorted by name. A model with invalid files is left out."""
        outside = [self._outside] if self._outside else []
        inside = [files for files in self.store.list() if not (outside and files.name == outside[0].name)]
        found = (self._describe_or_skip(files) for files in [*outside, *inside])
        return sorted((entry for entry in found if entry), key=lambda entry: entry.name)

    def find(self, name: str) -> CatalogEntry:
        """The entry of a model. Raises ModelNotFound, or another ModelError if its files are invalid."""
        return self._describe(self.files(name))

    def files(self, name: str) -> ModelFiles:
        """The files of a model. Raises ModelNotFound for a name that is not in the catalog, or not valid."""
        if self._is_outside(name):
            assert self._outside is not None
            return self._outside
        try:
            found = self.store.find(name)
        except ModelNotFound:
            found = None  # not a valid name
        if found is None:
            raise ModelNotFound(f"model '{name[:200]}' not found")
        return found

    def copy(self, source: str, target: str) -> None:
        """Give a model a second name; it replaces a model of that name. Raises ModelNotFound or RequestError."""
        self._refuse_outside(self.files(source).name, "copied")
        try:
            plain_name(target)
        except ModelNotFound as error:
            raise RequestError(str(error)) from error
        self._refuse_outside(target, "replaced")
        self.store.copy(source, target)

    def remove(self, name: str) -> None:
        """Delete a model and its trees on disk. It must not be loaded. Raises ModelNotFound."""
        files = self.files(name)
        self._refuse_outside(files.name, "deleted")
        self.store.remove(files.name)
        _remove_trees(self._trees_folder, files.name)

    def pull(self, name: str, progress: Progress) -> None:
        """Download a model, in the calling thread. Raises ModelNotFound or DownloadError."""
        models.pull(name, self._settings, gguf_support(self._settings), progress)

    def _is_outside(self, name: str) -> bool:
        return self._outside is not None and name.removesuffix(":latest") == self._outside.name

    def _refuse_outside(self, name: str, what: str) -> None:
        if self._is_outside(name):
            raise RequestError(f"the model '{name}' lies outside the model folder, and cannot be {what} there")

    def _describe_or_skip(self, files: ModelFiles) -> CatalogEntry | None:
        try:
            return self._describe(files)
        except ModelError as error:
            log.warning("the model %s is not listed: %s", files.name, error)
            return None

    def _describe(self, files: ModelFiles) -> CatalogEntry:
        try:
            return self._read_entry(files)
        except (AttributeError, KeyError, TypeError, ValueError) as error:  # a configuration may say anything
            raise UnsupportedModel(f"the files in {files.folder} are invalid: {type(error).__name__}: {error}") from error

    def _read_entry(self, files: ModelFiles) -> CatalogEntry:
        info = self._infos.find(files)
        config = files.config | (files.config.get("text_config") or {})
        family = str(files.config.get("model_type") or "")
        with translate_os_errors(files.folder):
            return CatalogEntry(
                name=files.name,
                family=family,
                families=(family,),
                format="safetensors",
                architecture=info.architecture,
                num_parameters=info.num_parameters,
                parameter_size=human_number(info.num_parameters),
                quantization=info.quantization or _SHORT_TYPES.get(info.dtype, info.dtype.upper()),
                digest=info.digest.removeprefix("sha256:"),
                size_bytes=info.size_bytes,
                modified=files.created or _modified(files),
                context_tokens=info.context_tokens,
                embedding_length=next((int(config[key]) for key in _SIZE_KEYS if config.get(key)), 0),
                capabilities=tuple(each for each in info.capabilities if each != "chat"),
                template=_read_template(files),
                license=_read_license(files),
                sampling=info.sampling,
            )


def human_number(number: int) -> str:
    """A number of parameters as Ollama writes it: 134.52M, 7.6B."""
    for unit, size, digits in (("T", 10**12, 1), ("B", 10**9, 1), ("M", 10**6, 2), ("K", 10**3, 0)):
        if number >= size:
            return f"{number / size:.{0 if number % size == 0 else digits}f}{unit}"
    return str(number)


class _InfoMemo:
    """The descriptions of models by folder, valid while the stamp of the files is the same."""

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


def _modified(files: ModelFiles) -> datetime:
    return datetime.fromtimestamp((files.folder / CONFIG_FILE).stat().st_mtime, UTC)


def _read_template(files: ModelFiles) -> str:
    """The text of the chat template: a file of its own, or a part of the tokenizer's configuration."""
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


def _remove_trees(folder: Path, model: str) -> None:
    try:
        for tree in list_trees(folder):
            if tree.model == model:
                remove_tree(tree.folder)
    except DiskError as error:
        log.warning("what is on disk for the model %s, which was deleted, stays: %s", model, error)
