"""The event stream over a real model in this process: what readers see, and what is collected for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bough.config import Settings
from bough.errors import ShuttingDown, Unavailable
from bough.models import ModelFiles
from bough.prompting.ask import Ask
from bough.server.app import make_service
from bough.server.serving.events import feed
from bough.server.serving.events.hub import MOST_OF_ONE, MOST_READERS
from bough.server.serving.events.reader import EventReader
from bough.server.serving.loaded.progress import RecordSlot, current_slot
from bough.server.serving.service import Service
from bough.types import SamplingParams
from tests.gates import Gate
from tests.server.watched import Watched
from tests.waiting import wait_until

INTERVAL_S = 0.1


class Client:
    """A reader, and what it knows so far."""

    def __init__(self, service: Service, **options: Any) -> None:
        self.hub = service.events
        self.reader: EventReader = self.hub.open(options.pop("salt", None), interval_s=INTERVAL_S, **options)
        self.watched = Watched()

    async def read_until(self, is_enough: Callable[[Watched], object]) -> Watched:
        """Take what comes until this is true."""
        while not is_enough(self.watched):
            await self.reader.wait(1.0)
            for event, text in self.reader.take():
                self.watched.apply(event, text)
        return self.watched

    def leave(self) -> None:
        self.hub.leave(self.reader)


@pytest.fixture
def play(tiny_model: Path, tmp_path: Path) -> Callable[..., None]:
    """Runs a scene with a service whose model is the tiny one."""

    def run(scene: Callable[[Service], Coroutine[Any, Any, None]], **options: Any) -> None:
        settings = Settings(data_folder=tmp_path, cache_folder=tmp_path / "cache", disk=0, threads=2, **options)

        @asynccontextmanager
        async def serving() -> Any:
            service = make_service(settings, ModelFiles("tiny", tiny_model))
            try:
                yield service
            finally:
                await service.close()

        async def run_scene() -> None:
            async with serving() as service, asyncio.timeout(60):
                await scene(service)

        asyncio.run(run_scene())

    return run


async def ask(service: Service, text: str, salt: str = "", keep_alive_s: float | None = None) -> None:
    current_slot.set(RecordSlot(request_id=text))
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    await service.complete(Ask("tiny", text=text, params=params, salt=salt, keep_alive_s=keep_alive_s))


def count_done(watched: Watched) -> int:
    return sum(each["state"] == "done" for each in watched.requests.values())


async def until_collected() -> None:
    """Wait until nothing is collected for readers any more."""
    collecting = [task for task in asyncio.all_tasks() if task.get_name().startswith("bough-events")]
    await asyncio.gather(*collecting, return_exceptions=True)  # some are cancelled by others


async def tree_of(service: Service) -> dict[str, dict[int, tuple[int, int]]]:
    """The nodes that there are, by their roots and keys: where each begins and ends."""
    cache = service.models.list()[0].runtime.cache
    records = await asyncio.to_thread(lambda: cache.tree().records)
    return {
        root: {each.key: (each.start, each.end) for each in found} for root, found in records.roots.items() if len(found)
    }


def seen_tree(watched: Watched) -> dict[str, dict[int, tuple[int, int]]]:
    roots = watched.trees.get("tiny", {})
    return {root: {key: (each["start"], each["end"]) for key, each in nodes.items()} for root, nodes in roots.items()}


def test_a_reader_sees_requests_come_and_go_and_the_tree_as_it_is(play: Callable[..., None]) -> None:
    async def scene(service: Service) -> None:
        await service.load("tiny")
        client = Client(service)
        await ask(service, "one text that is long enough to be shared")
        await ask(service, "one text that is long enough to be split")
        await client.read_until(lambda watched: count_done(watched) == 2)
        late = Client(service)
        expected = await tree_of(service)
        for each in (client, late):
            await each.read_until(lambda watched: seen_tree(watched) == expected)
            await each.read_until(lambda watched: watched.figures.get("tiny", {}).get("requests") == 2)

        assert len(expected[""]) == 3
        first, second = client.watched.requests.values()
        assert (first["cached_tokens"], first["completion_tokens"], second["completion_tokens"]) == (0, 4, 4)
        assert second["cached_tokens"] == client.watched.figures["tiny"]["cached_tokens"] > 0
        assert second["prompt_tokens"] < second["offset"] <= second["prompt_tokens"] + 4
        assert "leaves the tree" in second["reason"] and "it continues with 'plit'" in second["reason"]
        assert expected[""][second["node"]][1] == second["offset"]
        assert late.watched.requests == {}  # what had ended before it came

    play(scene)


def test_without_readers_nothing_is_collected(play: Callable[..., None]) -> None:
    async def scene(service: Service) -> None:
        await service.load("tiny")
        client = Client(service)
        await ask(service, "one text")
        await client.read_until(count_done)
        census = service.models.list()[0].runtime.prefix_cache.memory.census
        assert len(census.watchers) == 1

        client.leave()
        await until_collected()
        await ask(service, "another text")
        await tree_of(service)  # which records what has changed

        assert census.watchers == []
        again = Client(service)
        expected = await tree_of(service)
        await again.read_until(lambda watched: seen_tree(watched) == expected)

    play(scene)


def test_a_reader_sees_a_model_that_is_loaded_later_unloaded_and_loaded_again(play: Callable[..., None]) -> None:
    async def scene(service: Service) -> None:
        client = Client(service, model="tiny")
        await client.read_until(lambda watched: watched.events)
        assert client.watched.models == []

        await service.load("tiny")
        await client.read_until(lambda watched: watched.trees)
        for number in (1, 2):
            await ask(service, f"text {number}", keep_alive_s=0)  # which unloads it at once
            await client.read_until(lambda watched, number=number: count_done(watched) == number)
            await client.read_until(lambda watched: not watched.models)
        await service.load("tiny", keep_alive_s=60)
        await client.read_until(lambda watched: watched.models and watched.trees)

        assert [each["is_default"] for each in client.watched.models] == [True]
        assert sum(told["reset"] for told in client.watched.named("tree")) >= 2

    play(scene)


def test_after_the_engine_was_stuck_readers_have_the_whole_tree_and_the_end_of_every_request(
    play: Callable[..., None],
) -> None:
    async def scene(service: Service) -> None:
        await service.load("tiny")
        client, worker = Client(service), service.models.list()[0].worker
        await ask(service, "one text")
        await client.read_until(lambda watched: count_done(watched) and watched.trees["tiny"])
        has_begun, may_go_on = Gate(), Gate()
        num_resets = sum(told["reset"] for told in client.watched.named("tree"))

        def hold() -> None:
            has_begun.open()
            may_go_on.wait()

        held = worker.call(hold)
        await has_begun.passed()
        waiting = asyncio.create_task(ask(service, "a text that is never answered"))
        await asyncio.to_thread(wait_until, lambda: worker.num_waiting)
        worker._clock = lambda: time.monotonic() + 2 * worker.limits.stuck_s
        with pytest.raises(Exception, match="takes longer than"):
            await waiting
        watched = await client.read_until(lambda watched: len(watched.requests) == 2)
        assert [each["state"] for each in watched.requests.values()] == ["done", "failed"]
        may_go_on.open()
        await asyncio.wrap_future(held)
        await asyncio.to_thread(wait_until, lambda: not worker.is_stuck)
        await ask(service, "another text")
        await client.read_until(lambda watched: count_done(watched) == 2)
        expected = await tree_of(service)
        await client.read_until(lambda watched: seen_tree(watched) == expected)

        assert sum(told["reset"] for told in watched.named("tree")) > num_resets

    play(scene)


def test_a_reader_that_reads_nothing_is_told_the_whole_tree_in_place_of_all_that_came_and_went(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "MOST_BEHIND", 1)

    async def scene(service: Service) -> None:
        await service.load("tiny")
        sleepy, awake = Client(service), Client(service)
        await sleepy.read_until(lambda watched: watched.trees)
        for number in range(3):
            await ask(service, f"{number} is how this text begins")
            await awake.read_until(lambda watched, number=number: count_done(watched) == number + 1)
            await service.cache.clear("tiny", None)
            await awake.read_until(lambda watched: not seen_tree(watched))
        await ask(service, "the last text")
        expected = await tree_of(service)
        await awake.read_until(lambda watched: seen_tree(watched) == expected)

        assert sleepy.reader.num_waiting("tiny") <= 2
        await sleepy.read_until(lambda watched: seen_tree(watched) == expected)

    play(scene)


def test_the_number_of_readers_is_bounded_in_all_and_for_each_key(play: Callable[..., None]) -> None:
    async def scene(service: Service) -> None:
        hub = service.events
        own = [hub.open("key/a" if number % 2 else "key") for number in range(MOST_OF_ONE)]
        with pytest.raises(Unavailable, match=f"{MOST_OF_ONE} clients with this key"):
            hub.open("key/b")
        for number in range(MOST_READERS - MOST_OF_ONE):
            hub.open(f"other {number}")
        with pytest.raises(Unavailable, match=f"at most {MOST_READERS} may"):
            hub.open(None)

        hub.leave(own[0])
        hub.leave(own[0])

        hub.open("key")
        with pytest.raises(Unavailable, match=f"at most {MOST_READERS} may"):
            hub.open(None)

    play(scene)


def test_a_service_that_drains_ends_its_readers_and_takes_no_more(play: Callable[..., None]) -> None:
    async def scene(service: Service) -> None:
        reader = service.events.open(None)
        frames = service.events.frames(reader)
        assert [event for event, _ in await anext(frames)] == ["hello"]

        service.drain()

        assert {event async for batch in frames for event, _ in batch} <= {"models"}
        with pytest.raises(ShuttingDown):
            service.events.open(None)

    play(scene)
