"""What the server tells of itself: figures for Prometheus, lines in the log, traces."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Receive, Scope, Send

from bough.server.http.logs import JsonFormatter, Logs
from bough.server.serving.metrics import Seeing
from bough.server.serving.record import RequestRecord, note_record
from bough.types import Usage
from tests.server.layers import Inner, call_raw, send_to
from tests.server.servers import StartServer

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE_ID}-00f067aa0ba902b7-01"
USAGE = Usage(prompt_tokens=100, matched_tokens=80, cached_tokens=60, computed_tokens=40, completion_tokens=5)
RECORD = RequestRecord("tiny", usage=USAGE, completion_tokens=5, queue_s=0.5, first_token_s=0.2, decode_s=0.4)

Read = Callable[..., float | None]


@pytest.fixture
def seeing() -> Seeing:
    return Seeing()


@pytest.fixture
def read(seeing: Seeing) -> Read:
    return reader_of(seeing)


def reader_of(seeing: Seeing) -> Read:
    """Reads the value of one metric with these labels."""
    return lambda name, **labels: seeing.registry.get_sample_value(name, labels)


# Figures


def test_tokens_of_prompts_are_counted_by_what_became_of_them(seeing: Seeing, read: Read) -> None:
    seeing.request_done(RECORD)

    kinds = {kind: read("bough_prompt_tokens_total", model="tiny", kind=kind) for kind in ("matched", "cached", "computed")}
    assert kinds == {"matched": 80, "cached": 60, "computed": 40}
    assert read("bough_completion_tokens_total", model="tiny") == 5


@pytest.mark.parametrize(("host_bytes", "disk_bytes", "place"), [(0, 0, "device"), (7, 0, "host"), (7, 9, "disk")])
def test_a_hit_counts_for_the_lowest_place_that_it_came_from(
    seeing: Seeing, read: Read, host_bytes: int, disk_bytes: int, place: str
) -> None:
    seeing.request_done(RequestRecord("tiny", usage=USAGE, host_bytes=host_bytes, disk_bytes=disk_bytes))

    assert read("bough_hits_total", model="tiny", place=place) == 1
    assert read("bough_loaded_bytes_total", model="tiny", place="disk") == disk_bytes


def test_times_are_of_the_first_token_and_of_each_further_one(seeing: Seeing, read: Read) -> None:
    seeing.request_done(RECORD)

    assert read("bough_first_token_seconds_sum", model="tiny") == pytest.approx(0.2)
    assert read("bough_token_seconds_sum", model="tiny") == pytest.approx(0.1)
    assert read("bough_queue_seconds_sum", model="tiny") == pytest.approx(0.5)


def test_names_that_clients_make_up_never_become_labels(seeing: Seeing) -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        seeing.request_done(RequestRecord(f"made up {scope['path']}", error="not found"))
        await Inner()(scope, receive, send)

    for number in range(20):
        send_to(Logs(fail, seeing), path=f"/api/{number}")

    samples = [sample for metric in seeing.registry.collect() for sample in metric.samples]
    assert not any("made up" in value for sample in samples for value in sample.labels.values())


def test_models_beyond_the_first_hundred_are_counted_together(seeing: Seeing, read: Read) -> None:
    for number in range(300):
        seeing.http_began()
        seeing.request_done(replace(RECORD, model=f"copy-{number}"))
        seeing.http_ended("openai", f"copy-{number}", 200)

    assert read("bough_completion_tokens_total", model="copy-99") == 5
    assert read("bough_completion_tokens_total", model="copy-100") is None
    assert read("bough_completion_tokens_total", model="(others)") == 200 * 5
    assert read("bough_requests_total", api="openai", model="(others)", status="200") == 200


def test_requests_are_counted_by_api_and_status_and_none_stays_under_way(seeing: Seeing, read: Read) -> None:
    layer = Logs(Inner(), seeing)

    for path in ("/v1/messages", "/v1/chat/completions", "/api/tags", "/api/cache/tree"):
        send_to(layer, path=path)

    apis = ("anthropic", "openai", "ollama", "bough")
    assert [read("bough_requests_total", api=api, model="", status="200") for api in apis] == [1, 1, 1, 1]
    assert read("bough_requests_in_progress") == 0


def test_a_request_that_fails_inside_is_counted_as_a_failure(seeing: Seeing, read: Read) -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        raise ValueError("a mistake")

    with pytest.raises(ValueError, match="a mistake"):
        send_to(Logs(fail, seeing))

    assert read("bough_requests_total", api="ollama", model="", status="500") == 1
    assert read("bough_requests_in_progress") == 0


def test_trees_and_lanes_are_read_when_somebody_asks() -> None:
    figures: dict[str, Any] = {"queue": 3, "lanes": 4, "busy_lanes": 1, "used_bytes": 10, "budget_bytes": 20, "tokens": 7}
    figures |= {"disk_bytes": 5, "disk_budget_bytes": 50, "evicted_tokens": 8, "evicted_points": 2, "verified": 6}
    worker = SimpleNamespace(snapshot=lambda: figures)
    read = reader_of(Seeing(SimpleNamespace(list=lambda: [SimpleNamespace(name="tiny", worker=worker)])))

    figures["queue"] = 9

    assert read("bough_queue_length", model="tiny") == 9
    assert read("bough_lanes", model="tiny", state="resting") == 3
    assert read("bough_bytes", model="tiny", place="disk", kind="budget") == 50
    assert read("bough_bytes", model="tiny", place="host", kind="used") is None
    assert read("bough_evicted_tokens_total", model="tiny") == 8
    assert read("bough_verified_total", model="tiny") == 6


def test_a_disk_that_fails_shows_in_the_metrics() -> None:
    figures: dict[str, Any] = {"queue": 0, "lanes": 1, "busy_lanes": 0}
    figures |= {"disk_is_failing": True, "disk_failed_writes": 3, "disk_misses": 2, "disk_bad_rows": 1}
    worker = SimpleNamespace(snapshot=lambda: figures)
    read = reader_of(Seeing(SimpleNamespace(list=lambda: [SimpleNamespace(name="tiny", worker=worker)])))

    assert read("bough_disk_failing", model="tiny") == 1
    assert read("bough_disk_failed_writes_total", model="tiny") == 3
    assert read("bough_disk_misses_total", model="tiny") == 2
    assert read("bough_disk_bad_rows_total", model="tiny") == 1
    assert read("bough_models_loaded") == 1


def test_two_servers_in_one_process_count_apart(read: Read) -> None:
    Seeing().request_done(RECORD)

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


# Traces


def trace_of(**headers: str) -> httpx.Headers:
    return send_to(Logs(Inner(), Seeing()), headers=headers).headers


def test_a_trace_goes_on_with_a_step_of_its_own() -> None:
    headers = trace_of(traceparent=TRACEPARENT, tracestate="vendor=1")

    assert re.fullmatch(rf"00-{TRACE_ID}-[0-9a-f]{{16}}-01", headers["traceparent"])
    assert headers["traceparent"] != TRACEPARENT
    assert headers["tracestate"] == "vendor=1"


@pytest.mark.parametrize(
    "given",
    [
        "",
        "junk",
        TRACEPARENT.upper(),
        f"ff-{TRACE_ID}-00f067aa0ba902b7-01",
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"{TRACEPARENT}-more",
    ],
)
def test_what_is_no_trace_is_ignored_and_a_new_one_begins(given: str) -> None:
    headers = trace_of(traceparent=given, tracestate="vendor=1")

    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", headers["traceparent"])
    assert TRACE_ID not in headers["traceparent"]
    assert "tracestate" not in headers


def test_a_trace_of_a_later_version_is_understood_as_far_as_we_know_it() -> None:
    assert TRACE_ID in trace_of(traceparent=f"01-{TRACE_ID}-00f067aa0ba902b7-01-later")["traceparent"]


def test_every_answer_has_a_request_id_and_a_clients_own_is_kept() -> None:
    own, made = trace_of(**{"x-request-id": "abc-123"}), trace_of(**{"x-request-id": "no\x7f"})

    assert own["x-request-id"] == own["request-id"] == "abc-123"
    assert made["request-id"].startswith("req_")


# Lines


def lines_of(caplog: pytest.LogCaptureFixture, act: Callable[[], Any]) -> list[logging.LogRecord]:
    with caplog.at_level(logging.INFO, "bough.requests"):
        act()
    return [record for record in caplog.records if record.name == "bough.requests"]


def test_a_request_has_one_line_with_its_tokens_and_times(caplog: pytest.LogCaptureFixture) -> None:
    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        note_record(RECORD)
        await Inner()(scope, receive, send)

    (line,) = lines_of(caplog, lambda: send_to(Logs(serve, Seeing()), headers={"traceparent": TRACEPARENT}))

    text = line.getMessage()
    assert text.startswith("GET /api/tags 200 model=tiny prompt_tokens=100 cached_tokens=60 computed_tokens=40")
    assert "queue_s=0.5 first_token_s=0.2" in text
    assert f"trace_id={TRACE_ID}" in text and "client=192.0.2.7" in text


def test_who_only_looks_whether_the_server_is_up_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    assert lines_of(caplog, lambda: send_to(Logs(Inner(), Seeing()), path="/health")) == []


def test_a_line_as_json_has_the_same_fields(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = lines_of(caplog, lambda: send_to(Logs(Inner(), Seeing())))

    fields = json.loads(JsonFormatter().format(line))
    assert (fields["method"], fields["path"], fields["status"], fields["level"]) == ("GET", "/api/tags", 200, "info")


def test_neither_keys_nor_prompts_are_in_a_line(caplog: pytest.LogCaptureFixture) -> None:
    headers = {"Authorization": "Bearer hidden-key", "x-api-key": "hidden-key"}
    path = "/api/cache/explain?prompt=hidden-prompt"

    (line,) = lines_of(caplog, lambda: send_to(Logs(Inner(), Seeing()), path=path, headers=headers))

    assert "hidden" not in line.getMessage() + JsonFormatter().format(line)


def test_a_path_cannot_forge_a_line(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = lines_of(caplog, lambda: send_to(Logs(Inner(), Seeing()), path="/api/x%0aPOST%20/forged%20200"))

    assert "\n" not in line.getMessage()


def test_a_path_of_any_length_makes_a_line_of_bounded_length(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = lines_of(caplog, lambda: send_to(Logs(Inner(), Seeing()), path="/api/" + 60_000 * "a"))

    assert len(line.getMessage()) < 1_000


def test_a_client_that_hangs_up_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    async def begin(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})

    (line,) = lines_of(caplog, lambda: call_raw(Logs(begin, Seeing()), []))

    assert "note=the client hung up" in line.getMessage()
