"""One request from its prompt to its last token, as steps that a driver calls.

The driver (`pipeline` for one request, the scheduler for many) calls `begin`, then `advance_loading` while it `is_loading`,
then `prefill_chunk` until `is_prefilled`. Then it samples with `draw`, hands the token to `accept`, and feeds `next_id` to
the lane inside `session.feeding`, until `is_done`. However the request ends, `close` records the work that was done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bough.cache.session import Reuse, ReuseSession
from bough.cache.tree.state import Lane
from bough.engines.contract import Engine, Logits
from bough.errors import PromptTooLong, RequestError
from bough.generate.constraints import Constraint
from bough.generate.loops import CHECK_EVERY, find_cycle
from bough.generate.request import Request, Uniforms, default_max_tokens
from bough.generate.scoring import PromptScorer
from bough.generate.text import AnswerText, Vocabulary
from bough.types import (
    TO_THE_END,
    Chunk,
    Completion,
    Draw,
    FinishReason,
    Sampled,
    Timings,
    TokenCounts,
    TokenLogprob,
    Usage,
)

RESERVE_TOKENS = 1024
"""Tokens that are reserved beyond the prompt at the start. A longer answer reserves more as it grows."""

CHUNK_S = 0.25
CHUNK_BESIDE_OTHERS_S = 0.1  # every token of other requests waits so long
MIN_CHUNK = 128
MIN_CHUNK_BESIDE_OTHERS = 32  # on a slow device a third slower, but the tokens of other requests keep coming
_RATE_WEIGHT = 0.5  # weight of the newest measurement


class ChunkSize:
    """How many tokens the next prefill chunk may have: what the device evaluates in a certain time, or a fixed number.

    Short chunks keep the tokens of other requests coming, and a cancellation is seen soon. Long ones use the device better.
    """

    def __init__(self, fixed: int = 0, *, first: int = 512, largest: int = 8192) -> None:
        self._fixed = fixed
        self._first = min(first, largest)
        self._largest = largest
        self._rate: float | None = None  # tokens a second
        self._waited_rate: float | None = None

    def choose(self, *, beside_others: bool = False) -> int:
        """How many tokens the next chunk may have; fewer on a slow device while other requests decode."""
        if self._fixed:
            return self._fixed
        smallest = MIN_CHUNK_BESIDE_OTHERS if beside_others else MIN_CHUNK
        if self._rate is None:
            return min(self._first, MIN_CHUNK) if beside_others else self._first
        rate = self._rate if self._waited_rate is None else min(self._rate, self._waited_rate)
        wanted = int(rate * (CHUNK_BESIDE_OTHERS_S if beside_others else CHUNK_S))
        return min(self._largest, max(smallest, 1 << max(0, wanted.bit_length() - 1)))  # a power of two

    def measure(self, num_tokens: int, seconds: float) -> None:
        """Update the rate by the time that a chunk took. Very small chunks are ignored."""
        self._rate = _updated(self._rate, num_tokens, seconds)

    def measure_waited(self, num_tokens: int, seconds: float) -> None:
        """Update the rate by the time until what came after a chunk was there, less that of a step.

        On a device that computes beside the host, only this tells how long a chunk takes.
        """
        self._waited_rate = _updated(self._waited_rate, num_tokens, seconds)


def _updated(rate: float | None, num_tokens: int, seconds: float) -> float | None:
    if num_tokens < MIN_CHUNK_BESIDE_OTHERS or seconds <= 0:
        return rate
    newest = num_tokens / seconds
    return newest if rate is None else _RATE_WEIGHT * newest + (1 - _RATE_WEIGHT) * rate


class Generation:
    """The state of one answer while it is generated. The owner must call `close` however it ends."""

    def __init__(
        self,
        engine: Engine,
        request: Request,
        vocabulary: Vocabulary,
        constraint: Constraint | None,
        clock: Callable[[], float],
    ) -> None:
        self.request = request
        self._known_ids = request.known_ids
        self.logits: Logits = None
        self.next_id: int | None = None
        self.finish_reason: FinishReason | None = None
        self._engine = engine
        self._constraint = constraint
        self.clock = clock
        self._eos_ids = frozenset() if request.params.ignore_eos else vocabulary.eos_ids | request.end_ids
        self._text = AnswerText(vocabulary, request.params.stop, strip_leading_space=request.strip_leading_space)
        self._token_ids: list[int] = []
        self._seen = _count_penalised(request)
        self._uniforms = Uniforms(request.seed, request.choice) if request.params.temperature else None
        self._greedy_draw = Draw(request.params, seen=self._seen)  # the same for every token: `_seen` changes in place
        self._logprobs: list[TokenLogprob] = []
        self._state: list[float] = []
        self._scorer = PromptScorer(engine, request, self._text.logprob) if request.scores_prompt else None
        self._looks_for_loops = request.params.loop_guard and not request.params.ignore_eos
        self._cycle_tokens = 0
        self._session: ReuseSession | None = None
        self.is_loading = False  # whether the lane still waits for what is being read from disk
        self.is_prefilled = False  # whether the whole prompt has been evaluated
        self._has_first_token = False  # and its time is noted
        self._timings = Timings()
        self._decode_s = 0.0  # apart from the timings, because every token adds to it
        self._started_s = 0.0
        self._reported = -1  # tokens of the prompt, as the last progress told
        self._max_tokens = self._limit()
        self._room = min(self._max_tokens, RESERVE_TOKENS + len(request.resumed_ids))  # so many are reserved in the lane
        self._replay()

    def _replay(self) -> None:
        """Take up the tokens that were generated before, as if they came now. Their text was delivered then.

        Raises RequestError for one that cannot be part of this answer.
        """
        resumed = self.request.resumed_ids
        for number, token_id in enumerate(resumed):
            if token_id in self._eos_ids or not 0 <= token_id < self._engine.vocab_size:
                raise RequestError(f"resumed_ids[{number}] is {token_id}, which no answer of this model has")
            self._append(token_id)
            self._text.add(token_id)
        if resumed:
            self.finish_reason = self._reason_to_stop()
            if self.finish_reason is not None:
                self._last_chunk("", (), ())

    def _limit(self) -> int:
        """How many tokens may be generated. Raises PromptTooLong if the context has no room for one."""
        room = self._engine.context_tokens - len(self.request.ids)
        wanted = 0 if self.request.wants_state else self.request.params.max_tokens
        if room < (1 if wanted != 0 else 0):
            raise PromptTooLong(len(self.request.ids), self._engine.context_tokens)
        if wanted is None:
            wanted = default_max_tokens(self._engine.context_tokens)
        return room if wanted == TO_THE_END else min(wanted, room)

    def begin(self, reuse: Reuse) -> None:
        """Take a lane that has adopted the known prefix of the prompt, or will when it is read from disk."""
        request = self.request
        self._started_s = self.clock()
        self._session = reuse.begin(
            self._known_ids,
            boundaries=request.boundaries,
            salt=request.salt,
            max_new_tokens=max(0, self._room - len(request.resumed_ids)),
            keep=request.keep,
            store=request.store,
            reuse=not request.scores_prompt,
        )
        self._note_begin(self._session)

    def advance_loading(self) -> None:
        """Take what has been read from disk, if something is missing. A cancelled request ends here instead."""
        if self._ends_if_cancelled():
            return
        self.session.advance_loading()
        self._note_begin(self.session)

    def wait_for_reads(self, timeout_s: float) -> None:
        """Wait until the disk has read something more, or the time is over. Any thread may wait."""
        if self._session is not None:
            self._session.wait_for_reads(timeout_s)

    def _note_begin(self, session: ReuseSession) -> None:
        self.is_loading = session.is_loading
        begin_s = self.clock() - self._started_s
        self._timings = replace(self._timings, begin_s=begin_s, loading=session.loading)
        self._report_progress()

    @property
    def session(self) -> ReuseSession:
        assert self._session is not None, "begin was not called"
        return self._session

    @property
    def lane(self) -> Lane:
        return self.session.lane

    @property
    def done_tokens(self) -> int:
        """How many tokens of the prompt the lane holds, or has been read for it so far."""
        return self.session.loaded_tokens if self.is_loading else self.lane.offset

    @property
    def is_done(self) -> bool:
        return self.finish_reason is not None

    def prefill_chunk(self, size: ChunkSize, *, beside_others: bool = False) -> Chunk | None:
        """Evaluate the next chunk of the prompt and publish it. A cancelled request ends here instead.

        Returns the log-probabilities of its tokens if they were asked for.
        """
        if self._ends_if_cancelled():
            return None
        started_s = self.clock()
        most = size.choose(beside_others=beside_others)
        chunk = self.session.next_chunk(min(most, self._scorer.max_chunk) if self._scorer else most)
        num_scored = len(self.prompt_logprobs)
        with self.session.feeding(chunk):
            self._evaluate(chunk)
        self.session.publish()
        self.is_prefilled = self.lane.offset >= len(self._known_ids)
        seconds = self.clock() - started_s
        if self._scorer is None:  # otherwise it takes longer than usual
            size.measure(len(chunk), seconds)
        self._timings = replace(self._timings, prefill_s=self._timings.prefill_s + seconds)
        self._report_progress()
        if self.is_prefilled and self._max_tokens == 0:
            self.finish_reason = "length"
        scored = tuple(self.prompt_logprobs[num_scored:])
        return Chunk("", prompt_logprobs=scored) if scored else None

    def _evaluate(self, chunk: list[int]) -> None:
        """Feed a chunk to the lane; keeps its logits, or what the request wants instead of them after the last chunk."""
        is_last = self.lane.offset + len(chunk) >= len(self._known_ids)
        if self.request.wants_state and is_last:
            self._state = self._engine.evaluate_state(self.lane, chunk)
        else:
            self.logits = (self._scorer or self._engine).evaluate(self.lane, chunk)

    @property
    def prompt_logprobs(self) -> list[TokenLogprob]:
        """Those of the prompt's tokens from the second on, as far as it is evaluated; none if they were not asked for."""
        return self._scorer.logprobs if self._scorer else []

    def cancel(self) -> None:
        """End the request now, also if it has no lane yet."""
        self.finish_reason = "cancelled"

    def cross_reuse_limit(self) -> None:
        """Evaluate the whole sequence again at the length where its rotary scaling changes, if it has such a length."""
        limit = self._engine.capabilities.reuse_limit
        if limit is None or self.lane.offset != limit:
            return
        self.session.restart()
        ids = [*self.request.ids, *self._token_ids[:-1]]
        with self.session.feeding(ids):
            self._engine.evaluate(self.lane, ids)

    def draw(self) -> Draw:
        """Everything that the choice of the next token depends on besides the logits."""
        if self._uniforms is None and self._constraint is None:
            return self._greedy_draw
        uniform = self._uniforms.at(len(self._token_ids)) if self._uniforms else 0.0
        allowed = self._constraint.allowed() if self._constraint else None
        return Draw(self.request.params, uniform, self._seen, allowed)

    def accept(self, sampled: Sampled) -> Chunk | None:
        """Append the chosen token; returns the text that may be delivered now, if any.

        Afterwards the request is done, or `next_id` must be fed to the lane.
        """
        token_id = sampled.token_id
        if token_id in self._eos_ids:
            self.finish_reason = "stop"
            return self._last_chunk("", (), ())
        self._append(token_id)
        logprobs: tuple[TokenLogprob, ...] = ()
        if sampled.logprob is not None:
            logprobs = (self._text.logprob(sampled),)
            self._logprobs += logprobs
        text = self._text.add(token_id)
        self.finish_reason = self._reason_to_stop()
        if self.finish_reason is not None:
            return self._last_chunk(text, (token_id,), logprobs)
        self.next_id = token_id
        return Chunk(text, (token_id,), logprobs)

    def _append(self, token_id: int) -> None:
        """Make a token part of the answer, and so of what the next one depends on."""
        self._token_ids.append(token_id)
        if self._seen is not None:
            self._seen.add(token_id)
        if self._constraint:
            self._constraint.accept(token_id)

    def note_step(self, seconds: float) -> None:
        """Add the time of the decode step that gave the last accepted token."""
        if self._has_first_token:
            self._decode_s += seconds
        else:
            self._has_first_token = True
            so_far = self._timings.begin_s + self._timings.prefill_s
            self._timings = replace(self._timings, first_token_s=so_far + seconds)
            if self._scorer is None:
                # an asynchronous device finishes the prefill only now
                self.session.note_prefill(self._timings.prefill_s + seconds)

    def _reason_to_stop(self) -> FinishReason | None:
        if self._text.stop is not None or (self._constraint and self._constraint.is_done):
            return "stop"
        num_tokens = len(self._token_ids)
        if num_tokens >= self._max_tokens or (num_tokens >= self._room and not self._reserve_more(num_tokens)):
            return "length"
        if self._looks_for_loops and num_tokens % CHECK_EVERY == 0 and (cycle_tokens := find_cycle(self._token_ids)):
            self._cycle_tokens = cycle_tokens
            return "loop"
        return "cancelled" if self.request.is_cancelled() else None

    def _reserve_more(self, done: int) -> bool:
        """Reserve the lane for more tokens, of a long answer as it grows; if memory is short, for fewer, possibly none."""
        ahead = min(RESERVE_TOKENS, self._max_tokens - done)
        while ahead > 0 and not self.session.reserve(len(self.request.ids) + done + ahead):
            ahead //= 2
        self._room = done + ahead
        return ahead > 0

    def _last_chunk(self, text: str, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> Chunk | None:
        text += self._text.flush()
        if self._text.stop is not None:
            self.finish_reason = "stop"
        return Chunk(text, token_ids, logprobs) if text or token_ids else None

    def _ends_if_cancelled(self) -> bool:
        if self.request.is_cancelled():
            self.cancel()
        return self.is_done

    def _report_progress(self) -> None:
        total = len(self.request.ids)
        if (done := min(self.done_tokens, total)) > self._reported:  # less, if a load was given up
            self._reported = done
            self.request.on_progress(done, total)

    def completion(self) -> Completion:
        """The answer so far, with its usage and timings."""
        assert self.finish_reason is not None
        before_first = self._timings.first_token_s or self._timings.begin_s + self._timings.prefill_s
        timings = replace(self._timings, decode_s=self._decode_s, total_s=before_first + self._decode_s)
        return Completion(
            text=self._text.all,
            token_ids=tuple(self._token_ids),
            finish_reason=self.finish_reason,
            usage=self.usage,
            timings=timings,
            logprobs=tuple(self._logprobs),
            stop=self._text.stop,
            prompt_logprobs=tuple(self.prompt_logprobs),
            cycle_tokens=self._cycle_tokens if self.finish_reason == "loop" else 0,
            embedding=tuple(self._state),
        )

    @property
    def usage(self) -> Usage:
        """How many tokens were found, reused, evaluated and generated so far. Zero before `begin`.

        While the request loads, the tokens that are planned to be reused count as such. If it ends meanwhile, none was.
        Tokens that were generated before are no part of the prompt, whether they were reused or evaluated again.
        """
        prompt_tokens, session = len(self.request.ids), self._session
        if session is None:
            return Usage(prompt_tokens=prompt_tokens)
        cached = 0 if self.is_loading and self.is_done else min(session.cached, prompt_tokens)
        evaluated = 0 if self.is_loading else min(self.lane.offset, prompt_tokens) - cached
        return Usage(
            prompt_tokens=prompt_tokens,
            matched_tokens=min(session.matched, prompt_tokens),
            cached_tokens=cached,
            computed_tokens=evaluated,
            completion_tokens=len(self._token_ids),
        )

    def close(self) -> None:
        """Record what was computed, and make the lane idle."""
        if self._session is not None:
            self._session.close()


def _count_penalised(request: Request) -> TokenCounts | None:
    """The counts of the prompt's tokens that penalties apply to; None if there are no penalties."""
    params = request.params
    return TokenCounts(request.ids, params.repeat_last_n) if params.has_penalties and params.repeat_last_n else None
