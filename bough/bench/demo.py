"""`bough bench demo`: conversations take turns on a model, shown live; then a table of the turns, and the tree."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from bough.bench.alone import warm_up
from bough.bench.strategies import STRATEGIES
from bough.bench.switch import StrategyResult, StrategyRun, strategy_table, turn_table
from bough.cache.admin.view import view_tree
from bough.cache.prefix_cache import PrefixCache
from bough.runtime import Runtime
from bough.types import Completion, Message

REPLY_TOKENS = 24

SYSTEM = """You are a patient assistant for a small town library. You answer in plain words and short sentences. \
You know where the books stand: novels on the ground floor by the door, history and travel on the first floor, science \
and cooking on the second floor, children's books in the round room behind the stairs, newspapers beside the window. \
The library opens at nine in the morning and closes at seven in the evening, on Saturdays at one, and it is closed on \
Sundays and in the first week of August. A library card is free for everyone who lives in the town; visitors pay five \
coins a year. A reader may take six books home for four weeks, and may keep them four weeks longer if nobody else waits \
for them. A book that comes back late costs ten cents a day, never more than two coins. Whoever loses a book brings a \
used copy or pays half its price. Films may be taken for one week, two at a time. There are eight desks with lamps, four \
of them quiet, and two rooms for groups that can be booked for two hours a day. The printer takes cards, ten cents a \
page, in colour thirty. Dogs wait outside, where there is a bowl of water; coffee is welcome on the terrace. On Tuesdays \
there is a reading hour for children at four, on Thursdays a circle for people who learn the language, and on the last \
Friday of the month a writer comes to read. If somebody asks for a book that the library does not have, offer to order \
it from the county library, which takes about five days. If somebody asks for legal or medical advice, name the shelf \
where books about it stand and say that a book does not replace a visit. If you do not know something, say so, and say \
who does. Never invent a title. When you recommend a book, say in one sentence why. Keep every answer below four \
sentences unless you are asked for more. Be kind to people who are in a hurry, to those who have all day, and to those \
who only came in because of the rain."""

TOPICS: tuple[tuple[str, ...], ...] = (
    ("When do you open on Saturday?", "And how long may I keep a book?", "What if I am a week late?"),
    ("Where are the cook books?", "Can I print a recipe here?", "What does colour cost?"),
    ("My son is six. Is there something for him?", "Which day is the reading hour?", "May we bring the dog?"),
    ("I need a quiet desk for tomorrow.", "Can our group book a room?", "For how many hours?"),
)

NUM_TURNS = sum(map(len, TOPICS))


def show_demo(console: Console, runtime: Runtime) -> None:
    """Run the tour with three strategies, then print the cost of each turn, and the tree.

    The tour is shown live on a terminal; elsewhere each of its stages is a line.
    """
    engine, threads = runtime.engine.info, runtime.engine.describe().get("threads")
    threads = f", {threads} threads" if threads else ""
    console.print(f"[bold]{engine.model}[/bold] on {engine.device}, {engine.weights}{threads}")
    console.print(f"{len(TOPICS)} conversations take turns over one system prompt of {len(SYSTEM.split())} words\n")
    results, tree = _run_all(console, runtime)
    console.print(turn_table(results))
    console.print(strategy_table(results))
    console.print("\n[bold]the tree[/bold]: shared prefixes are stored once; each conversation is one branch")
    console.print(escape(tree), soft_wrap=True, highlight=False)


def _run_all(console: Console, runtime: Runtime) -> tuple[dict[str, StrategyResult], str]:
    _print_stage(console, "warming up")
    warm_up(runtime)
    results, drawing = {}, ""
    bars = Progress(TextColumn("{task.description:>14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    said = Text()
    with Live(Group(bars, Panel(said, title="now")), console=console, refresh_per_second=8, transient=True):
        for name in ("tree", "single", "none"):
            run, label = StrategyRun(name, runtime), STRATEGIES[name]
            task = bars.add_task(label, total=NUM_TURNS)
            _print_stage(console, f"{label}: {NUM_TURNS} questions in {len(TOPICS)} conversations")
            for num_answered, _ in enumerate(_ask_all(run, said), start=1):
                bars.advance(task)
                if num_answered % len(TOPICS) == 0:
                    _print_stage(console, f"{label}: {num_answered} of {NUM_TURNS} questions answered")
            results[name] = run.result
            if name == "tree" and isinstance(run.strategy, PrefixCache):
                decode = partial(runtime.tokenizer.decode, skip_special_tokens=False)
                drawing = str(view_tree(run.strategy, run.strategy.clock.now(), decode))
            run.strategy.clear()
    return results, drawing


def _print_stage(console: Console, text: str) -> None:
    """Print one line about what is done; a terminal shows it live instead."""
    if not console.is_terminal:
        console.print(text, markup=False, highlight=False)


def _ask_all(run: StrategyRun, said: Text) -> Iterator[None]:
    """Ask every question, conversations in turns, and yield after each answer. `said` shows the answer so far."""
    chats: list[list[Message]] = [[{"role": "system", "content": SYSTEM}] for _ in TOPICS]
    for turn, questions in enumerate(zip(*TOPICS, strict=True)):
        for number, (chat, question) in enumerate(zip(chats, questions, strict=True)):
            chat.append({"role": "user", "content": question})
            text = ""
            for piece in run.ask(number, turn, chat, max_tokens=REPLY_TOKENS):
                text = piece.text if isinstance(piece, Completion) else text + piece.text
                said.plain = f"chat {'ABCDEFGH'[number]}\n> {question}\n{text}"[-400:]
            chat.append({"role": "assistant", "content": text})
            yield
