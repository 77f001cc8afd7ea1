"""`python -m benchmarks hostile`: how long well-behaved clients wait while another client sends hostile requests.

One client streams an answer, and one polls `/health/live`. A third client, in its own process, sends a hostile request. For
each case we measure the longest wait of the first two, and once without the third.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Event
from typing import Annotated, Any

import httpx
import typer

from bough.bench.server import StreamedRequest, serving
from bough.cli.bench import BenchReport, Json, Model
from bough.config import load_settings

ATTACK_S = 120.0
"""The longest time that a case may take."""

_LEAST_S = 6.0  # the shortest time for which both clients are watched
_AFTER_S = 1.0  # how long they are watched after the last answer
_POLL_S = 0.02
_WORDS = "the quick brown fox jumps over the lazy dog and runs away from the bear "


@dataclass(frozen=True)
class HostileCase:
    """One hostile request: its path, its body, and the time after which its client hangs up."""

    path: str
    make_body: Callable[[str], bytes]
    hangs_up_s: float | None = None


@dataclass(frozen=True)
class Waits:
    """The result of a case: the answer's status and time, and the longest waits for a token and for a health check."""

    case: str
    status: str
    took_s: float
    token_gap_s: float
    health_gap_s: float


def _text(num_bytes: int) -> str:
    return (_WORDS * (num_bytes // len(_WORDS) + 1))[:num_bytes]


def _chat(num_bytes: int, **more: Any) -> Callable[[str], bytes]:
    def make(model: str) -> bytes:
        messages = [{"role": "user", "content": _text(num_bytes)}]
        return json.dumps({"model": model, "messages": messages, "max_tokens": 4, "stream": False, **more}).encode()

    return make


def _turns(number: int) -> Callable[[str], bytes]:
    def make(model: str) -> bytes:
        turns = [{"role": ("user", "assistant")[i % 2], "content": f"This is message number {i}."} for i in range(number)]
        return json.dumps({"model": model, "messages": turns, "stream": False, "options": {"num_predict": 4}}).encode()

    return make


def _small(**more: Any) -> Callable[[str], bytes]:
    """A short chat with another, large field."""
    return lambda model: _chat(20, **more)(model)


def _stops(num_bytes: int) -> Callable[[str], bytes]:
    return lambda model: _small(stop=[f"{i:06d}{_text(40)}" for i in range(num_bytes // 50)])(model)


def _tools(number: int) -> Callable[[str], bytes]:
    def make(model: str) -> bytes:
        tools = [{"type": "function", "function": {"name": f"tool{i}", "description": _text(200)}} for i in range(number)]
        return _small(tools=tools)(model)

    return make


def _schema(number: int) -> Callable[[str], bytes]:
    def make(model: str) -> bytes:
        properties = {f"field{i}": {"type": "string", "description": _text(60)} for i in range(number)}
        schema = {"name": "large", "schema": {"type": "object", "properties": properties}}
        return _small(response_format={"type": "json_schema", "json_schema": schema})(model)

    return make


def _empty_lists(number: int) -> Callable[[str], bytes]:
    return lambda model: b'{"model":"x","messages":[' + b"[]," * number + b"[]]}"


def _escapes(number: int) -> Callable[[str], bytes]:
    start, end = b'{"model":"x","messages":[{"role":"user","content":"', b'"}]}'
    return lambda model: start + b"\\n\\u0041" * (number // 2) + end


def _prompt(num_bytes: int, **more: Any) -> Callable[[str], bytes]:
    return lambda model: json.dumps({"model": model, "prompt": _text(num_bytes), **more}).encode()


CASES: dict[str, HostileCase] = {
    "a chat of 30 MB": HostileCase("/v1/chat/completions", _chat(30 * 10**6)),
    "a chat of 8 MB, to be shortened": HostileCase("/api/chat", _chat(8 * 10**6)),
    "the same, hung up on after 1 s": HostileCase("/api/chat", _chat(8 * 10**6), hangs_up_s=1.0),
    "a chat of 600 kB": HostileCase("/v1/chat/completions", _chat(600_000)),
    "a text of 2.6 MB": HostileCase("/v1/completions", _prompt(2_600_000, max_tokens=4)),
    "20,001 messages": HostileCase("/api/chat", _turns(20_001)),
    "9,999 messages": HostileCase("/api/chat", _turns(9_999)),
    "explaining 8 MB": HostileCase("/api/cache/explain", _prompt(8 * 10**6)),
    "counting 8 MB": HostileCase("/v1/messages/count_tokens", _chat(8 * 10**6)),
    "24 MB of stop strings": HostileCase("/v1/chat/completions", _stops(24 * 10**6)),
    "8 MB of stop strings": HostileCase("/v1/chat/completions", _stops(8 * 10**6)),
    "50,000 tools": HostileCase("/v1/chat/completions", _tools(50_000)),
    "20,000 tools": HostileCase("/v1/chat/completions", _tools(20_000)),
    "a schema of 150,000 fields": HostileCase("/v1/chat/completions", _schema(150_000)),
    "a schema of 3,000 fields": HostileCase("/v1/chat/completions", _schema(3_000)),
    "10 million empty lists": HostileCase("/v1/chat/completions", _empty_lists(10_000_000)),
    "2.5 million empty lists": HostileCase("/v1/chat/completions", _empty_lists(2_500_000)),
    "6 million escapes": HostileCase("/v1/chat/completions", _escapes(6_000_000)),
    "2 million escapes": HostileCase("/v1/chat/completions", _escapes(2_000_000)),
}


def measure_case(url: str, model: str, name: str) -> Waits:
    """Measure the waits while a case is sent, and for a second after its answer."""
    context = multiprocessing.get_context("spawn")  # in its own interpreter it does not slow down the watching clients
    is_ready, may_send, answers = context.Event(), context.Event(), context.SimpleQueue()
    sender = context.Process(target=_send, args=(url, model, name, is_ready, may_send, answers), daemon=True)
    sender.start()
    assert is_ready.wait(ATTACK_S)
    with _Watch(url, model) as watch:
        may_send.set()
        sender.join(ATTACK_S)
        status, took_s = ("no answer", ATTACK_S) if answers.empty() else answers.get()
        time.sleep(max(_AFTER_S, _LEAST_S - took_s))
    sender.terminate()
    return Waits(name, status, took_s, watch.token_gap_s, watch.health_gap_s)


def measure_quiet(url: str, model: str, seconds: float = 2 * _LEAST_S) -> Waits:
    """Measure the waits of both clients without a hostile one."""
    with _Watch(url, model) as watch:
        time.sleep(seconds)
    return Waits("nothing else", "", seconds, watch.token_gap_s, watch.health_gap_s)


def _send(url: str, model: str, name: str, is_ready: Event, may_send: Event, answers: Any) -> None:
    """Make the body, wait for `may_send`, send it, and put status and time into `answers`. Runs in its own process."""
    case = CASES[name]
    body = case.make_body(model)
    is_ready.set()
    may_send.wait()
    started_s = time.perf_counter()
    try:
        answer = httpx.post(url + case.path, content=body, timeout=case.hangs_up_s or ATTACK_S)
        status = str(answer.status_code)
    except httpx.TimeoutException:
        status = "hung up"
    except httpx.TransportError as error:
        status = type(error).__name__
    answers.put((status, time.perf_counter() - started_s))


class _Watch:
    """Two clients that measure their longest waits while the context lasts."""

    def __init__(self, url: str, model: str) -> None:
        self.token_gap_s = self.health_gap_s = 0.0
        self._url = url
        self._model = model
        self._ends = threading.Event()
        self._has_tokens = threading.Event()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._stream, self._poll)]

    def __enter__(self) -> _Watch:
        for thread in self._threads:
            thread.start()
        assert self._has_tokens.wait(ATTACK_S), "the watched stream did not begin"
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _stream(self) -> None:
        with httpx.Client(timeout=ATTACK_S) as client:
            while not self._ends.is_set():
                messages = [{"role": "user", "content": f"Tell a very long story about a bear. {time.time()}"}]
                body = {"model": self._model, "messages": messages, "max_tokens": 400, "temperature": 1}
                self._listen(StreamedRequest(client, f"{self._url}/v1/chat/completions", body, limit_s=math.inf))

    def _listen(self, answer: StreamedRequest) -> None:
        last_s = None
        for now_s in answer:
            if last_s is not None:
                self.token_gap_s = max(self.token_gap_s, now_s - last_s)
                self._has_tokens.set()
            last_s = now_s
            if self._ends.is_set():
                return

    def _poll(self) -> None:
        self._has_tokens.wait(ATTACK_S)
        with httpx.Client(timeout=ATTACK_S) as client:
            last_s = time.perf_counter()
            while not self._ends.is_set():
                client.get(f"{self._url}/health/live")
                now_s = time.perf_counter()
                self.health_gap_s, last_s = max(self.health_gap_s, now_s - last_s), now_s
                time.sleep(_POLL_S)


def hostile(
    model: Model = None,
    only: Annotated[str | None, typer.Option(help="Only cases whose name contains this.")] = None,
    as_json: Json = False,
) -> None:
    """How long a well-behaved client waits while another client sends hostile requests."""
    report, name = BenchReport("hostile", as_json), model or load_settings().model
    chosen = [case for case in CASES if only is None or only in case]
    with report.counting("nothing else", len(chosen) + 1) as count, serving(model) as url:
        measure_quiet(url, name, 2.0)  # the first requests are slower
        found = [measure_quiet(url, name)]
        for case in chosen:
            count(case)
            found.append(measure_case(url, name, case))
    columns = ("case", "answer", "after", "between two tokens", "of /health/live")
    report.table("the longest wait while another client sends", columns, map(_row, found))
    report.finish({"cases": [asdict(each) for each in found]})


def _row(waits: Waits) -> tuple[str, ...]:
    gaps = (f"{1000 * waits.token_gap_s:,.0f} ms", f"{1000 * waits.health_gap_s:,.0f} ms")
    return (waits.case, waits.status, f"{waits.took_s:.2f} s", *gaps)
