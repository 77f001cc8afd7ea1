"""Progress of long work: bars on a terminal, a few lines otherwise. Both go to standard error.

Only one piece of work is shown at a time: starting the next ends the one before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import filesize
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.status import Status

from bough.types import Progress as Work

_LINE_EVERY_S = 5.0


@contextmanager
def show_progress(console: Console, *, stays: bool = True) -> Iterator[Work]:
    """Yield a progress object for long work.

    With `stays` the output remains on the terminal, and all work is reported. Without, it is erased, and outside a terminal
    only work of a known size is reported.
    """
    if not console.is_terminal:
        yield Lines(lambda line: console.print(line, markup=False, soft_wrap=True), tells_all=stays)
        return
    bars = Bars(console, stays)
    try:
        yield bars
    finally:
        bars.finish()


def make_counter(console: Console) -> Progress:
    """A live line on a terminal: the running task, its finished steps, and the elapsed time."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


class Bars:
    """A bar for work of known size, a spinner for other work; one of them at a time."""

    def __init__(self, console: Console, stays: bool) -> None:
        self._console = console
        self._stays = stays
        self._bar: Progress | None = None
        self._spinner: Status | None = None
        self._label = ""
        self._done_bytes = 0

    def start(self, label: str, total_bytes: int | None) -> None:
        self.finish()
        self._label, self._done_bytes = escape(label), 0
        if total_bytes:
            texts = (SpinnerColumn(finished_text="✓"), TextColumn("{task.description}"))
            figures = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._bar = Progress(*texts, *figures, console=self._console, transient=not self._stays)
            self._bar.add_task(self._label, total=total_bytes)
            self._bar.start()
        else:
            self._spinner = self._console.status(self._label)
            self._spinner.start()

    def advance(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        if self._bar:
            self._bar.advance(self._bar.task_ids[0], num_bytes)
        elif self._spinner:
            self._spinner.update(f"{self._label} · {filesize.decimal(self._done_bytes)}")

    def finish(self) -> None:
        """Stop drawing, so that others can write to the terminal."""
        for shown in (self._bar, self._spinner):
            if shown:
                shown.stop()
        self._bar = self._spinner = None


class Lines:
    """A line when work starts and every few seconds after. Without `tells_all`, work of unknown size gets no first line."""

    def __init__(
        self, print_line: Callable[[str], None], *, tells_all: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._print = print_line
        self._tells_all = tells_all
        self._clock = clock
        self._label = ""
        self._total_bytes: int | None = None
        self._done_bytes = 0
        self._printed_at_s = 0.0

    def start(self, label: str, total_bytes: int | None) -> None:
        self._label, self._total_bytes, self._done_bytes = label, total_bytes, 0
        self._printed_at_s = self._clock()
        if total_bytes or self._tells_all:
            self._print(f"{label} ({filesize.decimal(total_bytes)})" if total_bytes else label)

    def advance(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        if self._clock() - self._printed_at_s >= _LINE_EVERY_S:
            self._printed_at_s = self._clock()
            done, total = filesize.decimal(self._done_bytes), self._total_bytes
            share = f" of {filesize.decimal(total)} ({100 * self._done_bytes // total} %)" if total else ""
            self._print(f"{self._label}: {done}{share}")

    def finish(self) -> None:
        self._label = ""
