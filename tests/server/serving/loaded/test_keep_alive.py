"""The loaded models: how long one stays after its last use."""

from __future__ import annotations

import asyncio
import math
from datetime import UTC, datetime

import pytest

from bough.server.serving.loaded import models as loaded_module


def test_a_model_goes_when_it_was_not_used_for_its_time(make_world, run):
    async def ask():
        world = make_world(keep_alive=300.0)
        await world.use("a")
        await world.pass_time(299)
        assert world.names == ["a"]
        await world.pass_time(1)
        assert (world.names, world.stopped) == ([], ["a"])

    run(ask())


def test_each_use_begins_the_time_anew(make_world, run):
    async def ask():
        world = make_world(keep_alive=300.0)
        await world.use("a")
        await world.pass_time(200)
        await world.use("a")
        assert world.models.find("a").expires_s == world.now + 300
        await world.pass_time(200)
        assert world.names == ["a"]

    run(ask())


def test_a_wall_clock_that_is_set_neither_unloads_a_model_nor_keeps_it(make_world, run, monkeypatch):
    class Wrong(datetime):
        years = 0

        @classmethod
        def now(cls, tz=None):
            return datetime(2026 + cls.years, 1, 1, tzinfo=tz)

    async def ask():
        monkeypatch.setattr(loaded_module, "datetime", Wrong)
        world = make_world(keep_alive=300.0)
        await world.use("a")
        for years in (10, -10):
            Wrong.years = years
            await world.models.unload_expired()
            left = world.models.expires_at(world.models.find("a")) - Wrong.now(UTC)
            assert (world.names, left.total_seconds()) == (["a"], 300)
        await world.pass_time(300)
        assert world.names == []

    run(ask())


def test_a_model_in_use_stays_however_long_that_takes(make_world, run):
    async def ask():
        world = make_world(keep_alive=300.0)
        async with world.models.using("a"):
            await world.pass_time(10_000)
            assert not await world.models.unload("a")
            assert world.names == ["a"]
        await world.models.unload_expired()
        assert world.names == []  # it was asked to go when its last use ends

    run(ask())


def test_the_request_may_say_how_long_its_model_stays(make_world, run):
    async def ask():
        world = make_world(keep_alive=300.0)
        await world.use("a", 10)
        await world.use("b", 1_000)
        await world.pass_time(10)
        assert world.names == ["b"]
        await world.pass_time(1_000)
        assert world.names == []

    run(ask())


@pytest.mark.parametrize("keep_alive_s", [-1.0, math.inf, 1e300])
def test_a_model_can_stay_for_ever(make_world, run, keep_alive_s):
    async def ask():
        world = make_world()
        await world.use("a", keep_alive_s)
        assert world.models.find("a").expires_s is None
        await world.pass_time(10**8)
        assert world.names == ["a"]

    run(ask())


def test_a_time_that_was_asked_for_counts_until_another_is(make_world, run):
    async def ask():
        world = make_world(keep_alive=300.0)
        await world.use("a", -1.0)
        await world.use("a")
        assert world.models.find("a").expires_s is None
        await world.use("a", 60.0)
        assert world.models.find("a").expires_s is not None

    run(ask())


def test_models_stay_for_ever_if_the_settings_say_so(make_world, run):
    async def ask():
        world = make_world(keep_alive=None)
        await world.use("a")
        await world.pass_time(10**8)
        assert world.names == ["a"]

    run(ask())


def test_a_model_that_is_not_to_stay_goes_by_itself_after_its_last_use(make_world, run):
    async def ask():
        world = make_world()
        async with world.models.using("a", 0), world.models.using("a", 0):
            await world.models.unload_expired()
            assert world.names == ["a"]
        await world.until_stopped("a")
        assert world.names == []

    run(ask())


def test_a_model_that_is_not_to_stay_is_there_for_each_of_many_that_wait_for_it(make_world, run):
    async def ask():
        world = make_world(keep_alive=0.0)
        await asyncio.gather(*(world.use(name, 0) for name in "abcabcab"))
        await world.stopped.until(lambda: len(world.stopped) >= len(world.started))
        assert world.names == []

    run(ask())
