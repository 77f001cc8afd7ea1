"""Models from the Hugging Face hub: safetensors, configuration and tokenizer files or a GGUF file, and never a pickle.

A model with its own code (`trust_remote_code`) works as a local folder only: nothing here fetches its `*.py`. The library
reads HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE. Its errors are translated here.
"""

from __future__ import annotations

import glob
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub.utils
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from bough.errors import DownloadError, ModelNotFound
from bough.models.files import hash_file, one_line, translate_os_errors
from bough.types import Progress

WANTED_FILES = (
    "*.safetensors",
    "*.json",
    "*.jinja",
    "tokenizer.model",
    "tiktoken.model",
    "*.tiktoken",
    "merges.txt",
    "vocab.txt",
)
_MODULE_FILE = re.compile(r"\d+_\w+/(config\.json|model\.safetensors)")  # of a step of sentence-transformers
_UNWANTED_FILES = ("*/*", "consolidated*.safetensors", "adapter_*")


@dataclass(frozen=True)
class HubFile:
    """A file of a repository. `sha256` is empty for small files, of which the hub does not tell it."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class HubModel:
    """A repository on the hub at one commit. Numbers are 0 and texts empty where the hub does not know them."""

    model_id: str
    commit: str
    license: str
    num_parameters: int
    dtype: str
    files: tuple[HubFile, ...]

    @property
    def has_safetensors(self) -> bool:
        return any(file.name.endswith(".safetensors") and not _MODULE_FILE.fullmatch(file.name) for file in self.files)

    @property
    def has_gguf(self) -> bool:
        return any(file.name.endswith(".gguf") for file in self.files)

    @property
    def wanted_files(self) -> tuple[HubFile, ...]:
        """The files of a model with safetensors. The steps of an encoder have folders of their own."""
        return tuple(file for file in self.files if _is_wanted(file.name))


def look_up(model_id: str) -> HubModel:
    """Ask the hub about a repository. Raises ModelNotFound if it is not there, or DownloadError."""
    with _translated(model_id):
        found = HfApi().model_info(model_id, files_metadata=True)
    files = (HubFile(file.rfilename, file.size or 0, file.lfs.sha256 if file.lfs else "") for file in found.siblings or [])
    weights = found.safetensors
    return HubModel(
        model_id,
        commit=str(found.sha),
        license=_license_of(found),
        num_parameters=weights.total if weights else int((found.gguf or {}).get("total") or 0),
        dtype=max(weights.parameters, key=lambda kind: weights.parameters[kind]) if weights else "",
        files=tuple(files),
    )


def require_safetensors(model: HubModel) -> None:
    """Raise ModelNotFound if the repository has no weights that can be read."""
    if not model.has_safetensors:
        raise ModelNotFound(
            f"{model.model_id} has no safetensors weights among its {len(model.files)} files; pickles are never loaded"
        )


def fetch(model: HubModel, folder: Path, progress: Progress, files: Sequence[HubFile] = ()) -> None:
    """Fetch the model's files, or only `files`, into `folder`; continues from an earlier try for this commit.

    Raises DownloadError if that fails, or if the hash of a file is wrong; such a file is deleted.
    """
    wanted = files or model.wanted_files
    total_bytes = sum(file.size_bytes for file in wanted)
    with _translated(model.model_id), _counting(model.model_id, total_bytes, progress) as counter:
        snapshot_download(
            model.model_id,
            revision=model.commit,
            local_dir=folder,
            allow_patterns=[glob.escape(file.name) for file in wanted],
            tqdm_class=counter,
        )
    with translate_os_errors(folder):
        for file in wanted:
            if file.sha256:
                _verify(folder / file.name, file.sha256, model.model_id)
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the library's records about the files


def _is_wanted(name: str) -> bool:
    is_own = _matches(name, WANTED_FILES) and not _matches(name, _UNWANTED_FILES)
    return is_own or _MODULE_FILE.fullmatch(name) is not None


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _license_of(found: Any) -> str:
    """The licence as the model's card names it: its own name where the hub has no word for it."""
    card = found.card_data.to_dict() if found.card_data else {}
    name = card.get("license")
    if name in (None, "other"):
        name = card.get("license_name") or name
    return str(name[0] if isinstance(name, list) and name else name or "")


def _verify(file: Path, sha256: str, model_id: str) -> None:
    found = hash_file(file)
    if found != sha256:
        num_bytes = file.stat().st_size
        file.unlink()
        raise DownloadError(
            f"{file.name} of {model_id} arrived damaged: the SHA-256 of its {num_bytes:,} bytes is {found}, "
            f"and should be {sha256}; the file was deleted"
        )


@contextmanager
def _counting(label: str, total_bytes: int, progress: Progress) -> Iterator[Any]:
    """A progress bar class for the library that prints nothing and reports the bytes of all files."""

    library: Any = huggingface_hub.utils

    class Counter(library.tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            self.counts_bytes = options.get("unit") == "B" and not str(options.get("name", "")).endswith(".transfer")
            options.pop("name", None)
            super().__init__(*args, **(options | {"disable": True}))

        def update(self, n: float | None = 1) -> bool | None:
            if self.counts_bytes:
                progress.advance(int(n or 0))
            return None

    progress.start(label, total_bytes or None)
    try:
        yield Counter
    finally:
        progress.finish()


@contextmanager
def _translated(model_id: str) -> Iterator[None]:
    """Turn every error of the library into one of ours."""
    try:
        yield
    except GatedRepoError as error:
        raise DownloadError(f"{model_id} is gated: accept its terms on the hub and set HF_TOKEN") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelNotFound(f"the hub has no model {model_id!r}, or it is private and HF_TOKEN is not set") from error
    except OfflineModeIsEnabled as error:
        raise DownloadError(f"cannot fetch {model_id}: HF_HUB_OFFLINE is set") from error
    except HfHubHTTPError as error:
        raise DownloadError(f"the hub answered {error.response.status_code} for {model_id}: {one_line(error)}") from error
    except Exception as error:  # also errors of its HTTP client, which differs between versions
        raise DownloadError(
            f"cannot fetch {model_id} from the hub: {type(error).__name__}: {one_line(error)}; is there a network?"
        ) from error
