"""The parts of `python -m benchmarks gaps` that need no model: gaps, the slow disk, and the trees that it writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gaps.figures import GapCase, GapFigures, GapWindow, gaps_in, percentile
from benchmarks.gaps.slow_server import DiskSpeed, slow_down
from benchmarks.gaps.stored import TreeFacts, open_tree, read_facts, write_branches, write_conversations
from bough.cache.admin.stats import stats
from bough.cache.disk import Disk, page_files
from bough.cache.prefix_cache import PrefixCache
from bough.cache.residency.memory import Tiers
from bough.replay.engine import CountingEngine

FACTS = TreeFacts("model-0123", "model", "0123456789", page_tokens=256, token_bytes=1)


def test_gaps_inside_a_window_count() -> None:
    assert gaps_in(GapWindow(0.5, 3.5), [1.0, 1.5, 3.0]) == [0.5, 1.5]


def test_a_gap_that_reaches_into_the_window_counts_whole() -> None:
    assert gaps_in(GapWindow(5.0, 6.0), [1.0, 2.0, 5.5]) == [3.5]


def test_a_gap_that_reaches_out_of_the_window_counts_whole() -> None:
    assert gaps_in(GapWindow(5.0, 6.0), [5.0, 5.5, 9.0, 10.0]) == [0.5, 3.5]


def test_a_gap_around_the_whole_window_counts() -> None:
    assert gaps_in(GapWindow(5.0, 6.0), [1.0, 9.0]) == [8.0]


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(number) for number in range(1, 201)]

    assert percentile(reversed(values), 0.99) == 198.0
    assert percentile([3.0], 0.5) == 3.0


def test_figures_are_of_the_gaps_of_all_streams() -> None:
    figures = GapFigures.of([0.1] * 98 + [0.2, 0.9])

    assert figures == GapFigures(longest_ms=900.0, p99_ms=200.0, median_ms=100.0, num_gaps=100)


def test_a_window_without_gaps_measures_nothing() -> None:
    with pytest.raises(ValueError, match="no answer"):
        GapFigures.of([])


def test_the_ratio_is_of_the_longest_gaps() -> None:
    case = GapCase("tree", "view", GapFigures.of([0.1, 0.2]), GapFigures.of([0.1, 0.5]), note="")

    assert case.ratio == pytest.approx(2.5)


def test_the_speed_of_the_disk_can_change_at_every_access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("read_into", "write_some"):
        monkeypatch.setattr(page_files, name, getattr(page_files, name))  # as they were, after the test
    slept_s: list[float] = []
    monkeypatch.setattr("benchmarks.gaps.slow_server.time.sleep", slept_s.append)
    speed, file, view = tmp_path / "speed.json", tmp_path / "file", memoryview(bytearray(100))
    slow_down(speed)

    DiskSpeed(write_hang_s=5.0).write(speed)
    with file.open("wb") as output:
        assert page_files.write_some(output.fileno(), [memoryview(b"x" * 100)]) == 100
    with file.open("rb") as source:
        assert page_files.read_into(source.fileno(), view) == 100
        DiskSpeed(read_bytes_s=50.0).write(speed)
        os.lseek(source.fileno(), 0, os.SEEK_SET)
        assert page_files.read_into(source.fileno(), view) == 100

    assert bytes(view) == b"x" * 100
    assert slept_s == [5.0, 0.0, 2.0]


def test_branches_become_as_many_nodes(tmp_path: Path) -> None:
    write_branches(tmp_path, FACTS, "salt", num_nodes=300)

    with open_tree(tmp_path, FACTS) as disk:
        assert _restore(disk)["nodes"] == 300


def test_conversations_take_the_bytes_that_were_wanted(tmp_path: Path) -> None:
    num_bytes = write_conversations(tmp_path, FACTS, "salt", total_bytes=1000, pages_each=2)

    assert num_bytes == 1024
    with open_tree(tmp_path, FACTS) as disk:
        assert sum(disk.payload_bytes(file) for file in disk.files()) == 1024
        figures = _restore(disk)
    assert (figures["nodes"], figures["tokens"]) == (2, 1024)


def test_facts_are_read_from_a_tree(tmp_path: Path) -> None:
    write_conversations(tmp_path, FACTS, "salt", total_bytes=1, pages_each=1)

    assert read_facts(tmp_path) == FACTS


def _restore(disk: Disk) -> dict[str, Any]:
    store: Any = CountingEngine()
    cache = PrefixCache(store, [], tiers=Tiers(store, disk=disk))
    cache.restore()
    return stats(cache.forest, cache.residency)
