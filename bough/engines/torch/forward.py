"""Calls a transformers model, for its logits or its last hidden state."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from bough.engines.shared.compute import RunResult, tensors_in
from bough.engines.torch.device import device_of
from bough.errors import EngineError


class TorchForward:
    """Calls one model, whatever its family names its cache and whether it has a parameter for positions."""

    def __init__(self, model: Any) -> None:
        names = inspect.signature(model.forward).parameters
        self.model = model
        self.device: torch.device = device_of(model)
        self._cache_name = "cache_params" if "cache_params" in names else "past_key_values"
        self._takes_positions = "position_ids" in names
        self._takes_keep = "logits_to_keep" in names

    def run(self, ids: Sequence[int], num_new: int, cache: Any, result: RunResult, first: int = 0) -> Tensor:
        """Logits or states of the last `num_new` of `ids`, whose positions begin at `first`. All go into the cache."""
        keep = num_new if result is RunResult.ALL_LOGITS else 1
        kwargs = {"logits_to_keep": keep} if self._takes_keep else {}
        return self._run(ids, first, cache, result, num_new, use_cache=cache is not None, **kwargs)[0]

    def continue_cache(self, ids: Sequence[int], first: int, cache: Any, result: RunResult) -> tuple[Tensor, Any]:
        """The same for new tokens only, and the cache that the model made or extended."""
        found, output = self._run(ids, first, cache, result, len(ids), use_cache=True)
        return found, getattr(output, self._cache_name, None)

    def run_anew(self, ids: Sequence[int], num_new: int, result: RunResult) -> Tensor:
        """The same for a whole sequence, without a cache."""
        return self.run(ids, num_new, None, result)

    def cache_bytes(self, cache: Any) -> int:
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors_in(cache, Tensor)}.values())

    @torch.inference_mode()
    def _run(
        self, ids: Sequence[int], first: int, cache: Any, result: RunResult, num_new: int, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        positions = torch.arange(first, first + len(ids), device=self.device)[None]
        with self.watching_head() if result is RunResult.LAST_STATE else nullcontext() as seen:
            output = self.call(self.tensor_of(ids), positions, cache, **kwargs)
        if seen is not None:
            return seen.last, output
        if result is RunResult.ALL_LOGITS:
            return output.logits[0, -num_new:].float(), output
        return self._last(output.logits)[0], output

    @torch.inference_mode()
    def last_logits(self, ids: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """Logits [batch, vocabulary] in float32 after the last of `ids` [batch, run], which go into the cache."""
        return self._last(self.logits(ids, positions, cache, 1))

    @torch.inference_mode()
    def all_logits(self, ids: Tensor, first_positions: Sequence[int]) -> Tensor:
        """Logits [batch, run, vocabulary] in float32 after each of `ids` [batch, run], without a cache.

        `first_positions` are the positions of the first token of each row.
        """
        firsts = torch.tensor(first_positions, device=self.device)[:, None]
        positions = firsts + torch.arange(ids.shape[1], device=self.device)
        logits: Tensor = self.call(ids, positions, None, use_cache=False).logits
        return logits.float()

    def logits(self, ids: Tensor, positions: Tensor, cache: Any, keep: int) -> Tensor:
        """Logits [batch, keep or more, vocabulary] in the model's own type after the last tokens of `ids` [batch, run]."""
        kept = {"logits_to_keep": keep} if self._takes_keep else {}
        logits: Tensor = self.call(ids, positions, cache, use_cache=cache is not None, **kept).logits
        return logits

    def call(self, ids: Tensor, positions: Tensor, cache: Any, **kwargs: Any) -> Any:
        if self._takes_positions:
            kwargs["position_ids"] = positions
        return self.model(input_ids=ids, **{self._cache_name: cache}, **kwargs)

    @property
    def state_size(self) -> int:
        """The length of the head's input; 0 if the model has no head that is known."""
        if (head := self._head) is None:
            return 0
        return int(getattr(head, "in_features", 0) or self.model.config.get_text_config(decoder=True).hidden_size)

    @property
    def _head(self) -> nn.Module | None:
        head = self.model.get_output_embeddings()
        return head if isinstance(head, nn.Module) else None

    @contextmanager
    def watching_head(self) -> Iterator[HeadInput]:
        """Record the head's input while this thread calls the model within this context."""
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
    """The last input of a model's head in the thread that made this: others may use the same model meanwhile."""

    def __init__(self) -> None:
        self._thread_id = threading.get_ident()
        self._states: Tensor | None = None

    def note(self, head: nn.Module, args: tuple[Any, ...]) -> None:
        """Record the input; torch calls this before the head."""
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
