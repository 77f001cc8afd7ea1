"""One request from its prompt to its last token, as steps that a driver calls.

The driver, such as the scheduler, calls `begin`, then `advance_loading` while it `is_loading`, then `prefill_chunk` until
`is_prefilled`. Then it samples with `draw`, hands the token to `accept`, and feeds `next_id` to the lane inside
`session.feeding`, until `is_done`. However the request ends, `close` records the work that was done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from bough.cache.tree.state import Lane
from bough.engines.contract import Engine, Logits
from bough.errors import PromptTooLong, RequestError
from bough.generate.constraints import Constraint
from bough.generate.loops import CHECK_EVERY, find_cycle
from bough.generate.request import Request, Uniforms, default_max_tokens
from bough.generate.reuse import Reuse, ReuseSession
from bough.generate.scoring import PromptScorer
from bough.generate.text import AnswerText, Vocabulary
from bough.sampling_params import TO_THE_END
from bough.tokens import Tokens
from bough.types import Chunk, Completion, Draw, FinishReason, SampledToken, Timings, TokenCounts, TokenLogprob, Usage

RESERVE_TOKENS = 1024
"""Tokens reserved beyond the prompt at the start. A longer answer reserves more as it grows."""

CHUNK_S = 0.25
CHUNK_BESIDE_OTHERS_S = 0.1  # every token of other requests waits this long
MIN_CHUNK = 128
MIN_CHUNK_BESIDE_OTHERS = 32  # on a slow device a third slower, but the tokens of other requests keep coming
_RATE_WEIGHT = 0.5  # weight of the newest measurement


class ChunkSize:
    """The most tokens of the next prefill chunk: what the device evaluates in a certain time, or a fixed number.

    Short chunks delay other requests and cancellations less; long ones use the device better.
    """

    def __init__(self, fixed: int = 0, *, first: int = 512, largest: int = 8192) -> None:
        self._fixed = fixed
        self._first = min(first, largest)
        self._largest = largest
        self._rate: float | None = None  # tokens a second
        self._waited_rate: float | None = None

    def choose(self, *, beside_others: bool = False) -> int:
        """The most tokens of the next chunk; fewer on a slow device while other requests decode."""
        if self._fixed:
            return self._fixed
        smallest = MIN_CHUNK_BESIDE_OTHERS if beside_others else MIN_CHUNK
        if self._rate is None:
            return min(self._first, MIN_CHUNK) if beside_others else self._first
        rate = self._rate if self._waited_rate is None else min(self._rate, self._waited_rate)
        wanted = int(rate * (CHUNK_BESIDE_OTHERS_S if beside_others else CHUNK_S))
        return min(self._largest, max(smallest, 1 << max(0, wanted.bit_length() - 1)))  # a power of two

    def measure(self, num_tokens: int, seconds: float) -> None:
        """Update the rate by the time of one chunk; a very small one is ignored."""
        self._rate = _updated(self._rate, num_tokens, seconds)

    def measure_waited(self, num_tokens: int, seconds: float) -> None:
        """Update the rate by the time to the result after a chunk, less a step: all that an asynchronous device shows."""
        self._waited_rate = _updated(self._waited_rate, num_tokens, seconds)


def _updated(rate: float | None, num_tokens: int, seconds: float) -> float | None:
    if num_tokens < MIN_CHUNK_BESIDE_OTHERS or seconds <= 0:
        return rate
    newest = num_tokens / seconds
    return newest if rate is None else _RATE_WEIGHT * newest + (1 - _RATE_WEIGHT) * rate


@dataclass(frozen=True)
class AnswerLimits:
    """Limits of all answers: the most tokens of one without its own limit (0: by the context), and the end of loops."""

    max_tokens: int = 0
    guards_loops: bool = True


NO_LIMITS = AnswerLimits()


class Generation:
    """One answer while it is generated. The owner must call `close`, however it ends.

    `asks_to_end` is called between chunks and steps.
    """

    def __init__(
        self,
        engine: Engine,
        request: Request,
        vocabulary: Vocabulary,
        constraint: Constraint | None,
        clock: Callable[[], float],
        *,
        limits: AnswerLimits = NO_LIMITS,
        asks_to_end: Callable[[], bool] = lambda: False,
    ) -> None:
        self.request = request
        self._asks_to_end = asks_to_end
        self._was_cancelled = False
        self.known = request.known
        self.logits: Logits = None
        self.next_id: int | None = None
        self.finish_reason: FinishReason | None = None
        self._engine = engine
        self._constraint = constraint
        self.clock = clock
        params = request.params
        self._eos_ids = frozenset() if params.ignore_eos else vocabulary.eos_ids | request.end_ids
        strips = request.is_chat and vocabulary.strips_leading_space
        self._text = AnswerText(vocabulary, params.stop, strip_leading_space=strips)
        self._token_ids: list[int] = []
        is_penalised = params.has_penalties and params.repeat_last_n
        self._seen = TokenCounts(request.tokens, params.repeat_last_n) if is_penalised else None
        self._uniforms = Uniforms(request.seed, request.choice) if params.temperature else None
        self._greedy_draw = Draw(params, seen=self._seen)  # the same for every token: `_seen` changes in place
        self._logprobs: list[TokenLogprob] = []
        self._state: list[float] = []
        self._scorer = PromptScorer(engine, request, self._text.logprob) if request.scores_prompt else None
        self._looks_for_loops = limits.guards_loops and params.loop_guard and not params.ignore_eos
        self._cycle_tokens = 0
        self._session: ReuseSession | None = None
        self._is_loading = False
        self.is_prefilled = False  # whether the whole prompt has been evaluated
        self._has_first_token = False  # and its time is noted
        self._timings = Timings()
        self._decode_s = 0.0  # apart from the timings, because every token adds to it
        self._started_s = 0.0
        self._reported = -1  # tokens of the prompt in the last progress
        self._max_tokens = self._limit(limits.max_tokens)
        self._room = min(self._max_tokens, RESERVE_TOKENS + len(request.resumed_ids))  # reserved in the lane
        self._replay()

    def _replay(self) -> None:
        """Accept tokens that were generated and delivered before. Raises RequestError for an impossible one."""
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

    def _limit(self, default: int) -> int:
        """The most tokens that may be generated. Raises PromptTooLong if the context has no room for one."""
        room = self._engine.context_tokens - len(self.request.tokens)
        wanted = 0 if self.request.wants_state else self.request.params.max_tokens
        if room < (wanted != 0):
            raise PromptTooLong(len(self.request.tokens), self._engine.context_tokens)
        if wanted is None:
            wanted = default or default_max_tokens(self._engine.context_tokens)
        return room if wanted == TO_THE_END else min(wanted, room)

    def begin(self, reuse: Reuse) -> None:
        """Get a lane that has adopted the known prefix of the prompt, or will when it is read from disk."""
        request = self.request
        self._started_s = self.clock()
        self._session = reuse.begin(
            self.known,
            boundaries=request.boundaries,
            salt=request.salt,
            max_new_tokens=max(0, self._room - len(request.resumed_ids)),
            keep=request.keep,
            keep_state=request.keep_state,
            reuse=not request.scores_prompt,
        )
        self._note_begin()

    def advance_loading(self) -> None:
        """Adopt content that has been read from disk. A cancelled request ends here instead."""
        if self._ends_if_cancelled():
            return
        self.session.advance_loading()
        self._note_begin()

    def wait_for_reads(self, timeout_s: float) -> None:
        """Wait until more has been read from disk, or the time is over. Any thread may wait."""
        if self._session is not None:
            self._session.wait_for_reads(timeout_s)

    def _note_begin(self) -> None:
        self._is_loading = self.session.is_loading
        begin_s = self.clock() - self._started_s
        self._timings = replace(self._timings, begin_s=begin_s, loading=self.session.loading)
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
        """The tokens of the prompt that the lane holds, or that have been read for it so far."""
        return self.session.loaded_tokens if self._is_loading else self.lane.offset

    @property
    def is_done(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_loading(self) -> bool:
        """Whether the lane still waits for what is being read from disk."""
        return self._is_loading and not self.is_done

    @property
    def is_cancelled(self) -> bool:
        return self._was_cancelled or self._asks_to_end()

    def cancel(self) -> None:
        """End the answer soon, keeping what was computed. Any thread may call this; a second call does nothing."""
        self._was_cancelled = True

    def prefill_chunk(self, size: ChunkSize, *, beside_others: bool = False) -> Chunk | None:
        """Evaluate and publish the next chunk, unless cancelled; return its log-probabilities if they were asked for."""
        if self._ends_if_cancelled():
            return None
        started_s = self.clock()
        most = size.choose(beside_others=beside_others)
        chunk = self.session.next_chunk(min(most, self._scorer.max_chunk) if self._scorer else most)
        num_scored = len(self.prompt_logprobs)
        with self.session.feeding(chunk):
            self._evaluate(chunk.ids)
        self.session.publish()
        self.is_prefilled = self.lane.offset >= len(self.known)
        seconds = self.clock() - started_s
        if self._scorer is None:  # otherwise it takes longer than usual
            size.measure(len(chunk), seconds)
        self._timings = replace(self._timings, prefill_s=self._timings.prefill_s + seconds)
        self._report_progress()
        if self.is_prefilled and self._max_tokens == 0:
            self.finish_reason = "length"
        scored = tuple(self.prompt_logprobs[num_scored:])
        return Chunk("", prompt_logprobs=scored) if scored else None

    def _evaluate(self, ids: list[int]) -> None:
        is_last = self.lane.offset + len(ids) >= len(self.known)
        if self.request.wants_state and is_last:
            self._state = self._engine.evaluate_state(self.lane, ids)
        else:
            self.logits = (self._scorer or self._engine).evaluate(self.lane, ids)

    @property
    def prompt_logprobs(self) -> list[TokenLogprob]:
        """Those of the prompt's tokens from the second on, as far as it is evaluated; empty if they were not asked for."""
        return self._scorer.logprobs if self._scorer else []

    def end_cancelled(self) -> None:
        """End the answer now."""
        self.finish_reason = "cancelled"

    def cross_reuse_limit(self) -> None:
        """Evaluate the whole sequence again at the length where its rotary scaling changes, if there is one."""
        limit = self._engine.capabilities.reuse_limit
        if limit is None or self.lane.offset != limit:
            return
        self.session.restart()
        tokens = self.request.tokens + Tokens.of(self._token_ids[:-1])
        with self.session.feeding(tokens):
            self._engine.evaluate(self.lane, tokens.ids)

    def draw(self) -> Draw:
        """What the choice of the next token depends on besides the logits."""
        if self._uniforms is None and self._constraint is None:
            return self._greedy_draw
        uniform = self._uniforms.at(len(self._token_ids)) if self._uniforms else 0.0
        allowed = self._constraint.allowed() if self._constraint else None
        return Draw(self.request.params, uniform, self._seen, allowed)

    def accept(self, sampled: SampledToken) -> Chunk | None:
        """Append the chosen token; return the text to deliver. Then the request is done, or `next_id` must be fed."""
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
        if self.is_done:
            return self._last_chunk(text, (token_id,), logprobs)
        self.next_id = token_id
        return Chunk(text, (token_id,), logprobs)

    def _append(self, token_id: int) -> None:
        self._token_ids.append(token_id)
        if self._seen is not None:
            self._seen.add(token_id)
        if self._constraint:
            self._constraint.accept(token_id)

    def note_step(self, seconds: float) -> None:
        """Add the time of the decode step of the last accepted token."""
        if self._has_first_token:
            self._decode_s += seconds
        else:
            self._has_first_token = True
            so_far = self._timings.begin_s + self._timings.prefill_s
            self._timings = replace(self._timings, first_token_s=so_far + seconds)
            if self._scorer is None:  # an asynchronous device finishes the prefill only now
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
        return "cancelled" if self.is_cancelled else None

    def _reserve_more(self, done: int) -> bool:
        """Reserve the lane for more tokens; if memory is short, for fewer. Returns False if there is room for none."""
        ahead = min(RESERVE_TOKENS, self._max_tokens - done)
        while ahead > 0 and not self.session.reserve(len(self.request.tokens) + done + ahead):
            ahead //= 2
        self._room = done + ahead
        return ahead > 0

    def _last_chunk(self, text: str, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> Chunk | None:
        text += self._text.flush()
        if self._text.stop is not None:
            self.finish_reason = "stop"
        return Chunk(text, token_ids, logprobs) if text or token_ids else None

    def _ends_if_cancelled(self) -> bool:
        if self.is_cancelled:
            self.end_cancelled()
        return self.is_done

    def _report_progress(self) -> None:
        total = len(self.request.tokens)
        if (done := min(self.done_tokens, total)) > self._reported:  # less, if a load was given up
            self._reported = done
            self.note_progress(done, total)

    def note_progress(self, done_tokens: int, total_tokens: int) -> None:
        """Is called when more of the prompt's tokens are done; a job passes it on."""

    def completion(self) -> Completion:
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
        """The tokens that were found, reused, evaluated and generated so far. Zero before `begin`.

        While the request loads, tokens that are planned to be reused count as reused; if it ends meanwhile, none does.
        Resumed tokens are not part of the prompt, whether they were reused or evaluated again.
        """
        prompt_tokens, session = len(self.request.tokens), self._session
        if session is None:
            return Usage(prompt_tokens)
        cached = 0 if self._is_loading and self.is_done else min(session.cached, prompt_tokens)
        evaluated = 0 if self._is_loading else min(self.lane.offset, prompt_tokens) - cached
        return Usage(prompt_tokens, min(session.matched, prompt_tokens), cached, evaluated, len(self._token_ids))

    def close(self) -> None:
        """Record the computed state, and make the lane idle."""
        if self._session is not None:
            self._session.close()
