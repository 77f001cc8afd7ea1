"""Answers of `/api/run`, whose lines become pieces and a completion."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from bough.client.http import Client
from bough.errors import Unavailable
from bough.types import Alternative, Chunk, Completion, Loading, Timings, TokenLogprob, ToolCall, Usage

Record = TypeVar("Record", Usage, Timings, Loading, Alternative, ToolCall)


def stream_answer(
    client: Client,
    body: Mapping[str, Any],
    salt: str = "",
    *,
    is_cancelled: Callable[[], bool] = lambda: False,
    on_progress: Callable[[int, int], object] = lambda done_tokens, total_tokens: None,
) -> Generator[Chunk | Completion, None, None]:
    """Yield the pieces of an answer, then its completion. Once `is_cancelled`, that is what has come so far.

    `on_progress` gets the number of prompt tokens that are cached or computed, and that of all.
    """
    partial, completion = _PartialAnswer(on_progress), None
    with client.post_stream("/api/run", salt, **body) as lines:
        for line in lines.read_until(is_cancelled):
            if "completion" in line:
                completion = _read_completion(line["completion"])
                continue  # to the end of the response: closing it earlier counts as hanging up
            if (piece := partial.add(line)) is not None:
                yield piece
    if completion is None and not is_cancelled():
        raise Unavailable(f"the server at {client.url} ended in the middle of the answer")
    yield completion or partial.cancelled()


@dataclass
class _PartialAnswer:
    """An answer as far as it has come. If it is stopped, its completion is made from this."""

    on_progress: Callable[[int, int], object]
    texts: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    done_tokens: int = 0
    num_generated: int = 0
    began_s: float = field(default_factory=time.perf_counter)
    first_s: float = 0.0

    def add(self, line: Mapping[str, Any]) -> Chunk | None:
        """Add a line of the stream, and return its piece of the answer if it has one."""
        if "progress" in line:
            self.done_tokens, self.prompt_tokens = line["progress"]
            if self.cached_tokens is None:
                self.cached_tokens = self.done_tokens
            self.on_progress(self.done_tokens, self.prompt_tokens)
            return None
        self.first_s = self.first_s or time.perf_counter() - self.began_s
        self.done_tokens = self.prompt_tokens
        self.num_generated += line["num_tokens"]
        self.texts.append(line["text"])
        return Chunk(line["text"])

    def cancelled(self) -> Completion:
        total_s, cached = time.perf_counter() - self.began_s, self.cached_tokens or 0
        usage = Usage(self.prompt_tokens, cached, cached, self.done_tokens - cached, self.num_generated)
        decode_s = total_s - self.first_s if self.first_s else 0.0
        timings = Timings(prefill_s=self.first_s or total_s, first_token_s=self.first_s, decode_s=decode_s, total_s=total_s)
        return Completion("".join(self.texts), (), "cancelled", usage, timings)


def _read_completion(plain: Mapping[str, Any]) -> Completion:
    return Completion(
        plain["text"],
        tuple(plain["token_ids"]),
        plain["finish_reason"],
        _read(Usage, plain["usage"]),
        read_timings(plain["timings"]),
        tuple(map(_read_token, plain.get("logprobs", ()))),
        plain.get("stop"),
        tuple(map(_read_token, plain.get("prompt_logprobs", ()))),
        plain.get("cycle_tokens", 0),
        tuple(_read(ToolCall, each) for each in plain.get("tool_calls", ())),
    )


def _read_token(plain: Mapping[str, Any]) -> TokenLogprob:
    top = tuple(_read(Alternative, each) for each in plain["top"])
    return TokenLogprob(plain["token_id"], plain["text"], plain["logprob"], top)


def read_timings(plain: Mapping[str, Any]) -> Timings:
    return _read(Timings, {**plain, "loading": _read(Loading, plain.get("loading", {}))})


def _read(kind: type[Record], plain: Mapping[str, Any]) -> Record:
    """A record of plain data. Fields that only another version has are left out."""
    known = {each.name for each in fields(kind)}
    return kind(**{name: value for name, value in plain.items() if name in known})
