"""Calls an mlx-lm model, for its logits or its last hidden state.

A model gives the logits of all positions. Usually only those of the last token are needed, and the head over the whole
vocabulary is a large part of a small model: so the head gets the last position only, unless all are wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from bough.engines.mlx.device import Allocator
from bough.engines.mlx.library import cache as library_cache
from bough.engines.mlx.library import nn
from bough.engines.mlx.loading.model import MlxModel
from bough.engines.shared.compute import RunResult, tensors_in
from bough.errors import EngineError

_HEAD = "_bough_head"


class MlxForward:
    """One model, called the same way whatever its family."""

    def __init__(self, loaded: MlxModel) -> None:
        self.model = loaded.model
        self.config = loaded.config
        self.text = loaded.text
        self._head = _find_head(loaded.model)
        self._allocator = Allocator()

    def last_logits(self, tokens: mx.array, cache: Any) -> mx.array:
        """Logits [batch, vocabulary] in float32 after the last of `tokens` [batch, run], not evaluated yet."""
        with self._head.last_only():
            logits: mx.array = self.model(tokens, cache=cache)
        return logits[:, -1].astype(mx.float32)

    def run(self, ids: Sequence[int], num_new: int, cache: Any, result: RunResult) -> mx.array:
        """Logits or the state of the last `num_new` of `ids`, in float32, not evaluated yet. All go into the cache."""
        tokens = mx.array([list(ids)])
        if result is RunResult.LAST_LOGITS:
            return self.last_logits(tokens, cache)[0]
        if result is RunResult.ALL_LOGITS:
            logits: mx.array = self.model(tokens, cache=cache)
            return logits[0, -num_new:].astype(mx.float32)
        with self._head.last_only():
            self.model(tokens, cache=cache)
            return self._head.take_read().reshape(-1).astype(mx.float32)

    @property
    def state_size(self) -> int:
        """The length of the head's input; 0 if no call of the model has used a head that is known."""
        return self._head.size

    def all_logits(self, ids: Sequence[int], cache: Any = None) -> mx.array:
        """Logits [run, vocabulary] in float32 after each of `ids`, evaluated."""
        logits: mx.array = self.model(mx.array([list(ids)]), cache=cache)[0].astype(mx.float32)
        mx.eval(logits)
        return logits

    def continue_cache(self, ids: Sequence[int], first: int, cache: Any, result: RunResult) -> tuple[mx.array, Any]:
        """The result of `run`, evaluated, and the cache of mlx-lm that was made or extended, which knows its length."""
        cache = self.make_cache() if cache is None else cache
        found = self.run(ids, len(ids), cache, result)
        mx.eval(found, list(tensors_in(cache, mx.array)))
        self._allocator.trim(len(ids))
        return found, cache

    def run_anew(self, ids: Sequence[int], num_new: int, result: RunResult) -> mx.array:
        """The result of `run` for a whole sequence, evaluated, with a fresh cache: some models answer otherwise without."""
        found = self.run(ids, num_new, self.make_cache(), result)
        mx.eval(found)
        self._allocator.trim(len(ids))
        return found

    def cache_bytes(self, cache: Any) -> int:
        return sum({id(array): array.nbytes for array in tensors_in(cache, mx.array)}.values())

    def make_cache(self) -> list[Any]:
        return list(library_cache.make_prompt_cache(self.model))


class Head:
    """The last layer of a model; within `last_only` it sees the last position of a run only.

    `size` is the length of its input; 0 before the first call of the model, and for ever if the layer is not recognised.
    """

    def __init__(self) -> None:
        self.size = 0
        self._is_short = False
        self._read: mx.array | None = None

    @contextmanager
    def last_only(self) -> Iterator[None]:
        self._is_short = True
        try:
            yield
        finally:
            self._is_short, self._read = False, None

    def cut(self, hidden: mx.array) -> mx.array:
        self.size = int(hidden.shape[-1])
        if not self._is_short or hidden.ndim != 3:
            return hidden
        self._read = hidden[:, -1:]
        return self._read

    def take_read(self) -> mx.array:
        """The head's input within `last_only`: [batch, 1, hidden]. Raises EngineError if it was not called."""
        if self._read is None:
            raise EngineError("the model did not call the head that is known, so its last hidden state is not known")
        return self._read


def _find_head(model: Any) -> Head:
    """The `Head` of the model. If its last layer is not recognised, the head changes nothing."""
    head: Head | None = getattr(model, _HEAD, None)
    if head is None:
        head = Head()
        for module in model.modules():
            _wrap_method(module.get("lm_head"), nn.Module, "__call__", head)
            _wrap_method(module, (nn.Embedding, nn.QuantizedEmbedding), "as_linear", head)  # where weights are tied
        object.__setattr__(model, _HEAD, head)
    return head


def _wrap_method(module: Any, kinds: Any, method: str, head: Head) -> None:
    """Let a method of this one module use only the positions that `head` leaves."""
    if isinstance(module, kinds):
        stock = getattr(type(module), method)
        short = {method: lambda self, hidden: stock(self, head.cut(hidden))}
        module.__class__ = type(type(module).__name__, (type(module),), short)
