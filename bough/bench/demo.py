"""The tour that `make demo` runs: conversations take turns on the default model, live, then the table and the tree."""

from __future__ import annotations

from functools import partial

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from bough.bench.report import load_warning, strategy_table, turn_table
from bough.bench.switch import StrategyResult, make_strategy
from bough.bench.tour import SYSTEM, TOPICS, Tour
from bough.cache.admin.view import view_tree
from bough.cache.prefix_cache import PrefixCache
from bough.runner import Runner, load
from bough.types import Progress as DownloadProgress

STRATEGIES = ("tree", "single", "none")


def show_demo(model: str | None = None, progress: DownloadProgress | None = None) -> None:
    """Run the tour under three ways of remembering and print what each turn cost, then the tree."""
    console = Console()
    if warning := load_warning():
        console.print(f"[yellow]{warning}[/yellow]")
    with console.status("loading the model (the first time it is fetched and converted)"):
        runner = load(model, progress=progress, disk_bytes=0)  # each run computes everything itself
    with runner:
        engine, threads = runner.engine.info, runner.engine.describe().get("threads")
        threads = f", {threads} threads" if threads else ""
        console.print(f"[bold]{engine.model}[/bold] on {engine.device}, {engine.weights}{threads}")
        console.print(f"{len(TOPICS)} conversations take turns over one system prompt of {len(SYSTEM.split())} words\n")
        results, tree = _run_all(console, runner)
    console.print(turn_table(results))
    console.print(strategy_table(results))
    console.print("\n[bold]the tree[/bold]: what is shared is kept once; each conversation is one branch")
    console.print(escape(tree), soft_wrap=True, highlight=False)


def _run_all(console: Console, runner: Runner) -> tuple[dict[str, StrategyResult], str]:
    runner.generate(list(range(3, 35)), max_tokens=2)  # the first forward pass of a process is slow
    results, drawing = {}, ""
    bars = Progress(TextColumn("{task.description:>14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    said = Text()
    with Live(Group(bars, Panel(said, title="now")), console=console, refresh_per_second=8, transient=True):
        for name in STRATEGIES:
            tour = Tour(runner)
            task = bars.add_task({"tree": "tree", "single": "single entry", "none": "no cache"}[name], total=tour.num_turns)
            strategy = make_strategy(name, runner)
            with runner.remembering(strategy):
                for _ in tour.run(name, lambda text: _say(said, text)):
                    bars.advance(task)
            results[name] = tour.result
            tour.result.kept_bytes = strategy.kept_bytes
            if name == "tree" and isinstance(strategy, PrefixCache):
                decode = partial(runner.tokenizer.decode, skip_special_tokens=False)
                drawing = str(view_tree(strategy.forest, strategy.clock.now(), decode))
            strategy.clear()
    return results, drawing


def _say(said: Text, text: str) -> None:
    said.plain = text[-400:]
