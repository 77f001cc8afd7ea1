"""How a transformers model is called: which arguments it takes, and where its logits and its last hidden state are."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bough.engines.torch.device import device_of
from bough.errors import EngineError


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

    @property
    def state_size(self) -> int:
        """How many numbers the head reads of each token; 0 if the model has no head that is known."""
        head = self._head
        if head is None:
            return 0
        return int(getattr(head, "in_features", 0) or self.model.config.get_text_config(decoder=True).hidden_size)

    @property
    def _head(self) -> nn.Module | None:
        head = self.model.get_output_embeddings()
        return head if isinstance(head, nn.Module) else None

    @contextmanager
    def watching_head(self) -> Iterator[HeadInput]:
        """Keep what the head reads while this thread calls the model inside this context."""
        head = self._head
        assert head is not None, "the model has no head that is known"
        seen = HeadInput()
        hook = head.register_forward_pre_hook(seen.note)
        try:
            yield seen
        finally:
            hook.remove()

    def tensor_of(self, ids: Any) -> Tensor:
        """Token ids as one batch entry on the model's device."""
        return torch.tensor([list(ids)], dtype=torch.long, device=self.device)

    def _last(self, logits: Tensor) -> Tensor:
        last = logits[:, -1]
        return last.float() if last.dtype != torch.float32 else last.clone()  # never a view of all positions


class HeadInput:
    """What the head of a model has read last, in the thread that made this: others may use the same model meanwhile."""

    def __init__(self) -> None:
        self._thread_id = threading.get_ident()
        self._states: Tensor | None = None

    def note(self, head: nn.Module, args: tuple[Any, ...]) -> None:
        """Keep what the head is given. torch calls it before the head."""
        if args and threading.get_ident() == self._thread_id:
            hidden: Tensor = args[0]
            self._states = hidden.reshape(-1, hidden.shape[-1])

    @property
    def states(self) -> Tensor:
        """The hidden states [tokens, hidden], in the model's own type. Raises EngineError if the head was not called."""
        if self._states is None:
            raise EngineError("the model did not call its head as a module, so its last hidden state is not known")
        return self._states

    @property
    def last(self) -> Tensor:
        """The hidden state [hidden] of the last token, in float32. Raises EngineError if the head was not called."""
        return self.states[-1].to(torch.float32, copy=True)
