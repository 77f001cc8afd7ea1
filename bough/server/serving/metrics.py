"""Metrics for Prometheus.

Requests are counted when they end. The figures of queues, lanes and trees come from the last snapshot of each model's
engine thread, so reading metrics never waits for an engine. Labels have few values: only models that were loaded are named,
and only the first hundred, because clients may copy models to any number of names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from bough.server.serving.record import RequestRecord

_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)


_MAX_NAMES = 100
_OTHERS = "(others)"  # not a valid name of a model


class WatchedModel(Protocol):
    """A loaded model, as far as metrics need it."""

    @property
    def name(self) -> str: ...

    @property
    def worker(self) -> Any: ...


class ModelList(Protocol):
    """The loaded models, as far as metrics need them."""

    def list(self) -> Iterable[WatchedModel]: ...


class Metrics:
    """The counters of one server, in a registry of their own, and the figures of the models that are loaded."""

    def __init__(self, models: ModelList | None = None) -> None:
        self.registry = registry = CollectorRegistry()
        self._names = {""}  # models that have labels of their own; some requests have no model
        self._requests = Counter(
            "bough_requests_total", "Requests that have ended", ("api", "model", "status"), registry=registry
        )
        self._in_progress = Gauge("bough_requests_in_progress", "Requests under way", registry=registry)
        self._prompt_tokens = Counter(
            "bough_prompt_tokens_total",
            "Tokens of prompts: matched in the tree, reused, computed; known, but sooner computed than loaded",
            ("model", "kind"),
            registry=registry,
        )
        self._completion_tokens = Counter(
            "bough_completion_tokens_total", "Tokens of answers", ("model",), registry=registry
        )
        self._texts = Counter(
            "bough_texts_total",
            "Texts that were embedded, and pairs of texts that were scored",
            ("model",),
            registry=registry,
        )
        self._hits = Counter(
            "bough_hits_total",
            "Requests that reused state, by the lowest tier that it came from",
            ("model", "tier"),
            registry=registry,
        )
        self._loaded_bytes = Counter(
            "bough_loaded_bytes_total", "Bytes brought back to the device", ("model", "tier"), registry=registry
        )
        self._queue_s = Histogram(
            "bough_queue_seconds", "Waiting for a lane", ("model",), buckets=_FIRST_TOKEN_S, registry=registry
        )
        self._first_token_s = Histogram(
            "bough_first_token_seconds",
            "From the loaded model to the first token",
            ("model",),
            buckets=_FIRST_TOKEN_S,
            registry=registry,
        )
        self._token_s = Histogram(
            "bough_token_seconds", "Time for each token after the first", ("model",), buckets=_TOKEN_S, registry=registry
        )
        ProcessCollector(registry=registry)
        if models is not None:
            registry.register(_Models(models))

    def http_began(self) -> None:
        """A request came in."""
        self._in_progress.inc()

    def http_ended(self, api: str, model: str, status: int) -> None:
        """A request was answered, or its client disconnected."""
        self._in_progress.dec()
        self._requests.labels(api, self._label(model), str(status)).inc()

    def request_done(self, record: RequestRecord) -> None:
        """A model has answered, or failed to."""
        if record.usage is None:
            return
        model, usage = self._label(record.model), record.usage
        record = replace(record, model=model)
        counts = {"matched": usage.matched_tokens, "cached": usage.cached_tokens, "computed": usage.computed_tokens}
        counts["recomputed"] = record.recomputed_tokens
        for kind, number in counts.items():
            self._prompt_tokens.labels(model, kind).inc(number)
        self._completion_tokens.labels(model).inc(record.completion_tokens)
        self._count_tiers(record)
        if record.num_texts:
            self._texts.labels(model).inc(record.num_texts)
        else:
            self._time(record)

    def _label(self, model: str) -> str:
        if len(self._names) <= _MAX_NAMES:
            self._names.add(model)
        return model if model in self._names else _OTHERS

    def _count_tiers(self, record: RequestRecord) -> None:
        if record.usage and record.usage.cached_tokens:
            below = "disk" if record.disk_bytes else "host" if record.host_bytes else "device"
            tier = "store" if record.store_bytes else below
            self._hits.labels(record.model, tier).inc()
        self._loaded_bytes.labels(record.model, "host").inc(record.host_bytes)
        self._loaded_bytes.labels(record.model, "disk").inc(record.disk_bytes)
        self._loaded_bytes.labels(record.model, "store").inc(record.store_bytes)

    def _time(self, record: RequestRecord) -> None:
        self._queue_s.labels(record.model).observe(record.queue_s)
        if record.completion_tokens > 0:
            self._first_token_s.labels(record.model).observe(record.first_token_s)
        if record.completion_tokens > 1:
            self._token_s.labels(record.model).observe(record.decode_s / (record.completion_tokens - 1))


class _Models(Collector):
    """The figures of the loaded models, read at each scrape."""

    def __init__(self, models: ModelList) -> None:
        self._models = models

    def describe(self) -> list[Metric]:
        return []  # so that registering reads no model

    def collect(self) -> Iterator[Metric]:
        models = {loaded.name: loaded.worker.snapshot() for loaded in self._models.list()}
        yield GaugeMetricFamily("bough_models_loaded", "Models in memory", value=len(models))
        figures = {labels: figure for model, whole in models.items() for labels, figure in _by_replica(model, whole)}
        yield _gauge("bough_queue_length", "Requests that wait for a lane", figures, {(): _get("queue")})
        lanes: Reads = {("busy",): _get("busy_lanes"), ("idle",): _count_idle_lanes}
        yield _gauge("bough_lanes", "Lanes by what they do", figures, lanes, ("state",))
        yield _gauge("bough_bytes", "Bytes of state by tier", figures, _BYTES, ("tier", "kind"))
        failing: Reads = {(): _get("disk_is_failing")}
        yield _gauge("bough_disk_failing", "1 while nothing can be written to disk", figures, failing)
        store_failing: Reads = {(): _get("store_is_failing")}
        yield _gauge("bough_store_failing", "1 while the shared store does not answer", figures, store_failing)
        yield _gauge("bough_tree_tokens", "Tokens that the tree knows", figures, {(): _get("tokens")})
        for name, text, key in _TOTALS:
            yield _counter(name, text, figures, key)


def _by_replica(model: str, figure: dict[str, Any]) -> Iterator[tuple[Labels, dict[str, Any]]]:
    """The figures of each replica of a model; those of a model without replicas as they are."""
    if "replicas" not in figure:
        yield (model,), figure
    for name, own in figure.get("replicas", {}).items():
        yield (model, name), own


Labels = tuple[str, ...]  # the model and, if it has replicas, which
Figures = dict[Labels, dict[str, Any]]
Read = Callable[[dict[str, Any]], float | None]
Reads = dict[tuple[str, ...], Read]  # by the values of the labels


def _get(key: str) -> Read:
    return lambda figure: figure.get(key)


def _count_idle_lanes(figure: dict[str, Any]) -> int | None:
    """None for a model without lanes: it generates no text."""
    return figure["lanes"] - figure["busy_lanes"] if "lanes" in figure else None


_BYTES: Reads = {
    ("device", "used"): _get("used_bytes"),
    ("device", "budget"): _get("budget_bytes"),
    ("host", "used"): _get("host_bytes"),
    ("host", "budget"): _get("host_budget_bytes"),
    ("disk", "used"): _get("disk_bytes"),
    ("disk", "budget"): _get("disk_budget_bytes"),
    ("store", "used"): _get("store_bytes"),
    ("store", "budget"): _get("store_budget_bytes"),
    ("store", "waiting"): _get("store_waiting_bytes"),
}
_TOTALS = (
    ("bough_evicted_tokens", "Tokens that were evicted", "evicted_tokens"),
    ("bough_evicted_points", "Restore points that were evicted", "evicted_points"),
    ("bough_disk_failed_writes", "Pages and states that could not be written to disk", "disk_failed_writes"),
    ("bough_disk_misses", "Pages and states on disk that were not what they should be", "disk_misses"),
    ("bough_disk_bad_rows", "Rows of the index on disk that made no sense and were dropped", "disk_bad_rows"),
    ("bough_store_sent_bytes", "Bytes that were sent to the shared store", "store_sent_bytes"),
    ("bough_store_already_there", "Objects that the shared store had already", "store_already_there"),
    ("bough_store_dropped", "Objects that were not sent to the shared store", "store_dropped"),
    ("bough_store_not_found", "Objects that were looked for in the shared store, and not found", "store_not_found"),
    ("bough_store_misses", "Objects in the shared store that were not what they should be", "store_misses"),
    ("bough_store_errors", "Calls to the shared store that failed", "store_errors"),
    ("bough_verified", "Answers that were computed again without reuse, to compare", "verified"),
    ("bough_verify_differences", "Answers that differed from those without reuse", "different"),
)


def _gauge(name: str, text: str, figures: Figures, reads: Reads, labels: tuple[str, ...] = ()) -> Metric:
    family = GaugeMetricFamily(name, text, labels=(*_label_names(figures), *labels))
    for of_model, figure in figures.items():
        for values, read in reads.items():
            value = read(figure)
            if value is not None:
                family.add_metric([*of_model, *values], value)
    return family


def _counter(name: str, text: str, figures: Figures, key: str) -> Metric:
    family = CounterMetricFamily(name, text, labels=_label_names(figures))
    for of_model, figure in figures.items():
        if key in figure:
            family.add_metric(of_model, figure[key])
    return family


def _label_names(figures: Figures) -> Labels:
    return ("model", "replica")[: max(map(len, figures), default=1)]
