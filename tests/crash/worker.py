"""A program whose processes are killed: it serves random requests from a tree on disk, and says what it has flushed.

    python -m tests.crash.worker

Starting Python takes longer than what is to be tested, so this process reads jobs, one JSON object a line, and forks a
child for each, which is alone in the folder. It writes one word a line: `pid` and a number, `opening` when the child is
about to open the disk, `ready` when it serves, `flushed` after each flush, `ended` and the child's status. What the child
has promised goes to the job's journal.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from tests.crash.tree import Request, Setup, serve, tell_begin, tell_flushed
from tests.scenarios.world import World

STOP_AFTER_S = 120.0  # nobody killed it


@dataclass(frozen=True)
class Job:
    """One life of a tree. With `num_requests` it ends by closing the cache; else it serves until it is killed."""

    folder: str
    journal: str
    seed: int
    life: int
    num_requests: int | None = None
    environ: dict[str, str] = field(default_factory=dict)


class Busy(World):
    """A world that checks everything now and then: checking at each step would be most of what it does."""

    num_calls = 0

    def check(self) -> None:
        self.num_calls += 1
        if self.num_calls % 50 == 0:
            super().check()


def main() -> None:
    gc.freeze()
    for line in sys.stdin:
        job = Job(**json.loads(line))
        pid = os.fork()
        if pid == 0:
            _live(job)
        _, status = os.waitpid(pid, 0)
        _say(1, f"ended {status}")


def _live(job: Job) -> None:
    """Be the child: never returns."""
    try:
        os.environ.update(job.environ)
        control = os.dup(1)
        _say(control, f"pid {os.getpid()}")
        os.dup2(os.open(job.journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 1)
        work(job, control)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def work(job: Job, control: int) -> None:
    """Serve requests, flushing now and then; what is promised goes to descriptor 1."""
    setup, chance = Setup(job.seed), random.Random(f"{job.seed} {job.life}")
    _say(control, "opening")
    world = setup.open(Path(job.folder), Busy)
    assert world.cache.memory.tiers is not None and world.cache.memory.tiers.disk is not None
    assert world.cache.memory.tiers.disk.counts.set_aside == 0
    _say(control, "ready")
    unflushed: list[Request] = []
    stop_at = time.monotonic() + STOP_AFTER_S
    for _ in itertools.count() if job.num_requests is None else range(job.num_requests):
        if setup.is_ample:  # an eviction must find something written, or else it drops what was promised
            world.cache.memory.tiers.disk.flush()
        request = setup.make_request(chance)
        os.write(1, tell_begin(request))
        serve(world, request)
        unflushed.append(request)
        if chance.random() < 0.2:
            _flush(world, unflushed)
            _say(control, "flushed")
        assert time.monotonic() < stop_at
    _flush(world, unflushed)
    world.cache.upkeep.close()


def _flush(world: World, unflushed: list[Request]) -> None:
    assert world.cache.upkeep.flush()
    os.write(1, tell_flushed(world, unflushed))
    unflushed.clear()


def _say(descriptor: int, text: str) -> None:
    os.write(descriptor, f"{text}\n".encode())


if __name__ == "__main__":
    main()
