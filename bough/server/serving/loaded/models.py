"""The loaded models: loaded when a request needs them, and unloaded when they are idle or their memory is needed.

A model is idle for `keep_alive_s` (of the request or of the settings) before it is unloaded; for another model, the least
recently used one is unloaded first. Unloading saves its tree. One model at a time is loaded or unloaded, in a thread; the
others serve meanwhile. Times are those of a monotonic clock, so that changing the machine's time has no effect.

Always true:
- a model that a request uses or waits for is not unloaded, except by `close`;
- a model whose engine is stuck in a step stays loaded until the step or the process ends;
- a load continues when its request is cancelled: the next request finds the model loaded.

Everything here runs on the event loop that first used it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

from bough.config import Settings
from bough.errors import NoRoom, ShuttingDown
from bough.models import ModelFiles
from bough.runtime import weights_bytes
from bough.server.serving.catalog import Catalog, LoadedEntry
from bough.server.serving.loaded.model import LoadedModel, ServedRuntime, Start, num_text_places, start_model
from bough.system.resources import HostMemory, read_host_memory
from bough.system.tasks import end_tasks
from bough.system.threads import run_in_thread

log = logging.getLogger(__name__)

_LONGEST_S = 100 * 365 * 86_400.0  # longer times are for ever
_OUT_OF_MEMORY_TEXTS = ("out of memory", "not enough memory", "cannot allocate memory", "can't allocate memory")
_LOAD_GRACE_S = 5.0  # how long `close` waits for a load
_STUCK_S = 30.0  # how often a stuck model is checked again


class LoadedModels:
    """The models in memory, by their own names: a model with several names is loaded once."""

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog,
        *,
        start: Start = start_model,
        clock: Callable[[], float] = time.monotonic,
        read_memory: Callable[[], HostMemory] = read_host_memory,
    ) -> None:
        self.catalog = catalog
        self._settings = settings
        self._start = start
        self._clock = clock
        self._read_memory = read_memory
        self._loaded: dict[str, LoadedModel] = {}
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._wanted: Counter[str] = Counter()  # requests that wait for a model, by its name
        self._changing = asyncio.Lock()
        self._changed = asyncio.Event()
        self._expiry_task: asyncio.Task[None] | None = None
        self._is_closed = False
        self.is_still_loading = False  # whether a thread still loads a model after `close`

    @asynccontextmanager
    async def using(self, name: str, keep_alive_s: float | None = None) -> AsyncIterator[LoadedModel]:
        """The model, loaded if need be, and in use until the context ends; then it stays for `keep_alive_s`.

        None: as the settings say; 0: unloaded when no request uses it; below 0 or infinite: for ever. Raises ModelNotFound,
        NoRoom, ShuttingDown, or what loading raises.
        """
        loaded = await self.acquire(name, keep_alive_s)
        try:
            yield loaded
        finally:
            self.release(loaded)

    async def acquire(self, name: str, keep_alive_s: float | None = None) -> LoadedModel:
        """As `using`; the caller must call `release` exactly once."""
        known = self.find(name) or await self._load_wanted(name)
        known.num_uses += 1
        if keep_alive_s is not None:
            known.keep_alive_s = keep_alive_s
        self._touch(known)
        return known

    def release(self, loaded: LoadedModel) -> None:
        """End one use of a model. Never waits."""
        assert loaded.num_uses > 0, f"{loaded.name} is not in use"
        loaded.num_uses -= 1
        self._touch(loaded)

    def find(self, name: str) -> LoadedModel | None:
        """The model of that very name if it is loaded; an alias is not found."""
        return self._loaded.get(name.removesuffix(":latest"))

    def choose_name(self, name: str | None) -> str:
        """The given name; without one, that of the generator that was used last, or of the server's own model."""
        return name or next((each.name for each in self.list() if each.generates), self._settings.model)

    async def unload(self, name: str) -> bool:
        """Unload the model of that very name. False if it is in use: then it is unloaded when its last use ends."""
        loaded = self.find(name)
        if loaded is None:
            return True
        loaded.keep_alive_s = 0.0
        self._touch(loaded)
        await asyncio.shield(self.unload_expired())  # cancelling the request must not interrupt it
        return self._loaded.get(loaded.name) is not loaded

    async def unload_expired(self) -> None:
        async with self._changing:
            now = self._clock()
            for loaded in list(self._loaded.values()):
                if loaded.expires_s is not None and loaded.expires_s <= now and self._is_idle(loaded):
                    await self._unload(loaded)

    async def close(self) -> None:
        """Unload all models, even those in use, and load no more. A long load is left to its thread."""
        self._is_closed = True
        if self._expiry_task is not None:
            await end_tasks(self._expiry_task)
        await self._end_loading()
        async with self._changing:
            for loaded in list(self._loaded.values()):
                if loaded.worker.is_stuck:
                    log.error("the model %s is stuck: its tree is left as it is on disk", loaded.name)
                else:
                    await self._unload(loaded)

    async def _end_loading(self) -> None:
        if not self._loading:
            return
        _, left = await asyncio.wait(self._loading.values(), timeout=_LOAD_GRACE_S)
        self.is_still_loading = bool(left)
        await end_tasks(*left)

    # Time

    def expires_at(self, loaded: LoadedModel) -> datetime | None:
        """The time when a model will expire, by the machine's clock; None: never."""
        if loaded.expires_s is None:
            return None
        return datetime.now(UTC) + timedelta(seconds=loaded.expires_s - self._clock())

    def _touch(self, loaded: LoadedModel) -> None:
        """Count the model's time from now: a use begins or ends."""
        loaded.used_s = self._clock()
        kept_s = self._settings.keep_alive if loaded.keep_alive_s is None else loaded.keep_alive_s
        loaded.expires_s = loaded.used_s + kept_s if kept_s is not None and 0 <= kept_s < _LONGEST_S else None
        self._note_change()

    def _note_change(self) -> None:
        """Wake the task that unloads expired models, and start it if need be."""
        self._changed.set()
        if self._expiry_task is None and not self._is_closed:
            self._expiry_task = asyncio.create_task(self._watch_expiry(), name="bough-keep-alive")

    def _is_idle(self, loaded: LoadedModel) -> bool:
        return loaded.num_uses == 0 and not self._wanted[loaded.name] and not loaded.worker.is_stuck

    async def _watch_expiry(self) -> None:
        while True:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._next_expiry_s()):
                    await self._changed.wait()
            await asyncio.shield(self.unload_expired())

    def _next_expiry_s(self) -> float | None:
        """Seconds until the next model expires, or until stuck models are checked again; None: wait for a change."""
        idle = [each for each in self._loaded.values() if self._is_idle(each)]
        times = [each.expires_s for each in idle if each.expires_s is not None]
        is_any_stuck = any(each.worker.is_stuck for each in self._loaded.values())
        next_s = max(0.0, min(times) - self._clock()) if times else None
        return min(_STUCK_S, math.inf if next_s is None else next_s) if is_any_stuck else next_s

    # Loading and unloading

    async def _load_wanted(self, name: str) -> LoadedModel:
        """Load the model, or wait for a request that loads it already."""
        files = await asyncio.to_thread(self.catalog.files, name)
        self._wanted[files.name] += 1
        try:
            while files.name not in self._loaded:
                if self._is_closed:
                    raise ShuttingDown("the server is shutting down, and loads no model")
                await asyncio.shield(self._loading_task(files))
            return self._loaded[files.name]
        finally:
            self._wanted[files.name] -= 1
            self._note_change()  # a loaded model may be idle now that this request no longer waits

    def _loading_task(self, files: ModelFiles) -> asyncio.Task[None]:
        def forget(done: asyncio.Task[None]) -> None:
            del self._loading[files.name]
            if not done.cancelled() and done.exception() is not None:  # its request may have been cancelled
                log.warning("the model %s could not be loaded: %s", files.name, done.exception())

        task = self._loading.get(files.name)
        if task is None:
            task = self._loading[files.name] = asyncio.create_task(self._load(files), name=f"bough-load-{files.name}")
            task.add_done_callback(forget)
        return task

    async def _load(self, files: ModelFiles) -> None:
        async with self._changing:
            if files.name in self._loaded:
                return
            if self._is_closed:  # while it waited for the lock
                raise ShuttingDown("the server is shutting down, and loads no model")
            info = await asyncio.to_thread(self.catalog.describe, files)
            await self._make_room(files)
            started_s = time.perf_counter()
            runtime = await self._start_retrying(files)
            load_s = time.perf_counter() - started_s
            is_on_cpu = runtime.engine.info.is_on_cpu
            loaded = LoadedModel(
                files.name,
                runtime,
                info,
                await asyncio.to_thread(weights_bytes, files, self._settings, is_on_cpu),
                runs_on=runtime.engine.describe(),
                text_places=asyncio.Semaphore(num_text_places(runtime, self._settings)),
            )
            self._touch(loaded)
            self._loaded[files.name] = loaded
            log.info("the model %s was loaded in %.1f s: %s", files.name, load_s, loaded.description)

    async def _start_retrying(self, files: ModelFiles) -> ServedRuntime:
        """Load the model. If memory runs out, unload idle models one by one and try again."""
        while True:
            try:
                started = await run_in_thread(self._start, files, self._settings)
                return await started if isinstance(started, Awaitable) else started
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if not await self._unload_oldest():
                    raise self._no_room(files, "the engine ran out of memory") from error

    async def _make_room(self, files: ModelFiles) -> None:
        most = self._settings.max_models
        while most and len(self._loaded) >= most:
            if not await self._unload_oldest():
                raise self._no_room(files, f"at most {most} models may be loaded, and {len(self._loaded)} are in use")
        if not any(each.fills_host_memory for each in self._loaded.values()):
            return
        is_on_cpu = any(each.is_on_cpu for each in self._loaded.values())
        needed_bytes = await asyncio.to_thread(weights_bytes, files, self._settings, is_on_cpu)
        while self._loaded and (available_bytes := self._read_memory().available_bytes) < needed_bytes:
            if not await self._unload_oldest():
                raise self._no_room(files, f"it needs {needed_bytes:,} bytes, and {available_bytes:,} are available")

    def _no_room(self, files: ModelFiles, why: str) -> NoRoom:
        busy = ", ".join(f"{each.name} ({each.num_bytes:,} bytes)" for each in self._loaded.values())
        return NoRoom(f"the model {files.name} cannot be loaded: {why}; loaded and in use: {busy or 'none'}")

    async def _unload_oldest(self) -> bool:
        """Unload the least recently used model; False if all are in use. Needs the lock."""
        idle = [each for each in self._loaded.values() if self._is_idle(each)]
        if idle:
            await self._unload(min(idle, key=lambda each: each.used_s))
        return bool(idle)

    async def _unload(self, loaded: LoadedModel) -> None:
        """Save the tree and free the memory. Needs the lock; requests for the model wait until it is unloaded."""
        del self._loaded[loaded.name]
        try:
            await run_in_thread(loaded.runtime.close)
        except Exception:  # the model is unloaded whatever its engine raises
            log.exception("unloading the model %s failed; it is no longer used", loaded.name)

    def list(self) -> list[LoadedModel]:
        return sorted(self._loaded.values(), key=lambda each: each.used_s, reverse=True)

    def describe(self) -> Sequence[LoadedEntry]:
        """Every loaded model as the APIs list it, the most recently used first."""
        return [
            LoadedEntry(
                entry=loaded.info,
                num_bytes=loaded.num_bytes,
                device_bytes=0 if loaded.is_on_cpu else loaded.num_bytes,
                context_tokens=loaded.runtime.engine.context_tokens,
                engine=loaded.runtime.engine.info.name,
                weights=loaded.runs_on.get("weights", loaded.runtime.engine.info.weights),
                step=loaded.runs_on.get("step", ""),
                expires_at=self.expires_at(loaded),
            )
            for loaded in self.list()
        ]


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error or its cause says that memory ran out, for which libraries have no common exception."""
    while error is not None:
        if isinstance(error, MemoryError) or any(words in str(error).lower() for words in _OUT_OF_MEMORY_TEXTS):
            return True
        error = error.__cause__
    return False
