"""`python -m bough.bench.gpu.clients JSON`: many streaming clients of one server, in one process, over plain sockets.

A token is counted by a mark in its text, without parsing, so that the clients take little of the machine. The rate is that
of the window in which every stream is under way: from the last stream's first token to the first stream's last one.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from bough.bench.workload import random_prompts

_READ_BYTES = 1 << 16


@dataclass
class Stream:
    """What one client saw: how many tokens had come at which moment."""

    moments: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    tail: bytes = b""

    def note(self, data: bytes, mark: bytes) -> None:
        number = data.count(mark)
        if number:
            self.moments.append(time.perf_counter())
            self.counts.append(number)
        self.tail = (self.tail + data)[-400:]

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    def between(self, start_s: float, end_s: float) -> int:
        """Tokens that came after a moment, up to another one."""
        return sum(count for at, count in zip(self.moments, self.counts, strict=True) if start_s < at <= end_s)


def summarize(streams: Sequence[Stream], started_s: float) -> dict[str, Any]:
    """The rate of the window in which all streams are under way, and when they began. Raises ValueError without tokens."""
    silent = next((each for each in streams if not each.moments), None)
    if silent is not None:
        raise ValueError(f"a stream had no token; it ended with {silent.tail!r}")
    start_s, end_s = max(each.moments[0] for each in streams), min(each.moments[-1] for each in streams)
    tokens = sum(each.between(start_s, end_s) for each in streams)
    firsts = sorted(each.moments[0] - started_s for each in streams)
    return {
        "tokens_per_s": round(tokens / (end_s - start_s), 1) if end_s > start_s else 0.0,
        "window_s": round(end_s - start_s, 3),
        "window_tokens": tokens,
        "tokens": sum(each.num_tokens for each in streams),
        "first_token_ms": [round(1000 * firsts[0], 1), round(1000 * firsts[-1], 1)],
        "reads": sum(len(each.moments) for each in streams),
        "own_cpu_s": round(time.process_time(), 2),
    }


async def _stream(url: str, body: dict[str, Any], mark: bytes) -> Stream:
    """One streamed request over a connection of its own, until the server closes it."""
    place, payload, stream = urlsplit(url), json.dumps(body).encode(), Stream()
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    head = f"POST {place.path} HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n".encode() + payload)
    await writer.drain()
    while data := await reader.read(_READ_BYTES):
        stream.note(data, mark)
    writer.close()
    await writer.wait_closed()
    return stream


async def _run(told: dict[str, Any]) -> dict[str, Any]:
    """Let one request compute the prefix, then run all streams together."""
    vocab, mark, url = range(told["vocab_size"]), told["mark"].encode(), told["url"]
    (prefix,) = random_prompts(vocab, told["tokens"], 1)
    tails = random_prompts(vocab, told["tail_tokens"], told["streams"], seed=1)
    body = {"model": told["model"], "temperature": 0, "ignore_eos": True, "stream": True}
    await _stream(url, body | {"prompt": prefix, "max_tokens": 1}, mark)
    started_s = time.perf_counter()
    bodies = [body | {"prompt": [*prefix, *tail], "max_tokens": told["max_tokens"]} for tail in tails]
    return summarize(await asyncio.gather(*(_stream(url, each, mark) for each in bodies)), started_s)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_run(json.loads(sys.argv[1])))), flush=True)
