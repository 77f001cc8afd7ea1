"""One answer: the progress of the prefill, the text as it is generated, and a summary of tokens and times.

Ctrl-C stops the answer between two steps, so that the computed state is kept. A second Ctrl-C raises at once.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import FrameType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.status import Status

from bough.cli.terminal.columns import describe
from bough.cli.terminal.screen import Screen
from bough.cli.terminal.wrap import WordWrap
from bough.types import Chunk, Completion


class OpenStream(Protocol):
    """Begins an answer, which is stopped once `is_cancelled`."""

    def __call__(
        self, *, is_cancelled: Callable[[], bool], on_progress: Callable[[int, int], None]
    ) -> Iterator[Chunk | Completion]: ...


def stream_answer(open_stream: OpenStream, screen: Screen, *, is_silent: bool = False, wraps: bool = True) -> Completion:
    """Write each piece of an answer as it comes, unless `is_silent`. With `wraps`, lines break between words on a terminal.

    After Ctrl-C it returns the answer so far.
    """
    wrap = WordWrap() if wraps and not screen.notes.is_dumb_terminal else None
    with catching_interrupt() as is_interrupted, PrefillLine(screen.notes) as line:
        for piece in open_stream(is_cancelled=is_interrupted, on_progress=line.report):
            if isinstance(piece, Completion):
                return piece
            if piece.text and not is_silent:
                line.end()
                screen.write(piece.text, wrap)
    raise AssertionError("a stream ends with a completion")


@contextmanager
def catching_interrupt() -> Iterator[Callable[[], bool]]:
    """Yield a call that returns whether Ctrl-C was pressed. The second Ctrl-C raises KeyboardInterrupt."""
    pressed: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    with on_interrupt(note):
        yield lambda: bool(pressed)


@contextmanager
def on_interrupt(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let Ctrl-C call this in place of what it did before. A background job goes on ignoring it."""
    before = signal.getsignal(signal.SIGINT)
    if before != signal.SIG_IGN:
        signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class PrefillLine:
    """The progress of the prefill, on one line that is erased when the answer begins. Only shown on a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._cached: int | None = None

    def report(self, done: int, total: int) -> None:
        """`done` of the prompt's tokens are computed or cached. Those of the first report are the cached ones."""
        if self._cached is None:
            self._cached = done
        if not self._console.is_terminal or done >= total:
            return
        if self._status is None:
            self._status = self._console.status("")
            self._status.start()
        self._status.update(describe_prefill(self._cached, done, total))

    def end(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def describe_prefill(cached: int, done: int, total: int) -> str:
    """ "computing 1,204 of 2,310 prompt tokens · 1,106 cached · 25 %" """
    wanted = total - cached
    share = 100 * (done - cached) // wanted
    return f"computing {wanted:,} of {total:,} prompt tokens · {cached:,} cached · {share} %"


def describe_end(completion: Completion) -> str:
    """Why an answer ended, in brackets, unless the model ended it."""
    if completion.finish_reason == "cancelled":
        return "(stopped)" if completion.text else "(stopped before the first word)"
    if completion.finish_reason == "length":
        return f"(cut off after {completion.usage.completion_tokens:,} tokens)"
    return "(stopped: the answer repeated itself)" if completion.finish_reason == "loop" else ""


def summarise(completion: Completion, load_s: float) -> list[str]:
    usage, timings = completion.usage, completion.timings
    share = usage.cached_tokens / usage.prompt_tokens if usage.prompt_tokens else 0.0
    facts = {
        "total": f"{timings.total_s:.2f} s",
        "load": f"{load_s:.2f} s",
        "prompt": f"{usage.prompt_tokens:,} tokens",
        "cached": f"{usage.cached_tokens:,} tokens ({share:.0%})",
        "computed": _rate(usage.computed_tokens, usage.computed_tokens, timings.prefill_s),
        "first token": f"{timings.first_token_s:.3f} s",
        "generated": _rate(usage.completion_tokens, usage.completion_tokens - 1, timings.decode_s),
        "finished": completion.finish_reason,
    }
    return describe(facts, indent="")


def _rate(num_tokens: int, num_timed: int, seconds: float) -> str:
    """`num_timed` of the tokens took `seconds`; the first generated token is not among them: the prefill computes it."""
    rate = f" ({num_timed / seconds:,.1f} tokens/s)" if num_timed > 0 and seconds > 0 else ""
    return f"{num_tokens:,} tokens in {seconds:.2f} s{rate}"


def as_dict(completion: Completion, model: str, load_s: float) -> dict[str, Any]:
    return {
        "model": model,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "usage": asdict(completion.usage),
        "timings": {"load_s": load_s} | asdict(completion.timings),
    }
