"""The power fails at any moment: unsynced writes are dropped, torn and reordered, and what was flushed is still there.

Workers are recorded, each tree through several lives that end in the middle of a call; then a disk is simulated.
"""

from __future__ import annotations

import random
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.crash.nursery import Nursery
from tests.crash.platter import Platter, build, read
from tests.crash.recorder import Kind, Record, build_recorder, read_log
from tests.crash.recovery import recover
from tests.crash.seeds import how_often, seeds
from tests.crash.tree import Promises, Setup
from tests.crash.worker import Job
from tests.fakes import MODELS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="calls are recorded with LD_PRELOAD")

NUM_TREES, NUM_STATES = 2 * len(MODELS), 24  # 336 states with --slow, a quarter of them without
NUM_LIVES = 4


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    library = build_recorder(tmp_path_factory.mktemp("recorder"))
    with Nursery({"LD_PRELOAD": str(library)}) as nursery:
        yield nursery


@dataclass(frozen=True)
class Recording:
    """What the lives of one tree did below a folder."""

    root: Path
    records: list[Record]


def record(nursery: Nursery, folder: Path, setup: Setup, chance: random.Random) -> Recording:
    """Let a tree live several times: all but the last end after some call, the last as it should. Some do nothing."""
    root, log, journal = folder / "disk", folder / "log", folder / "journal"
    root.mkdir()
    environ = {"RECORD_FOLDER": str(root), "RECORD_LOG": str(log)}
    for life in range(NUM_LIVES):
        is_last = life == NUM_LIVES - 1
        killed = {} if is_last else {"RECORD_KILL_AFTER": str(int(10 ** chance.uniform(0.5, 2.7)))}
        tree = root / "trees" / "tree"
        num_requests = 40 if is_last else chance.choice((0, 15, 40))
        job = Job(str(tree), str(journal), setup.seed, life, num_requests, environ | killed)
        assert nursery.run(job) in ((0,) if is_last else (0, signal.SIGKILL))
    return Recording(root, list(read_log(log)))


@pytest.mark.parametrize("seed", seeds(NUM_TREES))
def test_whatever_of_the_unsynced_writes_is_lost_what_was_flushed_is_kept(
    tmp_path: Path, nursery: Nursery, seed: int, request: pytest.FixtureRequest
) -> None:
    setup, chance, num_states = Setup(seed), random.Random(seed), how_often(request, NUM_STATES)
    recording = record(nursery, tmp_path.resolve(), setup, chance)
    platter, promises = Platter(recording.root), Promises()
    moments = choose_moments(recording.records, num_states, chance)
    reused_tokens = 0
    for number, each in enumerate(recording.records):
        if number in moments:
            state = tmp_path / f"state-{number}"
            build(state, platter.crash(chance), chance)
            reused_tokens += recover(setup, state / "trees" / "tree", promises, chance)
            shutil.rmtree(state)
        if each.kind is Kind.MARK:
            promises.hear(each.data)
        else:
            platter.take(each)
    assert platter.content() == read(recording.root)  # nothing escaped the recorder
    assert len(moments) == num_states and reused_tokens > 0


def choose_moments(records: list[Record], num_states: int, chance: random.Random) -> set[int]:
    """Before and after syncs, and anywhere."""
    syncs = [number for number, each in enumerate(records) if each.kind is Kind.SYNC]
    around = [*syncs, *(number + 1 for number in syncs if number + 1 < len(records))]
    moments = set(chance.sample(around, min(2 * num_states // 3, len(around))))
    while len(moments) < num_states:
        moments.add(chance.randrange(len(records)))
    return moments
