"""Finds a model that is on this machine: a folder, a GGUF file, or a name in the local store.

A model that an earlier version converted from a GGUF file has only floats. If the file is still there, its packed weights
are added here, else by `pull`; `why_not_packed` says so. The other files stay as they are, and with them the fingerprint.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path

from bough.config import Settings
from bough.errors import ModelError, ModelNotFound, UnsupportedModel
from bough.models.aliases import AliasRules
from bough.models.fetching.registry import find_made_from
from bough.models.fetching.short_names import find_short_name
from bough.models.files import (
    CONFIG_FILE,
    GGUF_FILE,
    ModelFiles,
    hash_file,
    link_or_copy,
    stamp_of,
    translate_os_errors,
)
from bough.models.gguf import convert as gguf_convert
from bough.models.gguf import folder as gguf_folder
from bough.models.gguf.contents import Converted
from bough.models.store import HUB, RECORD_FILE, Store, plain_name
from bough.models.weights import read_gguf_header, read_packed, require_model_keys
from bough.models.weights.packed import PACKED_FILE
from bough.types import Progress, SilentProgress

log = logging.getLogger(__name__)

_SHA256_DIGITS = 64  # a commit on the hub has fewer
_HUB_SOURCE = re.compile(r"hub: (\S+) \((.+\.gguf)\)")


@dataclass(frozen=True)
class GgufSupport:
    """What can be done with a GGUF file here, for the engine that will run the model.

    `is_readable`: the engine reads most GGUF files as they are. `is_convertible`: torch is installed, which converts them
    to safetensors. `problem` says why no engine can be used; then both are False. `may_pack`: the settings allow packed
    weights.
    """

    is_readable: bool
    is_convertible: bool
    problem: str = ""
    may_pack: bool = True

    @property
    def packs(self) -> bool:
        """Whether the engine uses packed weights of models that were converted."""
        return self.is_convertible and not self.is_readable and self.may_pack

    def require_engine(self) -> None:
        """Raise UnsupportedModel if no engine can be used."""
        if self.problem:
            raise UnsupportedModel(self.problem)


def resolve(
    name_or_path: str | Path, settings: Settings, gguf: GgufSupport, progress: Progress | None = None
) -> ModelFiles:
    """The files of a model that is on this machine: a Hugging Face folder (used in place), a GGUF file or a local name.

    A GGUF file is made into a folder in the store once. Later it is found by its stamp, or else by its hash. A folder that
    the engine cannot read is converted. Raises ModelNotFound, which says what is missing or lists the local models, or
    ModelError if the path cannot be read.
    """
    progress = progress or SilentProgress()
    path, store = Path(name_or_path).expanduser(), Store(settings.models_folder)
    store.clean()
    with translate_os_errors(path):
        if (path / CONFIG_FILE).is_file():
            return ModelFiles(path.resolve().name, path.resolve(), source=str(path.resolve()))
        if path.suffix == ".gguf" and path.is_file():
            return convert_if_needed(_resolve_gguf(path, store, gguf, progress), settings, gguf, progress)
        if path.is_dir() and path.name != str(name_or_path):
            raise ModelNotFound(_describe_folder(path))
    found = find_local(store, _stands_for(str(name_or_path), settings, store))
    if found is None:
        raise ModelNotFound(_describe_missing(str(name_or_path), path, store))
    return convert_if_needed(found, settings, gguf, progress)


def find_local(store: Store, name: str) -> ModelFiles | None:
    """The model of this name or alias, or of another name that stands for the same: `qwen3` and `qwen3:4b`."""
    if not is_name(name):
        return None
    short = find_short_name(plain_name(name))
    names = (name, *(short.names if short else ()))
    return next((found for found in map(store.resolve, names) if found is not None), None)


def _describe_missing(name: str, path: Path, store: Store) -> str:
    """Why a name or a path leads nowhere."""
    with translate_os_errors(path):
        if path.is_file():
            return f"{name} is a file, and not a GGUF file: give the folder of a model, or a file that ends in .gguf"
        if path.is_dir():
            return f"no model {name!r}, and {_describe_folder(path)}; {store.describe()}; {how_to_pull()}"
    if is_path(name):
        return f"there is no file or folder {name}" + ("" if path.is_absolute() else f" in {Path.cwd()}")
    return f"no model {name!r}; {store.describe()}; {how_to_pull(name)}"


def is_path(text: str) -> bool:
    """Whether a text can only be meant as a path. No file is looked up."""
    if text.startswith(("/", "./", "../", "~")) or text in (".", ".."):
        return True
    return (not is_name(text) and "/" in text) or (text.endswith(".gguf") and ":" not in text)


def _describe_folder(folder: Path) -> str:
    """What a folder without a configuration holds instead."""
    names = sorted(each.name for each in folder.iterdir() if not each.name.startswith("."))
    files = [name for name in names if name.endswith(".gguf")]
    if files:
        return f"the folder {folder} has no {CONFIG_FILE}; it holds {files[0]}: give that file"
    return f"the folder {folder} has no {CONFIG_FILE}: it is {'not a model folder' if names else 'empty'}"


def convert_if_needed(
    model: ModelFiles, settings: Settings, gguf: GgufSupport, progress: Progress | None = None
) -> ModelFiles:
    """The model in a form that the engine can read: a folder with a GGUF file is converted if it reads none.

    A model that was converted without packed weights gets them, if the file that it was made from is still there.
    """
    if not model.is_gguf:
        file = _find_source(model) if gguf.packs else None
        return model if file is None else _pack(model, file, Store(settings.models_folder), gguf, progress)
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


def _resolve_gguf(file: Path, store: Store, gguf: GgufSupport, progress: Progress) -> ModelFiles:
    stamp = stamp_of(file)
    there = store.find_stamped(stamp)
    if there is not None:
        return _pack(there, file, store, gguf, progress)
    check_gguf(file)
    sha256 = hash_file(file)
    there = store.find_made_from(sha256)
    if there is not None:
        return _pack(there, file, store, gguf, progress)
    stem = re.sub(r"[^A-Za-z0-9._]+", "-", file.stem).strip("-._") or "model"
    with store.making(f"{stem}-{sha256[:8]}") as making:
        there = store.find(making.name)
        if there is not None:
            return there
        done = make_gguf_folder(file, making.folder, gguf, progress)
        return making.commit(str(file.resolve()), sha256, done.num_parameters, done.quantization, stamp)


def lacks_packed(model: ModelFiles) -> bool:
    """Whether a model was converted from a GGUF file without its packed weights, by an earlier version."""
    return len(model.sha256) == _SHA256_DIGITS and not model.is_gguf and read_packed(model.folder) is None


def why_not_packed(model: ModelFiles) -> str:
    """Why a model that was converted from a GGUF file has no packed weights, and which command adds them, in a sentence.

    Empty if it has them, or was not made from such a file. Raises UnsupportedModel as `read_packed`.
    """
    if not lacks_packed(model):
        return ""
    wheel, hub = find_made_from(model.sha256), _HUB_SOURCE.fullmatch(model.source)
    name = wheel.name if wheel else ""
    if hub:
        name = model.name if hub[1] in model.name else f"{HUB}{hub[1]}:{hub[2]}"
    made = f"{model.name} was converted by an earlier version of Bough, which did not keep the packed weights"
    if name:
        return f"{made}: `bough pull {name}` adds them"
    return f"{made}: `bough show FILE` with the GGUF file that it was made from ({model.source}) adds them"


def _find_source(model: ModelFiles) -> Path | None:
    """The GGUF file that a model was made from, if its packed weights are missing and the file is there as it was."""
    file = Path(model.source)
    with translate_os_errors(file):
        is_there = bool(model.stamp) and file.is_file() and stamp_of(file) == model.stamp
    return file if is_there and lacks_packed(model) else None


def _pack(model: ModelFiles, file: Path, store: Store, gguf: GgufSupport, progress: Progress | None) -> ModelFiles:
    """The model with packed weights from the file that it was made from. A failure is logged, and then nothing changes."""
    if not gguf.packs or not lacks_packed(model):
        return model
    try:
        with store.making(model.name) as making:
            there = store.find(model.name)
            if there is None or not lacks_packed(there):  # another process packed it, or removed it
                return there or model
            add_packed(there, file, making.folder, progress or SilentProgress())
            return making.commit_again(there)
    except ModelError as error:
        log.warning("%s runs without packed weights: %s", model.name, error)
        return model


def add_packed(model: ModelFiles, file: Path, folder: Path, progress: Progress) -> None:
    """Make a folder with all files of the model, and the packed weights in `file`, the GGUF file that it was made from.

    Raises UnsupportedModel if the weights cannot be read, or the file is another.
    """
    gguf_convert.add_packed(file, model.folder, folder, progress)
    packed = read_packed(folder)
    if packed is None or packed.sha256 != model.sha256:
        raise UnsupportedModel(f"{file} is not the file that {model.name} was made from, {model.sha256}")
    with translate_os_errors(model.folder):
        for each in (path for path in model.folder.rglob("*") if path.is_file()):
            if each.name not in (RECORD_FILE, PACKED_FILE, GGUF_FILE):
                target = folder / each.relative_to(model.folder)
                target.unlink(missing_ok=True)  # of an interrupted run
                link_or_copy(each, target)


def check_gguf(file: Path) -> None:
    """Raise UnsupportedModel if a GGUF file is damaged, truncated, or no model. Reads its header, not the weights."""
    require_model_keys(file, read_gguf_header(file))


def make_gguf_folder(file: Path, folder: Path, gguf: GgufSupport, progress: Progress) -> Converted:
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
    is_known = find_local(store, name) is not None
    return name if is_known else rules.match(plain) or name


def is_name(text: str) -> bool:
    """Whether a text has the form of a model's name."""
    try:
        plain_name(text)
    except ModelNotFound:
        return False
    return True


def how_to_pull(name: str = "") -> str:
    """How to get a model, or the model of this name, as the end of a sentence."""
    if is_name(name) and (find_short_name(name) or "/" in name):
        return f"`bough pull {name}` fetches it"
    return "`bough pull` fetches smollm2 and the other names of `bough pull --list`, or org/name from the Hugging Face hub"
