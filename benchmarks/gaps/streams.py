"""Eight streamed answers that run as long as they are wanted, and the times at which their tokens arrive.

A thread receives each of them. Each answer continues a text that repeats itself, greedily and with a reward in place of a
penalty for repeating, so that it does not end before its limit. One that ends nevertheless is asked for again: that is
counted, because it disturbs the others.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import httpx

from benchmarks.gaps.figures import GapFigures, GapWindow, gaps_in
from bough.bench.server import StreamedRequest
from bough.bench.workload import words
from bough.errors import EngineError

NUM_STREAMS = 8
MAX_TOKENS = 4000
START_S = 120.0  # the longest wait for the first tokens
TOKEN_S = 120.0  # the longest wait for a token after a window
SETTLE_S = 2.0

_POLL_S = 0.05


class GapStreams:
    """The answers, from entering the context, when all have their first tokens, to leaving it."""

    def __init__(self, url: str, model: str) -> None:
        self._num_restarts = 0
        self._url, self._model = url, model
        self._arrivals: list[list[float]] = []  # by answer
        self._latest = [0.0] * NUM_STREAMS  # by stream
        self._error: Exception | None = None
        self._is_ending = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"bough-bench-stream-{number}", daemon=True)
            for number in range(NUM_STREAMS)
        ]

    def __enter__(self) -> GapStreams:
        for thread in self._threads:
            thread.start()
        self._wait_for_tokens(0.0, START_S)
        time.sleep(SETTLE_S)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._is_ending.set()
        for thread in self._threads:
            thread.join(TOKEN_S)  # it ends at its next token

    @contextmanager
    def watch(self, gaps: list[float]) -> Iterator[None]:
        """Add the gaps of all streams while the context lasts to a list. Raises EngineError if a stream fails."""
        start_s = time.perf_counter()
        yield
        window = GapWindow(start_s, time.perf_counter())
        self._wait_for_tokens(window.end_s, TOKEN_S)
        for arrivals in list(self._arrivals):
            gaps += gaps_in(window, list(arrivals))

    def rest(self, seconds: float) -> GapFigures:
        """The gaps of so many seconds in which nothing else is asked for."""
        gaps: list[float] = []
        with self.watch(gaps):
            time.sleep(seconds)
        return GapFigures.of(gaps)

    def add_facts(self, facts: dict[str, Any]) -> dict[str, Any]:
        """The facts of a case, and how many answers had to be asked for again so far: then its figures are doubtful."""
        return facts | {"restarted_streams": self._num_restarts}

    def _wait_for_tokens(self, after_s: float, timeout_s: float) -> None:
        deadline_s = time.perf_counter() + timeout_s
        while min(self._latest) <= after_s:
            if self._error is not None:
                raise EngineError(f"a stream failed: {self._error!r}")
            if time.perf_counter() > deadline_s:
                raise EngineError(f"a stream had no token for {timeout_s:.0f} s")
            time.sleep(_POLL_S)

    def _run(self, number: int) -> None:
        try:
            with httpx.Client(timeout=None) as client:
                self._stream(client, number)
        except Exception as error:
            self._error = error

    def _stream(self, client: httpx.Client, number: int) -> None:
        prompt = " ".join([words(4, f"stream {number}")] * 12)
        body = {"model": self._model, "prompt": prompt, "max_tokens": MAX_TOKENS}
        body |= {"temperature": 0, "frequency_penalty": -2}  # what repeats goes on repeating: no API can ignore the end
        while True:
            arrivals: list[float] = []
            self._arrivals.append(arrivals)
            for moment in StreamedRequest(client, f"{self._url}/v1/completions", body, limit_s=math.inf):
                arrivals.append(moment)
                self._latest[number] = moment
                if self._is_ending.is_set():
                    return
            self._num_restarts += 1
