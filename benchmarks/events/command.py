"""The command `events`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from benchmarks.events.cpu_cost import STEP_S, measure_cpu
from benchmarks.events.large_tree import measure_large_tree
from benchmarks.events.run import EventRound, EventsReport, EventsSetup, measure_events
from bough.cli.bench import BenchReport, Json, Model


def events(
    model: Model = None,
    readers: Annotated[int, typer.Option(min=1, help="Clients that read the events.")] = 3,
    clients: Annotated[int, typer.Option(min=2, help="Streams at once, besides a single one.")] = 8,
    tokens: Annotated[int, typer.Option(min=32, help="Tokens of an answer.")] = 128,
    rounds: Annotated[int, typer.Option(min=1)] = 12,
    as_json: Json = False,
) -> None:
    """What readers of /api/events cost: decode speed, first tokens and processor time with and without; a large tree."""
    report, setup = BenchReport("events", as_json), EventsSetup(readers, clients, tokens, rounds=rounds)
    large, measured = measure_large_tree(), list[EventRound]()
    with report.console.status("processor time"):
        costs = [measure_cpu(number, readers) for number in (1, clients)]
    with report.counting("rounds", rounds) as count:
        for each in measure_events(model, setup):
            measured.append(each)
            count()
    found = EventsReport.of(measured)
    names = ("tokens/s, 1 stream", f"tokens/s, {clients} streams", "first token, ms")
    compared = (found.one_stream, found.many_streams, found.first_token_ms)
    rows = [
        (name, f"{each.alone:,.1f}", f"{each.watched:,.1f}", f"{each.ratio:.3f}")
        for name, each in zip(names, compared, strict=True)
    ]
    title = f"{readers} readers of events; medians of {rounds} rounds"
    report.table(title, ("", "no reader", "with readers", "ratio"), rows)
    report.line(f"a reader gets {found.bytes_per_s / 1000:,.1f} kB/s")
    report.line(
        f"a tree of {large.nodes:,} nodes: the first look {large.first_look_ms:,.1f} ms of the engine's thread, "
        f"in steps of at most {large.longest_step_ms:.2f} ms, {large.first_write_ms:,.0f} ms in another thread, "
        f"{large.first_bytes:,} bytes; a later look after one change {large.later_look_us:,.0f} µs, "
        f"{large.later_bytes:,} bytes"
    )
    for cost in costs:
        report.line(
            f"processor time of the server at {1 / STEP_S:.0f} steps a second, {cost.streams} streams: "
            f"{sum(cost.alone.values()):.1f} ms a second, with readers {cost.more_ms:+.1f} ms"
        )
    cpu = [asdict(each) | {"more": each.more_ms} for each in costs]
    report.finish({"setup": asdict(setup), **asdict(found), "large_tree": asdict(large), "cpu_ms_per_s": cpu})
