"""Figures for Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Receive, Scope, Send

from bough.server.logs import LogsMiddleware
from bough.server.serving.loaded.progress import RequestRecord
from bough.server.serving.metrics import Metrics
from bough.types import Usage
from tests.server.layers import Inner, send_to
from tests.server.servers import StartServer

USAGE = Usage(prompt_tokens=100, matched_tokens=80, cached_tokens=60, computed_tokens=40, completion_tokens=5)
RECORD = RequestRecord("tiny", usage=USAGE, completion_tokens=5, queue_s=0.5, first_token_s=0.2, decode_s=0.4)

Read = Callable[..., float | None]


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def read(metrics: Metrics) -> Read:
    return reader_of(metrics)


def reader_of(metrics: Metrics) -> Read:
    """Reads the value of one metric with these labels."""
    return lambda name, **labels: metrics.registry.get_sample_value(name, labels)


# Figures


def test_tokens_of_prompts_are_counted_by_what_became_of_them(metrics: Metrics, read: Read) -> None:
    metrics.request_done(RECORD)

    kinds = {kind: read("bough_prompt_tokens_total", model="tiny", kind=kind) for kind in ("matched", "cached", "computed")}
    assert kinds == {"matched": 80, "cached": 60, "computed": 40}
    assert read("bough_completion_tokens_total", model="tiny") == 5


@pytest.mark.parametrize(("host_bytes", "disk_bytes", "tier"), [(0, 0, "device"), (7, 0, "host"), (7, 9, "disk")])
def test_a_hit_counts_for_the_lowest_tier_that_it_came_from(
    metrics: Metrics, read: Read, host_bytes: int, disk_bytes: int, tier: str
) -> None:
    metrics.request_done(RequestRecord("tiny", usage=USAGE, host_bytes=host_bytes, disk_bytes=disk_bytes))

    assert read("bough_hits_total", model="tiny", tier=tier) == 1
    assert read("bough_loaded_bytes_total", model="tiny", tier="disk") == disk_bytes


def test_times_are_of_the_first_token_and_of_each_further_one(metrics: Metrics, read: Read) -> None:
    metrics.request_done(RECORD)

    assert read("bough_first_token_seconds_sum", model="tiny") == pytest.approx(0.2)
    assert read("bough_token_seconds_sum", model="tiny") == pytest.approx(0.1)
    assert read("bough_queue_seconds_sum", model="tiny") == pytest.approx(0.5)


def test_names_that_clients_make_up_never_become_labels(metrics: Metrics) -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        metrics.request_done(RequestRecord(f"made up {scope['path']}", error="not found"))
        await Inner()(scope, receive, send)

    for number in range(20):
        send_to(LogsMiddleware(fail, metrics), path=f"/api/{number}")

    samples = [sample for metric in metrics.registry.collect() for sample in metric.samples]
    assert not any("made up" in value for sample in samples for value in sample.labels.values())


def test_embeddings_count_their_texts_and_have_no_queue_of_their_own(metrics: Metrics, read: Read) -> None:
    metrics.request_done(RequestRecord("tiny", usage=USAGE, num_texts=7))

    assert read("bough_texts_total", model="tiny") == 7
    assert read("bough_prompt_tokens_total", model="tiny", kind="computed") == 40
    assert read("bough_queue_seconds_count", model="tiny") is None


def test_a_model_without_lanes_shows_none() -> None:
    worker = SimpleNamespace(snapshot=lambda: {"queue": 2, "running": 1})
    read = reader_of(Metrics(SimpleNamespace(list=lambda: [SimpleNamespace(name="vectors", worker=worker)])))

    assert read("bough_queue_length", model="vectors") == 2
    assert read("bough_lanes", model="vectors", state="idle") is None


def test_models_beyond_the_first_hundred_are_counted_together(metrics: Metrics, read: Read) -> None:
    for number in range(300):
        metrics.http_began()
        metrics.request_done(replace(RECORD, model=f"copy-{number}"))
        metrics.http_ended("openai", f"copy-{number}", 200)

    assert read("bough_completion_tokens_total", model="copy-99") == 5
    assert read("bough_completion_tokens_total", model="copy-100") is None
    assert read("bough_completion_tokens_total", model="(others)") == 200 * 5
    assert read("bough_requests_total", api="openai", model="(others)", status="200") == 200


def test_requests_are_counted_by_api_and_status_and_none_stays_under_way(metrics: Metrics, read: Read) -> None:
    layer = LogsMiddleware(Inner(), metrics)

    for path in ("/v1/messages", "/v1/chat/completions", "/api/tags", "/api/cache/tree"):
        send_to(layer, path=path)

    apis = ("anthropic", "openai", "ollama", "bough")
    assert [read("bough_requests_total", api=api, model="", status="200") for api in apis] == [1, 1, 1, 1]
    assert read("bough_requests_in_progress") == 0


def test_a_request_that_fails_inside_is_counted_as_a_failure(metrics: Metrics, read: Read) -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        raise ValueError("a mistake")

    with pytest.raises(ValueError, match="a mistake"):
        send_to(LogsMiddleware(fail, metrics))

    assert read("bough_requests_total", api="ollama", model="", status="500") == 1
    assert read("bough_requests_in_progress") == 0


def test_trees_and_lanes_are_read_when_somebody_asks() -> None:
    figures: dict[str, Any] = {"queue": 3, "lanes": 4, "busy_lanes": 1, "used_bytes": 10, "budget_bytes": 20, "tokens": 7}
    figures |= {"disk_bytes": 5, "disk_budget_bytes": 50, "evicted_tokens": 8, "evicted_points": 2, "verified": 6}
    worker = SimpleNamespace(snapshot=lambda: figures)
    read = reader_of(Metrics(SimpleNamespace(list=lambda: [SimpleNamespace(name="tiny", worker=worker)])))

    figures["queue"] = 9

    assert read("bough_queue_length", model="tiny") == 9
    assert read("bough_lanes", model="tiny", state="idle") == 3
    assert read("bough_bytes", model="tiny", tier="disk", kind="budget") == 50
    assert read("bough_bytes", model="tiny", tier="host", kind="used") is None
    assert read("bough_evicted_tokens_total", model="tiny") == 8
    assert read("bough_verified_total", model="tiny") == 6


def test_a_disk_that_fails_shows_in_the_metrics() -> None:
    figures: dict[str, Any] = {"queue": 0, "lanes": 1, "busy_lanes": 0}
    figures |= {"disk_is_failing": True, "disk_failed_writes": 3, "disk_misses": 2, "disk_bad_rows": 1}
    worker = SimpleNamespace(snapshot=lambda: figures)
    read = reader_of(Metrics(SimpleNamespace(list=lambda: [SimpleNamespace(name="tiny", worker=worker)])))

    assert read("bough_disk_failing", model="tiny") == 1
    assert read("bough_disk_failed_writes_total", model="tiny") == 3
    assert read("bough_disk_misses_total", model="tiny") == 2
    assert read("bough_disk_bad_rows_total", model="tiny") == 1
    assert read("bough_models_loaded") == 1


def test_two_servers_in_one_process_count_apart(read: Read) -> None:
    Metrics().request_done(RECORD)

    assert read("bough_completion_tokens_total", model="tiny") is None


def test_a_running_server_shows_what_it_did(tiny_server: StartServer) -> None:
    url = tiny_server().url
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "count me"}], "max_tokens": 4}
    httpx.post(f"{url}/v1/chat/completions", json=chat).raise_for_status()

    answer = httpx.get(f"{url}/metrics")

    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    assert samples["bough_requests_total", "openai", "tiny", "200"] >= 1
    assert samples["bough_completion_tokens_total", "tiny"] >= 1
    assert samples["bough_models_loaded",] == 1
    assert "process_resident_memory_bytes" in answer.text
