"""Renders chat templates in other processes, with limits on time and memory.

A template is a program: it comes with a model's files or from a client, and any client may use it. Jinja's sandbox forbids
dangerous calls, and bounds neither time nor memory. One comparison of nested lists can hold the interpreter's lock for
ever. So templates run in other processes (see render_program), which end at a limit and are replaced. They are programs
of their own, never forks of this process, and end when it does.

Always true: a process renders for one caller at a time, and is ended if its answer is not valid.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

from bough.errors import RequestError, TemplateLimit, Unavailable
from bough.models.chat import render_program
from bough.models.chat.render_program import ANSWER, OUT_OF_MEMORY, READY, REQUEST, TEXT, TOOK_TOO_LONG, RenderRequest

LIMIT_S = 2.0
MEMORY_BYTES = 512 * 10**6
MAX_PROCESSES = 4
"""A template that uses all of its time keeps one of them busy. If all are busy, callers wait."""

_MAX_ANSWER_BYTES = 4 * render_program.MAX_CHARS
_LIBRARIES = ("jinja2", "markupsafe")


class Renderer:
    """Up to `max_processes` processes, started when they are needed. Any thread may call it."""

    def __init__(
        self, limit_s: float = LIMIT_S, memory_bytes: int = MEMORY_BYTES, max_processes: int = MAX_PROCESSES
    ) -> None:
        self._limit_s = limit_s
        self._memory_bytes = memory_bytes
        self._max_processes = max_processes
        self._reset()

    def start(self) -> None:
        """Start a process if there is none, without waiting for it: it imports Jinja while a model is loaded."""
        with self._lock:
            if not self._all:
                self._idle.append(self._add())

    def render(self, request: RenderRequest) -> str:
        """Render a template.

        Raises TemplateLimit if that takes too much time or memory, RequestError with the template's own error, and
        Unavailable if no process can be started.
        """
        try:
            body = json.dumps(request, ensure_ascii=False, default=_to_dict).encode("utf-8", "surrogatepass")
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"the chat template cannot be given these messages: {error}") from error
        with self._slots:
            process = self._take()
            try:
                kind, text = process.ask(body)
            except BaseException:
                process.end()
                with self._lock:
                    self._all.discard(process)
                raise
            with self._lock:
                self._idle.append(process)
        if kind != TEXT:
            raise RequestError(f"the chat template refuses these messages: {text}")
        return text

    def close(self) -> None:
        """Kill all processes. Callers that wait for an answer get an error."""
        with self._lock:
            for process in self._all:
                process.kill()
            for process in self._idle:
                process.end()
            self._all.difference_update(self._idle)
            self._idle.clear()

    def forget(self) -> None:
        """In a fork, leave the processes to the parent, which started them."""
        for process in self._all:
            process.forget()
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._slots = threading.Semaphore(self._max_processes)
        self._all: set[_Process] = set()
        self._idle: list[_Process] = []

    def _take(self) -> _Process:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.is_alive:
                    return process
                self._all.discard(process)
                process.end()
            return self._add()

    def _add(self) -> _Process:
        process = _Process(self._limit_s, self._memory_bytes)
        self._all.add(process)
        return process


class _Process:
    """One process that runs `render_program`."""

    def __init__(self, limit_s: float, memory_bytes: int) -> None:
        self._limit_s = limit_s
        self._memory_bytes = memory_bytes
        self._is_ready = False
        command = [sys.executable, "-S", "-P", render_program.__file__, str(limit_s), str(memory_bytes)]
        try:
            self._process = subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(_library_folders())},
                start_new_session=True,  # Ctrl-C in a terminal is for this process
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
        except OSError as error:
            raise Unavailable(f"cannot start the process that renders chat templates: {error}") from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, body: bytes) -> tuple[bytes, str]:
        """The kind of the answer to a request, and its text. Raises TemplateLimit if the process ends instead."""
        self._require_ready()
        try:
            left = memoryview(REQUEST.pack(len(body)) + body)
            while left:
                left = left[self._input.write(left) :]
            kind, num_bytes = ANSWER.unpack(_read(self._output, ANSWER.size))
            if num_bytes > _MAX_ANSWER_BYTES:
                raise TemplateLimit(f"the chat template makes {num_bytes:,} bytes, and {_MAX_ANSWER_BYTES:,} are allowed")
            return kind, _read(self._output, num_bytes).decode("utf-8", "surrogatepass")
        except (BrokenPipeError, EOFError):
            raise TemplateLimit(f"the chat template {self._why_ended()}") from None

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        """Kill the process, if it has not ended, and close its pipes, which no other thread may use."""
        self.kill()
        self._process.wait()
        self._close_pipes()

    def forget(self) -> None:
        self._process.returncode = 0  # the parent waits for it
        self._close_pipes()

    def _close_pipes(self) -> None:
        self._input.close()
        self._output.close()

    def _require_ready(self) -> None:
        """Wait until the process has started. Raises Unavailable if it ends instead, or is another program."""
        with suppress(EOFError):
            self._is_ready = self._is_ready or _read(self._output, ANSWER.size) == ANSWER.pack(READY, 0)
        if not self._is_ready:
            self.kill()
            status = self._process.wait()
            raise Unavailable(f"the process that renders chat templates did not start, and ended with {status}")

    def _why_ended(self) -> str:
        status = self._process.wait()
        if status in TOOK_TOO_LONG:
            return f"takes longer than {self._limit_s:g} s"
        if status == OUT_OF_MEMORY:
            return f"needs more than {self._memory_bytes // 10**6:,} MB"
        return f"ended the process that rendered it, with {status}"


@cache
def shared_renderer() -> Renderer:
    """The renderer of this process, for all models."""
    renderer = Renderer()
    atexit.register(renderer.close)
    os.register_at_fork(after_in_child=renderer.forget)
    return renderer


@cache
def _library_folders() -> list[str]:
    """The folders of the libraries that templates need. The process has no others but Python's own."""
    specs = [importlib.util.find_spec(name) for name in _LIBRARIES]
    return sorted({str(Path(spec.origin).parents[1]) for spec in specs if spec is not None and spec.origin})


def _to_dict(value: Any) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} is no JSON")


def _read(file: IO[bytes], num_bytes: int) -> bytes:
    """Read exactly `num_bytes`. Raises EOFError if the file ends before."""
    content = bytearray()
    while len(content) < num_bytes:
        part = file.read(num_bytes - len(content))
        if not part:
            raise EOFError
        content += part
    return bytes(content)
