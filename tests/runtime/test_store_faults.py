"""A real model, a real S3 server, and a proxy between them that makes every mistake: no answer changes, each is counted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import bough
from bough.runtime import object_store
from tests.faulty_proxy import Answer, Call, Fault, FaultyProxy, fail, faulty_proxy, hang, no_fault, of_content
from tests.runtime.test_store import AGAIN, PROMPT, load, s3_server
from tests.waiting import BOUND_S, wait_until

pytestmark = pytest.mark.usefixtures("reading_pays")  # so that a store is given up for its faults alone

URL = "s3://trees/faults"  # other servers of this process have the same objects


@dataclass(frozen=True)
class Filled:
    """A store with two pages, behind a proxy; what is answered without it, and where the model is."""

    proxy: FaultyProxy
    expected: bough.Completion
    models: Path

    def machine(self, folder: Path, fault: Fault) -> bough.Runner:
        """A machine with an empty tree, and a fault between it and the store."""
        self.proxy.fault = fault
        self.proxy.is_open.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(object_store, "TIMEOUT_S", 1 if fault is hang else object_store.TIMEOUT_S)
            return load("llama", self.models, folder, URL, disk=0)


OPTIONS: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True, "logprobs": 5, "store": False}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Filled]:
    folder = tmp_path_factory.mktemp("faults")
    with s3_server() as (host, port), faulty_proxy(host, port) as (proxy, endpoint), pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", endpoint)
        with load("llama", folder, folder / "first", URL, disk=0) as runner:
            runner.generate(PROMPT, max_tokens=1)
            assert runner.cache.flush() and runner.cache.stats()["store_sent"] == 2
        with load("llama", folder, folder / "without", "", disk=0) as runner:
            expected = runner.generate(AGAIN, **OPTIONS)
        yield Filled(proxy, expected, folder)


@pytest.fixture
def filled(made: Filled) -> Iterator[Filled]:
    yield made
    made.proxy.fault = no_fault
    made.proxy.is_open.set()


def check_answer(found: bough.Completion, filled: Filled) -> None:
    """An answer is the one without a store, up to how numbers are rounded."""
    assert found.token_ids == filled.expected.token_ids
    for ours, theirs in zip(found.logprobs, filled.expected.logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [each.logprob for each in ours.top] == pytest.approx([each.logprob for each in theirs.top], abs=1e-4)


def check_nothing_is_left(runner: bough.Runner) -> None:
    """Nothing is reserved, held or wanted from the store."""
    cache, worker = runner.runtime.prefix_cache, runner.runtime.worker
    wait_until(lambda: not cache.forest.holds)  # a cancelled request is closed by the engine's thread
    worker.call(cache.check).result()
    assert not any(cache.memory.reserved_bytes.values()) and not cache.forest.holds and not cache.residency.loader.loads
    assert cache.memory.shared is not None and not cache.memory.shared.reader.num_reads


def wait_for(runner: bough.Runner, name: str) -> dict[str, Any]:
    """The statistics, as soon as something is counted by this name."""
    wait_until(lambda: runner.cache.stats()[name])
    return dict(runner.cache.stats())


def test_behind_a_proxy_without_faults_pages_come_from_the_store(filled: Filled, tmp_path: Path) -> None:
    with filled.machine(tmp_path, no_fault) as runner:
        found = runner.generate(AGAIN, **OPTIONS)
    check_answer(found, filled)
    assert found.usage.cached_tokens == 512 and found.timings.loading.store_bytes > 0


def end_early(call: Call, answer: Answer) -> Answer:
    """The connection ends in the middle of the content, however often the rest is asked for."""
    return replace(answer, body=answer.body[: len(answer.body) // 2])


FAILURES = {"error": fail(500), "refusal": fail(403), "silence": hang, "broken connection": of_content(end_early)}


@pytest.mark.parametrize("fault", FAILURES.values(), ids=FAILURES)
def test_a_store_that_fails_changes_no_answer_and_is_counted(fault: Fault, filled: Filled, tmp_path: Path) -> None:
    with filled.machine(tmp_path, fault) as runner:
        found = runner.generate(AGAIN, **OPTIONS)
        stats = wait_for(runner, "store_errors")
        check_nothing_is_left(runner)
    check_answer(found, filled)
    assert found.usage.cached_tokens == 0 and stats["store_loaded_bytes"] == 0
    assert stats["store_errors"] and stats["store_is_failing"] and stats["store_problem"]


def truncate(call: Call, answer: Answer) -> Answer:
    return answer.with_body(answer.body[: len(answer.body) // 2])


def empty(call: Call, answer: Answer) -> Answer:
    return answer.with_body(b"")


def flip(call: Call, answer: Answer) -> Answer:
    at = len(answer.body) // 2
    return answer.with_body(answer.body[:at] + bytes([answer.body[at] ^ 1]) + answer.body[at + 1 :])


def swap(call: Call, answer: Answer) -> Answer:
    """Each of the two pages is the other."""
    pages = sorted(path for path in call.proxy.written if "/_" not in path)
    return replace(call, path=pages[1 - pages.index(call.path)]).pass_on() if call.path in pages else answer


@pytest.mark.parametrize("change", [truncate, empty, flip, swap])
def test_an_object_that_is_not_what_it_should_be_changes_no_answer_and_is_counted(
    change: Callable[[Call, Answer], Answer], filled: Filled, tmp_path: Path
) -> None:
    with filled.machine(tmp_path, of_content(change)) as runner:
        found = runner.generate(AGAIN, **OPTIONS)
        stats = wait_for(runner, "store_misses")
        check_nothing_is_left(runner)
    check_answer(found, filled)
    assert found.usage.cached_tokens == 0 and stats["store_loaded_bytes"] == 0
    assert stats["store_misses"] == 1 and not stats["store_is_failing"]


def test_a_store_that_is_full_is_still_read(filled: Filled, tmp_path: Path) -> None:
    with filled.machine(tmp_path, fail(507, "PUT")) as runner:
        found = runner.generate(AGAIN, **OPTIONS | {"store": True})
        stats = wait_for(runner, "store_errors")
    check_answer(found, filled)
    assert found.usage.cached_tokens == 512 and stats["store_errors"] and stats["store_sent"] == 0


def test_a_request_that_is_cancelled_while_the_store_is_silent_leaves_nothing_behind(
    filled: Filled, tmp_path: Path
) -> None:
    was_asked = threading.Event()

    def tell_and_hang(call: Call) -> Answer:
        was_asked.set()
        return hang(call)

    async def cancel() -> None:
        task = asyncio.ensure_future(runner.agenerate(AGAIN, **OPTIONS))
        assert await asyncio.to_thread(was_asked.wait, BOUND_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with filled.machine(tmp_path, tell_and_hang) as runner:
        asyncio.run(cancel())
        check_nothing_is_left(runner)
        filled.proxy.is_open.set()
        check_answer(runner.generate(AGAIN, **OPTIONS), filled)
