"""A model's fingerprint: one hash of everything that stored state depends on.

State is only used under the fingerprint that it was computed with. The fingerprint covers the content of the weights, the
configuration, the tokenizer with its templates, code that comes with the model, and the facts that the caller adds. Paths,
times and the order of files do not matter.

The packed weights of a converted model do not count: they are the same weights. `check_packed` compares their file with the
hash that it had when the table of its rows was made.

Weights are read once. Their hashes are kept in a small file, each with a stamp of its weights file. If that file of hashes
cannot be read or written, the weights are read again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from bough.config import Settings
from bough.errors import UnsupportedModel
from bough.models.files import ModelFiles, hash_file, read_json, read_notes, stamp_of, translate_os_errors, write_notes
from bough.models.weights import PackedFile, read_packed
from bough.types import Progress, SilentProgress

_FORMAT = 1
_MEMO_FILE = "weights.json"
_BLOCK_BYTES = 4 * 2**20
_LONGEST_NAME = 80
_SMALL_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "chat_template*",
    "*.jinja",
    "*_chat_templates/*",  # additional ones
    "*.safetensors.index.json",
    "adapter_config.json",
    "modules.json",  # of sentence-transformers, with the files below
    "sentence_*_config.json",
    "config_sentence_transformers.json",
    "[0-9]*_*/*",
    "*.py",
)


def fingerprint(files: ModelFiles, settings: Settings, progress: Progress | None = None, **facts: str) -> str:
    """The fingerprint of a model with these facts (dtype, page size, format and such), in hexadecimal.

    Reads all weights the first time, and reports to `progress`. Raises ModelError if a file cannot be read.
    """
    with translate_os_errors(files.folder):
        weights = _hash_weights(files, settings.cache_folder / _MEMO_FILE, progress or SilentProgress())
        small = {file.relative_to(files.folder).as_posix(): hash_file(file) for file in _small_files(files.folder)}
    content = {"format": _FORMAT, "weights": weights, "config": files.config, "files": small, "facts": facts}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def hash_weights(files: ModelFiles, settings: Settings, progress: Progress | None = None) -> dict[str, str]:
    """The SHA-256 of each weights file, by name. Only new and changed files are read. Raises ModelError."""
    with translate_os_errors(files.folder):
        return _hash_weights(files, settings.cache_folder / _MEMO_FILE, progress or SilentProgress())


def check_packed(files: ModelFiles, settings: Settings, progress: Progress | None = None) -> PackedFile | None:
    """The packed weights of a model, after a check that their file is the one that they were found in; None without.

    The file is read once, and again when it has changed. Raises UnsupportedModel if its content is another, or as
    `read_packed`, and ModelError if it cannot be read.
    """
    packed = read_packed(files.folder)
    if packed is None:
        return None
    with translate_os_errors(packed.path):
        memo_file = settings.cache_folder / _MEMO_FILE
        wanted = {packed.path.name: packed.path.resolve()}
        found = _hash_files(wanted, files.name, memo_file, progress or SilentProgress())[packed.path.name]
    if found != packed.sha256:
        raise UnsupportedModel(
            f"{packed.path} differs from the file that {files.name} was made of: its SHA-256 is {found}, "
            f"and was {packed.sha256}; `bough pull` repairs it, and with the setting weights=float32 it is not read"
        )
    return packed


def tree_folder(settings: Settings, name: str, fingerprint: str) -> Path:
    """The folder of the tree on disk for this model name and fingerprint. It is always inside the folder of all trees."""
    return settings.trees_folder / f"{safe_name(name)}-{safe_name(fingerprint[:12])}"


def safe_name(name: str) -> str:
    """A model's name as part of a file name. Different names may become equal."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name.replace("/", "--"))
    return plain.strip("-.")[:_LONGEST_NAME] or "model"


def _small_files(folder: Path) -> set[Path]:
    return {file for pattern in _SMALL_FILES for file in folder.glob(pattern) if file.is_file()}


def _weight_files(files: ModelFiles) -> dict[str, Path]:
    """Every safetensors file in the folder, and every file that an index names, by name."""
    names = {file.name for file in files.weights}
    for index in files.folder.glob("*.safetensors.index.json"):
        shards = read_json(index).get("weight_map")
        names.update(map(str, shards.values()) if isinstance(shards, dict) else ())
    return {name: (files.folder / name).resolve() for name in names}


def _hash_weights(files: ModelFiles, memo_file: Path, progress: Progress) -> dict[str, str]:
    return _hash_files(_weight_files(files), files.name, memo_file, progress)


def _hash_files(weights: Mapping[str, Path], name: str, memo_file: Path, progress: Progress) -> dict[str, str]:
    """The hash of each file, by the given names. Only new and changed files are read."""
    memo = _read_memo(memo_file)
    unknown = [file for file in weights.values() if memo.get(str(file), {}).get("stamp") != _stamp(file)]
    if unknown:
        new = _read_weights(unknown, name, progress)
        memo |= new
        write_notes(memo_file, _read_memo(memo_file) | new)  # another process may have written meanwhile
    return {each: memo[str(file)]["sha256"] for each, file in weights.items()}


def _read_weights(weights: Sequence[Path], name: str, progress: Progress) -> dict[str, dict[str, str]]:
    """Stamps and hashes by path. The stamp is taken before reading, so that a file that changes meanwhile is read again."""
    progress.start(f"reading the weights of {name}", sum(file.stat().st_size for file in weights))
    try:
        return {str(file): {"stamp": _stamp(file), "sha256": _hash_with_progress(file, progress)} for file in weights}
    finally:
        progress.finish()


def _stamp(file: Path) -> str:
    """As `stamp_of`, with inode and ctime: unpacking may replace a file by one of the same size and time."""
    stat = file.stat()
    return f"{stamp_of(file)} {stat.st_ctime_ns} {stat.st_ino}"


def _hash_with_progress(file: Path, progress: Progress) -> str:
    state, block = hashlib.sha256(), bytearray(_BLOCK_BYTES)
    with file.open("rb", buffering=0) as stream:
        while num_bytes := stream.readinto(block):
            state.update(memoryview(block)[:num_bytes])
            progress.advance(num_bytes)
    return state.hexdigest()


def _read_memo(file: Path) -> dict[str, dict[str, str]]:
    """Stamps and hashes by path, without malformed entries."""
    return {path: entry for path, entry in read_notes(file).items() if _is_entry(entry)}


def _is_entry(entry: Mapping[str, object]) -> bool:
    return all(isinstance(entry.get(name), str) for name in ("stamp", "sha256"))
