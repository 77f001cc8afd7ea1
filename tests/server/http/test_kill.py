"""A server that is killed, and one that is told to end, while eight clients read: what they see, and what is there again.

One story, told once for all tests of this file: a server answers, is killed under load, starts again at the same port on
the same folder, is told to end under load, and starts a third time.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from bough.models import ModelFiles
from tests.gates import Notes
from tests.server.load import APIS, PATHS, Chat, Reply, ask, ask_in_turn, body_of, figures, make_client, run, text_of
from tests.server.servers import DISK_BYTES, START_S, STOP_S, Server, find_port, share_self_checks, stop
from tests.waiting import BOUND_S, wait_until

pytestmark = pytest.mark.model

NUM_CLIENTS = 8
CLEAN_ERRORS = {"TransportError", "APIConnectionError"}  # by their names: client libraries come with an httpx of their own
KEPT = Chat("openai", text_of(300, begin="finished long before the kill"), max_tokens=4)


@dataclass
class Story:
    """What was seen on the way."""

    finished: list[Reply] = field(default_factory=list)
    killed: list[object] = field(default_factory=list)  # what each client ran into
    problems_after_kill: list[Any] = field(default_factory=list)
    healths: list[int] = field(default_factory=list)  # of the second start, each change once
    after_kill: list[Reply] = field(default_factory=list)
    ended: list[Reply] = field(default_factory=list)
    refusals: list[httpx.Response] = field(default_factory=list)
    exit_code: int | None = None
    problems_after_end: list[Any] = field(default_factory=list)
    after_end: list[Reply] = field(default_factory=list)


class Place:
    """Where servers run one after another: one port and one folder."""

    def __init__(self, folder: Path) -> None:
        share_self_checks(folder)
        self.folder = folder
        self.port = find_port()
        self.server: Server | None = None
        self.healths: list[int] = []
        settings = {
            "cache_folder": folder / "cache",
            "disk": DISK_BYTES,
            "threads": 2,
            "stop_after": 300,
            "loop_guard": False,
        }
        self._environment = dict(os.environ) | {f"BOUGH_{name.upper()}": str(value) for name, value in settings.items()}

    def start(self) -> Server:
        """A server that is ready; `healths` has what it said of itself until then."""
        command = [sys.executable, "-m", "bough", "serve", "--model", "smollm2", "--port", str(self.port)]
        log_file = self.folder / "server.log"
        with log_file.open("ab") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=self._environment
            )
        url = f"http://127.0.0.1:{self.port}"
        server = self.server = Server(url, "smollm2", self.folder / "cache", process, log_file)
        self.healths = []
        wait_until(self._is_ready, START_S, describe=lambda: server.log[-4000:])
        return server

    def _is_ready(self) -> bool:
        assert self.server is not None and self.server.process.poll() is None, self.server and self.server.log[-4000:]
        status = _health(self.server.url)
        if status and status not in self.healths:
            self.healths.append(status)
        return status == 200

    def verify(self) -> list[Any]:
        """What `bough cache verify` finds wrong, all trees together. No server may run."""
        command = [sys.executable, "-m", "bough", "cache", "verify", "--json"]
        done = subprocess.run(command, env=self._environment, capture_output=True, timeout=60, check=False)
        trees = json.loads(done.stdout)["trees"]
        assert trees and all(tree["num_files"] > 0 for tree in trees)
        return [problem for tree in trees for problem in tree["problems"]]


def _status(url: str) -> str:
    """What a server that answers says of itself."""
    return str(httpx.get(f"{url}/health", timeout=BOUND_S, trust_env=False).json()["status"])


def _health(url: str) -> int | None:
    try:
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code
    except httpx.TransportError:
        return None


@pytest.fixture(scope="module")
def story(smollm2_files: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    place, story = Place(tmp_path_factory.mktemp("kill")), Story()
    try:
        tell_of_the_kill(story, place)
        tell_of_the_end(story, place)
        yield story
    finally:
        if place.server is not None and place.server.process.poll() is None:
            place.server.process.kill()
            place.server.process.wait()


def tell_of_the_kill(story: Story, place: Place) -> None:
    server = place.start()
    story.finished = run(ask_in_turn(server, [KEPT]))
    wait_until(lambda: is_saved(figures(server)), describe=lambda: str(figures(server)))
    run(kill_under_load(story, server))
    story.problems_after_kill = place.verify()
    server = place.start()
    story.healths = place.healths
    story.after_kill = run(ask_in_turn(server, [KEPT]))


def is_saved(found: dict[str, Any]) -> bool:
    """Whether all of the tree is on disk."""
    return found["disk_pending_bytes"] == 0 and found["disk_bytes"] >= found["tree_bytes"] > 0


async def kill_under_load(story: Story, server: Server) -> None:
    """Eight clients read, by three libraries; all have begun when the server is killed."""
    begun: Notes[int] = Notes()
    async with make_client() as client:
        reading = [asyncio.create_task(read_on(number, client, server, begun)) for number in range(NUM_CLIENTS)]
        await begun.until(lambda: len(set(begun)) == NUM_CLIENTS)
        assert not any(each.done() for each in reading), [each for each in reading if each.done()]
        server.process.kill()
        async with asyncio.timeout(BOUND_S):
            story.killed = list(await asyncio.gather(*reading, return_exceptions=True))
    server.process.wait()


async def read_on(number: int, client: httpx.AsyncClient, server: Server, begun: Notes[int]) -> None:
    """A client that asks again whenever it has its answer, until something goes wrong."""
    question = f"Count from {number} to one thousand, number by number."
    reads = (read_plainly, read_by_openai, read_by_anthropic)[number % 3]
    while True:
        await reads(client, server, question, lambda: begun.append(number))


Begin = Callable[[], None]


async def read_plainly(client: httpx.AsyncClient, server: Server, question: str, begin: Begin) -> None:
    def note(reply: Reply) -> bool:
        begin()
        return False

    await ask(client, server, Chat("ollama", question, max_tokens=1000), note)


async def read_by_openai(client: httpx.AsyncClient, server: Server, question: str, begin: Begin) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as asked:
        stream = await asked.chat.completions.create(
            model=server.model, messages=[{"role": "user", "content": question}], max_tokens=1000, stream=True
        )
        async for _ in stream:
            begin()


async def read_by_anthropic(client: httpx.AsyncClient, server: Server, question: str, begin: Begin) -> None:
    asked = anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0)
    async with (
        asked,
        asked.messages.stream(
            model=server.model, messages=[{"role": "user", "content": question}], max_tokens=1000
        ) as events,
    ):
        async for _ in events:
            begin()


def tell_of_the_end(story: Story, place: Place) -> None:
    assert place.server is not None
    server = place.server
    asked = [Chat(APIS[i % 3], f"Count from {i} to one thousand.", max_tokens=30) for i in range(NUM_CLIENTS)]
    run(end_under_load(story, server, asked))
    story.exit_code = server.process.wait(STOP_S)
    story.problems_after_end = place.verify()
    server = place.start()
    story.after_end = run(ask_in_turn(server, asked[: len(APIS)]))  # one of each API; more take their time
    stop(server)


async def stay(client: httpx.AsyncClient, server: Server, may_leave: asyncio.Event) -> None:
    """Read an answer that does not end by itself, until all else was seen."""
    body = {"model": server.model, "prompt": "Once", "max_tokens": 8000, "ignore_eos": True, "stream": True}
    async with client.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        async for _ in response.aiter_lines():
            if may_leave.is_set():
                return


async def end_under_load(story: Story, server: Server, asked: list[Chat]) -> None:
    async with make_client() as client:
        replies, have_begun, may_leave = [Reply() for _ in asked], asyncio.Event(), asyncio.Event()

        def note(reply: Reply) -> bool:
            if all(each.text for each in replies):
                have_begun.set()
            return False

        staying = asyncio.create_task(stay(client, server, may_leave))  # until it leaves, the server cannot end
        reading = [
            asyncio.create_task(ask(client, server, chat, note, reply)) for chat, reply in zip(asked, replies, strict=True)
        ]
        await have_begun.wait()
        assert not all(each.done() for each in reading)
        server.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(wait_until, lambda: _status(server.url) == "shutting down")
        for api in APIS:
            body = body_of(Chat(api, "Too late?"), server.model)
            story.refusals.append(await client.post(f"{server.url}{PATHS[api]}", json=body))
        story.ended = list(await asyncio.gather(*reading))
        assert not staying.done()
        may_leave.set()
        await staying


def is_clean(error: object) -> bool:
    return any(kind.__name__ in CLEAN_ERRORS for kind in type(error).__mro__)


def test_clients_of_a_killed_server_get_a_clean_error(story: Story) -> None:
    assert len(story.killed) == NUM_CLIENTS
    assert [error for error in story.killed if not is_clean(error)] == []


def test_a_server_that_starts_again_says_first_that_it_is_not_ready(story: Story) -> None:
    assert story.healths == [503, 200]


def test_what_was_finished_and_saved_before_a_kill_is_cached_after_it(story: Story) -> None:
    (before,), (after,) = story.finished, story.after_kill

    assert before.cached_tokens == 0
    assert after.cached_tokens >= before.prompt_tokens - 64
    assert (after.text, after.tokens) == (before.text, before.tokens)


def test_a_kill_leaves_a_sound_tree(story: Story) -> None:
    assert story.problems_after_kill == []


def test_streams_that_run_when_the_server_is_told_to_end_come_to_their_end(story: Story) -> None:
    assert len(story.ended) == NUM_CLIENTS
    assert all(reply.is_whole and not reply.error for reply in story.ended)


def test_while_a_server_ends_whoever_comes_is_told_to_come_back(story: Story) -> None:
    assert [answer.status_code for answer in story.refusals] == [503] * 3
    assert all(int(answer.headers["retry-after"]) > 0 for answer in story.refusals)


def test_a_server_that_was_told_to_end_under_load_ends_well_and_has_saved_its_tree(story: Story) -> None:
    assert story.exit_code == 0
    assert story.problems_after_end == []
    assert all(
        after.cached_tokens >= after.prompt_tokens // 2 and after.text == before.text
        for before, after in zip(story.ended[: len(APIS)], story.after_end, strict=True)
    )
