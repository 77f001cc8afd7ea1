"""Types that several layers share: requests, answers and progress."""

from __future__ import annotations

import math
from array import array
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import NoneType
from typing import Any, Literal, Protocol

from bough.errors import RequestError

MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1_024
MAX_LOGIT_BIASES = 1_024
TO_THE_END = -1
"""As `max_tokens`: the answer may go on to the end of the context."""

FinishReason = Literal["stop", "length", "loop", "cancelled"]
Message = dict[str, Any]
Tool = Mapping[str, Any]
"""A function that a model may call, as OpenAI's API describes it."""

Prompt = str | Sequence[int] | Sequence[Message]


class Mark(Enum):
    """Why an offset of a prompt is worth a restore point. In order of worth: points of the last kind are evicted first."""

    SYSTEM_END = "system end"
    LAST_USER_START = "last user start"
    MESSAGE_END = "message end"


@dataclass(frozen=True)
class Boundary:
    """A token offset at which a message, or the system part of a prompt, begins or ends."""

    offset: int
    mark: Mark


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop. The defaults are greedy, until the model ends its answer.

    Every character of an answer is compared with every stop string. So there may be at most `MAX_STOPS`, each of at most
    `MAX_STOP_CHARACTERS`.

    The order is: logits → logit bias → repetition, presence and frequency penalties → grammar mask → temperature → top-k →
    top-p → min-p → one draw by inverse transform in token order. Temperature 0 takes the largest logit.

    `logit_bias` is added to the logits of single tokens. It is given as a mapping from token ids, or as pairs, and kept as
    pairs in the order of ids. -100 in effect bans a token, 100 in effect forces it, unless a grammar forbids it.

    `loop_guard` ends an answer that repeats itself; with `ignore_eos` it does nothing, because then the length is wanted.
    """

    max_tokens: int | None = None  # None: a length that suits the context; TO_THE_END: as long as the context has room
    temperature: float = 0.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64  # -1: the whole context, 0: none
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    loop_guard: bool = True
    logprobs: int | None = None  # None: none; n: the chosen token's and the n largest
    format: str | dict[str, Any] | None = None  # None, "json", or a JSON schema
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit), from -100 to 100

    def __post_init__(self) -> None:
        _require(isinstance(self.stop, str | Sequence | NoneType), "stop", self.stop, "a text or several")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        _check_stops(stop)
        object.__setattr__(self, "logit_bias", _read_logit_bias(self.logit_bias))
        for name in ("ignore_eos", "loop_guard"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        for name, kinds in _TYPES.items():
            value = getattr(self, name)
            _require(isinstance(value, kinds) and not isinstance(value, bool), name, value, f"of type {_named(kinds)}")
            _require(float not in kinds or _is_finite(value), name, value, "a finite number")
        _require(self.max_tokens is None or self.max_tokens >= -1, "max_tokens", self.max_tokens, "at least -1, or None")
        _require(self.temperature >= 0, "temperature", self.temperature, "at least 0")
        _require(self.top_k >= 0, "top_k", self.top_k, "at least 0")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        _require(self.repeat_penalty > 0, "repeat_penalty", self.repeat_penalty, "above 0")
        _require(self.repeat_last_n >= -1, "repeat_last_n", self.repeat_last_n, "at least -1")
        _require(-2 <= self.presence_penalty <= 2, "presence_penalty", self.presence_penalty, "in [-2, 2]")
        _require(-2 <= self.frequency_penalty <= 2, "frequency_penalty", self.frequency_penalty, "in [-2, 2]")
        _require(self.logprobs is None or 0 <= self.logprobs <= 20, "logprobs", self.logprobs, "in [0, 20], or None")
        _require(
            all(isinstance(each, str) and each for each in stop), "stop", self.stop, "strings of at least one character"
        )

    @property
    def has_penalties(self) -> bool:
        return self.repeat_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def _check_stops(stops: tuple[Any, ...]) -> None:
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop has {len(stops):,} entries, and may have {MAX_STOPS}")
    for number, stop in enumerate(stops):
        if isinstance(stop, str) and len(stop) > MAX_STOP_CHARACTERS:
            raise RequestError(f"stop[{number}] has {len(stop):,} characters, and may have {MAX_STOP_CHARACTERS:,}")


def _read_logit_bias(given: Any) -> tuple[tuple[int, float], ...]:
    """The biases as pairs in the order of ids, from a mapping or from pairs."""
    try:
        biases = dict(given or ())
    except (TypeError, ValueError) as error:
        raise RequestError(f"logit_bias is {given!r:.200}, and must be a mapping from token ids to numbers") from error
    if len(biases) > MAX_LOGIT_BIASES:
        raise RequestError(f"logit_bias has {len(biases):,} entries, and may have {MAX_LOGIT_BIASES:,}")
    for token_id, bias in biases.items():
        _require(_is_number(token_id, int) and token_id >= 0, "logit_bias", token_id, "for token ids, which are at least 0")
        in_range = _is_number(bias, int | float) and -100 <= bias <= 100
        _require(in_range, f"logit_bias[{token_id}]", bias, "a number in [-100, 100]")
    return tuple(sorted((token_id, float(bias)) for token_id, bias in biases.items()))


def _is_finite(value: float) -> bool:
    """Whether a number is one that a float can hold; an integer may be larger."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


_TYPES: dict[str, tuple[type, ...]] = {
    "max_tokens": (int, NoneType),
    "temperature": (int, float),
    "top_k": (int,),
    "top_p": (int, float),
    "min_p": (int, float),
    "repeat_penalty": (int, float),
    "repeat_last_n": (int,),
    "presence_penalty": (int, float),
    "frequency_penalty": (int, float),
    "seed": (int, NoneType),
    "logprobs": (int, NoneType),
    "format": (str, dict, NoneType),
}


def _named(kinds: tuple[type, ...]) -> str:
    return " or ".join("None" if kind is NoneType else kind.__name__ for kind in kinds)


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise RequestError(f"{name} is {value!r:.200}, and must be {wanted}")


class TokenCounts:
    """How often each token occurs among the last `last_n` tokens of a sequence, or among all of them if that is -1.

    The token `ids[i]` occurs `counts[i]` times. No id is there twice, and none without an occurrence; their order says
    nothing. Both are arrays of 64-bit integers, for engines to read as a whole. `add` changes them in place, in O(1)
    however long the sequence is, and fails while somebody holds a view of their memory.
    """

    def __init__(self, tokens: Sequence[int] = (), last_n: int = -1) -> None:
        counted = tokens if last_n < 0 else tokens[max(0, len(tokens) - last_n) :]
        counts = Counter(counted)
        self.ids = array("q", counts)
        self.counts = array("q", counts.values())
        self._places = {token_id: place for place, token_id in enumerate(counts)}
        self._last_n = last_n
        self._recent = deque(counted if last_n > 0 else ())  # what will leave, the oldest first

    def add(self, token_id: int) -> None:
        """Append a token to the sequence. The oldest of the last n leaves them."""
        if self._last_n == 0:
            return
        if self._last_n > 0:
            self._recent.append(token_id)
            if len(self._recent) > self._last_n:
                self._remove(self._recent.popleft())
        place = self._places.get(token_id)
        if place is not None:
            self.counts[place] += 1
        else:
            self._places[token_id] = len(self.ids)
            self.ids.append(token_id)
            self.counts.append(1)

    def _remove(self, token_id: int) -> None:
        """Count a token once less. The last entry takes the place of one that goes."""
        place = self._places[token_id]
        self.counts[place] -= 1
        if self.counts[place] > 0:
            return
        del self._places[token_id]
        last_id, last_count = self.ids.pop(), self.counts.pop()
        if last_id != token_id:
            self._places[last_id] = place
            self.ids[place], self.counts[place] = last_id, last_count


@dataclass(slots=True)  # not frozen: one is made for every token, and freezing takes twice as long
class Draw:
    """Everything that the choice of one token depends on besides the logits.

    `seen` counts the tokens that penalties apply to, already cut to the last n; None if there are none. It is what holds
    until the token is accepted. `uniform` in [0, 1) is the only randomness. `allowed` is a bit mask over the vocabulary
    (bit i of byte i // 8), or None for all.
    """

    params: SamplingParams
    uniform: float = 0.0
    seen: TokenCounts | None = None
    allowed: bytes | None = None


@dataclass(frozen=True)
class Alternative:
    """One token and the log of its probability in the raw distribution."""

    token_id: int
    logprob: float


@dataclass(slots=True)  # not frozen: one is made for every token, and freezing takes twice as long
class Sampled:
    """The chosen token. `logprob` and `top` are of the raw distribution, and only set if they were asked for."""

    token_id: int
    logprob: float | None = None
    top: tuple[Alternative, ...] = ()


@dataclass(frozen=True)
class Usage:
    """Token counts of one request: matched (found in the tree), cached (reused) and computed (evaluated) prompt tokens.

    cached + computed = prompt, unless the request was cancelled during the prefill.
    """

    prompt_tokens: int = 0
    matched_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True)
class Loading:
    """What was loaded for a request from host, disk and shared store, and how many known tokens were computed instead.

    The estimates are those that decided between the two: the time to load all known state that was not on the device, and
    the time to compute it. They are 0 before the first measurement.
    """

    host_bytes: int = 0
    disk_bytes: int = 0
    store_bytes: int = 0
    load_s: float = 0.0
    recomputed_tokens: int = 0
    estimated_load_s: float = 0.0
    estimated_compute_s: float = 0.0


@dataclass(frozen=True)
class Timings:
    """Seconds of each part of one request, without the time that the reader of a stream takes between two pieces.

    `first_token_s` runs from `begin` to the first token, and is 0 if there was none. `loading` is part of `begin_s`.
    """

    begin_s: float = 0.0
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0
    loading: Loading = field(default_factory=Loading)


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of one generated token, with its text and the most likely alternatives."""

    token_id: int
    text: str
    logprob: float
    top: tuple[Alternative, ...] = ()


@dataclass(slots=True)  # not frozen: one is made for every token, and freezing takes twice as long
class Chunk:
    """A piece of a streamed answer: whole characters only, possibly none yet for the tokens it carries.

    Before the answer, pieces without text may carry the log-probabilities of the prompt.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class ToolCall:
    """A tool call in an answer. `arguments` is a JSON object."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Completion:
    """A finished answer. `token_ids` are all generated tokens, without the end-of-sequence token.

    `stop` is the stop string that ended the answer, if any. `text` ends before it, but `token_ids` include its tokens.
    `prompt_logprobs`, if they were asked for, are those of the prompt's tokens from the second on.
    `cycle_tokens` is how many tokens an answer that ended by "loop" was repeating; otherwise it is 0.
    `tool_calls` are the calls in the text of an answer to a request of the library with tools.
    `embedding`, if it was asked for, is the last hidden state after the prompt.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    logprobs: tuple[TokenLogprob, ...] = ()
    stop: str | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    cycle_tokens: int = 0
    tool_calls: tuple[ToolCall, ...] = ()
    embedding: tuple[float, ...] = ()


class Progress(Protocol):
    """Is told of one piece of work after another: each starts, advances any number of times, and finishes."""

    def start(self, label: str, total_bytes: int | None) -> None:
        """Work of `total_bytes` begins; None if its size is unknown or not counted in bytes."""
        ...

    def advance(self, num_bytes: int) -> None:
        """So many more bytes are done; negative when work had to start again."""
        ...

    def finish(self) -> None:
        """The work that was started last has ended, with success or not."""
        ...


class SilentProgress:
    """Reports nothing."""

    def start(self, label: str, total_bytes: int | None) -> None:
        pass

    def advance(self, num_bytes: int) -> None:
        pass

    def finish(self) -> None:
        pass
