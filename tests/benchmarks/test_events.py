"""The benchmark of readers: what it compares, its readers on a real stream, and a large tree in small."""

from __future__ import annotations

from pathlib import Path

from benchmarks.events.large_tree import measure_large_tree
from benchmarks.events.readers import readers
from benchmarks.events.run import EventRound, EventsReport, Half
from bough.models import ModelFiles
from tests.server.in_process import make_words_folder, serving


def test_each_round_is_compared_with_itself() -> None:
    rounds = [  # the machine was half as fast in the second
        EventRound(Half(100, 400, 50), Half(99, 396, 51, bytes_per_s=10)),
        EventRound(Half(50, 200, 100), Half(49.5, 198, 102, bytes_per_s=30)),
        EventRound(Half(100, 400, 50), Half(50, 100, 500, bytes_per_s=20)),
    ]

    report = EventsReport.of(rounds)

    assert (report.one_stream.ratio, report.many_streams.ratio, report.first_token_ms.ratio) == (0.99, 0.99, 1.02)
    assert (report.one_stream.alone, report.one_stream.watched, report.bytes_per_s) == (100, 50, 20)


def test_readers_connect_when_they_are_told_and_tell_what_they_got(tmp_path: Path) -> None:
    files = ModelFiles("tiny", make_words_folder(tmp_path / "tiny"))
    with serving(files, tmp_path, disk=0) as address, readers(int(address.url.rpartition(":")[2]), 2) as process:
        for _ in range(2):
            process.open()  # which raises unless all were told something
            assert process.close().seconds > 0


def test_a_look_at_a_large_tree_is_done_in_steps_and_tells_every_node_once() -> None:
    few, many = measure_large_tree(100), measure_large_tree(1_000)

    assert 9 * few.first_bytes < many.first_bytes < 11 * few.first_bytes
    assert 0 < many.longest_step_ms <= many.first_look_ms
    assert few.later_bytes == many.later_bytes < few.first_bytes / 50
