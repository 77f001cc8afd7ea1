"""Benchmarks of a server, as its clients see it: switching, hostile clients, gaps in answers under way, other servers."""

from __future__ import annotations

import json
import secrets
from contextlib import ExitStack, closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from bough.bench.gaps.figures import Case
from bough.bench.hostile import CASES, Waits, measure_case, measure_quiet
from bough.bench.http import HttpFigures, choose_servers, run_http, serving, serving_all
from bough.bench.peers.client import Peer
from bough.bench.peers.report import columns, lines, plot_peers, rows
from bough.bench.peers.run import PeerReport, count_steps, measure_peers
from bough.bench.peers.workloads import PeerSetup
from bough.bench.plot import require_matplotlib
from bough.bench.workload import SwitchSetup
from bough.cli.bench.flags import Json, Model, Png, Shape, read_numbers, read_shape
from bough.cli.bench.tables import make_table, warn_if_busy
from bough.cli.terminal.progress import make_counter
from bough.config import load_settings

if TYPE_CHECKING:
    from bough.bench.streams.run import StreamFigures


def http(
    model: Model = None,
    conversations: Annotated[int, typer.Option(min=1)] = 6,
    turns: Annotated[int, typer.Option(min=2)] = 4,
    system_words: Annotated[int, typer.Option(min=1)] = 700,
    message_words: Annotated[int, typer.Option(min=1)] = 40,
    reply_tokens: Annotated[int, typer.Option(min=1)] = 16,
    replicas: Annotated[int, typer.Option(min=0, help="Compare with so many on Ray, and with round robin.")] = 0,
    as_json: Json = False,
) -> None:
    """Conversations take turns over HTTP: a server with the tree, against one without a cache, or against replicas."""
    console = Console(stderr=as_json)
    setup = SwitchSetup(conversations, turns, system_words, message_words, reply_tokens)
    warn_if_busy(console)
    figures, name = HttpFigures(), model or load_settings().model
    with make_counter(console) as progress:
        for servers in choose_servers(replicas):
            task = progress.add_task(servers.name, total=conversations * turns)
            with serving_all(model, servers) as urls:
                figures.turns[servers.name] = []
                for turn in run_http(urls, name, setup):
                    figures.turns[servers.name].append(turn)
                    progress.advance(task)
    report = figures.as_dict()
    columns = ("server", "first token, median", "mean", "cached", "all turns")
    console.print(
        make_table("later turns over HTTP", columns, [_http_row(label, report[label]) for label in figures.turns])
    )
    console.print(f"answers equal: {report['answers_equal']}")
    if as_json:
        print(json.dumps(report | {"setup": asdict(setup) | {"model": name}}))


def _http_row(label: str, figures: dict[str, float]) -> tuple[str, ...]:
    return (
        label,
        f"{figures['later_first_token_ms']:,.0f} ms",
        f"{figures['later_first_token_mean_ms']:,.0f} ms",
        f"{figures['later_cached_share']:.1%}",
        f"{figures['total_s']:.1f} s",
    )


def streams(
    shape: Shape = None,
    clients: Annotated[int, typer.Option(min=1)] = 64,
    tokens: Annotated[int, typer.Option(min=64, help="Tokens of an answer.")] = 600,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens that all prompts begin with.")] = 512,
    step_ms: Annotated[float, typer.Option(min=0, help="How long a step takes without a shape.")] = 6.5,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0,
    as_json: Json = False,
) -> None:
    """Many clients stream from one server, against the same requests in process; without a shape nothing is computed."""
    from bough.bench.streams.clients import PATHS, ClientSetup
    from bough.bench.streams.model import PacedEngine
    from bough.bench.streams.run import measure_streams
    from bough.config import Settings
    from bough.engines.contract import Engine
    from bough.runtime import make_shape

    def make_engine(settings: Settings) -> Engine:
        return make_shape(read_shape(shape), settings) if shape else PacedEngine(step_ms / 1000)

    console = Console(stderr=as_json)
    warn_if_busy(console)
    setup = ClientSetup(num_clients=clients, num_tokens=tokens, prompt_bytes=prompt, temperature=temperature, top_p=top_p)
    with console.status("streaming"):
        report = measure_streams(make_engine, setup, list(PATHS))
    ways = {"in process": report.in_process, **report.http}
    rows = [(name, *_stream_row(each, report.in_process)) for name, each in ways.items()]
    columns = ("way", "tokens/s", "share", "processor time for a token, µs", "reads", "bytes")
    console.print(make_table(f"{clients} streams at once", columns, rows))
    if as_json:
        print(json.dumps(asdict(report) | {"share": report.share, "setup": asdict(setup)}))


def _stream_row(figures: StreamFigures, in_process: StreamFigures) -> tuple[str, ...]:
    costs = ", ".join(f"{part} {us:.1f}" for part, us in figures.cpu_us.items())
    share = f"{figures.tokens_per_s / in_process.tokens_per_s:.1%}"
    return f"{figures.tokens_per_s:,.0f}", share, costs, f"{figures.reads_per_token:.2f}", f"{figures.bytes_per_token:.0f}"


def events(
    model: Model = None,
    readers: Annotated[int, typer.Option(min=1, help="Clients that read the events.")] = 3,
    clients: Annotated[int, typer.Option(min=2, help="Streams at once, besides a single one.")] = 8,
    tokens: Annotated[int, typer.Option(min=32, help="Tokens of an answer.")] = 128,
    rounds: Annotated[int, typer.Option(min=1)] = 12,
    as_json: Json = False,
) -> None:
    """What readers of /api/events cost: decode speed, first tokens and processor time with and without; a large tree."""
    from bough.bench.events.cpu_cost import STEP_S, measure_cpu
    from bough.bench.events.large_tree import measure_large_tree
    from bough.bench.events.run import EventsReport, EventsSetup, measure_events
    from bough.bench.machine import read_load

    console, setup = Console(stderr=as_json), EventsSetup(readers, clients, tokens, rounds=rounds)
    warn_if_busy(console)
    large, load = measure_large_tree(), read_load()
    with console.status("processor time"):
        costs = [measure_cpu(number, readers) for number in (1, clients)]
    measured = []
    with make_counter(console) as progress:
        task = progress.add_task("rounds", total=rounds)
        for each in measure_events(model, setup):
            measured.append(each)
            progress.advance(task)
    report = EventsReport.of(measured)
    names = ("tokens/s, 1 stream", f"tokens/s, {clients} streams", "first token, ms")
    compared = (report.one_stream, report.many_streams, report.first_token_ms)
    rows = [
        (name, f"{each.alone:,.1f}", f"{each.watched:,.1f}", f"{each.ratio:.3f}")
        for name, each in zip(names, compared, strict=True)
    ]
    title = f"{readers} readers of events; medians of {rounds} rounds"
    table = make_table(title, ("", "no reader", "with readers", "ratio"), rows)
    table.columns[0].justify = "left"
    console.print(table)
    console.print(f"a reader gets {report.bytes_per_s / 1000:,.1f} kB/s; the load before was {load}")
    console.print(
        f"a tree of {large.nodes:,} nodes: the first look {large.first_look_ms:,.1f} ms of the engine's thread, "
        f"in steps of at most {large.longest_step_ms:.2f} ms, {large.first_write_ms:,.0f} ms in another thread, "
        f"{large.first_bytes:,} bytes; a later look after one change {large.later_look_us:,.0f} µs, "
        f"{large.later_bytes:,} bytes",
        soft_wrap=True,
    )
    for cost in costs:
        console.print(
            f"processor time of the server at {1 / STEP_S:.0f} steps a second, {cost.streams} streams: "
            f"{sum(cost.alone.values()):.1f} ms a second, with readers {cost.more_ms:+.1f} ms",
            soft_wrap=True,
        )
    if as_json:
        found = {"large_tree": asdict(large), "cpu_ms_per_s": [asdict(each) | {"more": each.more_ms} for each in costs]}
        print(json.dumps({"setup": asdict(setup), "load": load, **asdict(report), **found}))


def hostile(
    model: Model = None,
    only: Annotated[str | None, typer.Option(help="Only cases whose name contains this.")] = None,
    as_json: Json = False,
) -> None:
    """How long a well-behaved client waits while another client sends hostile requests."""
    console, name = Console(stderr=as_json), model or load_settings().model
    warn_if_busy(console)
    chosen = [case for case in CASES if only is None or only in case]
    with make_counter(console) as progress, serving(model) as url:
        task = progress.add_task("nothing else", total=len(chosen) + 1)
        measure_quiet(url, name, 2.0)  # the first requests are slower
        found = [measure_quiet(url, name)]
        for case in chosen:
            progress.update(task, description=case, advance=1)
            found.append(measure_case(url, name, case))
    columns = ("case", "answer", "after", "between two tokens", "of /health/live")
    table = make_table("the longest wait while another client sends", columns, map(_hostile_row, found))
    table.columns[0].justify = "left"
    console.print(table)
    if as_json:
        print(json.dumps([asdict(each) for each in found]))


def _hostile_row(waits: Waits) -> tuple[str, ...]:
    gaps = (f"{1000 * waits.token_gap_s:,.0f} ms", f"{1000 * waits.health_gap_s:,.0f} ms")
    return (waits.case, waits.status, f"{waits.took_s:.2f} s", *gaps)


def gaps(
    model: Model = None,
    only: Annotated[
        str | None, typer.Option(help="Only these parts, separated by commas: loading, transfer, tree, writes.")
    ] = None,
    as_json: Json = False,
) -> None:
    """The longest pause of eight answers while the server loads, exports, imports, shows its tree, or cannot write."""
    from bough.bench.gaps.run import PARTS, measure_gaps

    console = Console(stderr=as_json)
    parts = only.split(",") if only else list(PARTS)
    if unknown := [part for part in parts if part not in PARTS]:
        raise typer.BadParameter(f"{unknown[0]!r} is not one of {', '.join(PARTS)}")
    warn_if_busy(console)
    found: list[Case] = []
    with make_counter(console) as progress:
        task = progress.add_task("starting servers", total=None)

        def note(case: Case) -> None:
            found.append(case)
            progress.update(task, description=f"{case.part}: {case.name}", advance=1)

        report = measure_gaps(model or load_settings().model, parts, note)
    columns = ("while", "longest", "alone", "ratio", "99 %", "alone")
    table = make_table("gaps between two tokens of eight streams, ms", columns, map(_gap_row, found))
    table.columns[0].justify = "left"
    console.print(table)
    for case in found:
        console.print(f"{case.name}: {case.note}", soft_wrap=True)
    if as_json:
        print(json.dumps(report))


def _gap_row(case: Case) -> tuple[str, ...]:
    quiet, disturbed = case.quiet, case.disturbed
    longest = (f"{disturbed.longest_ms:,.0f}", f"{quiet.longest_ms:,.0f}", f"{case.ratio:.2f}")
    return (case.name, *longest, f"{disturbed.p99_ms:,.0f}", f"{quiet.p99_ms:,.0f}")


def peers(
    urls: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME=]URL[#MODEL]...", help="Servers with OpenAI's API, such as llama.cpp=http://127.0.0.1:8080."
        ),
    ],
    bough: Annotated[str | None, typer.Option(help="The address of a running Bough; not given: one is started.")] = None,
    model: Model = None,
    threads: Annotated[int | None, typer.Option(help="Threads of the Bough that is started.")] = None,
    weights: Annotated[str | None, typer.Option(help="Weights of the Bough that is started.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is measured; the best round counts.")] = 3,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of an answer.")] = 64,
    contexts: Annotated[str, typer.Option("--depth", help="Tokens before the answers, separated by commas.")] = "32,500",
    prefills: Annotated[str, typer.Option("--prefill", help="Tokens of new prompts, separated by commas.")] = "512,2000",
    streams: Annotated[str, typer.Option(help="Numbers of streams at once, separated by commas.")] = "4,8",
    turns: Annotated[int, typer.Option(min=2, help="Turns of each of the six conversations.")] = 4,
    limit: Annotated[float, typer.Option(min=1, help="Seconds for everything; the rest is left out, and said.")] = 1200,
    api_key: Annotated[str, typer.Option(help="A key that the other servers ask for.")] = "",
    png: Png = None,
    as_json: Json = False,
) -> None:
    """Bough next to other servers with OpenAI's API, with the same workloads in turns."""
    sizes = {"contexts": read_numbers(contexts), "prefills": read_numbers(prefills), "streams": read_numbers(streams)}
    setup = PeerSetup(rounds, tokens, **sizes, switch=SwitchSetup(turns=turns), limit_s=limit)
    if png is not None:
        require_matplotlib()
    console, settings = Console(stderr=as_json), load_settings()
    warn_if_busy(console)
    flags = [*(("--threads", str(threads)) if threads else ()), *(("--weights", weights) if weights else ())]
    with ExitStack() as stack:
        others = [stack.enter_context(closing(Peer.parse(each, api_key))) for each in urls]
        url = bough or stack.enter_context(serving(model, *flags))
        ours = stack.enter_context(closing(Peer.parse(f"bough={url}", settings.api_key if bough else "")))
        ours.model = ours.model or model or settings.model
        servers = [ours, *others]
        for each in servers:
            each.connect()
        report = _run_peers(console, servers, setup)
    _print_peers(console, report)
    if as_json:
        print(json.dumps(report.as_dict()), flush=True)
    if png is not None:  # last: if the plot fails, the figures are already printed
        plot_peers(report, png)
        console.print(f"plot: {png}")


def _run_peers(console: Console, servers: list[Peer], setup: PeerSetup) -> PeerReport:
    with make_counter(console) as progress:
        task = progress.add_task("warming up", total=count_steps(setup))
        return measure_peers(
            servers, setup, secrets.token_hex(4), lambda name: progress.update(task, description=name, advance=1)
        )


def _print_peers(console: Console, report: PeerReport) -> None:
    table = make_table(f"the best of {report.setup.rounds} rounds; switching once", columns(report), rows(report))
    table.columns[0].justify = table.columns[1].justify = "left"
    console.print(table)
    for line in lines(report):
        console.print(line, soft_wrap=True, highlight=False)
