"""A loaded model: it wires cache and generation together, and answers requests.

Several threads may use a runner. One of them at a time runs the engine, and streams take turns between their pieces.
"""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import fields, replace
from types import TracebackType
from typing import Any, Self

from bough.cache.admin.stats import stats
from bough.cache.prefix_cache import PrefixCache
from bough.cache.residency.memory import Tiers
from bough.cache.session import Reuse
from bough.config import Settings
from bough.engines.contract import Engine
from bough.errors import RequestError
from bough.generate.constraints import ConstraintFactory
from bough.generate.generation import ChunkSize, Generation
from bough.generate.pipeline import run_alone
from bough.generate.request import Request, choose_seed
from bough.generate.scheduler import Scheduler
from bough.generate.verifier import Verifier
from bough.generate.worker import Limits, Worker
from bough.models.defaults import ModelDefaults, read_defaults, unset_names
from bough.models.files import ModelFiles
from bough.models.prompts import Encoded, Prompts
from bough.models.tokenizer import Tokenizer
from bough.runner.cache_handle import CacheHandle
from bough.runner.engine_lock import EngineLock
from bough.system.resources import trim_heap
from bough.types import Chunk, Completion, Prompt, SamplingParams

log = logging.getLogger(__name__)

_READ_WAIT_S = 0.01
_MIN_LANES = 4
_TRIM_EVERY_S = 60.0
_LANE_TOKENS = 4_096  # a lane should have memory for so many tokens

_SAMPLING = {each.name for each in fields(SamplingParams)}


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


class Runner:
    """A loaded model with its tree. Use it in a `with` statement, or call `close`."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        settings: Settings,
        files: ModelFiles | None = None,
        tiers: Tiers | None = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.settings = settings
        self.files = files
        self.defaults = _read_defaults(files)
        self._tiers = tiers
        self.prompts = Prompts(tokenizer, engine.vocab_size)
        self._engine_lock = EngineLock()
        self.prefix_cache = self._make_cache()
        self.cache = CacheHandle(self.prefix_cache, self._engine_lock, self.prompts)
        self.reuse: Reuse = self.prefix_cache
        self._vocabulary = _Vocabulary(tokenizer)
        self._constraints = ConstraintFactory(tokenizer.hf, engine.vocab_size, sorted(tokenizer.eos_ids))
        self._chunk_size = ChunkSize(settings.chunk, largest=engine.max_chunk_tokens)
        self._worker: Worker | None = None
        self._trim_at_s = time.monotonic() + _TRIM_EVERY_S
        self._running: set[Generator[Chunk | Completion, None, None]] = set()
        self._is_closed = False

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

    def encode(self, prompt: Prompt, *, raw: bool = False, tools: Any = None, **template_kwargs: Any) -> Encoded:
        """The token ids of a prompt; see `Prompts.encode`."""
        return self.prompts.encode(prompt, raw=raw, tools=tools, **template_kwargs)

    def generate(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Completion:
        """The whole answer. Options are those of `SamplingParams` and of `stream`.

        Without options it is greedy, whatever the model recommends: the same prompt gives the same text.
        """
        return _last(self.stream(prompt, params, **options))

    def model_params(self, **given: Any) -> SamplingParams:
        """The sampling that the model recommends, with the given values instead. Raises RequestError for an invalid one.

        If nothing is known of the model, what is not given is as in `SamplingParams`.
        """
        return self.defaults.fill(self._params(None, given), unset_names(given))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        salt: str = "",
        store: bool = True,
        choice: int = 0,
        prompt_logprobs: bool = False,
        tools: Any = None,
        template_kwargs: dict[str, Any] | None = None,
        is_cancelled: Callable[[], bool] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        **sampling: Any,
    ) -> Iterator[Chunk | Completion]:
        """Yield pieces of the answer, then the same `Completion` that `generate` returns.

        Errors in prompt and options are raised by this call. Those that depend on lanes and memory (LanesBusy, DoesNotFit)
        are raised with the first piece. Stop iterating, or close the iterator, to cancel; the work that was done is kept.
        """
        encoded = self.encode(prompt, raw=raw, tools=tools, **(template_kwargs or {}))
        generation = self.prepare(
            encoded,
            self._params(params, sampling),
            salt=salt,
            store=store,
            choice=choice,
            prompt_logprobs=prompt_logprobs,
            is_cancelled=is_cancelled,
            on_progress=on_progress,
        )
        return self._stream(generation)

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
        is_cancelled: Callable[[], bool] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Generation:
        """Check a request and make its generation, which the caller drives. Raises RequestError or PromptTooLong."""
        if prompt_logprobs and params.logprobs is None:
            raise RequestError("prompt_logprobs needs logprobs: the number of likeliest tokens to tell, from 0 on")
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
            end_ids=encoded.end_ids,
            **{name: hook for name, hook in hooks.items() if hook is not None},
        )
        return self._generation(request)

    def warm(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        salt: str = "",
        tools: Any = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> Completion:
        """Compute a prefix and keep it: it is evicted after everything that was not asked to be kept.

        Messages are kept up to where the next one would begin, a text up to its end.
        """
        template = {"tools": tools, **(template_kwargs or {})}
        encoded = self.prompts.encode_prefix(prompt, raw=raw, **template)
        generation = self.prepare(encoded, SamplingParams(max_tokens=0), salt=salt, keep=True)
        completion = _last(self._stream(generation))
        self.require_kept(encoded.ids, salt)
        return completion

    def require_kept(self, ids: Sequence[int], salt: str) -> None:
        """Raise DoesNotFit if there was no memory to keep a prefix."""
        cache = self.prefix_cache
        with self._engine_lock:
            if cache.is_enabled and not cache.is_kept(ids, salt):
                raise cache.residency.room.refuse(len(ids) * cache.costs.row_bytes + cache.costs.point_bytes(len(ids)))

    def _params(self, params: SamplingParams | None, sampling: dict[str, Any]) -> SamplingParams:
        unknown = sorted(set(sampling) - _SAMPLING)
        if unknown:
            raise RequestError(f"unknown option {', '.join(unknown)}; there are {', '.join(sorted(_SAMPLING))}")
        if params is not None and not isinstance(params, SamplingParams):
            raise RequestError(f"params is a {type(params).__name__}, and must be SamplingParams")
        if params is not None and sampling:
            raise RequestError("give either SamplingParams or single options, not both")
        return params or SamplingParams(**sampling)

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

    def _stream(self, generation: Generation) -> Iterator[Chunk | Completion]:
        steps = run_alone(self.engine, self.reuse, generation, self._chunk_size)
        self._running.add(steps)
        try:
            piece: Chunk | Completion = Chunk("")
            while isinstance(piece, Chunk):
                with self._engine_lock:
                    piece = self._next_piece(steps)
                if not isinstance(piece, Chunk) or piece.text or piece.token_ids or piece.prompt_logprobs:
                    yield piece
                elif generation.is_loading:
                    generation.wait_for_reads(_READ_WAIT_S)  # without the lock: other streams go on
        finally:
            self._running.discard(steps)
            self._engine_lock.close(steps)

    def _next_piece(self, steps: Iterator[Chunk | Completion]) -> Chunk | Completion:
        piece = None if self._is_closed else next(steps, None)
        if piece is None:
            raise RequestError("the runner is closed")
        return piece

    def start_worker(self, limits: Limits | None = None, verify_share: float = 0.0) -> Worker:
        """Start the thread that runs many requests together. It ends when the runner is closed."""
        assert self._worker is None, "there is one engine thread"
        cache = self.prefix_cache
        verifier = Verifier(self.engine, verify_share, random.random, self._generation) if verify_share else None
        scheduler = Scheduler(self.engine, cache, self._chunk_size, time.monotonic, verifier)
        self._worker = Worker(
            scheduler,
            self._engine_lock,
            limits or Limits(),
            take_stats=lambda: {**stats(cache.forest, cache.residency), **(verifier.stats() if verifier else {})},
            on_idle=self._tidy,
        )
        run_in_slices = self._worker.run_in_slices
        self.cache = CacheHandle(cache, self._engine_lock, self.prompts, lambda start: run_in_slices(start).result())
        return self._worker

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
        """End the running requests and release the model's memory. A second call does nothing."""
        if self._worker is not None:
            self._worker.close()
        with self._engine_lock:
            if self._is_closed:
                return
            self._is_closed = True
            for steps in list(self._running):
                steps.close()
            self.prefix_cache.close()
            self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


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


def _last(pieces: Iterator[Chunk | Completion]) -> Completion:
    """The completion that ends a stream."""
    for piece in pieces:
        if isinstance(piece, Completion):
            return piece
    raise AssertionError("a stream ends with its completion")
