"""The request router of Serve: what it remembers of requests, and for how long."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")
pytestmark = pytest.mark.ray

from ray.serve._private.common import DeploymentHandleSource, DeploymentID  # noqa: E402

from bough.cache.tree.state import Tier  # noqa: E402
from bough.models.prompts import Encoded  # noqa: E402
from bough.ray import router as module  # noqa: E402
from bough.ray.holdings import News, Report  # noqa: E402
from bough.ray.router import ReplicaRouter  # noqa: E402
from bough.routing import Batch, PageNote  # noqa: E402
from bough.routing.router import LOST_S  # noqa: E402
from bough.server.serving.model.contract import GenerateRequest  # noqa: E402
from bough.server.serving.remote.messages import RemoteRequest  # noqa: E402
from tests.gates import Notes  # noqa: E402

REPLICAS: Any = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=unique_id)) for unique_id in ("a", "b")]
NEWS = News({"replica-0": Report("replica-0", "a", {}), "replica-1": Report("replica-1", "b", {})}, [], 0, False)


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> ReplicaRouter:
    """A router that knows two replicas, and hears nothing more of them."""
    monkeypatch.setattr(module, "find_holdings", lambda application: None)
    made = ReplicaRouter(DeploymentID("Replica", "bough"), DeploymentHandleSource.REPLICA)
    made.initialize_state()
    made._apply(NEWS)
    return made


def choose(router: ReplicaRouter, request_id: str, *, is_cancelled: bool = False) -> list[list[Any]]:
    """The ranks of replicas for a request that waits, or has just been cancelled."""

    async def run() -> list[list[Any]]:
        future = asyncio.get_running_loop().create_future()
        if is_cancelled:
            future.cancel()
        asked = RemoteRequest(GenerateRequest(Encoded((1, 2, 3), ())), request_id)
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
    batches = [Batch("replica-0", 1, number, {bytes([number]) * 16: PageNote(Tier.DEVICE)}).pack() for number in (1, 2, 3)]
    wanted = router._apply(News(NEWS.replicas, [batches[0], b"of another version", batches[2]], 3, False))

    assert wanted == ["replica-0"]  # its second batch is missing
    assert router._policy.index.note("replica-0", bytes([3]) * 16) == PageNote(Tier.DEVICE)
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
