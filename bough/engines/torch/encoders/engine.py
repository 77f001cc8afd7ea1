"""The EncoderEngine contract on PyTorch and transformers: batches of texts with padding, in one forward pass each.

Padding is a matter of each family's code: some read the padding although a mask says not to, or refuse a batch. So each
model is tried at load with a padded batch. If that is not right, texts run one by one.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from bough.config import Settings
from bough.engines.contract import EncoderInput, EngineInfo, ReportProgress
from bough.engines.shared.errors import as_engine_errors
from bough.engines.torch.encoders.heads import Head, ScoreHead, VectorHead
from bough.engines.torch.encoders.loading import EncoderModel, load_encoder_model
from bough.errors import EngineError, UnsupportedModel
from bough.models.encoders.files import EmbedderFiles, RerankerFiles

DEFAULT_CONTEXT = 512
"""The most tokens of a text if neither the model nor the settings name a limit."""

_BATCH_TOKENS_CPU = 2_048
_BATCH_TOKENS_ACCELERATOR = 16_384
_LARGEST_DIFFERENCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # of the largest number
_PROBE_LENGTHS = (5, 12)


class TorchEncoder:
    """One loaded encoder. `load` makes it from a folder."""

    def __init__(self, loaded: EncoderModel, head: Head, settings: Settings) -> None:
        model = loaded.model
        self._model = model
        self._head = head
        self._device = loaded.device
        self._dtype = loaded.dtype
        self._takes_types = "token_type_ids" in inspect.signature(model.forward).parameters
        config = model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self._pad_id = min(getattr(config, "pad_token_id", None) or 0, self.vocab_size - 1)
        limits = [limit for limit in (loaded.max_positions, settings.context) if limit]
        self.context_tokens: int = min(limits, default=DEFAULT_CONTEXT)
        self.dimensions: int = head.dimensions
        self.has_host: bool = loaded.device.type == "cuda"
        dtype = str(loaded.dtype).removeprefix("torch.")
        self.info = EngineInfo("torch", type(model).__name__, str(loaded.device), dtype)
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
        is_reranker = isinstance(description, RerankerFiles)
        loaded = load_encoder_model(folder, settings, progress, is_reranker=is_reranker)
        if isinstance(description, RerankerFiles):
            return cls(loaded, ScoreHead(description), settings)
        return cls(loaded, VectorHead(description, _find_state_size(loaded.model), loaded.device), settings)

    def describe(self) -> dict[str, str]:
        """What the engine is and how it makes its numbers, for people."""
        return {
            "engine": self.info.name,
            "model": self.info.model,
            "device": self.info.device,
            "dtype": self.info.weights,
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
        """The numbers of each text of a batch, in one forward pass."""
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
            alone = [self.encode([probe])[0] for probe in probes]
        except EngineError as error:
            raise UnsupportedModel(f"{self.info.model} cannot run as an encoder: {error}") from error
        try:
            together = self.encode(probes)
        except EngineError as error:
            return f"texts run one by one: {error}"
        difference = max(_compare(*pair) for pair in zip(alone, together, strict=True))
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
        """Release the model's memory; the engine cannot be used afterwards."""
        del self._model, self._head
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _find_state_size(model: Any) -> int:
    """How many numbers the state of a token has. Some configurations name it differently, all have a `hidden_size`."""
    return int(model.config.get_text_config().hidden_size)


def _compare(numbers: Sequence[float], others: Sequence[float]) -> float:
    """The largest difference, as a share of the largest number."""
    largest = max(map(abs, numbers), default=0.0)
    difference = max((abs(one - other) for one, other in zip(numbers, others, strict=True)), default=0.0)
    return difference / largest if largest else difference
