"""Models from the Hugging Face hub: safetensors, configuration and tokenizer files or a GGUF file, and never a pickle.

A model with its own code (`trust_remote_code`) works as a local folder only: nothing here fetches its `*.py`. The library
reads HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE. Its errors are translated here.

A GGUF repository has one file for each quantization, with its name at the end: `Model-Q4_K_M.gguf`. A large one may be
split into parts, `Model-Q8_0-00001-of-00003.gguf`, which are fetched together.
"""

from __future__ import annotations

import glob
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
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

from bough.errors import DownloadError, ModelNotFound, UnsupportedModel
from bough.models.fetching.download import require_hash
from bough.models.files import one_line, translate_os_errors
from bough.models.weights.gguf_header import part_names
from bough.types import Progress

_WEIGHTS_AND_TEMPLATES = ("*.safetensors", "*.json", "*.jinja")
_VOCABULARIES = ("tokenizer.model", "tiktoken.model", "*.tiktoken", "merges.txt", "vocab.txt")
_MODULE_FILE = re.compile(r"\d+_\w+/(config\.json|model\.safetensors)")  # of a step of sentence-transformers
_UNWANTED_FILES = ("*/*", "consolidated*.safetensors", "adapter_*")

_USUAL = ("Q4_K_M", "Q4_0", "Q8_0", "Q5_K_M", "Q6_K", "Q4_K_S", "Q5_K_S", "Q5_0", "Q4_1", "Q5_1", "Q3_K_M")
_AFTER_USUAL = ("F16", "BF16", "F32")
_PART = re.compile(r"-\d{5}-of-(\d{5})$")
_QUANTIZATION = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|F16|FP16|F32))$", re.IGNORECASE)
_NO_MODELS = ("mmproj", "imatrix")  # but files beside them


@dataclass(frozen=True)
class HubFile:
    """A file of a repository. `sha256` is empty for small files, for which the hub has none."""

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
        """The files of a model with safetensors, with the folders of an encoder's steps."""
        return tuple(file for file in self.files if _is_wanted(file.name))


def look_up(model_id: str) -> HubModel:
    """Ask the hub about a repository. Raises ModelNotFound if it does not exist, or DownloadError."""
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


def choose_files(repository: str, files: Iterable[str], tag: str = "") -> list[str]:
    """The file whose quantization or whose own name is `tag`; without a tag, the one with the usual quantization.

    Several files if it is split, in order. Raises ModelNotFound, which lists the quantizations of the repository, or
    UnsupportedModel if a part is missing.
    """
    models = [file for file in files if file.endswith(".gguf") and not _stem(file).lower().startswith(_NO_MODELS)]
    if not models:
        raise ModelNotFound(f"{repository} has no GGUF file")
    known = {file: quantization_of(file) for file in sorted(models, key=_is_part)}
    if not tag:
        return _find_all_parts(repository, _choose_usual(known), models)
    for file, quantization in known.items():
        if tag.lower() in (quantization.lower(), PurePosixPath(file).name.lower()):
            return _find_all_parts(repository, file, models)
    listed = ", ".join(sorted(set(known.values()) - {""}))
    found = f"there are {listed}" if listed else "none of its files has one in its name"
    raise ModelNotFound(f"{repository} has no file with the quantization {tag}; {found}")


def quantization_of(file: str) -> str:
    """The quantization in a file's name, in capitals; empty if it has none."""
    found = _QUANTIZATION.search(_PART.sub("", _stem(file)))
    return found[1].upper() if found else ""


def _find_all_parts(repository: str, file: str, models: Iterable[str]) -> list[str]:
    path = PurePosixPath(file)
    names = [str(path.with_name(name)) for name in part_names(path.name)]
    missing = sorted(set(names) - set(models))
    if missing:
        raise UnsupportedModel(
            f"{repository} lacks {len(missing)} of the {len(names)} parts of {file}, such as {missing[0]}"
        )
    return names


def _choose_usual(known: dict[str, str]) -> str:
    """The file with the usual quantization, preferring one that is not split."""
    others = sorted(set(known.values()) - {*_USUAL, *_AFTER_USUAL})
    order = (*_USUAL, *others, *_AFTER_USUAL)
    return min(known, key=lambda file: (_is_part(file), order.index(known[file]), file))


def _is_part(file: str) -> bool:
    return bool(_PART.search(_stem(file)))


def _stem(file: str) -> str:
    return PurePosixPath(file).stem


def fetch(model: HubModel, folder: Path, progress: Progress, files: Sequence[HubFile]) -> None:
    """Fetch files of the model into `folder`, continuing an earlier try for this commit.

    Raises DownloadError if that fails, or if the hash of a file is wrong; such a file is deleted.
    """
    total_bytes = sum(file.size_bytes for file in files)
    with _translated(model.model_id), _counting(model.model_id, total_bytes, progress) as counter:
        snapshot_download(
            model.model_id,
            revision=model.commit,
            local_dir=folder,
            allow_patterns=[glob.escape(file.name) for file in files],
            tqdm_class=counter,
        )
    with translate_os_errors(folder):
        for file in files:
            if file.sha256:
                require_hash(folder / file.name, file.sha256, f"{file.name} of {model.model_id}")
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the library's records about the files


def _is_wanted(name: str) -> bool:
    if _MODULE_FILE.fullmatch(name):
        return True
    is_wanted = any(fnmatch(name, each) for each in (*_WEIGHTS_AND_TEMPLATES, *_VOCABULARIES))
    return is_wanted and not any(fnmatch(name, each) for each in _UNWANTED_FILES)


def _license_of(found: Any) -> str:
    """The licence as the model's card names it, by its own name if the hub has none for it."""
    card = found.card_data.to_dict() if found.card_data else {}
    name = card.get("license")
    if name in (None, "other"):
        name = card.get("license_name") or name
    return str(name[0] if isinstance(name, list) and name else name or "")


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
    """Turn every error of the library into one of Bough's."""
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
