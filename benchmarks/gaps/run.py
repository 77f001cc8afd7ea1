"""The whole benchmark: its parts one after another, each with a folder of its own that is deleted, and the report."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gaps import loading, transfer, views, writes
from benchmarks.gaps.figures import GapCase
from benchmarks.gaps.server import running_server
from benchmarks.gaps.stored import TreeFacts, read_facts
from benchmarks.gaps.streams import NUM_STREAMS
from bough.bench.workload import words

PARTS = (loading.PART, transfer.PART, views.PART, writes.PART)


def measure_gaps(model: str, parts: Sequence[str], on_case: Callable[[GapCase], None]) -> dict[str, Any]:
    """Run the parts; `on_case` hears of each case as it is measured. Returns the report as plain data."""
    setup = {"model": model, "streams": NUM_STREAMS}
    report: dict[str, Any] = {"setup": setup, "cases": [], "seconds": {}, "own_cpu_s": {}}
    facts = _learn_facts(model) if set(parts) - {loading.PART} else None
    for part in parts:
        started_s, started_cpu_s = time.monotonic(), time.process_time()
        with _new_folder() as folder:
            for case in _measure(part, model, folder, facts):
                on_case(case)
                report["cases"].append(asdict(case) | {"ratio": round(case.ratio, 2)})
        report["seconds"][part] = round(time.monotonic() - started_s, 1)
        report["own_cpu_s"][part] = round(time.process_time() - started_cpu_s, 1)  # not the server's
    return report


def _measure(part: str, model: str, folder: Path, facts: TreeFacts | None) -> Iterator[GapCase]:
    if part == loading.PART:
        return loading.measure_loading(model, folder)
    assert facts is not None
    measures = {
        transfer.PART: transfer.measure_transfer,
        views.PART: views.measure_views,
        writes.PART: writes.measure_writes,
    }
    return measures[part](model, folder, facts)


def _learn_facts(model: str) -> TreeFacts:
    """Let a server write a tree, to see what one of this model has to be."""
    with _new_folder() as folder:
        with running_server(model, folder) as server:
            server.warm([{"role": "user", "content": words(20, "facts")}])
        return read_facts(folder)


@contextmanager
def _new_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bough-gaps-") as folder:
        yield Path(folder)
