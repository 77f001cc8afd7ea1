"""A model's fingerprint: one hash of everything that stored state depends on.

State is only used under the fingerprint that it was computed with. The fingerprint covers the content of the weights, the
configuration, the tokenizer with its templates, code that comes with the model, and the facts that the caller adds. Paths,
times and the order of files do not matter.

The fingerprint of a GGUF file covers the file, the data derived from it for computing (configuration, table of rows, small
weights), and the facts. `check_packed` compares the file with the hash that it had when the table was made; the fingerprint
takes that hash, so that it names the content that was checked.

Weights are read once. Their hashes are kept in a small file, each with a stamp of its weights file. If that file of hashes
cannot be read or written, the weights are read again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bough.config import Settings
from bough.errors import UnsupportedModel
from bough.models.files import (
    FLOATS_FILE,
    ModelFiles,
    hash_file,
    read_json,
    read_notes,
    stamp_of,
    translate_os_errors,
    write_notes,
)
from bough.models.weights.packed import PackedFile, read_packed
from bough.types import Progress, SilentProgress

_FORMAT = 1
_MEMO_FILE = "weights.json"
_BLOCK_BYTES = 4 * 2**20
_LONGEST_NAME = 80
_NOT_COMPUTED_WITH = {"_name_or_path", "transformers_version"}  # in a configuration
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
    content: dict[str, Any]
    with translate_os_errors(files.folder):
        if files.is_packed:
            table = files.table or {}
            content = {
                "gguf": [each["sha256"] for each in table["files"]],
                "rows": table["tensors"],
                "floats": hash_file(files.folder / FLOATS_FILE),
                "config": {name: value for name, value in files.config.items() if name not in _NOT_COMPUTED_WITH},
            }
        else:
            small = {file for pattern in _SMALL_FILES for file in files.folder.glob(pattern) if file.is_file()}
            content = {
                "weights": hash_weights(files, settings, progress),
                "config": files.config,
                "files": {file.relative_to(files.folder).as_posix(): hash_file(file) for file in small},
            }
    content |= {"format": _FORMAT, "facts": facts}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def hash_weights(files: ModelFiles, settings: Settings, progress: Progress | None = None) -> dict[str, str]:
    """The SHA-256 of each weights file, by name. Only new and changed files are read. Raises ModelError."""
    with translate_os_errors(files.folder):
        named = _find_weight_files(files)
        return dict(zip(named, _hash_files(list(named.values()), files.name, settings, progress), strict=True))


def check_packed(files: ModelFiles, settings: Settings, progress: Progress | None = None) -> PackedFile | None:
    """Read the table of a model's rows, and check that its files are those that it was made of; None without a table.

    A file is read once, and again when it has changed. Raises UnsupportedModel if its content is another, or as
    `read_packed`, and ModelError if it cannot be read.
    """
    packed = read_packed(files.folder)
    if packed is None:
        return None
    found = hash_paths([part.path for part in packed.files], files.name, settings, progress)
    for part, sha256 in zip(packed.files, found, strict=True):
        if sha256 != part.sha256:
            raise UnsupportedModel(
                f"{part.path} differs from the file that {files.name} was made of: its SHA-256 is {sha256}, and was "
                f"{part.sha256}; give the file to use what it is now"
            )
    return packed


def hash_paths(files: Sequence[Path], name: str, settings: Settings, progress: Progress | None = None) -> list[str]:
    """The SHA-256 of each file. Only new and changed files are read. Raises ModelError."""
    with translate_os_errors(files[0]):
        return _hash_files(files, name, settings, progress)


def remember_hashes(files: Sequence[Path], hashes: Sequence[str], settings: Settings) -> None:
    """Note the hashes of files that were just written, so that they are not read again."""
    memo_file = settings.cache_folder / _MEMO_FILE
    with translate_os_errors(files[0]):
        new = {
            str(file.resolve()): {"stamp": _stamp(file.resolve()), "sha256": sha256}
            for file, sha256 in zip(files, hashes, strict=True)
        }
    write_notes(memo_file, _read_memo(memo_file) | new)


def combine_hashes(hashes: Sequence[str]) -> str:
    """The hash of one file; for several files, the hash over their hashes in order."""
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def tree_folder(settings: Settings, name: str, fingerprint: str) -> Path:
    """The folder of the tree on disk for this model name and fingerprint. It is always inside the folder of all trees."""
    return settings.trees_folder / f"{safe_name(name)}-{safe_name(fingerprint[:12])}"


def safe_name(name: str) -> str:
    """A model's name as part of a file name. Different names may become equal."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name.replace("/", "--"))
    return plain.strip("-.")[:_LONGEST_NAME] or "model"


def _find_weight_files(files: ModelFiles) -> dict[str, Path]:
    """The files of a GGUF model, or every safetensors file in the folder or in an index, by name."""
    if files.is_packed:
        return {file.name: file for file in files.weights}
    names = {file.name for file in files.weights}
    for index in files.folder.glob("*.safetensors.index.json"):
        shards = read_json(index).get("weight_map")
        names.update(map(str, shards.values()) if isinstance(shards, dict) else ())
    return {name: files.folder / name for name in names}


def _hash_files(files: Sequence[Path], name: str, settings: Settings, progress: Progress | None) -> list[str]:
    memo_file = settings.cache_folder / _MEMO_FILE
    memo = _read_memo(memo_file)
    found = [file.resolve() for file in files]
    unknown = [file for file in found if memo.get(str(file), {}).get("stamp") != _stamp(file)]
    if unknown:
        new = _read_files(unknown, name, progress or SilentProgress())
        memo |= new
        write_notes(memo_file, _read_memo(memo_file) | new)  # another process may have written meanwhile
    return [memo[str(file)]["sha256"] for file in found]


def _read_files(files: Sequence[Path], name: str, progress: Progress) -> dict[str, dict[str, str]]:
    """Stamps and hashes by path. The stamp is taken before reading, so that a file that changes meanwhile is read again."""
    progress.start(f"reading the weights of {name}", sum(file.stat().st_size for file in files))
    try:
        return {str(file): {"stamp": _stamp(file), "sha256": _hash_with_progress(file, progress)} for file in files}
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
    fields = ("stamp", "sha256")
    return {
        path: entry for path, entry in read_notes(file).items() if all(isinstance(entry.get(each), str) for each in fields)
    }
