"""The benchmark of readers: what it compares, its readers on a real stream, and a large tree in small."""

from __future__ import annotations

from pathlib import Path

from bough.bench.events.large_tree import measure_large_tree
from bough.bench.events.readers import readers
from bough.bench.events.run import EventsReport, Half, Round
from bough.config import Settings
from bough.models import ModelFiles
from tests.server.apis.conftest import serving
from tests.server.servers import make_chat_folder


def test_each_round_is_compared_with_itself() -> None:
    rounds = [  # the machine was half as fast in the second
        Round(Half(100, 400, 50), Half(99, 396, 51, bytes_per_s=10)),
        Round(Half(50, 200, 100), Half(49.5, 198, 102, bytes_per_s=30)),
        Round(Half(100, 400, 50), Half(50, 100, 500, bytes_per_s=20)),
    ]

    report = EventsReport.of(rounds)

    assert (report.one_stream.ratio, report.many_streams.ratio, report.first_token_ms.ratio) == (0.99, 0.99, 1.02)
    assert (report.one_stream.alone, report.one_stream.watched, report.bytes_per_s) == (100, 50, 20)


def test_readers_connect_when_they_are_told_and_tell_what_they_got(tmp_path: Path) -> None:
    settings = Settings(data_folder=tmp_path, cache_folder=tmp_path / "cache", disk=0, threads=2, model="tiny")
    files = ModelFiles("tiny", make_chat_folder(tmp_path / "tiny"))
    with serving(settings, files) as url, readers(int(url.rpartition(":")[2]), 2) as process:
        for _ in range(2):
            process.open()  # which raises unless all were told something
            assert process.close().seconds > 0


def test_a_look_at_a_large_tree_is_done_in_steps_and_tells_every_node_once() -> None:
    few, many = measure_large_tree(100), measure_large_tree(1_000)

    assert 9 * few.first_bytes < many.first_bytes < 11 * few.first_bytes
    assert 0 < many.longest_step_ms <= many.first_look_ms
    assert few.later_bytes == many.later_bytes < few.first_bytes / 50
