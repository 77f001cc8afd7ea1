"""The EncoderEngine contract on PyTorch and transformers: batches of texts with padding, in one forward pass each.

Padding is a matter of each family's code: some read the padding although a mask says not to, or refuse a batch. So each
model is tried at load with a padded batch. If that is not right, texts run one by one.

Only safetensors are read, never a pickle, and a weight that no file holds is an error: no model runs with random weights.
A checkpoint may have more weights than the encoder, such as the head of a masked language model. It may lack the pooler,
which no vector is made from: then the model has none.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForSequenceClassification, AutoModelForTextEncoding

from bough.config import Settings
from bough.engines.contract import EngineInfo, ReportProgress
from bough.engines.shared.errors import as_engine_errors
from bough.engines.shared.model_folder import list_weight_files, require_suffixes
from bough.engines.torch.device import choose_device, choose_dtype
from bough.engines.torch.encoders.heads import Head, ScoreHead, VectorHead
from bough.engines.torch.model_loader import (
    load_pretrained,
    prepare,
    read_config,
    refuse_other_engines,
    require_filled,
    set_threads,
)
from bough.errors import EngineError, SettingsError, UnsupportedModel
from bough.models.encoders.files import EmbedderFiles, RerankerFiles
from bough.types import EncoderInput

DEFAULT_CONTEXT = 512
"""The most tokens of a text if neither the model nor the settings name a limit."""

_BATCH_TOKENS_CPU = 2_048
_BATCH_TOKENS_ACCELERATOR = 16_384
_LARGEST_DIFFERENCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # of the largest number
_PROBE_LENGTHS = (5, 12)
_PLAIN_WEIGHTS = ("auto", "float32")


class TorchEncoder:
    """One loaded encoder. `load` makes it from a folder."""

    def __init__(self, model: Any, head: Head, settings: Settings, device: torch.device, dtype: torch.dtype) -> None:
        self._model = model
        self._head = head
        self._device = device
        self._dtype = dtype
        self._takes_types = "token_type_ids" in inspect.signature(model.forward).parameters
        config = model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self._pad_id = min(getattr(config, "pad_token_id", None) or 0, self.vocab_size - 1)
        limits = [limit for limit in (_find_max_positions(model), settings.context) if limit]
        self.context_tokens: int = min(limits, default=DEFAULT_CONTEXT)
        self.dimensions: int = head.dimensions
        self.has_host: bool = device.type == "cuda"
        self.info = EngineInfo("torch", type(model).__name__, str(device), str(dtype).removeprefix("torch."))
        self._why_alone = self._find_padding_problem()
        most = _BATCH_TOKENS_CPU if self.info.is_on_cpu else _BATCH_TOKENS_ACCELERATOR
        self.max_batch_tokens: int = 0 if self._why_alone else most

    @classmethod
    def load(
        cls,
        folder: Path,
        description: EmbedderFiles | RerankerFiles,
        settings: Settings,
        progress: ReportProgress | None = None,
    ) -> TorchEncoder:
        """Load the encoder in `folder` and try it. `progress` is called with a text at each stage. Raises ModelError."""
        if settings.weights not in _PLAIN_WEIGHTS:
            names = " or ".join(_PLAIN_WEIGHTS)
            raise SettingsError(f"weights is {settings.weights!r}, and encoders are never packed: use {names}")
        set_threads(settings)
        device = choose_device(settings.device)
        dtype = choose_dtype(settings.dtype, device)
        is_reranker = isinstance(description, RerankerFiles)
        model = prepare(_load_model(folder, settings, dtype, progress, is_reranker=is_reranker).to(device))
        if isinstance(description, RerankerFiles):
            return cls(model, ScoreHead(description), settings, device, dtype)
        state_size = int(model.config.get_text_config().hidden_size)  # which all have, also under another name
        return cls(model, VectorHead(description, state_size, device), settings, device, dtype)

    def describe(self) -> dict[str, str]:
        return {
            **self.info.describe(),
            "output": "1 score" if isinstance(self._head, ScoreHead) else f"vectors of {self.dimensions:,} numbers",
            "pooling": self._head.text,
            "context": f"{self.context_tokens:,} tokens",
            "batching": self._why_alone or f"up to {self.max_batch_tokens:,} tokens with padding",
            "attention": str(getattr(self._model.config, "_attn_implementation", "")),
            "parameters": f"{sum(each.numel() for each in self._model.parameters()):,}",
            "threads": str(torch.get_num_threads()),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }

    @as_engine_errors("encoding")
    @torch.inference_mode()
    def encode(self, batch: Sequence[EncoderInput]) -> list[list[float]]:
        ids = self._pad([text.ids for text in batch], self._pad_id)
        mask = self._pad([[1] * len(text.ids) for text in batch], 0)
        inputs = {"input_ids": ids, "attention_mask": mask}
        if self._takes_types and any(text.type_ids for text in batch):
            inputs["token_type_ids"] = self._pad([text.type_ids or [0] * len(text.ids) for text in batch], 0)
        num_prompt = torch.tensor([text.num_prompt for text in batch], device=self._device)
        numbers = self._head(self._model(**inputs, return_dict=True), mask, num_prompt)
        if not bool(torch.isfinite(numbers).all()):
            raise EngineError(f"the model gives numbers that are not finite, in {self.info.dtype}")
        found: list[list[float]] = numbers.tolist()
        return found

    def _pad(self, rows: Sequence[Sequence[int]], value: int) -> Tensor:
        longest = max(map(len, rows))
        return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows], device=self._device)

    def _find_padding_problem(self) -> str:
        """Why texts must run one by one; empty if padding is right. Raises UnsupportedModel if not even one text runs."""
        probes = [EncoderInput(self._make_probe(min(length, self.context_tokens))) for length in _PROBE_LENGTHS]
        try:
            alone = torch.tensor([self.encode([probe])[0] for probe in probes])
        except EngineError as error:
            raise UnsupportedModel(f"{self.info.model} cannot run as an encoder: {error}") from error
        try:
            together = torch.tensor(self.encode(probes))
        except EngineError as error:
            return f"texts run one by one: {error}"
        largest = alone.abs().amax(dim=1)
        difference = float(((alone - together).abs().amax(dim=1) / largest.where(largest > 0, 1)).max())
        is_right = difference <= _LARGEST_DIFFERENCE[self._dtype]
        return "" if is_right else f"texts run one by one: padding changes the numbers by {difference:.1e} of the largest"

    def _make_probe(self, length: int) -> list[int]:
        """Different tokens of the vocabulary, other than padding, with the end that some classifiers look for."""
        config = self._model.config.get_text_config()
        usable = [token_id for token_id in range(min(self.vocab_size, 64)) if token_id != self._pad_id] or [0]
        ids = [usable[(7 * place + 3) % len(usable)] for place in range(length)]
        end_id = getattr(config, "eos_token_id", None)
        if not isinstance(end_id, int) or not 0 <= end_id < self.vocab_size:
            return ids
        return [*(each for each in ids[:-1] if each != end_id), end_id]

    def close(self) -> None:
        del self._model, self._head
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _load_model(
    folder: Path, settings: Settings, dtype: torch.dtype, progress: ReportProgress | None, *, is_reranker: bool
) -> Any:
    config = read_config(folder, settings.trust_remote_code)
    refuse_other_engines(folder, config)
    if is_reranker and config.num_labels != 1:
        raise UnsupportedModel(f"{folder} has a classifier of {config.num_labels} labels, and rerankers have 1")
    require_suffixes(folder, list_weight_files(folder), ".safetensors")
    if progress:
        progress("reading weights")
    auto_model: Any = AutoModelForSequenceClassification if is_reranker else AutoModel
    if not is_reranker and getattr(config, "is_encoder_decoder", False):
        auto_model = AutoModelForTextEncoding  # the encoder alone
    if hasattr(config, "use_cache"):
        config.use_cache = False
    options = {"config": config, "dtype": dtype, "trust_remote_code": settings.trust_remote_code}
    model, info = load_pretrained(auto_model, folder, "encoder", **options)
    missing = [name for name in info["missing_keys"] if not name.startswith("pooler.")]
    if len(missing) < len(info["missing_keys"]):
        model.pooler = None
    require_filled(folder, {**info, "missing_keys": missing})
    return model


def _find_max_positions(model: Any) -> int:
    """The fewest positions of the configuration and of tables, of which some begin with padding; 0: any number."""
    limits = [int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 0)]
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            skipped = 0 if module.padding_idx is None else module.padding_idx + 1
            limits.append(module.num_embeddings - skipped)
    return min((limit for limit in limits if limit > 0), default=0)
