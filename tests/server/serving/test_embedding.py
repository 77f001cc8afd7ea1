"""Many texts of one request on one model: how many run at a time, and what ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from bough.config import Settings
from bough.errors import BoughError, EngineError, QueueFull, RequestError, TimedOut
from bough.runtime.embedding import WINDOW
from bough.server.serving.embedding import EmbedAsk, EmbeddingService, RerankAsk
from bough.server.serving.loaded import LoadedModels
from bough.server.serving.loaded.progress import RecordSlot, RequestRecord, current_slot
from tests.gates import pass_time
from tests.server.fake_encoders import FakeEmbedder, FakeEncoderRuntime
from tests.server.fake_models import FakeCatalog

Run = Callable[[Coroutine[Any, Any, None]], None]


class World:
    """A service whose models are all one fake embedder, and the records of its requests."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.embedder = FakeEmbedder()
        self.records: list[RequestRecord] = []
        chosen = Settings(data_folder=folder, cache_folder=folder, **settings)
        catalog: Any = FakeCatalog(folder)
        self.models = LoadedModels(
            chosen, catalog, start=lambda files, settings: FakeEncoderRuntime(files.name, self.embedder)
        )
        self.service = EmbeddingService(chosen, self.models, self)  # type: ignore[arg-type]

    def request_done(self, record: RequestRecord) -> None:
        self.records.append(record)

    async def embed(self, texts: list[str], **fields: Any) -> list[list[float]]:
        return list(await self.service.embed(EmbedAsk("a", texts, **fields)))

    async def until_started(self, number: int) -> None:
        await self.embedder.started.until(lambda: len(self.embedder.started) >= number)

    @property
    def num_cancelled(self) -> int:
        return sum(each.is_cancelled() for each in self.embedder.started)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def texts(number: int) -> list[str]:
    return [f"{chr(ord('a') + index % 26)} {index}" for index in range(number)]


async def fail_by(work: Coroutine[Any, Any, Any], kind: type[BoughError], match: str) -> None:
    with pytest.raises(kind, match=match):
        await work


def test_so_many_texts_of_a_request_are_queued_at_a_time(world: World, run: Run) -> None:
    async def work() -> None:
        world.embedder.may_run.clear()
        task = asyncio.create_task(world.embed(texts(WINDOW + 10)))
        await world.until_started(WINDOW)
        world.embedder.may_run.set()

        assert len(await task) == WINDOW + 10
        assert world.embedder.most_running == WINDOW

    run(work())


def test_requests_for_a_model_share_its_places(world: World, run: Run) -> None:
    async def work() -> None:
        async with world.models.using("a") as loaded:
            loaded.text_places = asyncio.Semaphore(3)
            await asyncio.gather(*(world.embed(texts(20)) for _ in range(3)))

        assert world.embedder.most_running == 3

    run(work())


def test_the_first_failure_ends_the_request_and_cancels_its_other_texts(world: World, run: Run) -> None:
    async def work() -> None:
        world.embedder.may_run.clear()
        world.embedder.outcomes[ord("c")] = EngineError("out of numbers")
        task = asyncio.create_task(world.embed(texts(4 * WINDOW)))
        await world.until_started(WINDOW)
        world.embedder.may_run.set()
        await fail_by(task, EngineError, "out of numbers")  # type: ignore[arg-type]

        assert len(world.embedder.started) < 4 * WINDOW
        assert world.models.list()[0].num_uses == 0
        assert world.records[0].error == "out of numbers"

    run(work())


def test_a_request_that_is_cancelled_cancels_its_texts_and_releases_its_model(world: World, run: Run) -> None:
    async def work() -> None:
        world.embedder.may_run.clear()
        task = asyncio.create_task(world.embed(texts(10)))
        await world.until_started(10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        assert world.num_cancelled == 10
        assert world.models.list()[0].num_uses == 0
        world.embedder.may_run.set()

    run(work())


def test_a_request_that_takes_too_long_ends_with_its_limit(tmp_path: Path, run: Run) -> None:
    world = World(tmp_path, request_timeout=10)

    async def work() -> None:
        world.embedder.may_run.clear()
        task = asyncio.create_task(world.embed(texts(3)))
        await world.until_started(3)
        pass_time(10)
        await fail_by(task, TimedOut, "the request took longer than the 10 s it may")  # type: ignore[arg-type]

        assert world.num_cancelled == 3
        world.embedder.may_run.set()

    run(work())


def test_a_request_is_refused_if_its_first_texts_find_the_queue_full(world: World, run: Run) -> None:
    async def work() -> None:
        world.embedder.errors[1] = QueueFull(64)
        await fail_by(world.embed(texts(3)), QueueFull, "64 requests are waiting")

    run(work())


@pytest.mark.parametrize("is_told", [False, True])
def test_when_some_texts_are_done_the_others_wait_for_a_full_queue(world: World, run: Run, is_told: bool) -> None:
    async def work() -> None:
        async with world.models.using("a") as loaded:
            loaded.text_places = asyncio.Semaphore(1)
            if is_told:  # refused later, in favour of another client
                world.embedder.outcomes[ord("b")] = QueueFull(64)
            else:
                world.embedder.errors = {2: QueueFull(64), 3: QueueFull(64)}
            assert len(await world.embed(texts(5))) == 5

        assert world.embedder.num_calls == (6 if is_told else 7)

    run(work())


@pytest.mark.parametrize(("settings", "tenant"), [({}, ""), ({"keys_file": Path("keys")}, "key")])
def test_texts_have_the_salt_of_their_client_and_with_keys_its_tenant(
    tmp_path: Path, run: Run, settings: dict[str, Any], tenant: str
) -> None:
    world = World(tmp_path, **settings)
    run(world.embed(["a", "b"], salt="key/own"))  # type: ignore[arg-type]

    assert {(each.salt, each.tenant) for each in world.embedder.started} == {("key/own", tenant)}


def test_a_request_is_recorded_with_its_texts_and_tokens(world: World, run: Run) -> None:
    async def work() -> None:
        slot = RecordSlot()
        current_slot.set(slot)
        await world.embed(["abc", "de"])
        assert slot.record is world.records[0]

    run(work())
    (record,) = world.records

    assert (record.model, record.num_texts, record.error) == ("a", 2, None)
    assert record.usage is not None
    assert (record.usage.prompt_tokens, record.usage.cached_tokens, record.usage.computed_tokens) == (5, 2, 3)


def test_a_model_that_only_embeds_ranks_nothing(world: World, run: Run) -> None:
    run(fail_by(world.service.rerank(RerankAsk("a", "q", ["d"])), RequestError, "the model a ranks no documents"))
