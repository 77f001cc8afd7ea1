"""Parts of a cluster end and change while clients read answers: no client notices, and what is shown is right again."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from bough.cache.disk.folder import owner_pid
from bough.config import Settings
from tests import waiting
from tests.ray.conftest import SMALL, Cluster
from tests.ray.test_server import ask, read_replicas
from tests.server.servers import Server, make_chat_folder, running
from tests.waiting import BOUND_S

pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.alone]

import ray  # noqa: E402
from ray import serve  # noqa: E402

from bough.ray.app import build_app  # noqa: E402
from bough.ray.applications import APPLICATION, deploy_replicas  # noqa: E402
from bough.ray.holdings import NAMESPACE  # noqa: E402

STREAMS = 4
TOKENS = 400  # an answer takes some seconds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("changes")
    make_chat_folder(folder / "tiny", context_tokens=2**17)
    return folder


@pytest.fixture(scope="module")
def server(cluster: Cluster, folder: Path) -> Iterator[Server]:
    """A server with one replica in a cluster that the test can change."""
    options = SMALL | {"ray": cluster.address, "replicas": 1, "data_folder": folder / "data"}
    with running(str(folder / "tiny"), folder, **options) as started:
        yield started


def scale(server: Server, folder: Path, replicas: int, **changes: Any) -> None:
    """Deploy the replicas of a server anew, as an operator would, without waiting for it."""
    own = {name: value for name, value in SMALL.items() if name != "ray"}
    settings = Settings(
        model=str(folder / "tiny"), cache_folder=server.cache_folder, data_folder=folder / "data", replicas=replicas, **own
    )
    serve.run(deploy_replicas(replace(settings, **changes)), name=APPLICATION, route_prefix=None)


def wait_until(holds: Callable[[], object], what: str) -> None:
    waiting.wait_until(holds, describe=lambda: what)


@contextmanager
def streams(server: Server, pause_s: float = 120) -> Iterator[list[Future[Any]]]:
    """Answers that are under way, again and again until the context ends; each must be as an undisturbed one.

    Clients wait for `pause_s` from one token to the next.
    """
    expected = [ask(server, number, TOKENS) for number in range(STREAMS)]
    heard, over = [threading.Event() for _ in range(STREAMS)], threading.Event()

    def go_on(number: int) -> int:
        times = 0
        while not over.is_set() or not times:
            assert ask(server, number, TOKENS, heard[number], pause_s) == expected[number]
            times += 1
        return times

    with ThreadPoolExecutor(STREAMS) as pool:
        answers = [pool.submit(go_on, number) for number in range(STREAMS)]
        try:
            for event in heard:
                assert event.wait(BOUND_S)
            yield answers
        finally:
            over.set()
    assert all(answer.result() for answer in answers)


def _known(server: Server) -> list[str]:
    """The replicas that are shown; none while the figures cannot be read."""
    answer = httpx.get(f"{server.url}/api/cache", timeout=60)
    return sorted(answer.json()["models"][0]["replicas"]) if answer.status_code == 200 else []


def test_requests_go_on_while_the_holdings_actor_is_killed(server: Server) -> None:
    with streams(server):
        ray.kill(ray.get_actor(f"bough-holdings-{APPLICATION}", NAMESPACE), no_restart=False)
        ask(server, 9, 8)  # one that comes meanwhile
        wait_until(lambda: _known(server) == ["replica-0"], "the replica is not known again")
    wait_until(lambda: _can_explain(server), "the tree is not known again")


def _can_explain(server: Server) -> bool:
    answer = httpx.post(f"{server.url}/api/cache/explain", json={"prompt": "0 word0"}, timeout=BOUND_S)
    return answer.status_code == 200


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_replicas_come_and_go_while_answers_are_read(server: Server, folder: Path) -> None:
    with streams(server):
        scale(server, folder, 2)
        wait_until(lambda: len(_known(server)) == 2, "there are not two replicas")
        scale(server, folder, 1)
        wait_until(lambda: len(_known(server)) == 1, "there is not one replica")


def test_new_settings_are_rolled_out_while_answers_are_read(server: Server, folder: Path) -> None:
    with streams(server):
        scale(server, folder, 1, lanes=3)
        wait_until(lambda: [each["lanes"] for each in read_replicas(server).values()] == [3], "the lanes are not 3")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_replica_that_does_nothing_any_more_is_replaced(server: Server) -> None:
    with streams(server, pause_s=400):
        (owner,) = _owners(server)
        os.kill(owner, signal.SIGSTOP)  # its process is there, and answers nothing
    assert len(_owners(server) - {owner}) == 1


def test_a_client_that_goes_away_frees_the_lane_at_the_replica(server: Server) -> None:
    num_tokens = 2**16
    body = {"model": "tiny", "prompt": "a", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        assert next(lines)
        wait_until(lambda: _busy(server), "no lane is busy")
    wait_until(lambda: not _busy(server), "the lane is still busy")
    assert sum(each["tokens"] for each in read_replicas(server).values()) < num_tokens  # it did not come to its end


def _busy(server: Server) -> int:
    return sum(each["busy_lanes"] for each in read_replicas(server).values())


def test_a_model_that_is_unloaded_ends_its_replicas_and_comes_back_with_its_tree(server: Server) -> None:
    before = ask(server, 1, 8)
    owners = _owners(server)
    body = {"model": server.model, "keep_alive": 0}
    assert httpx.post(f"{server.url}/api/generate", json=body, timeout=60).json()["done_reason"] == "unload"
    wait_until(lambda: not _owners(server), "the replica is still there")
    assert ask(server, 1, 8) == before
    assert owners and not owners & _owners(server)
    assert sum(each["disk_loaded_bytes"] for each in read_replicas(server).values()) > 0


def _owners(server: Server) -> set[int]:
    """The processes that hold a folder of a replica."""
    found = {owner_pid(folder) for folder in server.cache_folder.glob("replica-*")}
    return {pid for pid in found if pid is not None}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_ingress_that_is_killed_takes_its_own_connections_alone(cluster: Cluster, server: Server, folder: Path) -> None:
    own = {name: value for name, value in SMALL.items() if name != "ray"} | {"model": str(folder / "tiny"), "replicas": 1}
    more = {"ingresses": 2, "cache_folder": str(folder / "behind"), "data_folder": str(folder / "data")}
    serve.run(build_app(own | more), name="behind", route_prefix="/")
    proxy = replace(server, url=f"http://127.0.0.1:{cluster.port}", cache_folder=folder / "behind")
    try:
        numbers = [*range(STREAMS), *range(STREAMS)]
        expected = [ask(proxy, number, TOKENS) for number in range(STREAMS)] * 2
        heard = [threading.Event() for _ in numbers]
        with ThreadPoolExecutor(len(numbers)) as pool:
            answers = [pool.submit(ask, proxy, number, TOKENS, heard[at]) for at, number in enumerate(numbers)]
            assert all(event.wait(BOUND_S) for event in heard)
            names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
            ray.kill(ray.get_actor(next(name for name in names if "behind#Ingress" in name), NAMESPACE))
            assert ask(proxy, 0, 8)[2] == 8
        outcomes = [answer.exception() or answer.result() for answer in answers]
        assert any(outcome == whole for outcome, whole in zip(outcomes, expected, strict=True))
        assert all(
            outcome == whole or isinstance(outcome, Exception) for outcome, whole in zip(outcomes, expected, strict=True)
        )
        wait_until(lambda: not _busy(proxy), "lanes are busy for connections that have ended")
    finally:
        serve.delete("behind")
