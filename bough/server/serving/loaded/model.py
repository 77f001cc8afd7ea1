"""A model in memory, its uses, and the threads that prepare its prompts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TypeVar

from bough.config import Settings
from bough.errors import RequestError
from bough.models import ModelFiles
from bough.prompting.prompt import ModelFacts
from bough.runtime import EncoderRuntime, Runtime, load_any
from bough.runtime.embedding import WINDOW, EncoderTexts
from bough.scheduling.worker import Limits, Worker
from bough.server.serving.catalog import CatalogEntry
from bough.server.serving.model.contract import Generator, ServedTree
from bough.server.serving.model.embedder import InProcessEmbedder, ServedEmbedder
from bough.server.serving.model.in_process import InProcessTree
from bough.server.serving.remote.model import RemoteModel, RemoteWorker
from bough.system.threads import lower_priority
from bough.types import Progress

Result = TypeVar("Result")

LARGE_CHARS = 2**18  # a prompt of more characters is large
_NUM_THREADS = 4
_KEPT_TEMPLATES = 16

ServedRuntime = Runtime | EncoderRuntime | RemoteModel
ServedWorker = Worker | RemoteWorker
Start = Callable[[ModelFiles, Settings], ServedRuntime | Awaitable[ServedRuntime]]
"""Loads a model, in a thread. The result may still have to be awaited on the event loop."""


class PromptThreads:
    """The threads that prepare one model's prompts: render and encode them, and compile their grammars.

    Each model has its own, because chat templates come with models and may take long: one model's prompts never wait for
    another's. Only one thread at a time runs Python, so there are few. Large prompts run one after the other, in a thread
    of lower priority. The threads end with this object.
    """

    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(_NUM_THREADS, "bough-prompts")
        self._large = ThreadPoolExecutor(1, "bough-large-prompts", initializer=lower_priority)

    async def run(self, work: Callable[[Callable[[], bool]], Result], num_chars: int = 0) -> Result:
        """Run work on a prompt of this length. The work gets a function that says whether the caller was cancelled."""
        gone = threading.Event()
        executor = self._large if num_chars > LARGE_CHARS else self._small
        try:
            return await asyncio.get_running_loop().run_in_executor(executor, work, gone.is_set)
        finally:
            gone.set()


@dataclass(eq=False)
class LoadedModel:
    """A model in memory. `num_bytes` is the memory of its weights; `expires_s` is None if it stays for ever.

    `runs_on` is the engine's description of itself. `generator`, `tree`, `embedder` and `reranker` raise RequestError for a
    model of another kind.
    """

    name: str
    runtime: ServedRuntime
    info: CatalogEntry
    num_bytes: int
    used_s: float = 0.0
    expires_s: float | None = None
    keep_alive_s: float | None = field(default=None, repr=False)  # of the last request; None: of the settings
    num_uses: int = 0
    runs_on: Mapping[str, str] = field(default_factory=dict, repr=False)
    threads: PromptThreads = field(default_factory=PromptThreads, repr=False)
    text_places: asyncio.Semaphore = field(default_factory=asyncio.Semaphore, repr=False)  # for texts to embed or score

    @property
    def generates(self) -> bool:
        """Whether the model generates text, and so has a tree."""
        return isinstance(self.runtime, Runtime | RemoteModel)

    @property
    def generator(self) -> Generator:
        return self._generator

    @property
    def _generator(self) -> Runtime | RemoteModel:
        if isinstance(self.runtime, Runtime | RemoteModel):
            return self.runtime
        raise RequestError(f"the model {self.name} generates no text: it is for embeddings, or for ranking texts")

    @cached_property
    def tree(self) -> ServedTree:
        found = self._generator
        return InProcessTree(found) if isinstance(found, Runtime) else found.tree

    def facts(self, template: str | None = None) -> ModelFacts:
        """The facts that prompts depend on, with another chat template if given. Raises RequestError for an encoder."""
        return self._with_template(template) if template else self.generator.facts

    @cached_property
    def _with_template(self) -> Callable[[str], ModelFacts]:
        """The facts with another chat template, the last ones of which are kept. Any thread may call it."""
        return lru_cache(_KEPT_TEMPLATES)(self.generator.facts.with_template)

    @property
    def embedder(self) -> ServedEmbedder:
        if isinstance(self.runtime, RemoteModel):
            return self.runtime.embedder
        return InProcessEmbedder(self.runtime.embedder)

    @property
    def reranker(self) -> EncoderTexts:
        if isinstance(self.runtime, Runtime | RemoteModel):
            raise RequestError(f"the model {self.name} generates text, and ranks no documents")
        return self.runtime.reranker

    @cached_property
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
        info = self.runtime.engine.info
        more = [f"{name}: {self.runs_on[name]}" for name in ("weights", "step") if name in self.runs_on]
        return "; ".join([f"{info.name}, {info.device}, {info.weights}", *more])


def start_model(files: ModelFiles, settings: Settings, progress: Progress | None = None) -> ServedRuntime:
    runtime = load_any(files, settings, progress, limits=Limits(settings.queue))
    try:
        _ = runtime.worker  # the first use starts it
    except BaseException:
        runtime.close()
        raise
    return runtime


def num_text_places(runtime: ServedRuntime, settings: Settings) -> int:
    """The most texts to embed or score that wait for the engine; half of a generator's queue stays free for chats."""
    return max(1, settings.queue // 2 if isinstance(runtime, Runtime | RemoteModel) else settings.queue * WINDOW)
