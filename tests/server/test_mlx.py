"""A server whose engine is MLX: what clients see must not depend on the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bough.engines.choice import find_installed
from bough.engines.contract import EngineInfo
from bough.models import ModelFiles
from bough.runtime import Runtime
from tests.server.fake_models import MODEL_BYTES, World
from tests.server.load import APIS, Api, Chat, Reply, ask_in_turn, ask_together, run, text_of
from tests.server.servers import Server, running

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.skipif("mlx" not in find_installed(), reason="MLX is not installed"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mlx_server")


@pytest.fixture(scope="module")
def mlx_server(tiny_model: Path, place: Path) -> Iterator[Server]:
    with running(str(tiny_model), place, engine="mlx", data_folder=place / "data") as started:
        yield started


def ask_one(server: Server, chat: Chat) -> Reply:
    (reply,) = run(ask_in_turn(server, [chat]))
    assert reply.status == 200 and not reply.error, reply.error
    return reply


@pytest.mark.parametrize("api", APIS)
def test_each_api_gives_the_same_text_whole_and_as_a_stream(mlx_server: Server, api: Api) -> None:
    whole = ask_one(mlx_server, Chat(api, "Say something.", streams=False, salt="whole"))
    streamed = ask_one(mlx_server, Chat(api, "Say something.", streams=True, salt="streamed"))

    assert whole.is_whole and streamed.is_whole
    assert whole.text == streamed.text != ""
    assert whole.prompt_tokens == streamed.prompt_tokens > 0


def test_two_chats_at_once_are_answered_as_each_alone(mlx_server: Server) -> None:
    def chats(salt: str) -> list[Chat]:
        greedy = Chat("openai", text_of(150, begin="one"), max_tokens=24, salt=salt)
        return [greedy, Chat("ollama", text_of(60, begin="two"), max_tokens=24, seed=3, salt=salt)]

    together = run(ask_together(mlx_server, chats("together")))
    alone = run(ask_in_turn(mlx_server, chats("alone")))

    assert [reply.tokens for reply in together] == [reply.tokens for reply in alone]
    assert all(len(reply.tokens) > 1 for reply in together)


def test_the_second_turn_of_a_chat_computes_only_what_is_new(mlx_server: Server) -> None:
    text = text_of(200, begin="turns")
    first = ask_one(mlx_server, Chat("openai", text, max_tokens=2))

    again = ask_one(mlx_server, Chat("openai", text, max_tokens=2))
    longer = ask_one(mlx_server, Chat("openai", f"{text} and more", max_tokens=2))

    assert first.cached_tokens < 50  # the template's own words
    assert (again.cached_tokens, again.text) == (first.prompt_tokens - 1, first.text)
    assert longer.cached_tokens > first.prompt_tokens - 20


def test_the_server_tells_which_engine_it_has(mlx_server: Server) -> None:
    ask_one(mlx_server, Chat("ollama", "Hello.", max_tokens=1))

    (found,) = httpx.get(f"{mlx_server.url}/api/ps", timeout=10).json()["models"]

    assert (found["engine"], found["size_vram"]) == ("mlx", 0)
    assert "the model tiny was loaded in" in mlx_server.log and ": mlx, cpu, float32" in mlx_server.log


@pytest.mark.slow  # it starts three servers; what keeps trees of engines apart is tested by fingerprints, too
def test_a_server_that_starts_again_finds_its_tree_and_another_engine_does_not(tiny_model: Path, tmp_path: Path) -> None:
    chat = Chat("openai", text_of(300, begin="restart"), max_tokens=4)
    seen = {}
    for name, engine in (("first", "mlx"), ("again", "mlx"), ("other", "torch")):
        with running(str(tiny_model), tmp_path, engine=engine, data_folder=tmp_path / "data") as server:
            seen[name] = ask_one(server, chat)

    assert seen["first"].cached_tokens == seen["other"].cached_tokens == 0
    assert seen["again"].cached_tokens == seen["first"].prompt_tokens - 1
    assert seen["first"].text == seen["again"].text == seen["other"].text


class UnifiedWorld(World):
    """Fake models on a GPU that shares the machine's memory."""

    def _start(self, files: ModelFiles, settings: Any) -> Runtime:
        runtime: Any = super()._start(files, settings)
        runtime.engine.info = EngineInfo("mlx", "tokens", "gpu", "bfloat16")
        return runtime


def test_models_on_a_gpu_that_shares_the_memory_make_room_for_each_other(tmp_path: Path) -> None:
    world = UnifiedWorld(tmp_path)

    async def use_two() -> None:
        await world.use("a")
        world.available_bytes = MODEL_BYTES - 1
        await world.use("b")
        await world.models.close()

    asyncio.run(use_two())

    assert world.started == ["a", "b"]
    assert world.stopped[0] == "a"
