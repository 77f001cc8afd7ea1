"""Models as the APIs describe them, read from their files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from bough.models import ModelFiles, ModelInfo
from bough.models.aliases import Overlay
from bough.models.files import CONFIG_FILE, translate_os_errors

_LICENSE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "COPYING")
_LICENSE_CHARS = 2**17
_SIZE_KEYS = ("hidden_size", "n_embd", "d_model")
_SHORT_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}


@dataclass(frozen=True)
class CatalogEntry:
    """A model as the APIs describe it. `digest` is bare hexadecimal; `family` is what the configuration calls `model_type`,
    `architecture` the class in transformers. Texts are empty and numbers 0 if the files do not have them."""

    name: str
    family: str
    families: tuple[str, ...]
    format: str
    architecture: str
    num_parameters: int
    parameter_size: str
    quantization: str
    digest: str
    size_bytes: int
    modified: datetime
    context_tokens: int
    embedding_length: int
    capabilities: tuple[str, ...]  # of completion, tools, thinking, insert; or embedding, rerank
    template: str
    license: str
    sampling: Mapping[str, Any]  # the model's own defaults, by the names of SamplingParams; empty if it has none
    stands_for: str = ""  # the model's own name, if this is an alias
    overlay: Overlay = field(default_factory=Overlay)


@dataclass(frozen=True)
class LoadedEntry:
    """A loaded model as the APIs describe it. `expires_at` is None if it never expires.

    `weights` and `step` say how the weights are kept and what computes, for people.
    """

    entry: CatalogEntry
    num_bytes: int
    device_bytes: int  # of these, on an accelerator
    context_tokens: int
    engine: str
    weights: str
    step: str
    expires_at: datetime | None


def read_entry(files: ModelFiles, info: ModelInfo) -> CatalogEntry:
    """The entry of a model under its own name. Raises ModelError, or another exception if the configuration is invalid."""
    config = files.config | (files.config.get("text_config") or {})
    family = str(files.config.get("model_type") or "")
    with translate_os_errors(files.folder):
        return CatalogEntry(
            name=files.name,
            family=family,
            families=(family,),
            format="safetensors",
            architecture=info.architecture,
            num_parameters=info.num_parameters,
            parameter_size=human_number(info.num_parameters),
            quantization=info.quantization or _SHORT_TYPES.get(info.dtype, info.dtype.upper()),
            digest=info.digest.removeprefix("sha256:"),
            size_bytes=info.size_bytes,
            modified=files.created or _modified(files),
            context_tokens=info.context_tokens,
            embedding_length=next((int(config[key]) for key in _SIZE_KEYS if config.get(key)), 0),
            capabilities=tuple(each for each in info.capabilities if each != "chat"),
            template=_read_template(files),
            license=_read_license(files),
            sampling=info.sampling,
        )


def human_number(number: int) -> str:
    """A number of parameters as Ollama writes it: 134.52M, 7.6B."""
    for unit, size, digits in (("T", 10**12, 1), ("B", 10**9, 1), ("M", 10**6, 2), ("K", 10**3, 0)):
        if number >= size:
            return f"{number / size:.{0 if number % size == 0 else digits}f}{unit}"
    return str(number)


def _modified(files: ModelFiles) -> datetime:
    return datetime.fromtimestamp((files.folder / CONFIG_FILE).stat().st_mtime, UTC)


def _read_template(files: ModelFiles) -> str:
    """The text of the chat template: a file of its own, or a part of the tokenizer's configuration."""
    own = files.folder / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8", errors="replace")
    try:
        found = json.loads((files.folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return ""
    if isinstance(found, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default") or next(iter(named.values()), None)
    return found if isinstance(found, str) else ""


def _read_license(files: ModelFiles) -> str:
    file = next((files.folder / name for name in _LICENSE_FILES if (files.folder / name).is_file()), None)
    return file.read_text(encoding="utf-8", errors="replace")[:_LICENSE_CHARS] if file else ""
