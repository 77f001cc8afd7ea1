"""`bough logs`: the log of the server on this machine, from the file that `bough serve` writes.

There is a file for each port. It has the lines that the server also writes to its standard error: requests with their
counts and times, loads, warnings; never a prompt, an answer or a key.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from bough.cli.terminal.screen import Screen
from bough.config import load_settings
from bough.errors import Unavailable

_LOOK_EVERY_S = 0.5
_FIRST, _LAST = "serve-", ".log"


def log_name(port: int) -> str:
    """The name of the log file of the server at this port."""
    return f"{_FIRST}{port}{_LAST}"


def logs(
    num_lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last lines to show.")] = 50,
    follows: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines until Ctrl-C.")] = False,
    port: Annotated[int | None, typer.Option(help="The server's port; not given: the log written last.")] = None,
) -> None:
    """Show the last lines of the server's log: its requests, loads and warnings, without prompts and answers."""
    screen, file = Screen(), _choose(load_settings().logs_folder, port)
    older = sorted(file.parent.glob(f"{file.name}.*"), reverse=True)  # the one before is .1
    written = file.read_bytes()
    whole = written[: written.rfind(b"\n") + 1]
    pieces = [*(each.read_bytes() for each in older), whole]
    screen.write_lines(deque((line for piece in pieces for line in _decode(piece)), maxlen=num_lines))
    for line in _follow(file, len(whole)) if follows else ():
        screen.write_line(line)


def _choose(folder: Path, port: int | None) -> Path:
    """The log file of a port, or that which was written last. Raises Unavailable if there is none."""
    files = list(folder.glob(f"{_FIRST}*{_LAST}" if port is None else log_name(port)))
    if not files:
        raise Unavailable(f"no server has written a log in {folder}; `bough serve` does")
    return max(files, key=lambda file: file.stat().st_mtime)


def _decode(piece: bytes) -> list[str]:
    return piece.decode(errors="replace").split("\n")[:-1]


def _follow(file: Path, end: int) -> Iterator[str]:
    """Yield the lines that are added to the file after its first `end` bytes, also when a new file takes its place."""
    while True:
        with file.open("rb") as lines:
            is_replaced = False
            while not is_replaced:
                is_replaced = _is_replaced(file, os.fstat(lines.fileno()))  # then what is read now is all of it
                lines.seek(end)
                written = lines.read()
                whole = written[: written.rfind(b"\n") + 1]
                end += len(whole)
                yield from _decode(whole)
                time.sleep(_LOOK_EVERY_S)
            end = 0


def _is_replaced(file: Path, opened: os.stat_result) -> bool:
    with suppress(FileNotFoundError):  # for a moment, while files are renamed
        found = file.stat()
        return (found.st_ino, found.st_dev) != (opened.st_ino, opened.st_dev)
    return False
