"""The request router of Serve: what it remembers of requests, and for how long."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")
pytestmark = pytest.mark.ray

from ray.serve._private.common import DeploymentHandleSource, DeploymentID  # noqa: E402

from bough.cache.tree.state import Tier  # noqa: E402
from bough.generate.request import Request  # noqa: E402
from bough.ray import router as module  # noqa: E402
from bough.ray.holdings import News, ReplicaReport  # noqa: E402
from bough.ray.router import ReplicaRouter  # noqa: E402
from bough.routing import PageMessage, PageNote  # noqa: E402
from bough.routing.index import Run, key_of  # noqa: E402
from bough.routing.page_reports import encode_note  # noqa: E402
from bough.routing.router import LOST_S  # noqa: E402
from bough.server.serving.remote.replicas import RemoteRequest  # noqa: E402
from bough.tokens import Tokens  # noqa: E402
from tests.gates import Notes  # noqa: E402

DEVICE = PageNote(Tier.DEVICE)
COPIED = """
from ray.serve._private.common import DeploymentHandleSource, DeploymentID
from ray.serve.config import RequestRouterConfig

from bough.ray import replicas, router

router.find_holdings = lambda application: None
copied = RequestRouterConfig(request_router_class=router.ReplicaRouter).get_request_router_class()
made = copied(DeploymentID("Replica", "bough"), DeploymentHandleSource.REPLICA)
made.initialize_state()
made.stop = lambda: print("stopped")
replicas.stop_routers("another")
replicas.stop_routers("bough")
"""
REPLICAS: Any = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=unique_id)) for unique_id in ("a", "b")]
NEWS = News(
    {"replica-0": ReplicaReport("replica-0", "a", {}), "replica-1": ReplicaReport("replica-1", "b", {})}, [], 0, False
)


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> ReplicaRouter:
    """A router that knows two replicas, and hears nothing more of them."""
    monkeypatch.setattr(module, "find_holdings", lambda application: None)
    made = ReplicaRouter(DeploymentID("Replica", "bough"), DeploymentHandleSource.REPLICA)
    made.initialize_state()
    made._apply(NEWS)
    return made


def test_a_router_of_the_class_that_serve_has_copied_is_stopped_with_its_application() -> None:
    """In a process of its own, because copying changes the class."""
    done = subprocess.run([sys.executable, "-c", COPIED], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "stopped\n"), done.stderr


def choose(router: ReplicaRouter, request_id: str, *, is_cancelled: bool = False) -> list[list[Any]]:
    """The ranks of replicas for a request that waits, or has just been cancelled."""

    async def run() -> list[list[Any]]:
        future = asyncio.get_running_loop().create_future()
        if is_cancelled:
            future.cancel()
        asked = RemoteRequest(Request(Tokens.of((1, 2, 3))), request_id)
        pending: Any = SimpleNamespace(args=[asked], kwargs={}, future=future, routing_context=SimpleNamespace())
        ranks = await router.choose_replicas(REPLICAS, pending)
        if router._news is not None:
            router._news.cancel()
        return ranks

    return asyncio.run(run())


def test_the_best_replica_comes_first_and_its_work_counts_until_it_is_done(router: ReplicaRouter) -> None:
    (best, *_others) = choose(router, "one")
    assert len(best) == 1
    assert router._policy.queue("replica-0").works or router._policy.queue("replica-1").works
    router._done("one")
    assert not router._policy.queue("replica-0").works and not router._policy.queue("replica-1").works
    router._policy.check()


def test_a_request_that_was_cancelled_while_it_waited_is_not_counted(router: ReplicaRouter) -> None:
    assert choose(router, "one", is_cancelled=True)
    assert not router._tickets
    assert not router._policy.queue("replica-0").works and not router._policy.queue("replica-1").works


def test_requests_that_never_report_are_forgotten(router: ReplicaRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for number in range(10):
        choose(router, f"lost {number}")
    now[0] = LOST_S + 1
    choose(router, "one")
    router._apply(NEWS)
    assert list(router._tickets) == ["one"]


def test_a_message_that_cannot_be_read_does_not_hold_up_those_behind_it(router: ReplicaRouter) -> None:
    batches = [PageMessage("replica-0", 1, number, {bytes([number]) * 16: DEVICE}).pack() for number in (1, 2, 3)]
    wanted = router._apply(News(NEWS.replicas, [batches[0], b"of another version", batches[2]], 3, False))

    assert wanted == ["replica-0"]  # its second batch is missing
    assert router._policy.index.match([key_of(bytes([3]) * 16)], {}) == {"replica-0": [Run(1, encode_note(DEVICE))]}
    assert router._sequence == 3


def test_a_router_that_was_stopped_uses_ray_no_longer(router: ReplicaRouter) -> None:
    asked: Notes[int] = Notes()

    class Holdings:
        class read_news:
            @staticmethod
            async def remote(sequence: int, wanted: list[str]) -> News:
                asked.append(sequence)
                return NEWS

    router._holdings = Holdings

    async def run() -> None:
        pending: Any = SimpleNamespace(args=[], kwargs={}, routing_context=SimpleNamespace())
        before = asyncio.all_tasks()
        await router.choose_replicas(REPLICAS, pending)
        await asked.until(lambda: asked)
        await asyncio.to_thread(router.stop)
        assert asyncio.all_tasks() == before  # nothing is left that would ask again

    asyncio.run(run())
