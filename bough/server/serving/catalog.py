"""The catalog: the models on this machine as the APIs list them, and what each name stands for.

These are the models in the model folder, and the model that the server was started with, which may lie elsewhere. No name
reaches other files. A name is, in this order: an alias of the settings, a model or an alias in the folder, a name that a
pattern of the settings matches. Models of the folder with equal files (copies from before there were aliases) are one: the
oldest stands for all of them, so that it is loaded once and has one tree. The digest reads all weights, so it is computed
once and kept in a small file in the cache folder, with a stamp of the model's files. Calls may come from any thread.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Any

from bough import models
from bough.cache.admin.trees import list_trees, remove_tree
from bough.cache.disk import DiskError
from bough.config import Settings
from bough.errors import ModelError, ModelNotFound, RequestError, SettingsError, UnsupportedModel
from bough.models import ModelFiles, ModelInfo, Store, describe
from bough.models.aliases import Alias, AliasRules, Overlay
from bough.models.files import CONFIG_FILE, read_notes, stamp_of, translate_os_errors, write_notes
from bough.models.fingerprint import fingerprint, hash_weights
from bough.models.sources import find_local
from bough.models.store import describe_names, plain_name
from bough.models.tokenizer import load_tokenizer
from bough.runner import gguf_support
from bough.server.serving.overlay import check_overlay, merge_overlays
from bough.types import Progress

log = logging.getLogger(__name__)

_FORMAT = 2
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
    capabilities: tuple[str, ...]  # of completion, tools, thinking, insert
    template: str
    license: str
    sampling: Mapping[str, Any]  # the model's own defaults, by the names of SamplingParams; empty if it has none
    stands_for: str = ""  # the model's own name, if this is an alias
    overlay: Overlay = field(default_factory=Overlay)


@dataclass(frozen=True)
class LoadedEntry:
    """A loaded model as the APIs describe it. `expires_at` is None if it never expires."""

    entry: CatalogEntry
    num_bytes: int
    device_bytes: int  # of these, on an accelerator
    context_tokens: int
    engine: str
    expires_at: datetime | None


@dataclass(frozen=True)
class Resolved:
    """What a name stands for: a model, and what the name adds to it. `alias` is None for a model's own name."""

    name: str
    files: ModelFiles
    alias: Alias | None = None

    @property
    def overlay(self) -> Overlay:
        return self.alias.overlay if self.alias else Overlay()


class Catalog:
    """The models of the model folder, and `named`, the files of the model that the server was started with."""

    def __init__(self, settings: Settings, named: ModelFiles | None = None) -> None:
        self.store = Store(settings.models_folder)
        self._settings = settings
        self._rules = AliasRules(settings.aliases)
        self._trees_folder = settings.trees_folder
        self._outside = named if named is not None and named.folder.parent != self.store.folder else None
        self._infos = _InfoMemo(settings)
        self._twins = _TwinMemo(settings)

    def check_aliases(self) -> None:
        """Raise SettingsError if an alias of the settings stands for nothing. Note those that hide a model."""
        for name, target in (self._rules.names | self._rules.patterns).items():
            if self._look_up(target) is None:
                known = describe_names(self._names() - self._rules.names.keys()) or "no models yet"
                raise SettingsError(f"aliases has {name}={target}, and there is no model {target!r}; there are: {known}")
            if name in self._rules.names and self._look_up(name) is not None:
                log.warning("the alias %s=%s of the settings hides the model %s in the model folder", name, target, name)

    def list(self) -> list[CatalogEntry]:
        """Every model and alias, sorted by name. A model with invalid files is left out, and so are its aliases."""
        stored = self.store.list()
        found = (self._describe_or_skip(name, stored) for name in self._names())
        return sorted((entry for entry in found if entry), key=lambda entry: entry.name)

    def find(self, name: str) -> CatalogEntry:
        """The entry of a name. Raises ModelNotFound, or another ModelError if the files are invalid."""
        return self._find(name, self.store.list())

    def _find(self, name: str, stored: Sequence[ModelFiles]) -> CatalogEntry:
        resolved = self._resolve(name, stored)
        entry, overlay = self.describe(resolved.files), resolved.overlay
        if resolved.name == entry.name and overlay.is_empty:
            return entry
        return replace(
            entry,
            name=resolved.name,
            stands_for=entry.name,
            overlay=overlay,
            digest=entry.digest if overlay.is_empty else _digest(entry, overlay),
            modified=resolved.alias.created if resolved.alias else entry.modified,
            capabilities=overlay.capabilities or entry.capabilities,
            template=overlay.template or entry.template,
            license=overlay.license or entry.license,
        )

    def resolve(self, name: str) -> Resolved:
        """What a name stands for. Raises ModelNotFound, which lists the names there are, if it stands for nothing."""
        return self._resolve(name, self.store.list())

    def _resolve(self, name: str, stored: Sequence[ModelFiles]) -> Resolved:
        found = self._stands_for(name)
        if found is None:
            known = describe_names(self._names()) or "no models yet"
            raise ModelNotFound(f"model '{name[:200]}' not found; there are: {known}")
        if found.files is not self._outside:
            found = replace(found, files=self._twins.oldest(found.files, stored))
        return replace(found, name=name.removesuffix(":latest"))

    def overlay(self, name: str) -> Overlay:
        """What a name adds to its model: nothing if it is a model's own, or not known. Quicker than `resolve`."""
        found = self._stands_for(name)
        return found.overlay if found else Overlay()

    def _stands_for(self, name: str) -> Resolved | None:
        plain = name.removesuffix(":latest")
        target = self._rules.names.get(plain)
        found = self._look_up(plain if target is None else target)
        if found is None and target is None and (target := self._rules.match(plain)) is not None:
            return self._look_up(target)
        return found

    def files(self, name: str) -> ModelFiles:
        """The files of the model that a name stands for. Raises ModelNotFound."""
        return self.resolve(name).files

    def describe(self, files: ModelFiles) -> CatalogEntry:
        """The entry of a model under its own name. Raises ModelError if its files are invalid."""
        try:
            return self._read_entry(files)
        except (AttributeError, KeyError, TypeError, ValueError) as error:  # a configuration may say anything
            raise UnsupportedModel(f"the files in {files.folder} are invalid: {type(error).__name__}: {error}") from error

    def aliases_of(self, model: str) -> Sequence[str]:
        """The other names of a model: aliases, and copies that are one with it."""
        stored = self.store.list()
        return sorted(name for name in self._names() if name != model and self._resolves_to(name, model, stored))

    def copy(self, source: str, target: str) -> None:
        """Give a model another name; an alias of that name is replaced. Raises ModelNotFound or RequestError."""
        self._add_alias(target, source, self.resolve(source).overlay)

    def create(self, name: str, source: str, overlay: Overlay) -> None:
        """Let a name stand for the model of `source`, with its overlay and this one over it.

        Raises ModelNotFound, or RequestError if the name or the overlay cannot be used.
        """
        base = self.resolve(source)
        merged = merge_overlays(base.overlay, overlay)
        trusts = self._settings.trust_remote_code
        self._add_alias(name, source, check_overlay(merged, lambda: load_tokenizer(base.files, trusts)))

    def _add_alias(self, name: str, source: str, overlay: Overlay) -> None:
        files = self.files(source)
        self._refuse_outside(files.name, "copied")
        try:
            plain = plain_name(name)
        except ModelNotFound as error:
            raise RequestError(str(error)) from error
        self._refuse_outside(plain, "replaced")
        self._refuse_rule(plain, "made")
        self.store.add_alias(plain, files.name, overlay)

    def remove(self, name: str) -> None:
        """Delete a model or an alias. The weights and trees of a model stay if other names stand for it.

        A model must not be loaded. Raises ModelNotFound or RequestError.
        """
        resolved = self.resolve(name)
        self._refuse_outside(resolved.name, "deleted")
        self._refuse_rule(resolved.name, "deleted")
        if self.store.find(resolved.name) is None and self.store.find_alias(resolved.name) is None:
            raise RequestError(f"{resolved.name!r} is no name of its own: a pattern of the settings matches it")
        others = set(self.aliases_of(resolved.files.name)) - self._rules.names.keys()  # a setting keeps no weights
        is_needed = bool(others) or resolved.files.name != resolved.name
        self.store.remove(resolved.name)
        if not is_needed:
            _remove_trees(self._trees_folder, resolved.name)

    def is_weights_name(self, name: str) -> bool:
        """Whether a name is that of the model itself, under which it is loaded. Raises ModelNotFound."""
        resolved = self.resolve(name)
        return resolved.name == resolved.files.name

    def pull(self, name: str, progress: Progress) -> None:
        """Download a model, in the calling thread. Raises ModelNotFound or DownloadError."""
        models.pull(name, self._settings, gguf_support(self._settings), progress)

    def _look_up(self, name: str) -> Resolved | None:
        """The model or alias of that very name; None if there is none, or if it is not a valid name."""
        if self._is_outside(name):
            assert self._outside is not None
            return Resolved(name, self._outside)
        try:
            files = find_local(self.store, name)
            return Resolved(name, files, self.store.find_alias(name)) if files else None
        except ModelNotFound:
            return None

    def _names(self) -> set[str]:
        """Every name that can be listed."""
        outside = {self._outside.name} if self._outside else set()
        return outside | self.store.names() | set(self._rules.names)

    def _resolves_to(self, name: str, model: str, stored: Sequence[ModelFiles]) -> bool:
        try:
            return self._resolve(name, stored).files.name == model
        except ModelNotFound:
            return False

    def _is_outside(self, name: str) -> bool:
        return self._outside is not None and name.removesuffix(":latest") == self._outside.name

    def _refuse_outside(self, name: str, what: str) -> None:
        if self._is_outside(name):
            raise RequestError(f"the model '{name}' lies outside the model folder, and cannot be {what} there")

    def _refuse_rule(self, name: str, what: str) -> None:
        if name in self._rules.names:
            raise RequestError(f"'{name}' is an alias of the server's settings, and cannot be {what} here")

    def _describe_or_skip(self, name: str, stored: Sequence[ModelFiles]) -> CatalogEntry | None:
        try:
            return self._find(name, stored)
        except ModelError as error:
            log.warning("the model %s is not listed: %s", name, error)
            return None

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


class _TwinMemo:
    """Finds models with equal files. Fingerprints are kept in memory while the stamp of the files is the same."""

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


def _digest(entry: CatalogEntry, overlay: Overlay) -> str:
    """A digest that changes with the weights and with the overlay."""
    return hashlib.sha256(f"{entry.digest} {json.dumps(asdict(overlay), sort_keys=True)}".encode()).hexdigest()


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
