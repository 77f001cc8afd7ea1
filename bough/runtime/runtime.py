"""The runtime of a loaded model: engine, tokenizer, cache and the engine's thread, wired together.

The server and the library both make a request of what a client asks (`bough/prompting`), `prepare` its job, and submit it
to the `worker`, the only thread that uses engine and tree. Before the worker starts, a benchmark may drive the engine.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from functools import cached_property, lru_cache

from bough.cache.admin.stats import stats
from bough.cache.prefix_cache import PrefixCache
from bough.cache.residency.memory import Tiers
from bough.config import Settings
from bough.engines.contract import Engine
from bough.errors import RequestError
from bough.generate.constraints import ConstraintFactory
from bough.generate.generation import AnswerLimits, ChunkSize
from bough.generate.request import Request
from bough.models.defaults import read_defaults
from bough.models.files import ModelFiles
from bough.models.prompts import Prompts
from bough.models.tokenizer import Tokenizer
from bough.prompting.prompt import ModelFacts
from bough.runtime.cache_handle import CacheHandle
from bough.runtime.embedding import Embedder, LaneEmbedder
from bough.runtime.engine_thread import EngineOwner
from bough.sampling_params import ModelDefaults
from bough.scheduling.job import Job, Listener
from bough.scheduling.scheduler import Scheduler
from bough.scheduling.verifier import Verifier
from bough.scheduling.worker import Limits, Worker
from bough.system.resources import trim_heap
from bough.tokens import Tokens

log = logging.getLogger(__name__)

_MIN_LANES = 4
_TRIM_EVERY_S = 60.0
_LANE_TOKENS = 4_096  # a lane should have memory for these


class _Vocabulary:
    """The tokenizer for generation: special tokens have no text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special_ids, find = tokenizer.special_ids, tokenizer.token_bytes
        self.eos_ids = tokenizer.eos_ids
        self.strips_leading_space = tokenizer.strips_leading_space
        self.token_bytes = lru_cache(None)(lambda token_id: b"" if token_id in special_ids else find(token_id))


class Runtime(EngineOwner):
    """A loaded model with its tree."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        settings: Settings,
        files: ModelFiles | None = None,
        tiers: Tiers | None = None,
        limits: Limits | None = None,
    ) -> None:
        super().__init__()
        self.engine = engine
        self.tokenizer = tokenizer
        self.settings = settings
        self.files = files
        self.limits = limits or Limits()
        self.defaults = ModelDefaults() if files is None else read_defaults(files)
        for problem in self.defaults.problems:
            log.warning("%s; it is ignored", problem)
        self._tiers = tiers
        self.prompts = Prompts(tokenizer, engine.vocab_size)
        self.facts = ModelFacts(self.name, self.prompts, engine.context_tokens, settings.max_tokens, self.defaults)
        self.prefix_cache = self._make_cache()
        self.chunk_size = ChunkSize(settings.chunk, largest=engine.max_chunk_tokens)
        self._vocabulary = _Vocabulary(tokenizer)
        self._constraints = ConstraintFactory(tokenizer.hf, engine.vocab_size, sorted(tokenizer.eos_ids))
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
        self, request: Request, listener: Listener = lambda news: None, asks_to_end: Callable[[], bool] = lambda: False
    ) -> Job:
        """Check a request and make its job, which the worker or the caller drives. Raises RequestError or PromptTooLong.

        A request with `resumed_ids` needs the seed of its first part.
        """
        self._check(request)
        wanted = request.params.format
        return Job(
            self.engine,
            request,
            self._vocabulary,
            None if wanted is None else self._constraints.make(wanted),
            time.perf_counter,
            listener,
            limits=AnswerLimits(self.settings.max_tokens, self.settings.loop_guard),
            asks_to_end=asks_to_end,
        )

    def _check(self, request: Request) -> None:
        """Raise RequestError for a request that this model cannot compute, or that no caller should make."""
        if not request.tokens:
            raise RequestError("the prompt has 0 tokens, and needs at least 1")
        if not isinstance(request.salt, str):
            raise RequestError(f"salt is {request.salt!r}, and must be a text")
        try:
            request.salt.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"salt is {request.salt!r}, and must be valid Unicode") from error
        if request.scores_prompt and request.params.logprobs is None:
            raise RequestError("prompt_logprobs needs logprobs: the number of likeliest tokens to tell, from 0 on")
        if request.wants_state:
            self._require_state(prompt_logprobs=request.scores_prompt)
        if request.resumed_ids and (request.wants_state or request.scores_prompt):
            raise RequestError("an answer that goes on scores no prompt and has no embedding: these come before its tokens")
        if request.params.format is not None and not self.tokenizer.has_text:
            raise RequestError("structured output needs a tokenizer, and this model has none")
        vocab_size = self.engine.vocab_size
        wrong = next((token_id for token_id, _ in request.params.logit_bias if token_id >= vocab_size), None)
        if wrong is not None:
            raise RequestError(f"logit_bias has the token id {wrong}, which is outside the vocabulary of {vocab_size}")

    def submit(self, prepared: object) -> None:
        """Queue a job that was prepared here; the worker must run. Raises ShuttingDown, EngineStuck or QueueFull."""
        assert isinstance(prepared, Job) and self._worker is not None
        self._worker.submit(prepared)

    @property
    def stores_answers(self) -> bool:
        """Whether the state of answers is kept for reuse."""
        return self.prefix_cache.is_enabled

    def _require_state(self, *, prompt_logprobs: bool) -> None:
        if not self.engine.state_size:
            raise RequestError(f"{self.name} has no embeddings: {self.engine.info.model} has no output layer that is known")
        if prompt_logprobs:
            raise RequestError("a request has either prompt_logprobs or an embedding, not both")

    def require_kept(self, prefix: Tokens, salt: str) -> None:
        """Raise DoesNotFit if there was no memory to keep a prefix. Only the engine's thread may call this."""
        cache = self.prefix_cache
        if cache.is_enabled and not cache.is_kept(prefix.key, salt):
            raise cache.residency.room.refuse(len(prefix) * cache.memory.row_bytes + cache.memory.point_bytes(len(prefix)))

    @property
    def name(self) -> str:
        """The model's name; of a model without files, its architecture."""
        return self.files.name if self.files is not None else self.engine.info.model

    def _make_worker(self) -> Worker:
        cache, share = self.prefix_cache, self.settings.verify_cache
        verifier = Verifier(self.engine, share, random.random, self.prepare) if share else None
        return Worker(
            Scheduler(self.engine, cache, self.chunk_size, time.monotonic, verifier),
            self.limits,
            take_stats=lambda: {
                **stats(cache.forest, cache.residency),
                "clipped_numbers": self.engine.num_clipped,
                **(verifier.stats() if verifier else {}),
            },
            on_idle=self._tidy,
            on_close=self._release,
        )

    @cached_property
    def cache(self) -> CacheHandle:
        """Access to the tree for users of the library."""
        return CacheHandle(self.prefix_cache, self.facts, self.worker)

    @cached_property
    def embedder(self) -> Embedder:
        """Turns texts into vectors by the last hidden state. Raises RequestError if the model has none."""
        self._require_state(prompt_logprobs=False)
        return LaneEmbedder(self.engine, self.prompts, self.prepare, lambda job: self.worker.submit(job))

    def _tidy(self) -> bool:
        """Drop expired state, and now and then return free memory to the system; returns whether there is more to do."""
        self.prefix_cache.finisher.clear_device()
        if time.monotonic() >= self._trim_at_s:
            self._trim_at_s = time.monotonic() + _TRIM_EVERY_S
            trim_heap()
        return self.prefix_cache.residency.expiry.expire()

    def _release(self) -> None:
        self.prefix_cache.upkeep.close()
        self.engine.close()


def _num_lanes(engine: Engine, budget_bytes: int) -> int:
    """As many lanes as half the budget holds with `_LANE_TOKENS` each, within limits."""
    most = 8 if engine.info.is_on_cpu else 32
    lane_bytes = sum(group.bytes_per_token * _LANE_TOKENS + group.state_bytes for group in engine.groups)
    return max(_MIN_LANES, min(most, budget_bytes // (2 * lane_bytes))) if lane_bytes else _MIN_LANES
