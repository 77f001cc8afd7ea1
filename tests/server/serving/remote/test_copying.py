"""A prefix that one replica has, or is computing, is copied to another by the store, and never waited for too long."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from bough.cache.disk.errors import DiskMiss
from bough.cache.disk.keys import SECRET_BYTES
from bough.config import Settings
from bough.generate.request import Request
from bough.models import ModelFiles
from bough.routing import Copy
from bough.runtime import Runtime, load_runtime
from bough.server.serving.remote.host import ReplicaHost
from bough.server.serving.remote.replicas import RemoteRequest
from bough.tokens import Tokens, pack
from bough.types import Completion, SamplingParams
from tests.server.serving.remote.local_replicas import LocalReplicas
from tests.tiny_models import make_folder

chance = random.Random(3)
PREFIX = [chance.randrange(3, 90) for _ in range(1024)]
KINDS = ("llama", "qwen3_next")  # full attention alone, and with recurrent state

Scene = Callable[[LocalReplicas], Awaitable[None]]


@pytest.fixture(params=KINDS)
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Scene], None]:
    """Plays a scene with two replicas in this process, which share a folder as their store."""
    model = make_folder(request.param, tmp_path / "model", max_position_embeddings=4096)
    (secret := tmp_path / "secret").write_text("a secret of a few words")
    settings = Settings(
        data_folder=tmp_path,
        cache_folder=tmp_path / "cache",
        disk=0,
        threads=1,
        store=str(tmp_path / "store"),
        store_secret_file=secret,
    )

    async def run(scene: Scene) -> None:
        replicas = LocalReplicas()
        try:
            for _ in range(2):
                runtime = load_runtime(ModelFiles("tiny", model), settings)
                assert isinstance(runtime, Runtime)
                replicas.add(runtime, bytes(SECRET_BYTES))
            async with asyncio.timeout(60):
                await scene(replicas)
        finally:
            await replicas.close()

    return lambda scene: asyncio.run(run(scene))


async def ask(host: ReplicaHost, tail: int, copy: Copy | None = None) -> Completion:
    """The end of an answer to the prefix and a token of its own."""
    params = SamplingParams(max_tokens=4, ignore_eos=True, seed=0)
    request = RemoteRequest(Request(Tokens.of([*PREFIX, tail]), params), copy=copy)
    last = None
    async for messages in host.generate(request):
        last = messages[-1]
    assert isinstance(last, Completion), last
    return last


def look_in_vain(runtime: Runtime) -> None:
    """Let a replica know that the store lacks the prefix."""
    shared = runtime.prefix_cache.residency.memory.shared
    assert shared is not None
    path = shared.path("")
    path.add(pack(PREFIX))
    for address in (path.rows(0), path.points(0)):
        with pytest.raises(DiskMiss):
            shared.read(address, lambda nbytes: True)
        assert shared.is_missing(address)


def from_store(completion: Completion) -> int:
    return completion.timings.loading.store_bytes


def test_what_another_replica_holds_is_copied_although_it_was_missing_a_moment_ago(play: Callable[[Scene], None]) -> None:
    async def scene(replicas: LocalReplicas) -> None:
        one, other = replicas.hosts.values()
        look_in_vain(replicas.runtimes[1])
        expected = await ask(one, 7)
        copied = await ask(other, 7, Copy("replica-0", len(PREFIX), within_s=20.0))
        assert from_store(copied) > 0
        assert copied.usage.cached_tokens >= 768  # a restore point may lie before the last page
        assert copied.token_ids == expected.token_ids
        assert other.snapshot()["copied_prefixes"] == 1

    play(scene)


def test_a_prefix_that_is_being_computed_is_waited_for(play: Callable[[Scene], None]) -> None:
    async def scene(replicas: LocalReplicas) -> None:
        one, other = replicas.hosts.values()
        expected, copied = await asyncio.gather(
            ask(one, 7), ask(other, 7, Copy("replica-0", len(PREFIX), within_s=20.0, is_coming=True))
        )
        assert copied.usage.cached_tokens >= 768 and from_store(copied) > 0
        assert copied.token_ids == expected.token_ids

    play(scene)


@pytest.mark.parametrize(
    "copy", [Copy("replica-0", len(PREFIX), 0.2, is_coming=True), Copy("replica-9", len(PREFIX), 1000.0)]
)
def test_a_prefix_that_does_not_come_in_time_is_computed(play: Callable[[Scene], None], copy: Copy) -> None:
    async def scene(replicas: LocalReplicas) -> None:
        one, other = replicas.hosts.values()
        computed = await ask(other, 7, copy)
        assert (computed.usage.cached_tokens, from_store(computed)) == (0, 0)
        assert other.snapshot()["missed_prefixes"] == 1
        assert (await ask(one, 7)).token_ids == computed.token_ids

    play(scene)
