"""A line in the log for each request, and the trace that it belongs to."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from bough.models.prompts import LeftOut
from bough.server.http.errors import HttpError, format_plain_error, refuse
from bough.server.log_format import JsonFormatter, LineFormatter
from bough.server.logs import LogsMiddleware
from bough.server.serving.loaded.progress import RequestRecord, note_record
from bough.server.serving.metrics import Metrics
from bough.types import Usage
from tests.server.layers import Inner, call_raw, send_to

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE_ID}-00f067aa0ba902b7-01"
USAGE = Usage(prompt_tokens=100, matched_tokens=80, cached_tokens=60, computed_tokens=40, completion_tokens=5)
RECORD = RequestRecord("tiny", usage=USAGE, completion_tokens=5, queue_s=0.5, first_token_s=0.2, decode_s=0.4)


# Traces


def trace_of(**headers: str) -> httpx.Headers:
    return send_to(LogsMiddleware(Inner(), Metrics()), headers=headers).headers


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

    (line,) = lines_of(caplog, lambda: send_to(LogsMiddleware(serve, Metrics()), headers={"traceparent": TRACEPARENT}))

    assert re.fullmatch(r"GET /api/tags 200 \d+ms 100\+5 tokens, 60 cached", line.getMessage())
    fields = json.loads(JsonFormatter().format(line))
    assert (fields["model"], fields["queue_s"], fields["first_token_s"]) == ("tiny", 0.5, 0.2)
    assert (fields["trace_id"], fields["client"]) == (TRACE_ID, "192.0.2.7")


def test_a_line_says_what_was_left_out_of_a_prompt(caplog: pytest.LogCaptureFixture) -> None:
    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        note_record(replace(RECORD, left_out=LeftOut(3, is_text_cut=True)))
        await Inner()(scope, receive, send)

    (line,) = lines_of(caplog, lambda: send_to(LogsMiddleware(serve, Metrics())))

    assert line.getMessage().endswith("60 cached (3 messages left out) (text cut)")
    fields = json.loads(JsonFormatter().format(line))
    assert (fields["messages_left_out"], fields["text_cut"]) == (3, True)


def test_the_line_of_a_refused_request_ends_with_a_bounded_reason(caplog: pytest.LogCaptureFixture) -> None:
    async def refuse_long(scope: Scope, receive: Receive, send: Send) -> None:
        reason = HttpError(400, f"too long: {1_000 * 'x'}")
        await refuse(reason, lambda path: format_plain_error, scope, receive, send)

    (line,) = lines_of(caplog, lambda: send_to(LogsMiddleware(refuse_long, Metrics())))

    assert re.fullmatch(r"GET /api/tags 400 \d+ms: too long: x{290}", line.getMessage())
    assert json.loads(JsonFormatter().format(line))["reason"].startswith("too long: x")


def test_a_stream_that_failed_after_it_began_has_its_reason_in_its_line(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        note_record(replace(RECORD, error="the engine's step did not end"))
        await Inner()(scope, receive, send)

    (line,) = lines_of(caplog, lambda: send_to(LogsMiddleware(fail, Metrics())))

    assert re.fullmatch(r"GET /api/tags 200 .*: the engine's step did not end", line.getMessage())


def test_a_line_for_embeddings_tells_how_many_texts_there_were(caplog: pytest.LogCaptureFixture) -> None:
    async def embed(scope: Scope, receive: Receive, send: Send) -> None:
        note_record(RequestRecord("tiny", usage=USAGE, num_texts=7))
        await Inner()(scope, receive, send)

    (line,) = lines_of(caplog, lambda: send_to(LogsMiddleware(embed, Metrics()), path="/api/embed"))

    assert line.getMessage().endswith(" 7 texts, 100 tokens, 60 cached")
    fields = json.loads(JsonFormatter().format(line))
    assert fields["texts"] == 7
    assert "queue_s" not in fields and "first_token_s" not in fields


def test_who_only_looks_whether_the_server_is_up_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    assert lines_of(caplog, lambda: send_to(LogsMiddleware(Inner(), Metrics()), path="/health")) == []


def test_a_line_as_json_has_the_same_fields(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = lines_of(caplog, lambda: send_to(LogsMiddleware(Inner(), Metrics())))

    fields = json.loads(JsonFormatter().format(line))
    assert (fields["method"], fields["path"], fields["status"], fields["level"]) == ("GET", "/api/tags", 200, "info")


def test_neither_keys_nor_prompts_are_in_a_line(caplog: pytest.LogCaptureFixture) -> None:
    headers = {"Authorization": "Bearer hidden-key", "x-api-key": "hidden-key"}
    path = "/api/cache/explain?prompt=hidden-prompt"

    (line,) = lines_of(caplog, lambda: send_to(LogsMiddleware(Inner(), Metrics()), path=path, headers=headers))

    assert "hidden" not in line.getMessage() + JsonFormatter().format(line)


@pytest.mark.parametrize(
    ("level", "status", "colour"),
    [
        (logging.INFO, 200, ""),
        (logging.INFO, 404, "\x1b[33m"),
        (logging.INFO, 503, "\x1b[31m"),
        (logging.WARNING, 0, "\x1b[33m"),
    ],
)
def test_colours_show_what_went_wrong_and_only_on_a_terminal(level: int, status: int, colour: str) -> None:
    record = logging.LogRecord("bough", level, "", 0, "text", None, None)
    record.fields = {"status": status}

    on_terminal = LineFormatter(is_terminal=True, has_colours=True).format(record)
    in_file = LineFormatter(is_terminal=False, has_colours=False).format(record)

    word = "warning: " if level == logging.WARNING else ""
    assert re.fullmatch(rf"\d\d:\d\d:\d\d {re.escape(colour)}{word}text(\x1b\[0m)?", on_terminal)
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d {word}text", in_file)


def test_a_path_cannot_forge_a_line(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = lines_of(caplog, lambda: send_to(LogsMiddleware(Inner(), Metrics()), path="/api/x%0aPOST%20/forged%20200"))

    assert "\n" not in line.getMessage()


def test_a_path_of_any_length_makes_a_line_of_bounded_length(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = lines_of(caplog, lambda: send_to(LogsMiddleware(Inner(), Metrics()), path="/api/" + 60_000 * "a"))

    assert len(line.getMessage()) < 1_000


def test_a_client_that_hangs_up_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    async def begin(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})

    (line,) = lines_of(caplog, lambda: call_raw(LogsMiddleware(begin, Metrics()), []))

    assert line.getMessage().endswith("(the client hung up)")
