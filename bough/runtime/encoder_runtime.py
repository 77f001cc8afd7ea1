"""The runtime of a loaded encoder: engine, tokenizer and the engine's thread, wired together. It has no tree."""

from __future__ import annotations

import math
from dataclasses import replace

from bough.config import Settings
from bough.engines.contract import EncoderEngine
from bough.errors import RequestError
from bough.models.encoders.kinds import ModelKind
from bough.models.encoders.tokenizer import EncoderTokenizer
from bough.models.files import ModelFiles
from bough.runtime.embedding import WINDOW, Embedder
from bough.runtime.encoding import EncoderEmbedder, EncoderReranker
from bough.runtime.engine_thread import EngineThread
from bough.scheduling.encoder_scheduler import EncoderScheduler
from bough.scheduling.worker import Limits, Worker


class EncoderRuntime:
    """A loaded encoder, which makes embeddings or scores pairs of texts. Close it, however its use ends."""

    def __init__(
        self,
        kind: ModelKind,
        engine: EncoderEngine,
        tokenizer: EncoderTokenizer,
        settings: Settings,
        files: ModelFiles,
        limits: Limits | None = None,
    ) -> None:
        self.kind = kind
        self.engine = engine
        self.settings = settings
        self.files = files
        self.limits = _count_texts(limits or Limits(stuck_s=settings.watchdog))
        self._embedder = EncoderEmbedder(engine, tokenizer, lambda: self.worker)
        self._reranker = EncoderReranker(tokenizer, lambda: self.worker)
        self._thread = EngineThread(self._make_worker, engine.close)

    @property
    def name(self) -> str:
        """The model's name."""
        return self.files.name

    @property
    def embedder(self) -> Embedder:
        """What makes embeddings. Raises RequestError if the model makes none."""
        self._require_kind(ModelKind.EMBEDDER)
        return self._embedder

    @property
    def reranker(self) -> EncoderReranker:
        """What scores documents by a query. Raises RequestError if the model does not."""
        self._require_kind(ModelKind.RERANKER)
        return self._reranker

    def _require_kind(self, wanted: ModelKind) -> None:
        if self.kind is not wanted:
            raise RequestError(f"the model {self.name} {self.kind.value}: this needs one that {wanted.value}")

    @property
    def worker(self) -> Worker:
        """The engine's thread, which encodes texts of many clients together. It starts at the first use."""
        return self._thread.worker

    def require_open(self) -> None:
        """Raise RequestError if the runtime is closed, or was loaded by the process of which this is a fork."""
        self._thread.require_open()

    def _make_worker(self) -> Worker:
        scheduler = EncoderScheduler(self.engine)
        return Worker(
            scheduler,
            self.limits,
            take_stats=lambda: {"batches": scheduler.num_turns, "texts": scheduler.num_encoded},
            on_idle=lambda: False,
            on_close=self.engine.close,
        )

    def close(self) -> None:
        """End the running requests and release the model's memory. A second call does nothing; nor does one in a fork."""
        self._thread.close()

    def close_soon(self) -> None:
        """Close without waiting. A finalizer may call this."""
        self._thread.close_soon()


def _count_texts(limits: Limits) -> Limits:
    """Limits for texts: the queue of requests, of which each has up to `WINDOW` texts in the queue."""
    return limits if limits.queue == math.inf else replace(limits, queue=limits.queue * WINDOW)
