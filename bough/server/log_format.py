"""How a server's process writes its log: as lines for people or as JSON, and some of them only once."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler
from pathlib import Path
from queue import SimpleQueue
from typing import Any

log = logging.getLogger(__name__)

MOST_NOTICES = 1_000  # that are remembered: clients choose the names in them
LOG_FILE_BYTES, NUM_OLD_FILES = 5 * 10**6, 2
_RED, _YELLOW, _PLAIN = "\x1b[31m", "\x1b[33m", "\x1b[0m"


class LineFormatter(logging.Formatter):
    """Each record as a line for people: time (on a terminal without the date), level of warnings and errors, text."""

    def __init__(self, *, is_terminal: bool, has_colours: bool) -> None:
        super().__init__(datefmt="%H:%M:%S" if is_terminal else "%Y-%m-%d %H:%M:%S")
        self._has_colours = has_colours

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        text = f"{level}{record.getMessage()}"
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        status, colour = getattr(record, "fields", {}).get("status", 0), ""
        if self._has_colours and (record.levelno >= logging.WARNING or status >= 400):
            colour = _RED if record.levelno >= logging.ERROR or status >= 500 else _YELLOW
        return f"{self.formatTime(record, self.datefmt)} {colour}{text}{_PLAIN if colour else ''}"


class _StandardError(logging.StreamHandler[Any]):
    """Writes to the present standard error, which a progress bar replaces while it is drawn."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr


class JsonFormatter(logging.Formatter):
    """Each record as a JSON object on a line of its own."""

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", None) or {"message": record.getMessage()}
        if record.exc_info:
            fields = fields | {"error": self.formatException(record.exc_info)}
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        return json.dumps({"time": at, "level": record.levelname.lower(), "logger": record.name, **fields})


def set_up_logs(*, as_json: bool, is_terminal: bool = False, has_colours: bool = False) -> None:
    """Send what Bough logs to the standard error, as lines for people or as JSON. For a process that is a server."""
    handler = _StandardError()
    handler.setFormatter(JsonFormatter() if as_json else LineFormatter(is_terminal=is_terminal, has_colours=has_colours))
    logger = logging.getLogger("bough")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


class Notices:
    """Lines for the log about parts of requests that have no effect. Each part is named once in a run of the server."""

    def __init__(self) -> None:
        self._named: set[str] = set()

    def add(self, part: str, reason: str) -> None:
        if part not in self._named and len(self._named) < MOST_NOTICES:
            self._named.add(part)
            log.info("%s has no effect: %s", part, reason)


@contextmanager
def writing_log_file(file: Path, *, as_json: bool) -> Iterator[None]:
    """Write what Bough logs to a file, too, which its owner alone can read. A thread writes, in case the disk hangs.

    A full file becomes `FILE.1`, and so on; the oldest is deleted. Raises OSError if the file cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    output = _PrivateFile(file, maxBytes=LOG_FILE_BYTES, backupCount=NUM_OLD_FILES, encoding="utf-8")
    output.setFormatter(JsonFormatter() if as_json else LineFormatter(is_terminal=False, has_colours=False))
    records: SimpleQueue[logging.LogRecord] = SimpleQueue()
    listener, handler, logger = QueueListener(records, output), QueueHandler(records), logging.getLogger("bough")
    logger.addHandler(handler)
    listener.start()
    try:
        yield
    finally:
        logger.removeHandler(handler)
        listener.stop()  # writes what is left
        output.close()


class _PrivateFile(RotatingFileHandler):
    def _open(self) -> Any:
        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=_open_private)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
