"""`bough bench`: the benchmarks. They compare figures within one run, because machines differ."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bough.bench.gaps.figures import Case
from bough.bench.hostile import CASES, Waits, measure_case, measure_quiet
from bough.bench.workload import SHAPES, SwitchSetup
from bough.cli.terminal.progress import make_counter
from bough.runner import Runner

app = typer.Typer(help="Measure Bough on this machine, next to simpler caching strategies.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="End with one line of JSON.")]
Engine = Annotated[str | None, typer.Option(help="auto, torch or mlx.")]
Model = Annotated[str | None, typer.Option("--model", "-m", help="The model to run; not given: the default model.")]


def _warn_if_busy(console: Console) -> None:
    from bough.bench.report import load_warning

    if warning := load_warning():
        console.print(f"[yellow]{warning}[/yellow]")


def _load(model: str | None, shape: str | None, **settings: Any) -> Runner:
    """A model without a tree on disk, or random weights of a named shape."""
    from bough.runner import load, load_shape

    return load_shape(_shape(shape), **settings) if shape else load(model, disk=0, **settings)


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


@app.command()
def switch(
    model: Model = None,
    conversations: Annotated[int, typer.Option(min=1)] = 6,
    turns: Annotated[int, typer.Option(min=1)] = 8,
    system_words: Annotated[int, typer.Option(min=1)] = 700,
    message_words: Annotated[int, typer.Option(min=1)] = 40,
    reply_tokens: Annotated[int, typer.Option(min=1)] = 16,
    threads: Annotated[int | None, typer.Option(help="Threads of the engine.")] = None,
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
    from bough.bench.report import plot, require_matplotlib, strategy_table
    from bough.bench.strategies import STRATEGIES
    from bough.bench.switch import as_report, measure_overhead, run_strategy
    from bough.bench.timing import warm_up
    from bough.runner import load

    if png is not None:
        require_matplotlib()
    console = Console(stderr=as_json)
    setup = SwitchSetup(conversations, turns, system_words, message_words, reply_tokens)
    _warn_if_busy(console)
    settings: dict[str, Any] = {"device_memory": memory, "host_memory": host_memory, "disk": disk}
    with load(model, engine=engine, threads=threads, device=device, dtype=dtype, **settings) as runner:
        warm_up(runner)
        results = {}
        with make_counter(console) as progress:
            for name in STRATEGIES:
                task = progress.add_task(name, total=conversations * turns)
                for result, _ in run_strategy(name, runner, setup):
                    results[name] = result
                    progress.advance(task)
            task = progress.add_task("nothing to reuse", total=None)
            overhead = measure_overhead(runner, on_step=lambda: progress.advance(task))
        report = as_report(runner, setup, results, overhead)
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


@app.command()
def core(as_json: Json = False) -> None:
    """The cost of the tree alone: matching, evicting, starting from disk; the host cost of a decode step and of a chunk."""
    from bough.bench.core import measure_core

    console = Console(stderr=as_json)
    with console.status("building trees"):
        figures = measure_core()
    rows = [
        *(("match 100,000 tokens", f"{edges:,} edges", f"{ms:.3f} ms") for edges, ms in figures.match_ms.items()),
        *(("evict one page", f"{nodes:,} nodes", f"{us:.1f} µs") for nodes, us in figures.evict_us.items()),
        *(("start with a tree on disk", f"{pages:,} pages", f"{ms:,.0f} ms") for pages, ms in figures.start_ms.items()),
        *(("host cost of a step", f"{lanes:,} lanes", f"{ms:.3f} ms") for lanes, ms in figures.step_ms.items()),
        *(
            (f"host cost of a chunk, {name}", f"{depth:,} tokens deep", f"{us:.1f} µs")
            for name, depths in figures.chunk_us.items()
            for depth, us in depths.items()
        ),
    ]
    console.print(_table("the core: medians; of a step the lowest", ("operation", "size", "time"), rows))
    if as_json:
        print(json.dumps(asdict(figures)))


@app.command()
def restore(
    model: Model = None,
    shape: Annotated[str | None, typer.Option(help="Random weights instead of a model: llama-8b or tiny.")] = None,
    tokens: Annotated[int, typer.Option(min=16)] = 8192,
    engine: Engine = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, mps; gpu with mlx.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16, float16.")] = None,
    as_json: Json = False,
) -> None:
    """Return to a long conversation: restore it from the tree, against computing it again."""
    from bough.bench.restore import measure_restore

    console = Console(stderr=as_json)
    with console.status("measuring"), _load(model, shape, engine=engine, device=device, dtype=dtype) as runner:
        figures = measure_restore(runner, tokens)
    rows = {
        "first token, cold": figures.cold_first_token_ms,
        "restoring from the tree": figures.restore_ms,
        "first token, restored": figures.restored_first_token_ms,
        "first token, idle lane still holds it": figures.live_first_token_ms,
        "each further token": figures.decode_ms,
    }
    console.print(_milliseconds(f"{figures.tokens:,} tokens, medians", rows))
    console.print(f"snapshot {figures.snapshot_bytes / 2**20:,.0f} MiB · answers equal: {figures.answers_equal}")
    if as_json:
        print(json.dumps(asdict(figures)))


@app.command()
def restart(
    model: Model = None,
    tokens: Annotated[int, typer.Option(min=16)] = 2000,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    as_json: Json = False,
) -> None:
    """The first token of a conversation after a restart: read back from disk, against computing it again."""
    from bough.bench.restart import measure_restart

    console = Console(stderr=as_json)
    _warn_if_busy(console)
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
    console.print(_milliseconds(f"first token of {figures.tokens:,} tokens, medians of {rounds}", rows))
    console.print(
        f"{figures.ratio:.1f}× · {figures.read_bytes / 2**20:,.0f} MiB read · answers equal: {figures.answers_equal}"
    )
    if as_json:
        print(json.dumps(asdict(figures) | {"ratio": round(figures.ratio, 2)}))


def _shape(name: str) -> dict[str, Any]:
    if name not in SHAPES:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(SHAPES)}")
    return SHAPES[name]


def _milliseconds(title: str, rows: dict[str, float]) -> Table:
    table = _table(title, ("", "ms"), [(label, f"{value:,.2f}") for label, value in rows.items()])
    table.columns[0].justify = "left"
    return table


@app.command()
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
        figures = measure_paging(_shape(shape), tokens, conversations)
    rows = {
        "first token, computed": figures.computed_first_token_ms,
        "page-in from the host": figures.page_in_ms,
        "page-in, the slowest": figures.slowest_page_in_ms,
        "first token, paged in": figures.first_token_ms,
    }
    console.print(_milliseconds(f"{figures.conversations} conversations of {figures.tokens:,} tokens, medians", rows))
    console.print(
        f"{figures.conversation_bytes / 2**20:,.0f} MiB each · {figures.host_share:.0%} of it from the host · "
        f"equal to the bit: {figures.is_exact} · answer tokens as computed: {figures.agreement:.0%}"
    )
    if as_json:
        print(json.dumps(asdict(figures)))


@app.command()
def lanes(
    model: Model = None,
    shape: Annotated[str | None, typer.Option(help="Random weights instead of a model: llama-8b or tiny.")] = None,
    counts: Annotated[
        str, typer.Option("--lanes", help="Numbers of conversations to decode together, separated by commas.")
    ] = "1,2,4,8",
    context: Annotated[int, typer.Option(min=16, help="Tokens of each conversation.")] = 500,
    steps: Annotated[int, typer.Option(min=4)] = 24,
    engine: Engine = None,
    threads: Annotated[int | None, typer.Option(help="Threads of the engine.")] = None,
    as_json: Json = False,
) -> None:
    """Tokens per second of several conversations that decode together, against one alone."""
    from bough.bench.lanes import measure_lanes

    console = Console(stderr=as_json)
    wanted = _numbers(counts)
    _warn_if_busy(console)
    with (
        console.status("measuring"),
        _load(model, shape, engine=engine, lanes=max(wanted), threads=threads) as runner,
    ):
        figures = measure_lanes(runner, wanted, context, steps)
    rows = [
        (str(n), f"{ms:,.1f} ms", f"{figures.tokens_per_s[n]:,.1f} tokens/s", f"{figures.ratio[n]:.2f}×")
        for n, ms in figures.step_ms.items()
    ]
    title = f"decoding at {figures.context_tokens:,} tokens of context, medians"
    console.print(_table(title, ("lanes", "step", "together", "against one"), rows))
    console.print(f"tokens as when run one by one: {figures.agreement:.1%}")
    if as_json:
        print(json.dumps(asdict(figures)))


@app.command()
def http(
    model: Model = None,
    conversations: Annotated[int, typer.Option(min=1)] = 6,
    turns: Annotated[int, typer.Option(min=2)] = 4,
    system_words: Annotated[int, typer.Option(min=1)] = 700,
    message_words: Annotated[int, typer.Option(min=1)] = 40,
    reply_tokens: Annotated[int, typer.Option(min=1)] = 16,
    as_json: Json = False,
) -> None:
    """Conversations take turns over HTTP: a server with the tree, against a server without a cache."""
    from bough.bench.http import HttpFigures, run_http, serving
    from bough.config import load_settings

    console = Console(stderr=as_json)
    setup = SwitchSetup(conversations, turns, system_words, message_words, reply_tokens)
    _warn_if_busy(console)
    figures, name = HttpFigures(), model or load_settings().model
    with make_counter(console) as progress:
        for label, flags in (("tree", ()), ("no cache", ("--no-cache",))):
            task = progress.add_task(label, total=conversations * turns)
            with serving(model, *flags) as url:
                figures.turns[label] = []
                for turn in run_http(url, name, setup):
                    figures.turns[label].append(turn)
                    progress.advance(task)
    report = figures.as_dict()
    columns = ("server", "first token, median", "mean", "cached", "all turns")
    console.print(_table("later turns over HTTP", columns, [_http_row(label, report[label]) for label in figures.turns]))
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


@app.command()
def hostile(
    model: Model = None,
    only: Annotated[str | None, typer.Option(help="Only cases whose name contains this.")] = None,
    as_json: Json = False,
) -> None:
    """How long a well-behaved client waits while another client sends hostile requests."""
    from bough.bench.http import serving
    from bough.config import load_settings

    console, name = Console(stderr=as_json), model or load_settings().model
    _warn_if_busy(console)
    chosen = [case for case in CASES if only is None or only in case]
    with make_counter(console) as progress, serving(model) as url:
        task = progress.add_task("nothing else", total=len(chosen) + 1)
        measure_quiet(url, name, 2.0)  # the first requests are slower
        found = [measure_quiet(url, name)]
        for case in chosen:
            progress.update(task, description=case, advance=1)
            found.append(measure_case(url, name, case))
    columns = ("case", "answer", "after", "between two tokens", "of /health/live")
    table = _table("the longest wait while another client sends", columns, map(_hostile_row, found))
    table.columns[0].justify = "left"
    console.print(table)
    if as_json:
        print(json.dumps([asdict(each) for each in found]))


def _hostile_row(waits: Waits) -> tuple[str, ...]:
    gaps = (f"{1000 * waits.token_gap_s:,.0f} ms", f"{1000 * waits.health_gap_s:,.0f} ms")
    return (waits.case, waits.status, f"{waits.took_s:.2f} s", *gaps)


@app.command()
def gaps(
    model: Model = None,
    only: Annotated[
        str | None, typer.Option(help="Only these parts, separated by commas: loading, transfer, tree, writes.")
    ] = None,
    as_json: Json = False,
) -> None:
    """The longest pause of eight answers while the server loads, exports, imports, shows its tree, or cannot write."""
    from bough.bench.gaps.run import PARTS, measure_gaps
    from bough.config import load_settings

    console = Console(stderr=as_json)
    parts = only.split(",") if only else list(PARTS)
    if unknown := [part for part in parts if part not in PARTS]:
        raise typer.BadParameter(f"{unknown[0]!r} is not one of {', '.join(PARTS)}")
    _warn_if_busy(console)
    found: list[Case] = []
    with make_counter(console) as progress:
        task = progress.add_task("starting servers", total=None)

        def note(case: Case) -> None:
            found.append(case)
            progress.update(task, description=f"{case.part}: {case.name}", advance=1)

        report = measure_gaps(model or load_settings().model, parts, note)
    columns = ("while", "longest", "alone", "ratio", "99 %", "alone")
    table = _table("gaps between two tokens of eight streams, ms", columns, map(_gap_row, found))
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


def _numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",") if part.strip().isdecimal()]
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter(f"{text!r} is not a list of numbers such as 1,4,8")
    return numbers


@app.command()
def demo(model: Model = None) -> None:
    """A short tour: conversations take turns, with the cost of each turn and the tree at the end."""
    from bough.bench.demo import show_demo

    console = Console()
    _warn_if_busy(console)
    show_demo(console, model)
