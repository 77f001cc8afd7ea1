"""Checks a model's folder before it is described or loaded, so that an error is one line that names the file."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from bough.errors import UnsupportedModel
from bough.models.files import FLOATS_FILE, ModelFiles, read_json
from bough.models.weights.gguf_header import read_gguf_header
from bough.models.weights.packed import read_packed

INDEX_FILE = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def check_weights(files: ModelFiles) -> None:
    """Raise UnsupportedModel if the configuration, a file of weights or a weight that an index names is missing or damaged.

    Reads the headers of the files, not the weights.
    """
    assert isinstance(files.config, dict)  # reading it raises
    _require_weights(files)
    if files.is_packed:
        read_packed(files.folder)
        read_shapes(files.folder / FLOATS_FILE)
    elif files.is_gguf:
        for file in files.weights:
            read_gguf_header(file)
    else:
        _check_safetensors(files)


def _check_safetensors(files: ModelFiles) -> None:
    shards = list_shards(files.folder)
    others = [name for name in shards.values() if not name.endswith(".safetensors")]
    if others:
        raise UnsupportedModel(
            f"no safetensors weights in {files.folder}: {INDEX_FILE} names {others[0]}, and pickles are never loaded"
        )
    found = {name: read_shapes(files.folder / name) for name in sorted(set(shards.values()))}
    for weight, name in shards.items():
        if weight not in found[name]:
            raise UnsupportedModel(f"{files.folder / name} lacks the weight {weight}, which {INDEX_FILE} says is there")
    if not shards:
        for file in files.weights:
            read_shapes(file)


def list_shards(folder: Path) -> dict[str, str]:
    """The file of each weight, as the index says; empty without one. Raises UnsupportedModel if a file is not there."""
    index = folder / INDEX_FILE
    if not index.is_file():
        return {}
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise UnsupportedModel(f"{index} has no weight_map with the names of files")
    names = sorted(set(shards.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UnsupportedModel(f"{folder} lacks {len(missing)} of {len(names)} files of weights; the first is {missing[0]}")
    return shards


def read_shapes(file: Path) -> dict[str, list[int]]:
    """The shapes of the weights in a safetensors file, by name. No weight is read.

    Raises UnsupportedModel, in one line, if the header is damaged or the file is not as long as its header says.
    """
    try:
        with safe_open(file, framework="numpy") as weights:
            return {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118  # no mapping
    except SafetensorError as error:
        size = file.stat().st_size
        raise UnsupportedModel(
            f"{file} is damaged, truncated or not a safetensors file: it has {size:,} bytes, and the library says: {error}"
        ) from error
    except OSError as error:
        raise UnsupportedModel(f"cannot read {file}: {error}") from error


def _require_weights(files: ModelFiles) -> None:
    """Raise UnsupportedModel if the folder has no weights that can be read, and say what it has instead."""
    if files.weights or (files.folder / INDEX_FILE).is_file():
        return
    pickles = sorted(file.name for pattern in _PICKLES for file in files.folder.glob(pattern))
    reason = f"it has {pickles[0]}, and pickles are never loaded" if pickles else "it has no *.safetensors file"
    raise UnsupportedModel(f"no safetensors weights in {files.folder}: {reason}")
