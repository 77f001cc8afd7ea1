"""The runtime of a loaded model: engine, tokenizer, cache and the engine's thread, wired together.

The server and the library both run requests with it: they encode a prompt, `prepare` a generation, and submit it to the
`worker`, the only thread that uses engine and tree. The worker starts when it is first needed. Before that, a benchmark may
drive the engine itself.
"""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from bough.cache.admin.stats import stats
from bough.cache.prefix_cache import PrefixCache
from bough.cache.residency.memory import Tiers
from bough.config import Settings
from bough.engines.contract import Engine
from bough.errors import RequestError
from bough.generate.constraints import ConstraintFactory
from bough.generate.generation import ChunkSize, Generation
from bough.generate.request import Request, choose_seed
from bough.models.defaults import ModelDefaults, read_defaults
from bough.models.files import ModelFiles
from bough.models.prompts import Encoded, Prompts
from bough.models.tokenizer import Tokenizer
from bough.runtime.cache_handle import CacheHandle
from bough.runtime.embedding import Embedder
from bough.runtime.engine_thread import EngineThread
from bough.runtime.lane_embedder import LaneEmbedder
from bough.scheduling.scheduler import Scheduler
from bough.scheduling.verifier import Verifier
from bough.scheduling.worker import Limits, Worker
from bough.system.resources import trim_heap
from bough.types import SamplingParams

log = logging.getLogger(__name__)

_MIN_LANES = 4
_TRIM_EVERY_S = 60.0
_LANE_TOKENS = 4_096  # a lane should have memory for so many tokens


class _Vocabulary:
    """The tokenizer for generation: special tokens have no text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}  # at most the vocabulary
        self.eos_ids = tokenizer.eos_ids

    def token_bytes(self, token_id: int) -> bytes:
        known = self._known.get(token_id)
        return self._find_bytes(token_id) if known is None else known

    def _find_bytes(self, token_id: int) -> bytes:
        is_special = token_id in self._tokenizer.special_ids
        known = self._known[token_id] = b"" if is_special else self._tokenizer.token_bytes(token_id)
        return known


class Runtime:
    """A loaded model with its tree. Close it, however its use ends."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        settings: Settings,
        files: ModelFiles | None = None,
        tiers: Tiers | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.settings = settings
        self.files = files
        self.limits = limits or Limits(stuck_s=settings.watchdog)
        self.defaults = _read_defaults(files)
        self._tiers = tiers
        self.prompts = Prompts(tokenizer, engine.vocab_size)
        self.user_prompts = self.prompts.writing_tools()  # of messages and tools as users of the library give them
        self.prefix_cache = self._make_cache()
        self.chunk_size = ChunkSize(settings.chunk, largest=engine.max_chunk_tokens)
        self._vocabulary = _Vocabulary(tokenizer)
        self._constraints = ConstraintFactory(tokenizer.hf, engine.vocab_size, sorted(tokenizer.eos_ids))
        self._thread = EngineThread(self._make_worker, self._release)
        self._trim_at_s = time.monotonic() + _TRIM_EVERY_S

    def _make_cache(self) -> PrefixCache:
        can = self.engine.capabilities
        budget_bytes = self.settings.device_memory or self.engine.default_budget_bytes()
        self.engine.limit_device(budget_bytes)
        cache = PrefixCache(
            self.engine,
            [self.engine.make_lane() for _ in range(self.settings.lanes or _num_lanes(self.engine, budget_bytes))],
            budget_bytes=budget_bytes,
            keeps_on_device=self.settings.device_memory != 0,
            is_enabled=self.settings.cache and can.can_reuse,
            can_chunk=can.can_chunk,
            reuse_limit=can.reuse_limit,
            tiers=self._tiers,
            salt_share=self.settings.salt_share,
            ttl_s=self.settings.disk_ttl,
        )
        if cache.memory.disk is not None:
            cache.restore()
        return cache

    def prepare(
        self,
        encoded: Encoded,
        params: SamplingParams,
        *,
        salt: str = "",
        store: bool = True,
        keep: bool = False,
        choice: int = 0,
        prompt_logprobs: bool = False,
        wants_state: bool = False,
        resumed_ids: Sequence[int] = (),
        is_cancelled: Callable[[], bool] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Generation:
        """Check a request and make its generation, which the caller drives. Raises RequestError or PromptTooLong.

        With `wants_state` nothing is generated: the completion has the last hidden state after the prompt. With
        `resumed_ids` an answer goes on that was begun before: they are what was generated of it, and `params` need the seed
        that it had.
        """
        if prompt_logprobs and params.logprobs is None:
            raise RequestError("prompt_logprobs needs logprobs: the number of likeliest tokens to tell, from 0 on")
        if wants_state:
            self._require_state(prompt_logprobs=prompt_logprobs)
        if resumed_ids and (wants_state or prompt_logprobs):
            raise RequestError("an answer that goes on scores no prompt and has no embedding: these come before its tokens")
        params = self._apply_settings(params)
        hooks: dict[str, Any] = {"is_cancelled": is_cancelled, "on_progress": on_progress}
        request = Request(
            encoded.ids,
            params,
            encoded.boundaries,
            salt=salt,
            seed=choose_seed(params.seed, secrets.randbits),
            choice=choice,
            store=store,
            keep=keep,
            strip_leading_space=encoded.is_chat and self.tokenizer.strips_leading_space,
            scores_prompt=prompt_logprobs,
            wants_state=wants_state,
            end_ids=encoded.end_ids,
            resumed_ids=tuple(resumed_ids),
            **{name: hook for name, hook in hooks.items() if hook is not None},
        )
        return self._generation(request)

    def _require_state(self, *, prompt_logprobs: bool) -> None:
        if not self.engine.state_size:
            raise RequestError(f"{self.name} has no embeddings: {self.engine.info.model} has no output layer that is known")
        if prompt_logprobs:
            raise RequestError("a request has either prompt_logprobs or an embedding, not both")

    def require_kept(self, ids: Sequence[int], salt: str) -> None:
        """Raise DoesNotFit if there was no memory to keep a prefix. Only the engine's thread may call this."""
        cache = self.prefix_cache
        if cache.is_enabled and not cache.is_kept(ids, salt):
            raise cache.residency.room.refuse(len(ids) * cache.costs.row_bytes + cache.costs.point_bytes(len(ids)))

    def _apply_settings(self, params: SamplingParams) -> SamplingParams:
        """The parameters with the limit of the settings where they have none, and without the loop guard if that is off."""
        changes: dict[str, Any] = {}
        if params.max_tokens is None and self.settings.max_tokens:
            changes["max_tokens"] = self.settings.max_tokens
        if params.loop_guard and not self.settings.loop_guard:
            changes["loop_guard"] = False
        return replace(params, **changes) if changes else params

    def _generation(self, request: Request) -> Generation:
        if not request.ids:
            raise RequestError("the prompt has 0 tokens, and needs at least 1")
        if not isinstance(request.salt, str):
            raise RequestError(f"salt is {request.salt!r}, and must be a text")
        if not request.salt.isprintable() and not _is_text(request.salt):
            raise RequestError(f"salt is {request.salt!r}, and must be valid Unicode")
        if request.params.format is not None and not self.tokenizer.has_text:
            raise RequestError("structured output needs a tokenizer, and this model has none")
        _check_bias(request.params, self.engine.vocab_size)
        constraint = self._constraints.make(request.params.format)
        return Generation(self.engine, request, self._vocabulary, constraint, time.perf_counter)

    @property
    def name(self) -> str:
        """The model's name; of a model without files, its architecture."""
        return self.files.name if self.files is not None else self.engine.info.model

    @property
    def worker(self) -> Worker:
        """The engine's thread, which runs many requests together. It starts at the first use."""
        return self._thread.worker

    def require_open(self) -> None:
        """Raise RequestError if the runtime is closed, or was loaded by the process of which this is a fork."""
        self._thread.require_open()

    def _make_worker(self) -> Worker:
        cache, share = self.prefix_cache, self.settings.verify_cache
        verifier = Verifier(self.engine, share, random.random, self._generation) if share else None
        return Worker(
            Scheduler(self.engine, cache, self.chunk_size, time.monotonic, verifier),
            self.limits,
            take_stats=lambda: {**stats(cache.forest, cache.residency), **(verifier.stats() if verifier else {})},
            on_idle=self._tidy,
            on_close=self._release,
        )

    @cached_property
    def cache(self) -> CacheHandle:
        """What can be seen of the tree, and done with it."""
        return CacheHandle(self.prefix_cache, self.user_prompts, self.worker)

    @cached_property
    def embedder(self) -> Embedder:
        """What turns texts into vectors, by the last hidden state of this model. Raises RequestError if it has none."""
        self._require_state(prompt_logprobs=False)
        return LaneEmbedder(self.engine, self.prompts, self.prepare, lambda job: self.worker.submit(job))

    def _tidy(self) -> bool:
        """Work for an idle engine thread: drop expired state, and from time to time return free memory to the system.

        Returns whether there is more to do.
        """
        self.prefix_cache.finisher.clear_device()
        if time.monotonic() >= self._trim_at_s:
            self._trim_at_s = time.monotonic() + _TRIM_EVERY_S
            trim_heap()
        return self.prefix_cache.residency.expiry.expire()

    def close(self) -> None:
        """End the running requests, save the tree and release the model's memory. A second call does nothing.

        In a forked process it does nothing either: what was loaded belongs to the process that loaded it.
        """
        self._thread.close()

    def close_soon(self) -> None:
        """Close without waiting. A finalizer may call this."""
        self._thread.close_soon()

    def _release(self) -> None:
        self.prefix_cache.close()
        self.engine.close()


def _read_defaults(files: ModelFiles | None) -> ModelDefaults:
    """The sampling that a model recommends. Values that cannot be used are logged."""
    defaults = ModelDefaults() if files is None else read_defaults(files)
    for problem in defaults.problems:
        log.warning("%s; it is ignored", problem)
    return defaults


def _num_lanes(engine: Engine, budget_bytes: int) -> int:
    """The default number of lanes: as many as half the budget holds with `_LANE_TOKENS` each, within limits."""
    most = 8 if engine.info.is_on_cpu else 32
    lane_bytes = sum(group.bytes_per_token * _LANE_TOKENS + group.state_bytes for group in engine.groups)
    return max(_MIN_LANES, min(most, budget_bytes // (2 * lane_bytes))) if lane_bytes else _MIN_LANES


def _check_bias(params: SamplingParams, vocab_size: int) -> None:
    wrong = next((token_id for token_id, _ in params.logit_bias if token_id >= vocab_size), None)
    if wrong is not None:
        raise RequestError(f"logit_bias has the token id {wrong}, which is outside the vocabulary of {vocab_size}")


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
