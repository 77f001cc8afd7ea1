"""Starts workers and kills them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.crash.worker import Job

ROOT = Path(__file__).parents[2]


class Nursery:
    """The process that forks workers, one at a time. Use it in a `with` statement."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._pid = 0  # of the worker that lives now
        command = [sys.executable, "-m", "tests.crash.worker"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **(environ or {})},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._kill_worker()
        self._process.communicate()

    def run(self, job: Job) -> int:
        """Let a job live to its end; returns the signal that it died of, 0 if none."""
        self._begin(job)
        return self._end()

    def kill_after(self, job: Job, word: str, delay_s: float) -> None:
        """Begin a job, and kill it so many seconds after it has said a word."""
        self._begin(job)
        while self._hear(job) != word:
            pass
        time.sleep(delay_s)
        self._kill_worker()
        assert self._end() == signal.SIGKILL, "it did not live until it was killed"

    @contextlib.contextmanager
    def living(self, job: Job, word: str) -> Iterator[int]:
        """A job that has said a word, by its process id; it lives until it is killed at the end of the block."""
        self._begin(job)
        while self._hear(job) != word:
            pass
        yield self._pid
        self._kill_worker()
        assert self._end() == signal.SIGKILL, "it did not live until it was killed"

    def _kill_worker(self) -> None:
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def _begin(self, job: Job) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(job)) + "\n")
        self._process.stdin.flush()
        word, pid = self._hear(job).split()
        assert word == "pid"
        self._pid = int(pid)

    def _end(self) -> int:
        while not (line := self._hear(None)).startswith("ended "):
            pass
        status, self._pid = int(line.split()[1]), 0
        assert os.WIFSIGNALED(status) or status == 0, "a worker has failed: its error stands above"
        return os.WTERMSIG(status) if status else 0

    def _hear(self, job: Job | None) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().rstrip("\n")
        assert line, "the workers' parent has died"
        assert job is None or not line.startswith("ended"), f"{job} ended too early: {line}"
        return line


def random_moment(chance: random.Random) -> tuple[str, float]:
    """A word and a delay after it: some lives are killed as they open the disk, most while they work."""
    word = chance.choice(["opening", "ready", "ready", "flushed"])
    return word, chance.uniform(0, 0.03 if word == "opening" else 0.3)
