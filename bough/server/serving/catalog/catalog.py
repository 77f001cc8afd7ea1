"""The catalog: the models on this machine as the APIs list them.

These are the models in the model folder, and the model that the server was started with, which may be elsewhere. No name
reaches other files. Models of the folder with equal files are one: the oldest stands for all of them, so that it is loaded
once and has one tree. Any thread may call this.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from bough import models
from bough.cache.admin.trees import list_trees, remove_tree
from bough.cache.disk import DiskError
from bough.config import Settings
from bough.errors import ModelError, ModelNotFound, RequestError, SettingsError, UnsupportedModel
from bough.models import ModelFiles, ModelFolder
from bough.models.aliases import AliasRules, Overlay
from bough.models.fetching.short_names import CatalogueModel, list_catalogue
from bough.models.store import describe_names, plain_name
from bough.models.tokenizer import load_tokenizer
from bough.runtime import gguf_support
from bough.server.serving.catalog.entries import CatalogEntry, InfoMemo, TwinMemo, read_entry
from bough.server.serving.catalog.names import ModelNames, ResolvedName
from bough.server.serving.catalog.overlay import check_overlay, merge_overlays
from bough.types import Progress

log = logging.getLogger(__name__)


class Catalog:
    """The models of the model folder, and `named`, the files of the model that the server was started with."""

    def __init__(self, settings: Settings, named: ModelFiles | None = None) -> None:
        self.store = ModelFolder(settings.models_folder)
        self._settings = settings
        self._trees_folder = settings.trees_folder
        self._outside = named if named is not None and named.folder.parent != self.store.folder else None
        self._rules = AliasRules(settings.aliases)
        self.names = ModelNames(self.store, self._rules, self._outside)
        self._infos = InfoMemo(settings)
        self._twins = TwinMemo(settings)

    def check_aliases(self) -> None:
        """Raise SettingsError if an alias of the settings stands for nothing. Logs those that hide a model."""
        for name, target in (self._rules.names | self._rules.patterns).items():
            if self.names.look_up(target) is None:
                known = describe_names(self.names.all() - self._rules.names.keys()) or "no models yet"
                raise SettingsError(f"aliases has {name}={target}, and there is no model {target!r}; there are: {known}")
            if name in self._rules.names and self.names.look_up(name) is not None:
                log.warning("the alias %s=%s of the settings hides the model %s in the model folder", name, target, name)

    def list(self) -> list[CatalogEntry]:
        """Every model and alias, sorted by name. A model with invalid files is left out, and so are its aliases."""
        stored, found = self.store.list(), list[CatalogEntry]()
        for name in self.names.all():
            try:
                found.append(self.find(name, stored))
            except ModelError as error:
                log.warning("the model %s is not listed: %s", name, error)
        return sorted(found, key=lambda entry: entry.name)

    def find(self, name: str, stored: Sequence[ModelFiles] | None = None) -> CatalogEntry:
        """The entry of a name. Raises ModelNotFound, or another ModelError if the files are invalid."""
        resolved = self.resolve(name, stored)
        entry, overlay = self.describe(resolved.files), resolved.overlay
        if resolved.name == entry.name and overlay.is_empty:
            return entry
        own = json.dumps(asdict(overlay), sort_keys=True)
        return replace(
            entry,
            name=resolved.name,
            stands_for=entry.name,
            overlay=overlay,
            digest=entry.digest if overlay.is_empty else hashlib.sha256(f"{entry.digest} {own}".encode()).hexdigest(),
            modified=resolved.alias.created if resolved.alias else entry.modified,
            capabilities=overlay.capabilities or entry.capabilities,
            template=overlay.template or entry.template,
            license=overlay.license or entry.license,
        )

    def resolve(self, name: str, stored: Sequence[ModelFiles] | None = None) -> ResolvedName:
        """The model of a name; `stored` are those of the folder, if known. Raises ModelNotFound, which lists names."""
        found = self.names.stands_for(name)
        if found is None:
            known = describe_names(self.names.all()) or "no models yet"
            raise ModelNotFound(f"model '{name[:200]}' not found; there are: {known}")
        if found.files is not self._outside:
            found = replace(found, files=self._twins.oldest(found.files, self.store.list() if stored is None else stored))
        return replace(found, name=name.removesuffix(":latest"))

    def files(self, name: str) -> ModelFiles:
        """The files of a name's model. Raises ModelNotFound."""
        return self.resolve(name).files

    def describe(self, files: ModelFiles) -> CatalogEntry:
        """The entry of a model under its own name. Raises ModelError if its files are invalid."""
        try:
            return read_entry(files, self._infos.find(files))
        except (AttributeError, KeyError, TypeError, ValueError) as error:  # a configuration may say anything
            raise UnsupportedModel(f"the files in {files.folder} are invalid: {type(error).__name__}: {error}") from error

    def aliases_of(self, model: str) -> Sequence[str]:
        """The other names of a model: aliases, and copies with equal files."""
        stored, found = self.store.list(), list[str]()
        for name in self.names.all() - {model}:
            with suppress(ModelNotFound):
                if self.resolve(name, stored).files.name == model:
                    found.append(name)
        return sorted(found)

    def copy(self, source: str, target: str) -> None:
        """Give a model another name; an alias of that name is replaced. Raises ModelNotFound or RequestError."""
        self._add_alias(target, source, self.resolve(source).overlay)

    def create(self, name: str, source: str, overlay: Overlay) -> None:
        """Make a name for the model of `source`, with this overlay over its own. Raises ModelNotFound or RequestError."""
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
        """Delete an alias, or a model that is not loaded; other names keep its files. Raises RequestError."""
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
        """Whether a name is the model's own, under which it is loaded. Raises ModelNotFound."""
        resolved = self.resolve(name)
        return resolved.name == resolved.files.name

    def list_catalogue(self, memory_bytes: int) -> Sequence[CatalogueModel]:
        """What can be fetched by a short name, as it would be fetched here, on a machine with this much memory."""
        return list_catalogue(memory_bytes, gguf_support(self._settings).is_preferred)

    def pull(self, name: str, progress: Progress) -> None:
        """Download a model, in the calling thread. Raises ModelNotFound or DownloadError."""
        models.pull(name, self._settings, gguf_support(self._settings), progress)

    def _refuse_outside(self, name: str, what: str) -> None:
        if self.names.is_outside(name):
            raise RequestError(f"the model '{name}' lies outside the model folder, and cannot be {what} there")

    def _refuse_rule(self, name: str, what: str) -> None:
        if name in self._rules.names:
            raise RequestError(f"'{name}' is an alias of the server's settings, and cannot be {what} here")


def _remove_trees(folder: Path, model: str) -> None:
    try:
        for tree in list_trees(folder):
            if tree.model == model:
                remove_tree(tree.folder)
    except DiskError as error:
        log.warning("what is on disk for the model %s, which was deleted, stays: %s", model, error)
