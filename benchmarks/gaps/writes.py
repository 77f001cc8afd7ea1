"""The disk hangs on every write while answers stream, and new prompts need memory that holds what is not written yet.

The new prompts themselves take time from the streams. So they are measured first with the disk as it is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gaps.figures import GapCase, GapFigures, percentile
from benchmarks.gaps.server import Server, running_server
from benchmarks.gaps.slow_server import DiskSpeed
from benchmarks.gaps.stored import TreeFacts
from benchmarks.gaps.streams import NUM_STREAMS, GapStreams
from bough.bench.workload import words

PART = "writes"
HANG_S = 5.0
QUIET_S = 15.0
NUM_PROMPTS = 8
LONGEST_S = 90.0  # then no further prompt is asked

_LANE_TOKENS = 1280  # what a stream reserves, in whole pages
_PROMPT_WORDS = 340  # 400 tokens, in two pages
_PROMPT_LANE_TOKENS = 512
_TREE_TOKENS = 1280  # the memory that is left for the tree: the prompts of the streams, and two of those that are asked
_COUNTED = ("evicted_tokens", "disk_failed_writes")


def measure_writes(model: str, folder: Path, facts: TreeFacts) -> Iterator[GapCase]:
    """Ask new prompts one after another: on a disk that is well, then on one that hangs."""
    tokens = NUM_STREAMS * _LANE_TOKENS + 2 * _PROMPT_LANE_TOKENS + _TREE_TOKENS
    with running_server(model, folder, "--memory", str(tokens * facts.token_bytes)) as server:
        _ask_new(server, "start", 1)
        with GapStreams(server.url, model) as streams:
            quiet = streams.rest(QUIET_S)
            for name, hang_s in (("disk well", 0.0), (f"writes hang {HANG_S:.0f} s", HANG_S)):
                gaps: list[float] = []
                with streams.watch(gaps):
                    server.set_speed(DiskSpeed(write_hang_s=hang_s))
                    found = _ask_new(server, name, NUM_PROMPTS)
                note = f"{found['prompts']} prompts, slowest {found['slowest_ms']:,.0f} ms"
                yield GapCase(PART, f"new prompts, {name}", quiet, GapFigures.of(gaps), note, streams.add_facts(found))


def _ask_new(server: Server, name: str, count: int) -> dict[str, Any]:
    """Ask prompts that nobody has asked before, one after another."""
    before, end_s, times_s = server.figures(), time.monotonic() + LONGEST_S, list[float]()
    while len(times_s) < count and time.monotonic() < end_s:
        text = words(_PROMPT_WORDS, f"{name} {len(times_s)}")
        times_s.append(server.ask([{"role": "user", "content": text}], max_tokens=1).first_token_s)
    after = server.figures()
    found = {"prompts": len(times_s), "first_token_ms": _ms(percentile(times_s, 0.5)), "slowest_ms": _ms(max(times_s))}
    return found | {each: after[each] - before[each] for each in _COUNTED} | {"pending_bytes": after["disk_pending_bytes"]}


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)
