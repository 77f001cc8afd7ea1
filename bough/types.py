"""Types that several layers share: requests, answers and progress."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, Protocol

from bough.python_types import Value, parse_json
from bough.sampling_params import SamplingParams as SamplingParams  # one of the types that layers share

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


class TokenCounts:
    """How often each token occurs among the last `last_n` tokens of a sequence, or among all of them if that is -1.

    The token `ids[i]` occurs `counts[i]` times, at least once; ids are unique and have no order. Both are arrays of 64-bit
    integers, for engines to read as a whole. `add` changes them in place, in O(1) however long the sequence is, and fails
    while a view of their memory exists.
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
        """Append a token to the sequence."""
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
        """Count a token once less. The last entry takes the place of one that is removed."""
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

    `seen` counts the tokens that penalties apply to, already cut to the last n; None if there are none. It changes when
    the token is accepted. `uniform` in [0, 1) is the only randomness. `allowed` is a bit mask over the vocabulary (bit i of
    byte i // 8), or None for all.
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
class SampledToken:
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
    """The bytes loaded for a request from host, disk and shared store, and the known tokens that were computed instead.

    The estimates decided between the two: the time to load all known state that was not on the device, and the time to
    compute it. They are 0 before the first measurement.
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
class EncoderInput:
    """The token ids of one text, or of a pair, special tokens included.

    `type_ids` distinguish the texts of a pair, one for each token; empty: all 0. The first `num_prompt` tokens are the
    model's own prompt.
    """

    ids: Sequence[int]
    type_ids: Sequence[int] = ()
    num_prompt: int = 0


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

    def parse(self, kind: type[Value]) -> Value:
        """The value of a type that was the `format` of the request. Raises BoughError if the text describes none."""
        return parse_json(self.text, kind)


class Progress(Protocol):
    """Shows one piece of work after another: each starts, advances any number of times, and finishes."""

    def start(self, label: str, total_bytes: int | None) -> None:
        """Work of `total_bytes` begins; None if its size is unknown or not counted in bytes."""

    def advance(self, num_bytes: int) -> None:
        """More bytes are done; negative when work had to start again."""

    def finish(self) -> None:
        """The work that was started last has ended, with success or not."""


class SilentProgress:
    """Reports nothing."""

    def start(self, label: str, total_bytes: int | None) -> None:
        pass

    def advance(self, num_bytes: int) -> None:
        pass

    def finish(self) -> None:
        pass
