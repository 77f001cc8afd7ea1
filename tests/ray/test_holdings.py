"""What replicas tell is passed on to routers, in order, and what is missing is noticed; folders have one owner each."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("ray")
pytestmark = pytest.mark.ray

from bough.config import Settings  # noqa: E402
from bough.ray.holdings import LOST_S, MOST_BYTES, MOST_MESSAGES, Holdings, ReplicaReport  # noqa: E402
from bough.ray.replica import claim_folder, name_replica, settings_for  # noqa: E402


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_router_hears_each_message_once_and_in_order() -> None:
    holdings = Holdings(b"", Clock())
    holdings.report(ReplicaReport("replica-0", "a", {}, messages=[b"1", b"2"]))
    first = holdings.read_news(0, [])
    holdings.report(ReplicaReport("replica-1", "b", {}, messages=[b"3"]))
    second = holdings.read_news(first.sequence, [])

    assert (first.messages, second.messages) == ([b"1", b"2"], [b"3"])
    assert sorted(second.replicas) == ["replica-0", "replica-1"]
    assert not first.has_gap and not second.has_gap
    assert holdings.read_news(second.sequence, []).messages == []


def test_a_router_that_is_too_far_behind_or_ahead_is_told_of_the_gap() -> None:
    holdings = Holdings(b"", Clock())
    holdings.report(ReplicaReport("replica-0", "a", {}, messages=[b"x"] * (MOST_MESSAGES + 1)))

    assert holdings.read_news(0, []).has_gap
    assert not holdings.read_news(1, []).has_gap
    assert Holdings(b"", Clock()).read_news(5, []).has_gap  # the actor was started anew


def test_no_more_bytes_wait_than_may() -> None:
    holdings, large = Holdings(b"", Clock()), bytes(MOST_BYTES // 2)
    for _ in range(4):
        holdings.report(ReplicaReport("replica-0", "a", {"queue": 3, "tokens": 5}, messages=[large]))

    assert holdings.read_news(1, []).has_gap
    news = holdings.read_news(2, [])
    assert (len(news.messages), news.has_gap) == (2, False)
    assert news.replicas["replica-0"].figures == {"queue": 3}  # what a router needs of them
    holdings.report(ReplicaReport("replica-0", "a", {}, messages=[bytes(2 * MOST_BYTES)]))
    assert len(holdings.read_news(4, []).messages) == 1


def test_a_listing_that_a_router_wants_is_asked_of_its_replica_once() -> None:
    holdings = Holdings(b"", Clock())
    holdings.read_news(0, ["replica-1"])

    assert not holdings.report(ReplicaReport("replica-0", "a", {}))
    assert [holdings.report(ReplicaReport("replica-1", "b", {})) for _ in range(2)] == [True, False]


def test_replicas_that_end_or_say_nothing_are_gone() -> None:
    clock = Clock()
    holdings = Holdings(b"", clock)
    for name in ("replica-0", "replica-1", "replica-2"):
        holdings.report(ReplicaReport(name, f"id of {name}", {}))
    holdings.leave("replica-0", "id of another")
    holdings.leave("replica-1", "id of replica-1")
    assert sorted(holdings.read()) == ["replica-0", "replica-2"]
    clock.now = LOST_S - 1
    holdings.report(ReplicaReport("replica-2", "id of replica-2", {}))
    clock.now = LOST_S + 1

    assert sorted(holdings.read()) == ["replica-2"]


def test_a_replica_takes_the_lowest_folder_that_is_free(tmp_path: Path) -> None:
    folders = [claim_folder(tmp_path) for _ in range(3)]
    folders[1].lock.release()
    again = claim_folder(tmp_path)

    assert [folder.path.name for folder in folders] == ["replica-0", "replica-1", "replica-2"]
    assert again.path.name == "replica-1"
    settings = settings_for(Settings(cache_folder=tmp_path), again)
    assert settings.trees_folder == tmp_path / "replica-1" / "trees"
    assert settings.cache_folder == tmp_path  # self-checks are shared
    for folder in (folders[0], folders[2], again):
        folder.lock.release()


def test_replicas_of_several_machines_have_names_of_their_own(tmp_path: Path) -> None:
    machines = {"10.0.0.1": claim_folder(tmp_path / "one"), "fe80::2": claim_folder(tmp_path / "two")}
    names = [name_replica(folder, address, len(machines)) for address, folder in machines.items()]

    assert names == ["replica-0@10.0.0.1", "replica-0@fe80--2"]
    assert name_replica(machines["10.0.0.1"], "10.0.0.1", 1) == "replica-0"
    for folder in machines.values():
        folder.lock.release()
