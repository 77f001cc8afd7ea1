"""Models from the Hugging Face hub: safetensors, configuration and tokenizer files, and never a pickle.

A model with its own code (`trust_remote_code`) works as a local folder only: nothing here fetches its `*.py`. The library
reads HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE. Its errors are translated here.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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
from bough.models.files import hash_file, translate_os_errors
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
_UNWANTED_FILES = ("*/*", "consolidated*.safetensors", "adapter_*")


@dataclass(frozen=True)
class HubModel:
    """A model on the hub at one commit, with the SHA-256 of its weights files as far as the hub has them."""

    model_id: str
    commit: str
    num_parameters: int
    dtype: str
    sha256_of: Mapping[str, str]


def look_up(model_id: str) -> HubModel:
    """Ask the hub about a model. Raises ModelNotFound if it is not there or has no safetensors, or DownloadError."""
    with _translated(model_id):
        found = HfApi().model_info(model_id, files_metadata=True)
    siblings = found.siblings or []
    files = [file for file in siblings if file.rfilename.endswith(".safetensors")]
    if not files:
        raise ModelNotFound(
            f"{model_id} has no safetensors weights among its {len(siblings)} files; pickles are never loaded"
        )
    weights = found.safetensors
    dtype = max(weights.parameters, key=lambda kind: weights.parameters[kind]) if weights else ""
    sha256_of = {file.rfilename: file.lfs.sha256 for file in files if file.lfs}
    return HubModel(model_id, str(found.sha), weights.total if weights else 0, dtype, sha256_of)


def fetch(model: HubModel, folder: Path, progress: Progress) -> None:
    """Fetch the model's files into `folder`, continuing from the files of an earlier try for this commit.

    Raises DownloadError if that fails, or if the hash of a weights file is wrong; such a file is deleted.
    """
    with _translated(model.model_id), _counting(model.model_id, progress) as counter:
        snapshot_download(
            model.model_id,
            revision=model.commit,
            local_dir=folder,
            allow_patterns=list(WANTED_FILES),
            ignore_patterns=list(_UNWANTED_FILES),
            tqdm_class=counter,
        )
    with translate_os_errors(folder):
        for file in folder.glob("*.safetensors"):
            if file.name in model.sha256_of:
                _verify(file, model.sha256_of[file.name], model.model_id)
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the library's records about the files


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
def _counting(label: str, progress: Progress) -> Iterator[Any]:
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

    progress.start(label, None)
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
        raise DownloadError(f"the hub answered {error.response.status_code} for {model_id}: {error}") from error
    except Exception as error:  # also errors of its HTTP client, which differs between versions
        raise DownloadError(
            f"cannot fetch {model_id} from the hub: {type(error).__name__}: {error}; is there a network?"
        ) from error
