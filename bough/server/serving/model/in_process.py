"""A model whose engine runs in this process: requests go to its worker, and what touches the tree runs on its thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from bough.cache.admin.archive import Imported
from bough.cache.admin.nodes import EvictedNodes, KeptNode, NodeDetails
from bough.cache.admin.view import Lookup, TreeView
from bough.cache.steps import Steps
from bough.errors import BoughError
from bough.models.defaults import ModelDefaults
from bough.models.prompts import Encoded, Prompts
from bough.runtime import Runtime
from bough.scheduling.job import Job
from bough.server.serving.model.contract import ChoiceListener, GenerateRequest
from bough.server.serving.model.look import Look, Sought, look
from bough.system.threads import lower_priority, run_in_thread, write_in_thread
from bough.types import Completion, SamplingParams

Result = TypeVar("Result")

ONLY = ""
"""The name of the only tree, where there are no replicas."""


class InProcessRequest:
    """Implements `PreparedRequest` by a job of the model's worker."""

    replica = request_id = ""

    def __init__(self, runtime: Runtime, request: GenerateRequest, listener: ChoiceListener) -> None:
        self._cancelled = threading.Event()
        self._worker = runtime.worker
        generation = runtime.prepare(
            request.encoded,
            request.params,
            salt=request.salt,
            choice=request.choice,
            prompt_logprobs=request.scores_prompt,
            resumed_ids=request.resumed_ids,
            is_cancelled=self._cancelled.is_set,
            on_progress=listener.on_progress,
        )
        self._job = Job(generation, listener, request.deadline_s, tenant=request.tenant)

    @property
    def is_loading(self) -> bool:
        return self._job.is_loading

    def submit(self) -> None:
        self._worker.submit(self._job)

    def cancel(self) -> None:
        self._cancelled.set()


class InProcessGenerator:
    """Implements `Generator` by a runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.prompts: Prompts = runtime.prompts
        self.defaults: ModelDefaults = runtime.defaults
        self.context_tokens = runtime.engine.context_tokens
        self.max_tokens = runtime.settings.max_tokens
        self.stores_answers = runtime.prefix_cache.is_enabled
        self.tree = InProcessTree(runtime)

    def prepare(self, request: GenerateRequest, listener: ChoiceListener) -> InProcessRequest:
        return InProcessRequest(self._runtime, request, listener)


class InProcessTree:
    """Implements `ServedTree` for the one tree of a runtime.

    What touches the tree runs on the engine's thread, between two steps; clearing, exporting and importing wait for
    the disk on threads of their own.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._cache = runtime.cache
        self._worker = runtime.worker

    async def stats(self, salt: str | None) -> dict[str, Any]:
        def steps() -> Steps[dict[str, Any]]:  # it only looks, and may wait so as not to delay requests
            yield
            return self._cache.stats(salt)

        exact = await self._run(steps)
        return {**self._worker.snapshot(), **exact} if salt is None else exact

    async def view(self, salt: str | None) -> TreeView:
        return self._cache.view(await self._run(lambda: self._cache.take_records(salt)))

    async def look_up(self, prompt: bytes, salt: str) -> Mapping[str, Lookup]:
        return {ONLY: await self._call(lambda: self._cache.look_up(prompt, salt))}

    async def keep(self, prefix: bytes, kept: bool, salt: str) -> Mapping[str, Lookup]:
        return {ONLY: await self._call(lambda: self._cache.keep(prefix, kept, salt))}

    async def warm(self, prefix: Encoded, salt: str, tenant: str) -> Completion:
        """As the contract says. Cancelling the caller cancels the work."""
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        generation = self._runtime.prepare(
            prefix, SamplingParams(max_tokens=0), salt=salt, keep=True, is_cancelled=future.cancelled
        )
        self._worker.submit(Job(generation, _EndListener(future), tenant=tenant))
        completion = await future  # cancelling this cancels the future, and so the work
        await self._call(lambda: self._runtime.require_kept(prefix.ids, salt))
        return completion

    def own_root(self, root: str, salt: str) -> str:
        return salt

    def watch(self) -> InProcessWatch:
        return InProcessWatch(self._runtime)

    async def read_node(self, root: str, key: int) -> NodeDetails:
        return await self._run(lambda: self._cache.read_node(root, key))

    async def keep_node(self, root: str, key: int, kept: bool) -> KeptNode:
        return await self._run(lambda: self._cache.keep_node(root, key, kept))

    async def evict_node(self, root: str, key: int) -> EvictedNodes:
        return await self._run(lambda: self._cache.evict_node(root, key))

    async def clear(self, salt: str | None) -> None:
        await run_in_thread(self._cache.clear, salt)

    async def export_file(self, file: Path, salt: str) -> None:
        await write_in_thread(file, lambda is_wanted: self._cache.export_file(file, salt, is_wanted=is_wanted))

    async def import_file(self, file: Path, salt: str) -> Imported:
        return await run_in_thread(self._import, file, salt)

    def _import(self, file: Path, salt: str) -> Imported:
        """Import on a thread of its own, which yields to requests."""
        lower_priority()
        return self._cache.import_file(file, salt)

    async def _call(self, work: Callable[[], Result]) -> Result:
        """Run something on the engine's thread, between two steps."""
        return await asyncio.wrap_future(self._worker.call(work))

    async def _run(self, work: Callable[[], Steps[Result]]) -> Result:
        """Run long work in slices on the engine's thread."""
        return await asyncio.wrap_future(self._worker.run_in_slices(work))


class InProcessWatch:
    """Implements `ServedWatch` by looks on the engine's thread."""

    def __init__(self, runtime: Runtime) -> None:
        self._cache = runtime.prefix_cache
        self._worker = runtime.worker
        self._watch = runtime.cache.watch()

    async def look(self, sought: Sequence[Sought], salts: Collection[str]) -> Look:
        return await asyncio.wrap_future(self._worker.run_in_slices(lambda: look(self._cache, self._watch, sought, salts)))

    async def close(self) -> None:
        self._watch.close()


class _EndListener:
    """A listener for the end of a request alone: it sets a future on the event loop."""

    def __init__(self, future: asyncio.Future[Completion]) -> None:
        self._future = future
        self._loop = future.get_loop()

    def on_start(self, usage: object, waited_s: float) -> None:
        pass

    def on_loaded(self, usage: object) -> None:
        pass

    def on_chunk(self, chunk: object) -> None:
        pass

    def on_end(self, completion: Completion) -> None:
        self._loop.call_soon_threadsafe(self._settle, completion)

    def on_error(self, error: BoughError) -> None:
        self._loop.call_soon_threadsafe(self._settle, error)

    def _settle(self, outcome: Completion | BoughError) -> None:
        if self._future.done():
            return
        if isinstance(outcome, BoughError):
            self._future.set_exception(outcome)
        else:
            self._future.set_result(outcome)
