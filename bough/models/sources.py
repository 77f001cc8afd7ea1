"""Finds a model that is on this machine: a folder, a GGUF file, or a name in the model folder.

A GGUF file gets a small folder there, and is used where it is.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bough.config import Settings
from bough.errors import ModelNotFound, UnsupportedModel
from bough.models.aliases import AliasRules
from bough.models.fetching.short_names import find_short_name
from bough.models.files import CONFIG_FILE, GGUF_FILE, ModelFiles, link_or_copy, stamp_of, translate_os_errors
from bough.models.fingerprint import combine_hashes, hash_paths, remember_hashes
from bough.models.gguf.folder import MadeModel, make_folder
from bough.models.gguf.prepare import convert, import_library, prepare
from bough.models.gguf.reading import RowsNotFound
from bough.models.store import Making, ModelFolder, plain_name
from bough.models.weights.gguf_header import GgufModel, find_parts, read_gguf, require_model_keys
from bough.models.weights.packed import GgufPart
from bough.types import Progress, SilentProgress

log = logging.getLogger(__name__)

_NAME_DIGITS = 8


@dataclass(frozen=True)
class GgufSupport:
    """How the engine that will run a model can use a GGUF file.

    `is_readable`: the engine reads most GGUF files by itself, as MLX does. `is_convertible`: torch is installed, which
    reads the others, or converts them to safetensors. `problem` says why no engine can be used; then both are False.
    `is_preferred`: weights stay quantized in memory, so a short name stands for a GGUF file rather than for 16 bits.
    """

    is_readable: bool
    is_convertible: bool
    problem: str = ""
    is_preferred: bool = False

    def require_engine(self) -> None:
        """Raise UnsupportedModel if no engine can be used."""
        if self.problem:
            raise UnsupportedModel(self.problem)


def resolve(
    name_or_path: str | Path, settings: Settings, gguf: GgufSupport, progress: Progress | None = None
) -> ModelFiles:
    """The files of a model that is on this machine: a Hugging Face folder (used in place), a GGUF file or a local name.

    For a GGUF file a small folder is made once. Later it is found by the file's stamp, or else by its hash. Raises
    ModelNotFound, which says what is missing or lists the local models, or ModelError if the path cannot be read.
    """
    progress = progress or SilentProgress()
    path, store = Path(name_or_path).expanduser(), ModelFolder(settings.models_folder)
    store.clean()
    with translate_os_errors(path):
        if (path / CONFIG_FILE).is_file():
            return ModelFiles(path.resolve().name, path.resolve(), source=str(path.resolve()))
        if path.suffix == ".gguf" and path.is_file():
            return convert_if_needed(_resolve_gguf(path, settings, gguf, progress), settings, gguf, progress)
        if path.is_dir() and path.name != str(name_or_path):
            raise ModelNotFound(_describe_folder(path))
    found = find_local(store, _apply_aliases(str(name_or_path), settings, store))
    if found is None:
        raise ModelNotFound(_describe_missing(str(name_or_path), path, store))
    return convert_if_needed(found, settings, gguf, progress)


def find_local(store: ModelFolder, name: str) -> ModelFiles | None:
    """The model of this name or alias, or of another short name for the same, as `qwen3` and `qwen3:4b`; or None."""
    if not is_name(name):
        return None
    short = find_short_name(plain_name(name))
    names = (name, *(short.names if short else ()))
    return next((found for found in map(store.resolve, names) if found is not None), None)


def _describe_missing(name: str, path: Path, store: ModelFolder) -> str:
    """Why a name or a path is no model."""
    with translate_os_errors(path):
        if path.is_file():
            return f"{name} is a file, and not a GGUF file: give the folder of a model, or a file that ends in .gguf"
        if path.is_dir():
            return f"no model {name!r}, and {_describe_folder(path)}; {store.describe()}; {how_to_pull()}"
    if is_path(name):
        return f"there is no file or folder {name}" + ("" if path.is_absolute() else f" in {Path.cwd()}")
    return f"no model {name!r}; {store.describe()}; {how_to_pull(name)}"


def is_path(text: str) -> bool:
    """Whether a text can only be a path, whether or not there is a file."""
    if text.startswith(("/", "./", "../", "~")) or text in (".", ".."):
        return True
    return (not is_name(text) and "/" in text) or (text.endswith(".gguf") and ":" not in text)


def _describe_folder(folder: Path) -> str:
    names = sorted(each.name for each in folder.iterdir() if not each.name.startswith("."))
    files = [name for name in names if name.endswith(".gguf")]
    if files:
        return f"the folder {folder} has no {CONFIG_FILE}; it holds {files[0]}: give that file"
    return f"the folder {folder} has no {CONFIG_FILE}: it is {'not a model folder' if names else 'empty'}"


def convert_if_needed(
    model: ModelFiles, settings: Settings, gguf: GgufSupport, progress: Progress | None = None
) -> ModelFiles:
    """The model in a form that the engine can read. The folder of a GGUF file is made again for another engine."""
    if not model.is_gguf or model.is_packed != gguf.is_readable:
        return model
    gguf.require_engine()
    store = ModelFolder(settings.models_folder)
    with store.making(model.name) as making:
        there = store.find(model.name)
        if there is None or not there.is_gguf or there.is_packed != gguf.is_readable:
            return there or model  # another process made it, or removed it
        files = _find_source(there) or there.weights
        is_own = files[0].parent == there.folder
        return commit_gguf(
            making, files, there.source, settings, gguf, progress or SilentProgress(), stamp=there.stamp, is_own=is_own
        )


def _find_source(model: ModelFiles) -> tuple[Path, ...]:
    """All parts of the user's file that a model was made from; none if one of them is missing or has changed."""
    file = Path(model.source)
    with suppress(UnsupportedModel), translate_os_errors(file):
        files = find_parts(file) if model.stamp and file.is_file() else ()
        return files if "\n".join(map(stamp_of, files)) == model.stamp else ()
    return ()


def _resolve_gguf(file: Path, settings: Settings, gguf: GgufSupport, progress: Progress) -> ModelFiles:
    store, files = ModelFolder(settings.models_folder), find_parts(file)
    stamp = "\n".join(map(stamp_of, files))
    for model in store.list():
        if model.stamp == stamp and is_current(model, gguf):
            return model
    _check_gguf(file)
    with ThreadPoolExecutor(1) as pool:  # importing and hashing take some seconds each
        hashing = pool.submit(hash_paths, files, file.name, settings, progress)
        if not gguf.is_readable and gguf.is_convertible:
            import_library()
        hashes = hashing.result()
    sha256 = combine_hashes(hashes)
    for model in store.list():
        if model.sha256 == sha256 and is_current(model, gguf):
            return model
    with store.making(_choose_name(files[0], sha256, store)) as making:
        found = store.find(making.name)
        if found is not None and is_current(found, gguf):
            return found
        source = str(file.absolute())
        return commit_gguf(making, files, source, settings, gguf, progress, hashes, stamp=stamp, is_own=False)


def _choose_name(file: Path, sha256: str, store: ModelFolder) -> str:
    """The name that the model in a file already has, or else a new one."""
    same = next((model for model in store.list() if model.sha256 == sha256), None)
    if same is not None:
        return same.name
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", file.stem)
    stem = re.sub(r"[^A-Za-z0-9._]+", "-", stem).strip("-._") or "model"
    return f"{stem}-{sha256[:_NAME_DIGITS]}"


def is_current(model: ModelFiles, gguf: GgufSupport) -> bool:
    """Whether a model in the folder can be used for the file that it was made from: it is whole, and for this engine."""
    is_for_engine = not model.is_gguf or model.is_packed != gguf.is_readable
    return is_for_engine and bool(model.weights) and all(file.is_file() for file in model.weights)


def _check_gguf(file: Path) -> GgufModel:
    """Read a file's header. Raises UnsupportedModel if it is damaged, truncated, or no language model."""
    model = read_gguf(file)
    require_model_keys(model.file, model.header)
    return model


def commit_gguf(
    making: Making,
    files: Sequence[Path],
    source: str,
    settings: Settings,
    gguf: GgufSupport,
    progress: Progress,
    hashes: Sequence[str] = (),
    *,
    stamp: str = "",
    fetched: Path | None = None,
    is_own: bool = True,
) -> ModelFiles:
    """Make a model of GGUF files, whose hashes are computed unless they are given, and delete the folder `fetched`.

    The model's folder names the files where they are. If they are Bough's own, it gets a hard link to each, or else a copy.
    Raises UnsupportedModel.
    """
    model = _check_gguf(files[0])
    with translate_os_errors(files[0]):
        hashes = hashes or hash_paths(model.files, model.file.name, settings, progress)
        done = _make_gguf_folder(model, hashes, making.folder, gguf, progress, is_own)
        if done.is_packed and is_own:
            for file, name in zip(model.files, _stored_names(model), strict=True):
                (making.folder / name).unlink(missing_ok=True)  # of an interrupted run
                link_or_copy(file, making.folder / name)
        if fetched is not None:
            shutil.rmtree(fetched)
    made = making.commit(source, combine_hashes(hashes), done.num_parameters, done.quantization, stamp)
    if done.is_packed:
        remember_hashes(made.weights, hashes, settings)
    return made


def _stored_names(model: GgufModel) -> list[str]:
    return [GGUF_FILE] if len(model.files) == 1 else [file.name for file in model.files]


def _make_gguf_folder(
    model: GgufModel, hashes: Sequence[str], folder: Path, gguf: GgufSupport, progress: Progress, is_own: bool
) -> MadeModel:
    """Make a folder that the engine can read. One that cannot be used as it is gets converted, with a line in the log."""
    gguf.require_engine()
    try:
        if gguf.is_readable:
            return make_folder(model, folder, progress)
        paths = [Path(name) for name in _stored_names(model)] if is_own else [file.absolute() for file in model.files]
        sizes = [file.stat().st_size for file in model.files]
        return prepare(model, [GgufPart(*each) for each in zip(paths, sizes, hashes, strict=True)], folder, progress)
    except (UnsupportedModel, RowsNotFound) as error:
        if isinstance(error, UnsupportedModel) and not (gguf.is_readable and gguf.is_convertible):
            raise
        log.warning("%s cannot be used as it is, and is converted to safetensors: %s", model.file.name, error)
        return convert(model, folder, progress, str(error))


def _apply_aliases(name: str, settings: Settings, store: ModelFolder) -> str:
    """The name that a name stands for by the setting `aliases`, or else the name itself."""
    rules, plain = AliasRules(settings.aliases), name.removesuffix(":latest")
    if plain in rules.names:
        return rules.names[plain]
    is_known = find_local(store, name) is not None
    return name if is_known else rules.match(plain) or name


def is_name(text: str) -> bool:
    try:
        plain_name(text)
    except ModelNotFound:
        return False
    return True


def how_to_pull(name: str = "") -> str:
    """The command that fetches a model, or the model of this name, as the end of a sentence."""
    if is_name(name) and (find_short_name(name) or "/" in name):
        return f"`bough pull {name}` fetches it"
    return "`bough pull` fetches smollm2 and the other names of `bough pull --list`, or org/name from the Hugging Face hub"
