"""From a folder to an encoder that is ready to run.

Only safetensors are read, never a pickle, and a weight that no file holds is an error: no model runs with random weights.
A checkpoint may have more weights than the encoder, such as the head of a masked language model. It may lack the pooler,
which no vector is made from: then the model has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, AutoModelForSequenceClassification, AutoModelForTextEncoding

from bough.config import Settings
from bough.engines.contract import ReportProgress
from bough.engines.shared.model_folder import list_weight_files, require_suffixes
from bough.engines.torch.device import choose_device, choose_dtype
from bough.engines.torch.loading import prepare, read_config, refuse_other_engines, require_filled, set_threads
from bough.errors import SettingsError, UnsupportedModel
from bough.models.files import one_line, quiet_transformers

_OWN_ATTENTION = ("auto", "bough")  # of the setting: encoders then run with what transformers prefers
_PLAIN_WEIGHTS = ("auto", "float32")


@dataclass(frozen=True)
class EncoderModel:
    """A transformers model, where it is, and the most tokens that its positions allow (0: any number)."""

    model: Any
    device: torch.device
    dtype: torch.dtype
    max_positions: int


def load_encoder_model(
    folder: Path, settings: Settings, progress: ReportProgress | None, *, is_reranker: bool
) -> EncoderModel:
    """The encoder in `folder`, on the device and in the type that the settings ask for. Raises ModelError."""
    if settings.weights not in _PLAIN_WEIGHTS:
        raise SettingsError(
            f"weights is {settings.weights!r}, and encoders are never packed: use {' or '.join(_PLAIN_WEIGHTS)}"
        )
    set_threads(settings)
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    config = read_config(folder, settings.trust_remote_code)
    refuse_other_engines(folder, config)
    if is_reranker and config.num_labels != 1:
        raise UnsupportedModel(f"{folder} has a classifier of {config.num_labels} labels, and rerankers have 1")
    require_suffixes(folder, list_weight_files(folder), ".safetensors")
    if progress:
        progress("reading weights")
    model = prepare(_load(folder, _choose_class(config, is_reranker), config, dtype, settings).to(device))
    return EncoderModel(model, device, dtype, _find_max_positions(model))


def _choose_class(config: Any, is_reranker: bool) -> Any:
    """The class that loads the model: of an encoder with a decoder, the encoder alone."""
    if is_reranker:
        return AutoModelForSequenceClassification
    return AutoModelForTextEncoding if getattr(config, "is_encoder_decoder", False) else AutoModel


def _load(folder: Path, auto_model: Any, config: Any, dtype: torch.dtype, settings: Settings) -> Any:
    if hasattr(config, "use_cache"):
        config.use_cache = False
    attention = {} if settings.attention in _OWN_ATTENTION else {"attn_implementation": settings.attention}
    try:
        with quiet_transformers():
            model, info = auto_model.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                trust_remote_code=settings.trust_remote_code,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # told below, in one line
                **attention,
            )
    except Exception as error:  # transformers and the family's code may raise anything
        raise UnsupportedModel(f"transformers cannot load the encoder in {folder}: {one_line(error)}") from error
    missing = [name for name in info["missing_keys"] if not name.startswith("pooler.")]
    if len(missing) < len(info["missing_keys"]):
        model.pooler = None
    require_filled(folder, {**info, "missing_keys": missing})
    return model


def _find_max_positions(model: Any) -> int:
    """The fewest positions that the configuration, or a table of positions, has. Some tables begin behind a padding row."""
    limits = [int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 0)]
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            skipped = 0 if module.padding_idx is None else module.padding_idx + 1
            limits.append(module.num_embeddings - skipped)
    return min((limit for limit in limits if limit > 0), default=0)
