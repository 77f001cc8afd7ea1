"""`bough bench`: the commands, and the report that every benchmark prints.

They compare figures within one run, because machines differ.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from bough.bench.report import load_warning, read_load, read_machine, require_matplotlib
from bough.bench.workload import SHAPES, SwitchSetup
from bough.cli import options
from bough.cli.groups import CommandApp
from bough.cli.terminal.progress import make_counter, show_progress
from bough.config import WEIGHTS, load_settings
from bough.runner import Runner

if TYPE_CHECKING:
    from bough.bench.decode import DecodeReport, Figure

app = CommandApp("Measure Bough on this machine, next to simpler ways and other servers.")

Json = Annotated[bool, typer.Option("--json", help="End with one line of JSON.")]
Model = Annotated[str | None, typer.Option("--model", "-m", help="The model to run; not given: the default model.")]
Shape = Annotated[str | None, typer.Option(help="Random weights instead of a model: llama-8b or tiny.")]
Weights = Annotated[str, typer.Option(help=f"Some of {', '.join(WEIGHTS)}, separated by commas.")]
Png = Annotated[Path | None, typer.Option(help="Where to write a plot.")]


class BenchReport:
    """The output of one benchmark.

    With `as_json` the tables go to stderr, and `finish` prints the figures with the machine and its load. The plot is drawn
    last: if it fails, the figures are already printed. Raises RequestError if there cannot be one.
    """

    def __init__(self, name: str, as_json: bool, png: Path | None = None) -> None:
        if png is not None:
            require_matplotlib()
        self.console = Console(stderr=as_json)
        self._name, self._as_json, self._png = name, as_json, png
        self._load = read_load()
        if warning := load_warning():
            self.console.print(f"[yellow]{warning}[/yellow]")

    @contextmanager
    def counting(self, label: str, total: int | None) -> Iterator[Callable[..., None]]:
        """Show how far a measurement is; yields a call that counts one step, and may change the `description`."""
        with make_counter(self.console) as progress:
            task = progress.add_task(label, total=total)
            yield lambda description=None: progress.update(task, description=description, advance=1)

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], left: Iterable[int] = (0,)) -> None:
        """Print a table; the columns with these numbers are texts, the others are figures."""
        table = Table(title=title, title_justify="left")
        for number, column in enumerate(columns):
            table.add_column(column, justify="left" if number in left else "right")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def line(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, highlight=False, markup=False)

    def machine_line(self) -> str:
        """The processor, and the load at the start and now."""
        return f"{read_machine()} · load {self._load} at the start, {read_load()} at the end"

    def as_dict(self, figures: Mapping[str, Any]) -> dict[str, Any]:
        """The figures with the name of the benchmark, the machine and its load."""
        load = {"start": self._load, "end": read_load()}
        return {"benchmark": self._name, "machine": asdict(read_machine()), "load": load, **figures}

    def finish(self, figures: Mapping[str, Any], plot: Callable[[Path], None] | None = None) -> None:
        """Print the line of JSON, and draw the plot, where they are asked for."""
        if self._as_json:
            print(json.dumps(self.as_dict(figures)), flush=True)
        if plot is not None and self._png is not None:
            plot(self._png)
            self.console.print(f"plot: {self._png}")


@app.command()
def demo(model: Model = None) -> None:
    """A short tour: conversations take turns, with the cost of each turn and the tree at the end."""
    from bough.bench.demo import show_demo
    from bough.runner import load

    console = BenchReport("demo", as_json=False).console
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


@app.command()
@options.with_flags(options.setting_flags("threads", "engine", "device", "dtype", "host_memory"))
def switch(
    model: Model = None,
    conversations: Annotated[int, typer.Option(min=1)] = 6,
    turns: Annotated[int, typer.Option(min=1)] = 8,
    system_words: Annotated[int, typer.Option(min=1)] = 700,
    message_words: Annotated[int, typer.Option(min=1)] = 40,
    reply_tokens: Annotated[int, typer.Option(min=1)] = 16,
    memory: Annotated[str | None, typer.Option(help="Budget for lanes and pages, such as 2GB, or auto.")] = None,
    disk: Annotated[str, typer.Option(help="Budget for the disk, such as 50GB; 0: nothing is written to disk.")] = "0",
    png: Png = None,
    as_json: Json = False,
    **settings: Any,
) -> None:
    """Conversations take turns over one system prompt: the tree, a copy per conversation, a single entry, no cache."""
    from bough.bench.alone import warm_up
    from bough.bench.strategies import STRATEGIES
    from bough.bench.switch import as_report, measure_overhead, plot_switch, run_strategy, strategy_table
    from bough.runner import load

    report, results = BenchReport("switch", as_json, png), {}
    setup = SwitchSetup(conversations, turns, system_words, message_words, reply_tokens)
    with load(model, device_memory=memory, disk=disk, **settings) as runner:
        runtime = runner.runtime
        warm_up(runtime)
        for name in STRATEGIES:
            with report.counting(name, conversations * turns) as count:
                for result in run_strategy(name, runtime, setup):
                    results[name] = result
                    count()
        with report.counting("nothing to reuse", None) as count:
            overhead = measure_overhead(runtime, on_step=count)
        figures = as_report(runtime, setup, results, overhead)
    report.console.print(strategy_table(results))
    for line in _switch_lines(figures):
        report.line(line)
    report.finish(figures, partial(plot_switch, results))


def _switch_lines(report: dict[str, Any]) -> Iterator[str]:
    figures = report["strategies"]
    tree = figures["tree"]
    for name, label in (("single", "single entry"), ("none", "no cache")):
        ratio = figures[name]["later_ttft_ms"] / max(tree["later_ttft_ms"], 1e-9)
        yield f"first token of later turns: {ratio:.1f}× sooner than with {label}"
    yield f"the tree takes {tree['bytes'] / max(figures['copies']['bytes'], 1):.0%} of the bytes of the copies"
    yield f"with nothing to reuse: {report['no_reuse_overhead']:+.1%} of the time of no cache"
    yield f"answers equal under all strategies: {report['setup']['answers_equal']}"


@app.command()
@options.with_flags(options.setting_flags("engine", "threads"))
def decode(
    model: Model = None,
    shape: Shape = None,
    weights: Weights = "float32,auto",
    counts: Annotated[str, typer.Option("--lanes", help="Numbers of lanes in a step, separated by commas.")] = "1,2,4,8",
    runs: Annotated[
        str, typer.Option("--tokens", help="Numbers of tokens in a run of a prompt, separated by commas; 0: none.")
    ] = "64,512",
    depths: Annotated[str, typer.Option("--depth", help="Rows of each lane before, separated by commas.")] = "0,500",
    steps: Annotated[int, typer.Option(min=1, help="Steps in a round.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is measured; the quickest round counts.")] = 5,
    png: Png = None,
    as_json: Json = False,
    **settings: Any,
) -> None:
    """The time of a decode step, and of a run of prompt tokens, with different weights, in turns in this process."""
    from bough.bench.decode import DecodeReport, DecodeSetup, measure_decode, plot_decode
    from bough.bench.variants import describe_variants, load_variants, variant_lines

    tokens = [each for each in read_numbers(runs, least=0) if each]
    setup = DecodeSetup(read_numbers(counts), tokens, read_numbers(depths, least=0), steps, rounds)
    names, report = read_weights(weights), BenchReport("decode", as_json, png)
    load = partial(load_model, model, shape, **settings)
    with load_variants(names, lambda each: load(weights=each)) as variants:
        found = DecodeReport(setup, _collect(report, setup.num_cases, measure_decode(variants, setup)))
        about, lines = describe_variants(variants), variant_lines(variants)
    columns = ("rows", "size", "weights", "smallest, ms", "median, ms", "tokens/s", f"against {names[0]}")
    title = "steps of lanes and runs of tokens; speeds and ratios of the smallest time"
    report.table(title, columns, (_decode_row(found, each) for each in found.figures), left=(2,))
    for line in [report.machine_line(), *lines]:
        report.line(line)
    report.finish({**about, **found.as_dict()}, partial(plot_decode, found))


def _collect(report: BenchReport, total: int, cases: Iterable[list[Figure]]) -> list[Figure]:
    figures: list[Figure] = []
    with report.counting("decode", total) as count:
        for case in cases:
            figures += case
            count()
    return figures


def _decode_row(report: DecodeReport, each: Figure) -> tuple[str, ...]:
    times = (f"{each.smallest_ms:,.2f}", f"{each.median_ms:,.2f}", f"{each.tokens_per_s:,.1f}")
    return (f"{each.rows:,}", f"{each.size:,} {each.unit}", each.weights, *times, f"{report.ratio(each):.2f}×")


@app.command()
@options.with_flags(options.setting_flags("threads", "weights"))
def peers(
    urls: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME=]URL[#MODEL]...", help="Servers with OpenAI's API, such as llama.cpp=http://127.0.0.1:8080."
        ),
    ],
    bough: Annotated[str | None, typer.Option(help="The address of a running Bough; not given: one is started.")] = None,
    model: Model = None,
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
    **given: Any,
) -> None:
    """Bough next to other servers with OpenAI's API, with the same workloads in turns.

    The settings are those of the Bough that is started.
    """
    from bough.bench.peers.client import Peer
    from bough.bench.peers.comparison import columns, count_steps, lines, measure_peers, plot_peers, rows
    from bough.bench.peers.workloads import PeerSetup
    from bough.bench.server import serving

    sizes = {"contexts": read_numbers(contexts), "prefills": read_numbers(prefills), "streams": read_numbers(streams)}
    setup = PeerSetup(rounds, tokens, **sizes, switch=SwitchSetup(turns=turns), limit_s=limit)
    report, settings = BenchReport("peers", as_json, png), load_settings()
    flags = [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
    with ExitStack() as stack:
        others = [stack.enter_context(closing(Peer.parse(each, api_key))) for each in urls]
        url = bough or stack.enter_context(serving(model, *flags))
        ours = stack.enter_context(closing(Peer.parse(f"bough={url}", settings.api_key if bough else "")))
        ours.model = ours.model or model or settings.model
        servers = [ours, *others]
        for each in servers:
            each.connect()
        with report.counting("warming up", count_steps(setup)) as count:
            found = measure_peers(servers, setup, secrets.token_hex(4), count)
    title = f"the best of {rounds} rounds; switching once"
    report.table(title, columns(found), rows(found), left=(0, 1))
    for line in [report.machine_line(), *lines(found)]:
        report.line(line)
    report.finish(found.as_dict(), partial(plot_peers, found))


def load_model(model: str | None, shape: str | None, **settings: Any) -> Runner:
    """A model without a tree on disk, or random weights of a named shape."""
    from bough.runner import load
    from bough.runtime import load_shape

    return Runner(load_shape(read_shape(shape), **settings)) if shape else load(model, disk=0, **settings)


def read_shape(name: str) -> dict[str, Any]:
    if name not in SHAPES:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(SHAPES)}")
    return SHAPES[name]


def read_numbers(text: str, least: int = 1) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and int(part) >= least for part in parts):
        raise typer.BadParameter(f"{text!r} is not a list of numbers from {least} on, such as 1,4,8")
    return [int(part) for part in parts]


def read_weights(text: str) -> list[str]:
    """Values of the setting `weights`, separated by commas, each once."""
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in WEIGHTS:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(WEIGHTS)}")
    return list(dict.fromkeys(names))
