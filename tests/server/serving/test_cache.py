"""Prefixes are encoded in threads of their own, and no prompt is worked on longer than its client waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException

from bough.cache.admin.view import Lookup
from bough.config import Settings
from bough.errors import PromptTooLong
from bough.models.encoder import PromptLimit
from bough.models.prompts import EncodedPrompt
from bough.prompting.prompt import ModelFacts
from bough.server.apis.bough import cache as cache_api
from bough.server.apis.bough.cache import PrefixBody
from bough.server.serving.loaded.model import LARGE_CHARS, PromptThreads
from bough.server.serving.service import Service
from bough.tokens import Tokens, num_tokens
from tests.waiting import BOUND_S, wait_until


class OneModel(Service):
    """A service with one model of a context of 100, which notes on which thread it is asked to do what."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        prompts: Any = SimpleNamespace(encode=self._encode, decode=self._decode, has_template=False)
        facts = ModelFacts("m", prompts, 100)
        tree = SimpleNamespace(look_up=self._look_up, keep=self._look_up)
        self.loaded: Any = SimpleNamespace(
            name="m",
            generator=SimpleNamespace(facts=facts),
            facts=lambda template: facts,
            tree=tree,
            threads=PromptThreads(),
        )
        models: Any = SimpleNamespace(list=lambda: [self.loaded], using=self._using, choose_name=lambda name: name or "m")
        super().__init__(Settings(), models, SimpleNamespace(names=SimpleNamespace(complete=lambda ask: ask)))  # type: ignore[arg-type]

    @asynccontextmanager
    async def _using(self, model: str) -> AsyncIterator[Any]:
        yield self.loaded

    def _encode(self, prompt: str, *, limit: PromptLimit, **options: Any) -> EncodedPrompt:
        self.steps.append(f"encoded by {_thread()}")
        limit.check(len(prompt))
        return EncodedPrompt(Tokens.of([1] * len(prompt)))

    async def _look_up(self, prompt: bytes, *args: Any) -> dict[str, Lookup]:
        self.steps.append(f"asked for {num_tokens(prompt)} ids")
        return {"": Lookup(3, 3, (), is_kept=True, is_enabled=True)}

    def _decode(self, ids: Sequence[int]) -> str:
        self.steps.append(f"put into words by {_thread()}")
        return ""


def _thread() -> str:
    return "the event loop" if threading.current_thread() is threading.main_thread() else "a thread"


prefix_routes = pytest.mark.parametrize("route", [cache_api.explain, cache_api.keep, cache_api.unkeep])


@prefix_routes
def test_a_prefix_is_encoded_in_a_thread_and_the_engine_is_asked_once_for_ids(route: Callable[..., Any]) -> None:
    service = OneModel()

    with suppress(HTTPException):  # pin: not all of the prefix is known
        asyncio.run(route(PrefixBody(prompt="text", raw=True), service, "salt"))

    assert service.steps == ["encoded by a thread", "asked for 4 ids", "put into words by a thread"]


@prefix_routes
def test_a_prefix_that_does_not_fit_never_reaches_the_engine(route: Callable[..., Any]) -> None:
    service = OneModel()

    with pytest.raises(PromptTooLong, match="101 tokens, and the context holds 100"):
        asyncio.run(route(PrefixBody(prompt="x" * 101, raw=True), service, "salt"))

    assert service.steps == ["encoded by a thread"]


def test_work_on_a_prompt_hears_that_nobody_waits_for_it() -> None:
    has_begun, has_heard = threading.Event(), threading.Event()

    def work(is_cancelled: Callable[[], bool]) -> None:
        has_begun.set()
        wait_until(is_cancelled)
        has_heard.set()

    async def hang_up() -> None:
        task = asyncio.create_task(PromptThreads().run(work))
        await asyncio.to_thread(has_begun.wait, BOUND_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(hang_up())
    assert has_heard.wait(BOUND_S)


def test_large_prompts_go_one_after_the_other_and_small_ones_pass_them() -> None:
    may_end, order = threading.Event(), []

    def large(is_cancelled: Callable[[], bool]) -> None:
        order.append("large begins")
        assert may_end.wait(BOUND_S)
        order.append("large ends")

    async def run() -> None:
        threads = PromptThreads()
        larges = [asyncio.create_task(threads.run(large, LARGE_CHARS + 1)) for _ in range(2)]
        await threads.run(lambda is_cancelled: order.append("small"), 5)
        may_end.set()
        await asyncio.gather(*larges)

    asyncio.run(run())
    assert order.index("small") < order.index("large ends")
    assert [each for each in order if each != "small"] == ["large begins", "large ends"] * 2
