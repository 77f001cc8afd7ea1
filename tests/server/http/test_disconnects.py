"""Clients that hang up, whenever they like: lanes and queue are free afterwards, memory stays, and their work is kept."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Literal
from urllib.parse import urlsplit

import httpx
import pytest

from bough.cache.tree.state import Lane
from bough.config import Settings
from bough.models import ModelFiles, Tokenizer
from bough.runtime import Runtime
from tests.gates import Gate
from tests.server.in_process import WordsEngine, make_words_folder, serving, start_words
from tests.server.load import (
    APIS,
    PATHS,
    Api,
    Chat,
    Reply,
    ask,
    body_of,
    figures,
    make_client,
    run,
    text_of,
    wait_until_at_rest,
)
from tests.server.servers import Address, Server, StartProcess, running
from tests.waiting import wait_until

Leaving = Literal["unsent", "half-sent", "unanswered", "in prefill", "in words", "whole", "stays"]
LEAVINGS: tuple[Leaving, ...] = ("unsent", "half-sent", "unanswered", "in prefill", "in words", "whole", "stays")
SLOW_S = 300.0
NUM_ENDLESS = 2**16
NUM_AT_ONCE = 10  # the next client comes when one leaves
STATUS_FILE = Path("/proc/self/status")

has_status_file = pytest.mark.skipif(not STATUS_FILE.exists(), reason="reads the memory of a process as Linux tells it")


@dataclass(frozen=True)
class Visit:
    """What one client does: it comes, asks, and leaves when it likes to."""

    chat: Chat
    leaving: Leaving
    after_s: float  # for those who leave by the clock


@dataclass
class Crowd:
    """What became of many visits."""

    ends: Counter[str] = field(default_factory=Counter)
    stayed: list[Reply] = field(default_factory=list)
    refused: list[Reply] = field(default_factory=list)

    def note(self, visit: Visit, reply: Reply | None) -> None:
        if reply is not None and reply.status == 503:
            self.refused.append(reply)
            self.ends["refused"] += 1
            return
        if visit.leaving == "stays" and reply is not None:
            self.stayed.append(reply)
        self.ends[visit.leaving] += 1


def make_visit(random: Random, number: int, num_words: int) -> Visit:
    leaving, api = random.choice(LEAVINGS), random.choice(APIS)
    text = text_of(random.randrange(5, num_words), begin=f"visit {number}")
    tokens = 6 if leaving == "stays" else 200
    return Visit(Chat(api, text, tokens, streams=leaving != "whole"), leaving, random.uniform(0, 0.5))


async def pay(client: httpx.AsyncClient, server: Server, visit: Visit) -> Reply | None:
    """Do what the visit says; what was message, if it was anything."""
    if visit.leaving in ("unsent", "half-sent", "unanswered"):
        await leave_early(server, visit)
        return None
    if visit.leaving == "whole":
        with suppress(TimeoutError):
            return await asyncio.wait_for(ask(client, server, visit.chat), visit.after_s)
        return None
    until = {"in prefill": lambda reply: True, "in words": lambda reply: bool(reply.text)}
    return await ask(client, server, visit.chat, until.get(visit.leaving, lambda reply: False))


async def leave_early(server: Server, visit: Visit) -> None:
    """Connect, send nothing, half a request or all of it, and hang up without having read anything."""
    address, body = urlsplit(server.url), json.dumps(body_of(visit.chat, server.model)).encode()
    head = f"POST {PATHS[visit.chat.api]} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
    request = head.encode() + body
    sizes = {"unsent": 0, "half-sent": len(request) - len(body) // 2, "unanswered": len(request)}
    _, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(request[: sizes[visit.leaving]])
    with suppress(ConnectionError):
        await writer.drain()
        await asyncio.sleep(visit.after_s / 5)
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


def resident_bytes(server: Server) -> int:
    """The memory that the server's process has now."""
    for line in Path(f"/proc/{server.process.pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the process has no memory")


def other_bytes(server: Server) -> int:
    """The memory that the server has beside what it says its lanes and its tree take, which grow until they may not."""
    used_bytes: int = figures(server)["used_bytes"]
    return resident_bytes(server) - used_bytes


# A short crowd, of a model that is loaded at once


async def visit_all(server: Server, num_clients: int, seed: int) -> Crowd:
    random, crowd, places = Random(seed), Crowd(), asyncio.Semaphore(NUM_AT_ONCE)

    async def visit(client: httpx.AsyncClient, number: int) -> None:
        chosen = make_visit(random, seed * 1000 + number, num_words=60)
        async with places:
            crowd.note(chosen, await pay(client, server, chosen))

    async with make_client() as client:
        await asyncio.gather(*(visit(client, number) for number in range(num_clients)))
    return crowd


@pytest.fixture(scope="module")
def visited(tiny_process: StartProcess) -> Server:
    return tiny_process(lanes=2, device_memory=64 * 2**20, disk=64 * 2**20)


def test_when_forty_clients_came_and_went_all_lanes_are_free_and_who_stayed_has_its_answer(visited: Server) -> None:
    crowd = run(visit_all(visited, 40, seed=1))

    wait_until_at_rest(visited)
    assert set(crowd.ends) == set(LEAVINGS)  # each kind was there, and nobody was refused
    assert all(reply.is_whole and not reply.error for reply in crowd.stayed)
    assert not any(text in visited.log for text in ("mistake of ours", "unexpected error", "Traceback"))


@has_status_file
def test_the_memory_of_the_server_stays_while_clients_come_and_go(visited: Server) -> None:
    run(visit_all(visited, 40, seed=2))
    before = resident_bytes(visited)

    for seed in (3, 4):
        run(visit_all(visited, 40, seed))
    wait_until_at_rest(visited)

    assert resident_bytes(visited) - before < 64 * 2**20


@pytest.fixture(scope="module")
def endless_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    """One lane of a model whose answers end when their clients leave: no machine computes so many tokens meanwhile."""
    folder = tmp_path_factory.mktemp("endless")
    files = ModelFiles("endless", make_words_folder(folder / "endless", context_tokens=2 * NUM_ENDLESS))
    with serving(files, folder, lanes=1, queue=1, loop_guard=False) as server:
        yield server


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("api", APIS)
def test_a_client_that_leaves_the_queue_frees_its_place_while_others_go_on(
    endless_server: Address, api: Api, streams: bool
) -> None:
    server = endless_server

    async def leave_the_queue() -> bool:
        async with make_client() as client:
            endless = Chat("ollama", f"go on {api} {streams}", max_tokens=NUM_ENDLESS)
            running = asyncio.create_task(ask(client, server, endless))
            await _until(lambda: figures(server)["running"] == 1)
            waiting = asyncio.create_task(ask(client, server, Chat(api, f"wait {streams}", streams=streams)))
            await _until(lambda: figures(server)["queue"] == 1)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await _until(lambda: figures(server)["queue"] == 0)
            was_running = not running.done()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        return was_running

    assert run(leave_the_queue())
    wait_until_at_rest(server)


async def _until(is_so: Callable[[], bool]) -> None:
    """Wait until something is so; the clients of this loop go on meanwhile."""
    await asyncio.to_thread(wait_until, is_so)


# What was computed for those who left


class HeldEngine(WordsEngine):
    """Computes two chunks of a prompt, if it is held, and waits with the third until it may go on."""

    def __init__(self, tokenizer: Tokenizer, context_tokens: int) -> None:
        super().__init__(tokenizer, context_tokens)
        self.hold()
        self.may_go_on.open()

    def hold(self) -> None:
        self._num_before, self.waits, self.may_go_on = 2, Gate(), Gate()

    def evaluate(self, lane: Lane, ids: Sequence[int]) -> tuple[float, ...]:
        if len(ids) > 1 and self._num_before == 0:
            self.waits.open()
            self.may_go_on.wait()
        self._num_before -= bool(self._num_before) and len(ids) > 1
        return super().evaluate(lane, ids)


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Address, HeldEngine]]:
    """A server, and its engine."""
    folder, engines = tmp_path_factory.mktemp("held"), []

    def start(files: ModelFiles, settings: Settings) -> Runtime:
        runtime = start_words(files, settings, HeldEngine)
        engines.append(runtime.engine)
        return runtime

    files = ModelFiles("held", make_words_folder(folder / "held", context_tokens=2**15))
    with serving(files, folder, start, chunk=512) as server:
        yield server, engines[0]


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("api", APIS)
def test_the_prefill_of_a_client_that_left_stops_and_its_retry_finds_what_was_done(
    held: tuple[Address, HeldEngine], api: Api, streams: bool
) -> None:
    server, engine = held
    text = text_of(6000, begin=f"a client of {api} that leaves, {streams}")
    num_ended = count_ended(server, api)
    engine.hold()

    async def leave_in_prefill() -> None:
        async with make_client() as client:
            asking = asyncio.create_task(ask(client, server, Chat(api, text, streams=streams)))
            await engine.waits.passed()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    run(leave_in_prefill())
    wait_until(lambda: count_ended(server, api) > num_ended)
    engine.may_go_on.open()
    wait_until_at_rest(server)
    retry = run(look(server, text))

    assert 100 < retry.cached_tokens < retry.prompt_tokens - 100


def count_ended(server: Address, api: Api) -> float:
    """How many requests by this API have ended, as they may."""
    text = httpx.get(f"{server.url}/metrics").raise_for_status().text
    begin = f'bough_requests_total{{api="{api}"'
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(begin))


async def look(server: Address, text: str) -> Reply:
    """What is cached of a text: Anthropic's API says so before anything is computed, and then nobody reads on."""
    async with make_client() as client:
        return await ask(client, server, Chat("anthropic", text), lambda reply: reply.prompt_tokens > 0)


# A crowd for minutes


@pytest.fixture
def bounded_server(smollm2_files: ModelFiles, tmp_path: Path) -> Iterator[Server]:
    with running("smollm2", tmp_path, lanes=4, device_memory=2**29, disk=2**29) as server:
        yield server


async def visit_for(server: Server, num_clients: int, seconds: float) -> tuple[Crowd, list[int]]:
    """So many clients that come again and again; what became of them, and every few seconds the memory beside the tree."""
    random, crowd, ends_s = Random(0), Crowd(), time.monotonic() + seconds
    memory: list[int] = []

    async def keep_visiting(client: httpx.AsyncClient, number: int) -> None:
        for turn in range(10**9):
            await asyncio.sleep(random.uniform(0, 60))
            if time.monotonic() > ends_s:
                return
            visit = make_visit(random, turn * 1000 + number, num_words=200)
            crowd.note(visit, await pay(client, server, visit))

    async def watch() -> None:
        while time.monotonic() < ends_s:
            await asyncio.sleep(seconds / 30)
            memory.append(await asyncio.to_thread(other_bytes, server))

    async with make_client() as client:
        await asyncio.gather(watch(), *(keep_visiting(client, number) for number in range(num_clients)))
    return crowd, memory


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(SLOW_S + 300)
@has_status_file
def test_two_hundred_clients_that_come_and_go_for_minutes_leave_nothing_behind(bounded_server: Server) -> None:
    crowd, memory = run(visit_for(bounded_server, 200, SLOW_S))

    wait_until_at_rest(bounded_server)
    found, others = figures(bounded_server), other_bytes(bounded_server)
    print(dict(crowd.ends), [size // 2**20 for size in memory], others // 2**20, found)
    assert crowd.stayed and all(reply.is_whole and not reply.error for reply in crowd.stayed)
    assert all(int(reply.headers["retry-after"]) > 0 for reply in crowd.refused)
    assert found["used_bytes"] <= found["budget_bytes"]
    assert others < 1.15 * max(memory[: len(memory) // 3])
    assert not any(text in bounded_server.log for text in ("mistake of ours", "unexpected error", "Traceback"))
