"""A service whose model has two replicas in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bough.config import Settings
from bough.models import ModelFiles
from bough.models.defaults import read_defaults
from bough.models.prompts import Prompts
from bough.models.tokenizer import load_tokenizer
from bough.runtime import Runtime, load_runtime
from bough.server.app import make_service
from bough.server.serving.events import feed
from bough.server.serving.remote import model
from bough.server.serving.remote.model import RemoteModel
from bough.server.serving.service import Service
from tests.server.serving.remote.local_replicas import SECRET, LocalReplicas

Scene = Callable[[Service, LocalReplicas], Awaitable[None]]


@pytest.fixture
def play(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Plays a scene with a service whose model has two replicas in this process, each with a cache folder of its own."""
    monkeypatch.setattr(model, "FIGURES_S", 0.05)  # tests wait for what is read
    monkeypatch.setattr(feed, "IDLE_S", 0.1)
    files = ModelFiles("tiny", tiny_model)
    common = Settings(data_folder=tmp_path, cache_folder=tmp_path / "cache", disk=0, threads=1, lanes=4)
    made: list[LocalReplicas] = []

    def start(files: ModelFiles, settings: Settings) -> Awaitable[RemoteModel]:
        async def connect() -> RemoteModel:
            replicas = LocalReplicas()
            for number in range(2):
                runtime = load_runtime(files, replace(settings, cache_folder=tmp_path / f"replica-{number}"))
                assert isinstance(runtime, Runtime)
                replicas.add(runtime, SECRET)
            made.append(replicas)
            facts = await replicas.read_facts()
            prompts = Prompts(load_tokenizer(files, False), facts.vocab_size)
            return RemoteModel(files.name, replicas, facts, prompts, read_defaults(files))

        return connect()

    async def run(scene: Scene, **options: Any) -> None:
        service = make_service(replace(common, **options), files, start=start)  # type: ignore[arg-type]
        try:
            async with asyncio.timeout(100):
                await service.load("tiny")
                await scene(service, made[0])
        finally:
            await service.close()

    return lambda scene, **options: asyncio.run(run(scene, **options))
