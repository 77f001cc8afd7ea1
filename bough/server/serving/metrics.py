"""Metrics for Prometheus.

Requests are counted when they end. Labels have few values: only models that were loaded are named, and only the first
hundred, because clients may copy models to any number of names.
"""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from bough.server.serving.loaded import LoadedModels
from bough.server.serving.loaded.progress import RequestRecord
from bough.server.serving.model_figures import ModelFigures

_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
_MAX_NAMES = 100
_OTHERS = "(others)"  # not a valid name of a model


class Metrics:
    """The counters of one server, in a registry of their own, and the figures of the models that are loaded."""

    def __init__(self, models: LoadedModels | None = None) -> None:
        self.registry = registry = CollectorRegistry()
        self._names = {""}  # models that have labels of their own; some requests have no model
        counter, histogram = partial(Counter, registry=registry), partial(Histogram, registry=registry)
        self._requests = counter("bough_requests_total", "Requests that have ended", ("api", "model", "status"))
        self._in_progress = Gauge("bough_requests_in_progress", "Requests under way", registry=registry)
        about = "Tokens of prompts: matched in the tree, reused, computed; known, but sooner computed than loaded"
        self._prompt_tokens = counter("bough_prompt_tokens_total", about, ("model", "kind"))
        self._completion_tokens = counter("bough_completion_tokens_total", "Tokens of answers", ("model",))
        about = "Texts that were embedded, and pairs of texts that were scored"
        self._texts = counter("bough_texts_total", about, ("model",))
        about = "Requests that reused state, by the lowest tier that it came from"
        self._hits = counter("bough_hits_total", about, ("model", "tier"))
        about = "Bytes brought back to the device"
        self._loaded_bytes = counter("bough_loaded_bytes_total", about, ("model", "tier"))
        about = "Waiting for a lane"
        self._queue_s = histogram("bough_queue_seconds", about, ("model",), buckets=_FIRST_TOKEN_S)
        about = "From the loaded model to the first token"
        self._first_token_s = histogram("bough_first_token_seconds", about, ("model",), buckets=_FIRST_TOKEN_S)
        about = "Time for each token after the first"
        self._token_s = histogram("bough_token_seconds", about, ("model",), buckets=_TOKEN_S)
        ProcessCollector(registry=registry)
        if models is not None:
            registry.register(ModelFigures(models))

    def http_began(self) -> None:
        self._in_progress.inc()

    def http_ended(self, api: str, model: str, status: int) -> None:
        self._in_progress.dec()
        self._requests.labels(api, self._label(model), str(status)).inc()

    def request_done(self, record: RequestRecord) -> None:
        """A model has answered, or failed to."""
        if record.usage is None:
            return
        model, usage = self._label(record.model), record.usage
        counts = {"matched": usage.matched_tokens, "cached": usage.cached_tokens, "computed": usage.computed_tokens}
        for kind, number in (counts | {"recomputed": record.recomputed_tokens}).items():
            self._prompt_tokens.labels(model, kind).inc(number)
        self._completion_tokens.labels(model).inc(record.completion_tokens)
        loaded = {"store": record.store_bytes, "disk": record.disk_bytes, "host": record.host_bytes}
        for tier, num_bytes in loaded.items():
            self._loaded_bytes.labels(model, tier).inc(num_bytes)
        if usage.cached_tokens:
            self._hits.labels(model, next((tier for tier, num_bytes in loaded.items() if num_bytes), "device")).inc()
        if record.num_texts:
            self._texts.labels(model).inc(record.num_texts)
            return
        self._queue_s.labels(model).observe(record.queue_s)
        if record.completion_tokens > 0:
            self._first_token_s.labels(model).observe(record.first_token_s)
        if record.completion_tokens > 1:
            self._token_s.labels(model).observe(record.decode_s / (record.completion_tokens - 1))

    def _label(self, model: str) -> str:
        if len(self._names) <= _MAX_NAMES:
            self._names.add(model)
        return model if model in self._names else _OTHERS
