"""The loaded models: loading them, evicting some for others, and what happens when requests come and go meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from bough.config import Settings
from bough.errors import EngineError, ModelNotFound, NoRoom, ShuttingDown, UnsupportedModel
from bough.runner import Runner
from bough.server.serving.catalog import Catalog
from bough.server.serving.loaded import LoadedModels
from tests.gates import Gate
from tests.server.fake_models import MODEL_BYTES
from tests.tiny_models import make_folder


def test_a_model_is_loaded_once_for_all_that_ask_at_the_same_time(make_world, run):
    async def ask():
        world = make_world()
        await asyncio.gather(*(world.use("a") for _ in range(5)))
        assert world.started == ["a"]

    run(ask())


def test_the_name_with_latest_is_the_same_model(make_world, run):
    async def ask():
        world = make_world()
        await world.use("a")
        async with world.models.using("a:latest") as loaded:
            assert loaded.name == "a"
        assert world.started == ["a"]

    run(ask())


def test_a_model_that_is_not_in_the_catalog_is_not_found(make_world, run):
    async def ask():
        with pytest.raises(ModelNotFound, match="model 'nonsense' not found"):
            await make_world().use("nonsense")

    run(ask())


def test_the_model_that_was_used_least_recently_makes_way(make_world, run):
    async def ask():
        world = make_world(max_models=2)
        for name in "aba":
            world.now += 1
            await world.use(name)
        await world.use("c")
        assert set(world.names) == {"a", "c"}

    run(ask())


def test_models_in_use_make_no_way_and_the_refusal_says_who_they_are(make_world, run):
    async def ask():
        world = make_world(max_models=1)
        async with world.models.using("a"):
            with pytest.raises(NoRoom, match=r"at most 1 models may be loaded, .* in use: a \(1,000 bytes\)"):
                await world.use("b")
        await world.use("b")
        assert world.names == ["b"]

    run(ask())


def test_models_make_way_for_weights_that_would_not_fit_beside_them(make_world, run):
    async def ask():
        world = make_world()
        await world.use("a")
        world.now += 1
        await world.use("b")
        world.available_bytes = MODEL_BYTES // 2
        await world.use("c")
        assert (world.stopped, set(world.names)) == (["a"], {"b", "c"})

    run(ask())


def test_weights_that_do_not_fit_beside_a_model_in_use_are_refused_with_both_numbers(make_world, run):
    async def ask():
        world = make_world()
        async with world.models.using("a"):
            world.available_bytes = 500
            with pytest.raises(NoRoom, match="it needs 1,000 bytes, and 500 are available"):
                await world.use("b")

    run(ask())


def test_a_load_that_runs_out_of_memory_is_tried_again_with_fewer_models(make_world, run):
    async def ask():
        world = make_world()
        await world.use("a")
        world.now += 1
        await world.use("b")
        world.errors["c"] = [MemoryError(), EngineError("loading failed: OutOfMemoryError: CUDA out of memory")]
        await world.use("c")
        assert (world.stopped, world.names) == (["a", "b"], ["c"])

    run(ask())


def test_a_load_that_runs_out_of_memory_alone_is_refused_for_now(make_world, run):
    async def ask():
        world = make_world()
        world.errors["a"] = [MemoryError()]
        with pytest.raises(NoRoom, match="out of memory"):
            await world.use("a")
        await world.use("a")
        assert world.names == ["a"]

    run(ask())


def test_a_load_that_fails_is_told_to_all_and_tried_again_by_the_next(make_world, run):
    async def ask():
        world = make_world()
        world.errors["a"] = [UnsupportedModel("no such layers")]
        world.may_start["a"] = Gate()
        asked = [asyncio.create_task(world.use("a")) for _ in range(2)]
        await world.until_wanted("a", 2)
        world.may_start["a"].open()
        failed = await asyncio.gather(*asked, return_exceptions=True)
        assert [str(error) for error in failed] == ["no such layers"] * 2
        await world.use("a")
        assert world.started == ["a", "a"]

    run(ask())


def test_a_load_goes_on_when_the_request_is_cancelled(make_world, run):
    async def ask():
        world = make_world()
        world.may_start["a"] = Gate()
        asked = asyncio.create_task(world.use("a"))
        await world.started.until(lambda: world.started)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        world.may_start["a"].open()
        await world.use("a")
        assert world.started == ["a"]

    run(ask())


def test_loaded_models_serve_while_another_loads(make_world, run):
    async def ask():
        world = make_world()
        await world.use("a")
        world.may_start["b"] = Gate()
        loading = asyncio.create_task(world.use("b"))
        await world.started.until(lambda: "b" in world.started)
        await world.use("a")
        world.may_start["b"].open()
        await loading

    run(ask())


def test_closing_unloads_everything_used_or_not_and_takes_nothing_new(make_world, run):
    async def ask():
        world = make_world()
        await world.use("a")
        async with world.models.using("b"):
            await world.models.close()
            assert sorted(world.stopped) == ["a", "b"]
        with pytest.raises(ShuttingDown):
            await world.use("a")
        await world.models.close()
        assert sorted(world.stopped) == ["a", "b"]

    run(ask())


def test_a_model_that_is_stuck_holds_up_neither_the_others_nor_the_end(make_world, run):
    async def ask():
        world = make_world(keep_alive=300.0)
        await world.use("a")
        world.models.find("a").worker.is_stuck = True
        await world.use("b")
        await world.pass_time(300)
        assert world.stopped == ["b"]
        await world.models.close()
        assert world.stopped == ["b"]

    run(ask())


def test_two_real_models_take_turns_in_the_room_of_one(tmp_path, run):
    settings = Settings(
        data_folder=tmp_path, cache_folder=tmp_path / "cache", max_models=1, disk=64 * 2**20, lanes=2, device="cpu"
    )
    for name, vocab_size in (("first", 64), ("second", 65)):  # equal models would be one
        with Catalog(settings).store.making(name) as making:
            make_folder("llama", making.folder, vocab_size=vocab_size)
            making.commit("a test", "", 0, "")

    async def ask():
        models = LoadedModels(settings, Catalog(settings))
        kept = []
        for name in ("first", "second", "first"):
            async with models.using(name) as loaded:
                runner = Runner(loaded.runtime)
                await asyncio.to_thread(runner.generate, list(range(1, 40)), max_tokens=2)
                kept.append(loaded.runtime.cache.stats()["tokens"])
                assert [each.name for each in models.list()] == [name]
                assert loaded.info.name == name and loaded.num_bytes > 0
        await models.close()
        assert kept[2] >= kept[0] > 0  # the tree came back from disk

    run(ask())


def test_a_load_that_waits_for_another_is_given_up_when_the_server_ends(make_world, run):
    async def ask():
        world = make_world()
        world.may_start["a"] = Gate()
        asks = [asyncio.create_task(world.use(name)) for name in "ab"]
        await world.started.until(lambda: world.started == ["a"])
        await world.until_wanted("b")
        closing = asyncio.create_task(world.models.close())
        await asyncio.sleep(0)  # so that it has begun
        world.may_start["a"].open()
        await closing
        ends = await asyncio.gather(*asks, return_exceptions=True)

        assert isinstance(ends[1], ShuttingDown)
        assert world.started == world.stopped == ["a"]

    run(ask())


def test_a_model_whose_asker_leaves_the_moment_it_is_loaded_still_goes_when_its_time_is_over(make_world, run):
    async def ask():
        world = make_world(keep_alive=0.0)
        world.may_start["a"] = Gate()
        asker = asyncio.create_task(world.use("a"))
        await world.started.until(lambda: world.started)
        world.models._loading["a"].add_done_callback(lambda done: asker.cancel())
        world.may_start["a"].open()
        await asyncio.gather(asker, return_exceptions=True)

        await world.until_stopped("a")
        assert asker.cancelled()

    run(ask())


def test_a_model_that_was_stuck_goes_when_its_step_has_ended(make_world, run, monkeypatch):
    monkeypatch.setattr("bough.server.serving.loaded.models._STUCK_S", 0.01)

    async def ask():
        world = make_world(keep_alive=0.0)
        async with world.models.using("a") as loaded:
            loaded.worker.is_stuck = True
        await world.models.unload_expired()
        assert world.names == ["a"]
        loaded.worker.is_stuck = False

        await world.until_stopped("a")

    run(ask())


def test_prompts_of_one_model_that_take_long_take_no_threads_from_others(make_world, run):
    async def ask():
        world, may_end = make_world(), Gate()
        async with world.models.using("a") as slow, world.models.using("b") as other:
            waiting = [asyncio.create_task(slow.threads.run(lambda is_cancelled: may_end.wait())) for _ in range(100)]
            assert await other.threads.run(lambda is_cancelled: 7) == 7
            assert await asyncio.to_thread(str, 8) == "8"
            assert not any(each.done() for each in waiting)
            may_end.open()
            await asyncio.gather(*waiting)

    run(ask())


def test_a_load_that_takes_long_is_left_to_its_thread_when_the_server_ends(make_world, run, monkeypatch):
    monkeypatch.setattr("bough.server.serving.loaded.models._LOAD_GRACE_S", 0.05)

    async def ask():
        world = make_world()
        await world.use("b")
        world.may_start["a"] = Gate()
        asking = asyncio.create_task(world.use("a"))
        await world.started.until(lambda: world.started == ["b", "a"])
        await world.models.close()
        assert world.models.is_still_loading
        assert world.stopped == ["b"]
        with pytest.raises((ShuttingDown, asyncio.CancelledError)):
            await asking
        world.may_start["a"].open()

    run(ask())
