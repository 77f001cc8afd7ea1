"""A model folder as every engine reads it: the files with weights, and errors if it cannot be used."""

from __future__ import annotations

from pathlib import Path

from bough.errors import ModelError, UnsupportedModel
from bough.models.weights.check import list_shards

_NO_CODE = "the folder holds no code: a model's own code works from local folders only, since `bough pull` fetches none"


def require_config(folder: Path) -> None:
    """Raise ModelError if the folder has no configuration."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json: it is not a model folder")


def require_suffixes(folder: Path, files: list[Path], *suffixes: str) -> list[Path]:
    """The same files. Raises UnsupportedModel if there are none, or others than these among them."""
    if not files or any(file.suffix not in suffixes for file in files):
        raise UnsupportedModel(f"no safetensors weights in {folder}; pickles are never loaded")
    return files


def list_weight_files(folder: Path) -> list[Path]:
    """The files that the index names, or else the one file of weights; empty if there are neither.

    Raises UnsupportedModel if the index cannot be read or names files that are not there.
    """
    shards = sorted(set(list_shards(folder).values()))
    return [folder / name for name in shards] or [file for file in [folder / "model.safetensors"] if file.is_file()]


def hint_at_code(folder: Path, trust_remote_code: bool) -> str:
    """An addition to an error where the user trusts a model's own code and the folder has none."""
    return f"; {_NO_CODE}" if trust_remote_code and not any(folder.glob("*.py")) else ""
