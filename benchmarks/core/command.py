"""The command `core`."""

from __future__ import annotations

from dataclasses import asdict

from benchmarks.core.run import CoreSizes, measure_core
from bough.cli.bench import BenchReport, Json


def core(as_json: Json = False) -> None:
    """The cost of the tree alone: matching, evicting, starting from disk; the host cost of a decode step and of a chunk."""
    report = BenchReport("core", as_json)
    with report.console.status("building trees"):
        figures = measure_core(CoreSizes())
    rows = [
        *(("match 100,000 tokens", f"{edges:,} edges", f"{ms:.3f} ms") for edges, ms in figures.match_ms.items()),
        *(("evict one page", f"{nodes:,} nodes", f"{us:.1f} µs") for nodes, us in figures.evict_us.items()),
        *(("start with a tree on disk", f"{pages:,} pages", f"{ms:,.0f} ms") for pages, ms in figures.start_ms.items()),
        *(
            (f"host cost of a step, {name}", f"{lanes:,} lanes", f"{ms:.3f} ms")
            for name, counts in figures.step_ms.items()
            for lanes, ms in counts.items()
        ),
        *(
            (f"host cost of a chunk, {name}", f"{depth:,} tokens deep", f"{us:.1f} µs")
            for name, depths in figures.chunk_us.items()
            for depth, us in depths.items()
        ),
    ]
    report.table("the core: medians; of a step the lowest", ("operation", "size", "time"), rows)
    report.finish(asdict(figures))
