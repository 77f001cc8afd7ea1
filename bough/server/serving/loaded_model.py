"""A model in memory, and what it can be used for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

from bough.config import Settings
from bough.errors import RequestError
from bough.models import ModelFiles
from bough.runtime import EncoderRuntime, Runtime, load_any
from bough.runtime.embedding import WINDOW, Embedder
from bough.runtime.encoding import EncoderReranker
from bough.scheduling.worker import Limits
from bough.server.serving.catalog import CatalogEntry
from bough.server.serving.model.contract import Generator, ServedRuntime, ServedWorker
from bough.server.serving.model.in_process import InProcessGenerator
from bough.server.serving.overlay import OtherTemplates
from bough.server.serving.prompting.prompt import PromptThreads
from bough.server.serving.remote.model import RemoteModel
from bough.types import Progress

Start = Callable[[ModelFiles, Settings], ServedRuntime | Awaitable[ServedRuntime]]
"""Loads a model, in a thread. What it returns may still have to be awaited on the event loop."""


@dataclass(eq=False)
class LoadedModel:
    """A model in memory. `num_bytes` are its weights as its files hold them; `expires_s` is None if it stays for ever.

    `runs_on` is how its engine describes itself, for people. What a model is used for is asked by `generator`, `embedder`
    and `reranker`, which raise RequestError for a model that cannot do it.
    """

    name: str
    runtime: ServedRuntime
    info: CatalogEntry
    num_bytes: int
    load_s: float
    used_s: float
    expires_s: float | None
    keep_alive_s: float | None = field(default=None, repr=False)  # of the last request; None: of the settings
    num_uses: int = 0
    runs_on: Mapping[str, str] = field(default_factory=dict, repr=False)
    threads: PromptThreads = field(default_factory=PromptThreads, repr=False)
    templates: OtherTemplates = field(default_factory=OtherTemplates, repr=False)
    text_places: asyncio.Semaphore = field(default_factory=asyncio.Semaphore, repr=False)  # for texts to embed or score

    @property
    def generates(self) -> bool:
        """Whether the model generates text, and so has a tree."""
        return self._generator is not None

    @property
    def generator(self) -> Generator:
        if self._generator is None:
            raise RequestError(f"the model {self.name} generates no text: it is for embeddings, or for ranking texts")
        return self._generator

    @cached_property
    def _generator(self) -> Generator | None:
        if isinstance(self.runtime, RemoteModel):
            return self.runtime
        return InProcessGenerator(self.runtime) if isinstance(self.runtime, Runtime) else None

    @property
    def embedder(self) -> Embedder:
        return self.runtime.embedder

    @property
    def reranker(self) -> EncoderReranker:
        if self.generates:
            raise RequestError(f"the model {self.name} generates text, and ranks no documents")
        return cast("EncoderRuntime", self.runtime).reranker

    @property
    def worker(self) -> ServedWorker:
        return self.runtime.worker

    @property
    def is_on_cpu(self) -> bool:
        return self.runtime.engine.info.is_on_cpu

    @property
    def fills_host_memory(self) -> bool:
        """Whether the weights are in the machine's own memory: on a CPU, or on a GPU that shares it."""
        return not self.runtime.engine.has_host

    @property
    def description(self) -> str:
        """The engine and how it keeps weights and steps, in a line."""
        info = self.runtime.engine.info
        more = [f"{name}: {self.runs_on[name]}" for name in ("weights", "step") if name in self.runs_on]
        return "; ".join([f"{info.name}, {info.device}, {info.weights}", *more])


def start_model(files: ModelFiles, settings: Settings, progress: Progress | None = None) -> ServedRuntime:
    """Load a model and start its engine's thread, which tidies up and takes statistics from now on."""
    runtime = load_any(files, settings, progress, limits=Limits(settings.queue, settings.watchdog))
    try:
        _ = runtime.worker  # the first use starts it
    except BaseException:
        runtime.close()
        raise
    return runtime


def num_text_places(runtime: ServedRuntime, settings: Settings) -> int:
    """How many texts to embed or score may wait for the engine; half of a generator's queue stays free for chats."""
    return max(1, settings.queue // 2 if isinstance(runtime, Runtime | RemoteModel) else settings.queue * WINDOW)
