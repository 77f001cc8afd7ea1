"""Benchmarks of what is kept and reused: switching between conversations, restoring, restarting, paging; the tree alone."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from bough.bench.workload import SwitchSetup
from bough.cli.bench.flags import Engine, Json, Model, Shape, Threads, load_model, read_shape
from bough.cli.bench.tables import make_table, milliseconds_table, warn_if_busy
from bough.cli.terminal.progress import make_counter, show_progress


def switch(
    model: Model = None,
    conversations: Annotated[int, typer.Option(min=1)] = 6,
    turns: Annotated[int, typer.Option(min=1)] = 8,
    system_words: Annotated[int, typer.Option(min=1)] = 700,
    message_words: Annotated[int, typer.Option(min=1)] = 40,
    reply_tokens: Annotated[int, typer.Option(min=1)] = 16,
    threads: Threads = None,
    engine: Engine = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, mps; gpu with mlx.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16, float16.")] = None,
    memory: Annotated[str | None, typer.Option(help="Budget for lanes and pages, such as 2GB, or auto.")] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Budget for pages that are demoted from a GPU, auto, or 0.")
    ] = None,
    disk: Annotated[str, typer.Option(help="Budget for the disk, such as 50GB; 0: nothing is written to disk.")] = "0",
    png: Annotated[Path | None, typer.Option(help="Where to write a plot.")] = None,
    as_json: Json = False,
) -> None:
    """Conversations take turns over one system prompt: the tree, a copy per conversation, a single entry, no cache."""
    from bough.bench.plot import require_matplotlib
    from bough.bench.report import plot, strategy_table
    from bough.bench.strategies import STRATEGIES
    from bough.bench.switch import as_report, measure_overhead, run_strategy
    from bough.bench.timing import warm_up
    from bough.runner import load

    if png is not None:
        require_matplotlib()
    console = Console(stderr=as_json)
    setup = SwitchSetup(conversations, turns, system_words, message_words, reply_tokens)
    warn_if_busy(console)
    settings: Any = {"device_memory": memory, "host_memory": host_memory, "disk": disk}
    settings |= {"engine": engine, "threads": threads, "device": device, "dtype": dtype}
    with load(model, **settings) as runner:
        runtime = runner.runtime
        warm_up(runtime)
        results = {}
        with make_counter(console) as progress:
            for name in STRATEGIES:
                task = progress.add_task(name, total=conversations * turns)
                for result, _ in run_strategy(name, runtime, setup):
                    results[name] = result
                    progress.advance(task)
            task = progress.add_task("nothing to reuse", total=None)
            overhead = measure_overhead(runtime, on_step=lambda: progress.advance(task))
        report = as_report(runtime, setup, results, overhead)
    console.print(strategy_table(results))
    _print_ratios(console, report)
    if as_json:
        print(json.dumps(report), flush=True)
    if png is not None:  # last: if the plot fails, the figures are already printed
        plot(results, png)
        console.print(f"plot: {png}")


def _print_ratios(console: Console, report: dict[str, Any]) -> None:
    figures = report["strategies"]
    tree = figures["tree"]
    for name, label in (("single", "single entry"), ("none", "no cache")):
        ratio = figures[name]["later_ttft_ms"] / max(tree["later_ttft_ms"], 1e-9)
        console.print(f"first token of later turns: {ratio:.1f}× sooner than with {label}")
    console.print(f"the tree takes {tree['bytes'] / max(figures['copies']['bytes'], 1):.0%} of the bytes of the copies")
    console.print(f"with nothing to reuse: {report['no_reuse_overhead']:+.1%} of the time of no cache")
    console.print(f"answers equal under all strategies: {report['setup']['answers_equal']}")


def core(as_json: Json = False) -> None:
    """The cost of the tree alone: matching, evicting, starting from disk; the host cost of a decode step and of a chunk."""
    from bough.bench.core.run import CoreSizes, measure_core

    console = Console(stderr=as_json)
    with console.status("building trees"):
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
    console.print(make_table("the core: medians; of a step the lowest", ("operation", "size", "time"), rows))
    if as_json:
        print(json.dumps(asdict(figures)))


def router(
    replicas: Annotated[int, typer.Option(min=1)] = 64,
    pages: Annotated[int, typer.Option(min=10_000, help="The pages that are known of all replicas together.")] = 1_000_000,
    decisions: Annotated[int, typer.Option(min=100)] = 5_000,
    rate: Annotated[int, typer.Option(min=1, help="Requests a second, for the messages of the replicas.")] = 1_000,
    as_json: Json = False,
) -> None:
    """What choosing a replica costs, and the messages that tell the router what replicas hold."""
    from bough.bench.router import measure_router

    console = Console(stderr=as_json)
    warn_if_busy(console)
    with console.status("filling the index"):
        figures = measure_router(replicas, pages, decisions, rate)
    rows = [
        ("a decision: mean, median, p99", f"{figures.decision_us:.0f}, {figures.median_us:.0f}, {figures.p99_us:.0f} µs"),
        ("decisions a second", f"{figures.decisions_per_s:,.0f}"),
        ("a decision with a store: mean", f"{figures.copying_us:.0f} µs"),
        ("the digests of 8,192 tokens", f"{figures.chain_us:.0f} µs"),
        ("memory of a page", f"{figures.page_bytes:.0f} bytes"),
        ("taking up a whole listing", f"{figures.listing_ms:.0f} ms"),
        (f"messages a second at {rate:,} requests/s", f"{figures.messages_per_s:,.0f}"),
        ("their changes a second", f"{figures.changes_per_s:,.0f}"),
        ("their bytes a second", f"{figures.message_bytes_per_s:,.0f}"),
        ("processor that applying them takes", f"{figures.apply_share:.1%}"),
    ]
    console.print(make_table(f"{replicas} replicas, {figures.pages:,} pages known", ("", "processor time"), rows))
    if as_json:
        print(json.dumps(asdict(figures)))


def restore(
    model: Model = None,
    shape: Shape = None,
    tokens: Annotated[int, typer.Option(min=16)] = 8192,
    engine: Engine = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, mps; gpu with mlx.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16, float16.")] = None,
    as_json: Json = False,
) -> None:
    """Return to a long conversation: restore it from the tree, against computing it again."""
    from bough.bench.restore import measure_restore

    console = Console(stderr=as_json)
    with console.status("measuring"), load_model(model, shape, engine=engine, device=device, dtype=dtype) as runner:
        figures = measure_restore(runner.runtime, tokens)
    rows = {
        "first token, cold": figures.cold_first_token_ms,
        "restoring from the tree": figures.restore_ms,
        "first token, restored": figures.restored_first_token_ms,
        "first token, idle lane still holds it": figures.live_first_token_ms,
        "each further token": figures.decode_ms,
    }
    console.print(milliseconds_table(f"{figures.tokens:,} tokens, medians", rows))
    console.print(f"snapshot {figures.snapshot_bytes / 2**20:,.0f} MiB · answers equal: {figures.answers_equal}")
    if as_json:
        print(json.dumps(asdict(figures)))


def restart(
    model: Model = None,
    tokens: Annotated[int, typer.Option(min=16)] = 2000,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    as_json: Json = False,
) -> None:
    """The first token of a conversation after a restart: read back from disk, against computing it again."""
    from bough.bench.restart import measure_restart

    console = Console(stderr=as_json)
    warn_if_busy(console)
    with console.status("computing, then starting again"):
        figures = measure_restart(model, tokens, rounds)
    rows = {
        "computed, without a disk": figures.computed_ms,
        "computed, while it is written to disk": figures.computed_while_writing_ms,
        "after a restart": figures.restarted_ms,
        "  of which reading": figures.reading_ms,
        "starting: model and tree": figures.start_ms,
        "with a disk of 4 MB/s: computed": figures.slow_disk_computed_ms,
        "with a disk of 4 MB/s: the slowest known prompt": figures.slow_disk_ms,
    }
    console.print(milliseconds_table(f"first token of {figures.tokens:,} tokens, medians of {rounds}", rows))
    console.print(
        f"{figures.ratio:.1f}× · {figures.read_bytes / 2**20:,.0f} MiB read · answers equal: {figures.answers_equal}"
    )
    if as_json:
        print(json.dumps(asdict(figures) | {"ratio": round(figures.ratio, 2)}))


def store(
    model: Model = None,
    tokens: Annotated[int, typer.Option(min=512)] = 2000,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    url: Annotated[str | None, typer.Option(help="The store; not given: a folder that goes afterwards.")] = None,
    s3: Annotated[bool, typer.Option("--s3", help="Use moto's S3 server on this machine.")] = False,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """A conversation on a machine that has never seen it: from a store that another has filled, against computing it."""
    from bough.bench.store import local_s3, measure_store, temporary_folder

    console = Console(stderr=as_json)
    warn_if_busy(console)
    place = nullcontext(url) if url is not None else local_s3() if s3 else temporary_folder()
    with console.status("measuring"), place as chosen:
        figures = measure_store(model, chosen, tokens, rounds, threads=threads)
    rows = {
        "first token, computed": figures.computed_ms,
        "computed, while pages are sent": figures.computed_while_sending_ms,
        "first token, from the store": figures.fetched_ms,
        "of it loading": figures.loading_ms,
    }
    console.print(milliseconds_table(f"{figures.tokens:,} tokens, medians", rows))
    console.print(
        f"{figures.fetched_tokens:,} tokens came as {figures.fetched_bytes / 2**20:,.1f} MiB · {figures.ratio:.1f}× sooner"
        f" · {figures.sent_objects:,} objects sent · load {figures.load_average} · answers equal: {figures.answers_equal}"
    )
    if as_json:
        print(json.dumps(asdict(figures)))


def paging(
    shape: Annotated[str, typer.Option(help="Random weights: llama-8b or tiny.")] = "llama-8b",
    tokens: Annotated[int, typer.Option(min=16)] = 8192,
    conversations: Annotated[int, typer.Option(min=2)] = 5,
    as_json: Json = False,
) -> None:
    """Conversations take turns on a GPU with memory for three of them, and page in from pinned host memory."""
    from bough.bench.paging import measure_paging

    console = Console(stderr=as_json)
    with console.status("measuring"):
        figures = measure_paging(read_shape(shape), tokens, conversations)
    rows = {
        "first token, computed": figures.computed_first_token_ms,
        "page-in from the host": figures.page_in_ms,
        "page-in, the slowest": figures.slowest_page_in_ms,
        "first token, paged in": figures.first_token_ms,
    }
    console.print(milliseconds_table(f"{figures.conversations} conversations of {figures.tokens:,} tokens, medians", rows))
    console.print(
        f"{figures.conversation_bytes / 2**20:,.0f} MiB each · {figures.host_share:.0%} of it from the host · "
        f"equal to the bit: {figures.is_exact} · answer tokens as computed: {figures.agreement:.0%}"
    )
    if as_json:
        print(json.dumps(asdict(figures)))


def demo(model: Model = None) -> None:
    """A short tour: conversations take turns, with the cost of each turn and the tree at the end."""
    from bough.bench.demo import show_demo
    from bough.runner import load

    console = Console()
    warn_if_busy(console)
    with show_progress(console) as progress:
        progress.start(f"loading {model or 'the default model'}", None)
        runner = load(  # without a disk each run computes everything itself
            model,
            progress=progress,
            announce=lambda plan: console.print(f"fetching {plan.describe()}", markup=False),
            disk=0,
        )
    with runner:
        show_demo(console, runner.runtime)
