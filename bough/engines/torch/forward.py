"""How a transformers model is called: which arguments it takes, and where its logits are."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from bough.engines.torch.device import device_of


class Forward:
    """One model, called the same way whatever its family names its cache and whether it takes positions."""

    def __init__(self, model: Any) -> None:
        names = inspect.signature(model.forward).parameters
        self.model = model
        self.device: torch.device = device_of(model)
        self._cache_name = "cache_params" if "cache_params" in names else "past_key_values"
        self._takes_positions = "position_ids" in names
        self._takes_keep = "logits_to_keep" in names

    @torch.inference_mode()
    def last_logits(self, ids: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """Logits [batch, vocabulary] in float32 after the last of `ids` [batch, run]; the cache takes in the run."""
        keep = {"logits_to_keep": 1} if self._takes_keep else {}
        return self._last(self.call(ids, positions, cache, use_cache=cache is not None, **keep).logits)

    @torch.inference_mode()
    def run_logits(self, ids: Tensor, positions: Tensor, cache: Any, run: int) -> Tensor:
        """Logits [run, vocabulary] in float32 after each of the last `run` of `ids` [1, …]; the cache takes all in."""
        keep = {"logits_to_keep": run} if self._takes_keep else {}
        logits: Tensor = self.call(ids, positions, cache, use_cache=cache is not None, **keep).logits
        return logits[0, -run:].float()

    @torch.inference_mode()
    def all_logits(self, ids: Tensor) -> Tensor:
        """Logits [run, vocabulary] in float32 after each of `ids` [1, run], with no cache at all."""
        positions = torch.arange(ids.shape[1], device=self.device)[None]
        logits: Tensor = self.call(ids, positions, None, use_cache=False).logits[0]
        return logits.float()

    @torch.inference_mode()
    def continue_cache(self, ids: Tensor, positions: Tensor, cache: Any, *, keeps_all: bool = False) -> tuple[Tensor, Any]:
        """The last logits [1, vocabulary], or all [run, vocabulary], and the cache that the model made or went on with."""
        output = self.call(ids, positions, cache, use_cache=True)
        logits = output.logits[0].float() if keeps_all else self._last(output.logits)
        return logits, getattr(output, self._cache_name, None)

    def logits(self, ids: Tensor, positions: Tensor, cache: Any, keep: int) -> Tensor:
        """Logits [batch, keep or more, vocabulary] in the model's own type after the last tokens of `ids` [batch, run]."""
        kept = {"logits_to_keep": keep} if self._takes_keep else {}
        logits: Tensor = self.call(ids, positions, cache, use_cache=cache is not None, **kept).logits
        return logits

    def call(self, ids: Tensor, positions: Tensor, cache: Any, **kwargs: Any) -> Any:
        """The model's own output."""
        if self._takes_positions:
            kwargs["position_ids"] = positions
        return self.model(input_ids=ids, **{self._cache_name: cache}, **kwargs)

    def tensor_of(self, ids: Any) -> Tensor:
        """Token ids as one batch entry on the model's device."""
        return torch.tensor([list(ids)], dtype=torch.long, device=self.device)

    def _last(self, logits: Tensor) -> Tensor:
        last = logits[:, -1]
        return last.float() if last.dtype != torch.float32 else last.clone()  # never a view of all positions
