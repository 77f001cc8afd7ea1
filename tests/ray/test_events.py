"""The event stream over replicas of a cluster: each replica's tree, and one that is killed and comes back."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.ray.test_server import LONG, NAMES, ask, pid_of, wait_for
from tests.server.event_stream import watching
from tests.server.servers import Server
from tests.server.watched import Watched

pytestmark = [pytest.mark.ray, pytest.mark.alone]


def roots_of(watched: Watched) -> set[str]:
    return set(watched.trees.get("tiny", {}))


def num_done(watched: Watched) -> int:
    return sum(each["state"] == "done" for each in watched.requests.values())


def test_readers_see_the_tree_of_each_replica_and_one_that_is_killed_and_comes_back(ray_server: Server) -> None:
    everyone, victim = {f"{name}:" for name in NAMES}, NAMES[0]
    with httpx.Client(base_url=ray_server.url, timeout=60) as client, watching(client) as stream:
        stream.wait_until(lambda watched: watched.trees)
        with ThreadPoolExecutor(12) as pool:  # so that each has something
            list(pool.map(lambda number: ask(ray_server, number, 8), range(12)))
        watched = stream.wait_until(lambda watched: roots_of(watched) == everyone)
        stream.wait_until(lambda watched: num_done(watched) >= 12)
        placed = [each for each in watched.requests.values() if each["node"] is not None]
        assert placed  # a replica that answers late leaves its requests without a node
        for request in placed:
            node = watched.trees["tiny"][request["root"]][request["node"]]
            assert node["start"] < request["offset"] <= node["end"]
        stream.wait_until(lambda watched: watched.figures["tiny"]["nodes"] >= 12)

        pid = pid_of(ray_server, victim)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        stream.wait_until(lambda watched: roots_of(watched) == everyone - {f"{victim}:"})
        ask(ray_server, 99, 8)
        stream.wait_until(lambda watched: num_done(watched) >= 13)

        wait_for(ray_server, victim, but_not=pid)
        stream.wait_until(lambda watched: f"{victim}:" in roots_of(watched))
        tree = client.get("/api/cache/tree").json()["roots"]
        assert roots_of(watched) == {root for root, nodes in tree.items() if nodes} == everyone
        assert sum(LONG[:20] in text for text in texts_of(watched)) >= 12


def texts_of(watched: Watched) -> list[str]:
    return [node["text"] for nodes in watched.trees.get("tiny", {}).values() for node in nodes.values()]
