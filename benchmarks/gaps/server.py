"""The server that is measured: a process with a folder of its own, a disk that can be slowed down, and a log to read."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.gaps.slow_server import DiskSpeed
from bough.bench.server import LOG, StreamedRequest, run_server
from bough.types import Message

IDLE_LANES = 2  # for what disturbs the streams
LANES = 8 + IDLE_LANES
TIMEOUT_S = 300.0

_COUNTED = ("bough_prompt_tokens_total", "bough_loaded_bytes_total", "bough_hits_total")


@dataclass(frozen=True)
class Asked:
    """One request as its client saw it, and what the server told about it: in its metrics and in its log."""

    first_token_s: float
    counts: dict[str, int]
    log: dict[str, Any]


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    model: str
    folder: Path

    @property
    def log_file(self) -> Path:
        return self.folder / LOG

    def set_speed(self, speed: DiskSpeed) -> None:
        """Make the disk as slow as this from now on."""
        speed.write(_speed_file(self.folder))

    def warm(self, messages: list[Message]) -> int:
        """Compute a prefix and keep it; returns how many tokens it has."""
        answer = self._post("/api/cache/warm", {"model": self.model, "messages": messages})
        return int(answer["prompt_tokens"])

    def figures(self) -> dict[str, Any]:
        """The figures of the model's tree."""
        answer = httpx.get(f"{self.url}/api/cache", timeout=TIMEOUT_S).raise_for_status()
        found: dict[str, Any] = answer.json()["models"][0]
        return found

    def ask(self, messages: list[Message], max_tokens: int = 4, salt: str = "") -> Asked:
        """Ask for a streamed answer. The counts hold if no other request ends meanwhile."""
        request_id = f"gaps-{time.monotonic_ns()}"
        headers = {"X-Request-Id": request_id} | ({"X-Bough-Salt": salt} if salt else {})
        before = self._read_counts()
        first_token_s = self._time_first_token(messages, max_tokens, headers)
        line = self._read_log(request_id)  # a request is counted before it is logged
        after = self._read_counts()
        changed = {name: int(value - before.get(name, 0)) for name, value in after.items() if value != before.get(name, 0)}
        return Asked(first_token_s, changed, line)

    def _time_first_token(self, messages: list[Message], max_tokens: int, headers: dict[str, str]) -> float:
        body = {"model": self.model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
        with httpx.Client(timeout=TIMEOUT_S) as client:
            return StreamedRequest(client, f"{self.url}/v1/chat/completions", body, headers=headers).receive().first_s

    def _read_counts(self) -> dict[str, float]:
        """The metrics of prompts and loading, by name and label."""
        text = httpx.get(f"{self.url}/metrics", timeout=TIMEOUT_S).raise_for_status().text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {_label(sample.name, sample.labels): sample.value for sample in samples if sample.name in _COUNTED}

    def _read_log(self, request_id: str) -> dict[str, Any]:
        """The line that the server writes when a request has ended, without what is the same for all; waits for it."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s:
            for line in self.log_file.read_text(encoding="utf-8").splitlines():
                if f'"request_id": "{request_id}"' in line:
                    return {name: value for name, value in json.loads(line).items() if name not in _SAME}
            time.sleep(0.02)
        raise TimeoutError(f"the server has not logged the request {request_id}")

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return httpx.post(self.url + path, json=body, timeout=TIMEOUT_S).raise_for_status().json()


_SAME = ("time", "level", "logger", "method", "client", "trace_id", "request_id", "model")


def _label(name: str, labels: dict[str, str]) -> str:
    kind = labels.get("kind") or labels.get("tier")
    return f"{name.removeprefix('bough_').removesuffix('_total')} {kind}"


def _speed_file(folder: Path) -> Path:
    return folder / "disk-speed.json"


@contextmanager
def running_server(model: str, folder: Path, *flags: str, speed: DiskSpeed | None = None) -> Iterator[Server]:
    """Start a server whose cache is in this folder. At the end the disk is as it was, and the tree is saved."""
    speed_file = _speed_file(folder)
    (speed or DiskSpeed()).write(speed_file)
    words = ("serve", "--log-json", "--model", model, "--lanes", str(LANES), "--no-loop-guard", *flags)
    with run_server(folder, "benchmarks.gaps.slow_server", str(speed_file), *words) as url:
        server = Server(url, model, folder)
        try:
            yield server
        finally:
            server.set_speed(DiskSpeed())  # so that stopping does not take long
