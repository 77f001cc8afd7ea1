"""Models that load at once and weigh next to nothing, for the bookkeeping of those that are loaded."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bough.config import Settings
from bough.engines.contract import EngineInfo
from bough.errors import ModelNotFound
from bough.models import ModelFiles
from bough.runtime import Runtime
from bough.server.serving.loaded import LoadedModels
from bough.system.resources import HostMemory
from tests.gates import Gate, Notes
from tests.waiting import wait_until

MODEL_BYTES = 1_000


class FakeCatalog:
    """Three models of the same size."""

    def __init__(self, folder: Path) -> None:
        self._models = {name: ModelFiles(name, folder / name) for name in "abc"}
        for files in self._models.values():
            files.folder.mkdir()
            (files.folder / "config.json").write_text("{}")
            (files.folder / "model.safetensors").write_bytes(bytes(MODEL_BYTES))

    def files(self, name: str) -> ModelFiles:
        if name not in self._models:
            raise ModelNotFound(f"model '{name}' not found")
        return self._models[name]

    def describe(self, files: ModelFiles) -> Any:
        return SimpleNamespace(name=files.name)


class World:
    """Loaded models over fakes: a clock that is set by hand, memory that runs out, and a note of what was started."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.now = 1_000.0
        self.started: Notes[str] = Notes()
        self.stopped: Notes[str] = Notes()
        self.errors: dict[str, list[BaseException]] = {}
        self.may_start: dict[str, Gate] = {}
        self.available_bytes = 10**9
        self.models = LoadedModels(
            Settings(data_folder=folder, cache_folder=folder, **settings),
            FakeCatalog(folder),  # type: ignore[arg-type]
            start=self._start,
            clock=lambda: self.now,
            read_memory=lambda: HostMemory(10**9, self.available_bytes),
        )

    def _start(self, files: ModelFiles, settings: Settings) -> Runtime:
        self.started.append(files.name)
        if files.name in self.may_start:
            self.may_start[files.name].wait()
        if self.errors.get(files.name):
            raise self.errors[files.name].pop(0)
        engine = SimpleNamespace(info=EngineInfo("fake", "tokens", "cpu", "tokens"), has_host=False, describe=dict)
        worker = SimpleNamespace(is_stuck=False)
        runtime: Any = SimpleNamespace(engine=engine, worker=worker, close=lambda: self._stop(files.name))
        return runtime

    def _stop(self, name: str) -> None:
        self.available_bytes += MODEL_BYTES
        self.stopped.append(name)

    async def use(self, name: str, keep_alive_s: float | None = None) -> None:
        async with self.models.using(name, keep_alive_s):
            pass

    async def until_stopped(self, *names: str) -> None:
        """Wait until exactly these models were unloaded, in this order."""
        await self.stopped.until(lambda: self.stopped == [*names])

    async def until_wanted(self, name: str, number: int = 1) -> None:
        """Wait until so many requests wait for a model to be loaded."""
        await asyncio.to_thread(wait_until, lambda: name in self.models._loading and self.models._wanted[name] == number)

    async def pass_time(self, seconds: float) -> None:
        self.now += seconds
        await self.models.unload_expired()

    @property
    def names(self) -> list[str]:
        return [each.name for each in self.models.list()]
