"""The figures of queues, lanes and trees for Prometheus.

They come from the last snapshot of each model's engine thread, so reading them never waits for an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from bough.server.serving.loaded import LoadedModels


class ModelFigures(Collector):
    """The figures of the loaded models, read at each scrape."""

    def __init__(self, models: LoadedModels) -> None:
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
        failing = "1 while nothing can be written to disk"
        yield _gauge("bough_disk_failing", failing, figures, {(): _get("disk_is_failing")})
        failing = "1 while the shared store does not answer"
        yield _gauge("bough_store_failing", failing, figures, {(): _get("store_is_failing")})
        yield _gauge("bough_tree_tokens", "Tokens that the tree knows", figures, {(): _get("tokens")})
        for name, text, key in _TOTALS:
            yield _counter(name, text, figures, key)


def _by_replica(model: str, figure: dict[str, Any]) -> Iterator[tuple[Labels, dict[str, Any]]]:
    """The figures of each replica of a model, or of a model without replicas."""
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
    **{(tier, "used"): _get(f"{tier}_bytes") for tier in ("host", "disk", "store")},
    **{(tier, "budget"): _get(f"{tier}_budget_bytes") for tier in ("host", "disk", "store")},
    ("store", "waiting"): _get("store_waiting_bytes"),
}
_TOTALS = (
    ("bough_evicted_tokens", "Tokens that were evicted", "evicted_tokens"),
    ("bough_evicted_points", "Restore points that were evicted", "evicted_points"),
    ("bough_clipped_numbers", "Keys and values that were too large for the type that they are kept in", "clipped_numbers"),
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
