"""The event stream over replicas: their trees as one, those that are lost, and what it costs them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from bough.cache.admin.nodes import evict_node, keep_node, read_node
from bough.errors import NodeNotFound, RequestError
from bough.prompting.ask import Ask
from bough.server.serving.cache import NodeName
from bough.server.serving.loaded.progress import RecordSlot, current_slot
from bough.server.serving.model.contract import TEXT_TOKENS, Look, WatchedRequest
from bough.server.serving.model.in_process import InProcessTree
from bough.server.serving.remote import watch
from bough.server.serving.remote.host import ReplicaHost
from bough.server.serving.remote.leases import LEASE_S
from bough.server.serving.remote.replicas import Operation
from bough.server.serving.remote.watch import Watches
from bough.server.serving.service import Service
from bough.tokens import num_tokens
from bough.types import SamplingParams
from tests.gates import Gate, pass_time
from tests.server.serving.events.test_hub import Client, count_done, seen_tree, until_collected
from tests.server.serving.remote.local_replicas import LocalReplicas
from tests.server.watched import Watched
from tests.waiting import wait_until

TEXTS = {"replica-0": "the tale of the first tree", "replica-1": "a song about another one"}


async def ask(service: Service, text: str, salt: str = "", num_tokens: int = 4) -> None:
    current_slot.set(RecordSlot(request_id=text))
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    await service.complete(Ask("tiny", text=text, params=params, salt=salt))


async def ask_at(service: Service, replicas: LocalReplicas, name: str, salt: str = "") -> None:
    """Ask something that this replica answers."""
    replicas.hosts = dict(sorted(replicas.hosts.items(), key=lambda each: each[0] != name))
    await ask(service, TEXTS[name], salt)


async def tree_of(service: Service) -> dict[str, dict[int, tuple[int, int]]]:
    view = (await service.cache.tree(None, None)).result
    return {
        root: {each.key: (each.start, each.end) for each in nodes} for root, nodes in view.records.roots.items() if nodes
    }


async def until_read(replicas: LocalReplicas) -> None:
    """Wait until the model has heard which replicas there are now."""
    num_reads = len(replicas.reads)
    await replicas.reads.until(lambda: len(replicas.reads) >= num_reads + 2)  # the second read comes after the first


def count_looks(replicas: LocalReplicas, name: str) -> int:
    return sum((call.replica, call.name) == (name, "watch") for call in replicas.calls)


async def until_looked(replicas: LocalReplicas, name: str) -> None:
    """Wait until a replica was looked at twice from now on: the first of these looks has ended then."""
    num_looks = count_looks(replicas, name)
    await replicas.calls.until(lambda: count_looks(replicas, name) >= num_looks + 2)


def num_watchers(host: ReplicaHost) -> int:
    """How many note what changes in the tree of a replica; one of them tells the router."""
    return sum(not each.is_over for each in host._runtime.prefix_cache.memory.census.watchers)


def test_a_reader_sees_the_trees_of_all_replicas_and_where_each_request_is(play: Any) -> None:
    async def scene(service: Service, replicas: LocalReplicas) -> None:
        client = Client(service)
        for name in TEXTS:
            await ask_at(service, replicas, name)
        await client.read_until(lambda watched: count_done(watched) == 2)
        expected = await tree_of(service)
        assert sorted(expected) == ["replica-0:", "replica-1:"]
        for each in (client, Client(service)):  # one that comes later is told all of it
            await each.read_until(lambda watched: seen_tree(watched) == expected)
            await each.read_until(lambda watched: watched.figures.get("tiny", {}).get("nodes") == 2)
        requests = {each["id"]: each for each in client.watched.requests.values()}
        for name, text in TEXTS.items():
            told = requests[text]
            assert told["root"] == f"{name}:" and told["state"] == "done"
            assert expected[told["root"]][told["node"]][1] == told["offset"] > told["prompt_tokens"]
            (node,) = client.watched.trees["tiny"][told["root"]].values()
            assert node["text"].startswith(text)
            assert abs(node["last_used"] - time.time()) < 60
        assert client.watched.figures["tiny"]["lanes"] == 8

    play(scene)


def test_the_nodes_of_a_lost_replica_vanish_and_come_back_with_it(play: Any) -> None:
    async def scene(service: Service, replicas: LocalReplicas) -> None:
        client = Client(service)
        for name in TEXTS:
            await ask_at(service, replicas, name)
        await client.read_until(lambda watched: len(seen_tree(watched)) == 2)
        num_resets = count_resets(client.watched)

        lost = replicas.hosts.pop("replica-0")
        await client.read_until(lambda watched: list(seen_tree(watched)) == ["replica-1:"])
        await until_read(replicas)  # now it is not even listed
        await until_looked(replicas, "replica-1")
        replicas.hosts["replica-0"] = lost
        expected = await tree_of(service)
        await client.read_until(lambda watched: seen_tree(watched) == expected)

        assert sorted(expected) == ["replica-0:", "replica-1:"]
        assert count_resets(client.watched) == num_resets  # the other's tree was not told again

    play(scene)


def count_resets(watched: Watched) -> int:
    return sum(told["reset"] for told in watched.named("tree"))


def test_a_replica_that_was_started_anew_between_two_looks_replaces_its_tree(play: Any) -> None:
    async def scene(service: Service, replicas: LocalReplicas) -> None:
        client = Client(service)
        await ask_at(service, replicas, "replica-0")
        await client.read_until(lambda watched: "replica-0:" in seen_tree(watched))

        (watch_id,) = {call.arguments[0] for call in replicas.calls if call.name == "watch"}
        for host in replicas.hosts.values():
            await host.call(Operation(host.name, "unwatch", (watch_id,)))  # a new process knows of no watch
        replicas.hosts = dict(zip(replicas.hosts, reversed(replicas.hosts.values()), strict=True))

        await client.read_until(lambda watched: list(seen_tree(watched)) == ["replica-1:"])

    play(scene)


def test_without_readers_no_replica_is_watched(play: Any) -> None:
    async def scene(service: Service, replicas: LocalReplicas) -> None:
        for host in replicas.hosts.values():
            await host.look()
        await ask(service, "a text that nobody watches")
        assert not any(call.name == "watch" for call in replicas.calls)
        assert [num_watchers(host) for host in replicas.hosts.values()] == [1, 1]

        client = Client(service)
        await client.read_until(lambda watched: seen_tree(watched))
        assert [num_watchers(host) for host in replicas.hosts.values()] == [2, 2]
        client.leave()
        await until_collected()

        assert [num_watchers(host) for host in replicas.hosts.values()] == [1, 1]

    play(scene)


def test_a_watch_that_no_server_uses_any_more_is_closed(play: Any) -> None:
    async def scene(service: Service, replicas: LocalReplicas) -> None:
        host = replicas.hosts["replica-0"]
        watches = Watches(InProcessTree(host._runtime), lambda request_id: None)
        resets = []
        for _ in range(3):  # as long as it is used, it is open
            resets.append((await watches.look("id", False, (), ())).changes.is_reset)
            pass_time(0.6 * LEASE_S)
        assert (resets, len(watches), num_watchers(host)) == ([True, False, False], 1, 1)

        pass_time(0.4 * LEASE_S)

        await asyncio.to_thread(wait_until, lambda: (len(watches), num_watchers(host)) == (0, 0))
        assert (await watches.look("id", False, (), ())).changes.is_reset  # a server that slept is told all

    play(scene)


def test_a_replica_that_does_not_answer_delays_the_others_a_little(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PATIENCE_S", 0.1)

    async def scene(service: Service, replicas: LocalReplicas) -> None:
        client, goes_on = Client(service), asyncio.Event()
        await client.read_until(lambda watched: watched.trees)

        async def hold(operation: Operation) -> None:
            if (operation.replica, operation.name) == ("replica-1", "watch"):
                await goes_on.wait()

        replicas.hold = hold
        for name in reversed(TEXTS):
            await ask_at(service, replicas, name)
        await client.read_until(lambda watched: list(seen_tree(watched)) == ["replica-0:"])
        num_asked = sum(call.replica == "replica-1" for call in replicas.calls)
        await until_looked(replicas, "replica-0")
        assert sum(call.replica == "replica-1" for call in replicas.calls) == num_asked  # it has one look to answer
        goes_on.set()
        await client.read_until(lambda watched: len(seen_tree(watched)) == 2)

    play(scene)


def test_a_reader_of_one_salt_sees_its_own_tree_at_every_replica_and_nothing_else(play: Any) -> None:
    async def scene(service: Service, replicas: LocalReplicas) -> None:
        client = Client(service, salt="mine")
        await ask_at(service, replicas, "replica-0")
        for name in TEXTS:
            await ask_at(service, replicas, name, "mine")
            await ask_at(service, replicas, name, "replica-0:mine")  # which only looks like a root of the other
        await client.read_until(lambda watched: len(seen_tree(watched)) == 2 and count_done(watched) == 2)
        await client.read_until(lambda watched: watched.figures.get("tiny", {}).get("nodes") == 2)

        assert sorted(seen_tree(client.watched)) == ["replica-0:mine", "replica-1:mine"]
        assert {each["root"] for each in client.watched.requests.values()} == set(seen_tree(client.watched))
        assert "lanes" not in client.watched.figures["tiny"]

    play(scene)


def test_a_node_is_reached_by_who_may_see_its_salt_alone(play: Any) -> None:
    async def scene(service: Service, replicas: LocalReplicas) -> None:
        await ask_at(service, replicas, "replica-1", "mine")
        ((key, _),) = (await tree_of(service))["replica-1:mine"].items()
        cache = service.cache

        for root in ("replica-1:mine", "replica-1:", "replica-1:other"):  # the replica counts, the salt is the key's
            found = await cache.at_node(NodeName(None, root, key, salt="mine"), read_node)
            assert (found.root, found.result.record.key) == ("replica-1:mine", key)
            with pytest.raises(NodeNotFound):
                await cache.at_node(NodeName(None, root, key, salt="other"), read_node)
        with pytest.raises(NodeNotFound):
            await cache.at_node(NodeName(None, "replica-0:mine", key, salt="mine"), evict_node)
        for root in ("", "mine", "replica-7:mine"):
            with pytest.raises(RequestError, match="must name"):
                await cache.at_node(NodeName(None, root, key, salt="mine"), partial(keep_node, kept=True))
        kept = await cache.at_node(NodeName(None, "replica-1:", key, salt="mine"), partial(keep_node, kept=True))
        assert kept.result.is_kept
        assert (await cache.at_node(NodeName(None, "replica-1:", key, salt="mine"), evict_node)).result.num_nodes == 1

    play(scene)


def test_what_is_sent_of_a_long_prompt_is_short(play: Any) -> None:
    async def scene(service: Service, replicas: LocalReplicas) -> None:
        looks: list[Look] = []
        call: Callable[[Operation], Any] = replicas.call

        async def note(operation: Operation) -> Any:
            result = await call(operation)
            if isinstance(result, Look):
                looks.append(result)
            return result

        replicas.call = note  # type: ignore[method-assign]
        replicas.may_go_on = Gate()
        client = Client(service)
        await client.read_until(lambda watched: watched.trees)
        asking = asyncio.create_task(ask(service, "word " * 300, num_tokens=20))
        await client.read_until(lambda watched: any(each["node"] for each in watched.requests.values()))
        assert not asking.done()  # it is found although only its replica has its tokens
        replicas.may_go_on.open()
        await asking
        await client.read_until(lambda watched: count_done(watched) == 1)
        (node,) = client.watched.trees["tiny"]["replica-0:"].values()

        records = [each for look in looks for root in look.changes.roots.values() for each in root.nodes.values()]
        sought = [each for call in replicas.calls if call.name == "watch" for each in call.arguments[2]]
        assert {num_tokens(each.edge) for each in records if each is not None} == {TEXT_TOKENS}
        assert [isinstance(each, WatchedRequest) and bool(each.packed) for each in sought].count(True) == 1  # at its end
        assert node["is_cut"] and node["end"] > TEXT_TOKENS

    play(scene)
