"""How much and how often: bodies, their time, and requests a minute."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Message

from bough.config import Settings
from bough.errors import RateLimited
from bough.server.app import error_format_of
from bough.server.http.limits import LimitsMiddleware, RateLimit
from tests.gates import Notes, pass_time
from tests.server.layers import Inner, call_raw, in_app, send_to
from tests.server.servers import StartServer
from tests.waiting import BOUND_S


def make_layer(inner: Inner | None = None, body_s: float = BOUND_S, **settings: Any) -> ASGIApp:
    inner = inner or Inner()
    return in_app(LimitsMiddleware(inner, Settings(max_body=1000, **settings), error_format_of, body_s), inner)


async def in_pieces(size: int) -> AsyncIterator[bytes]:
    for _ in range(size // 100):
        yield b"x" * 100


def test_a_body_of_the_largest_size_comes_through_whole() -> None:
    assert send_to(make_layer(), "POST", content=b"x" * 1000).json()["num_bytes"] == 1000


def test_a_body_in_pieces_comes_through_whole() -> None:
    assert send_to(make_layer(), "POST", content=in_pieces(1000)).json()["num_bytes"] == 1000


@pytest.mark.parametrize("content", [b"x" * 1200, in_pieces(1200)], ids=["declared", "in pieces"])
def test_a_larger_body_is_refused_with_both_numbers(content: Any) -> None:
    inner = Inner()

    answer = send_to(make_layer(inner), "POST", "/v1/chat/completions", content=content)

    assert answer.status_code == 413
    assert "1,000" in answer.json()["error"]["message"]
    assert inner.num_calls == 0


@pytest.mark.parametrize("is_declared", [True, False])
def test_over_the_wire_the_client_reads_the_refusal_although_it_was_still_sending(
    tiny_server: StartServer, is_declared: bool
) -> None:
    body = b"x" * (9 * 2**20)  # the limit is 8 MiB

    answer = httpx.post(f"{tiny_server().url}/api/chat", content=body if is_declared else iter([body]), timeout=30)

    assert answer.status_code == 413
    assert "8,388,608" in answer.json()["error"]


def test_a_declared_size_is_refused_before_the_body_comes() -> None:
    sent = call_raw(make_layer(body_s=0.05), [], [(b"content-length", b"99999999999999999999999")])

    assert sent[0]["status"] == 413


def test_a_body_that_does_not_come_is_not_waited_for_long() -> None:
    first = {"type": "http.request", "body": b"{", "more_body": True}

    sent = call_raw(make_layer(body_s=0.05), [first])

    assert sent[0]["status"] == 408
    assert b"only 1 bytes" in sent[1]["body"]


def test_a_body_that_trickles_has_only_so_much_time_in_all() -> None:
    async def trickle() -> Message:
        pass_time(1)
        await asyncio.sleep(0)  # so that the loop looks at its clock
        return {"type": "http.request", "body": b" ", "more_body": True}

    assert call_raw(make_layer(body_s=10), trickle)[0]["status"] == 408


def test_a_client_that_goes_before_its_body_is_whole_asks_nothing() -> None:
    inner = Inner()

    sent = call_raw(
        make_layer(inner), [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    )

    assert sent == []
    assert inner.num_calls == 0


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_every_body_is_called_json(kind: str | None) -> None:
    headers = {"Content-Type": kind} if kind else {}

    assert (
        send_to(make_layer(), "POST", content=b"{}", headers=headers).json()["headers"]["content-type"]
        == "application/json"
    )


def test_an_import_streams_and_may_be_larger_than_other_bodies() -> None:
    layer = make_layer()

    assert send_to(layer, "POST", "/api/cache/import", content=b"x" * 4000).json()["num_bytes"] == 4000
    assert send_to(layer, "POST", "/api/chat", content=b"x" * 4000).status_code == 413


def test_an_import_that_stops_coming_ends_like_one_whose_client_has_gone() -> None:
    first = {"type": "http.request", "body": b"x", "more_body": True}

    sent = call_raw(make_layer(body_s=0.05), [first], path="/api/cache/import")

    assert b'"num_bytes":1' in sent[1]["body"]


def test_so_many_requests_a_minute_and_no_more() -> None:
    now = 0.0
    limit = RateLimit(3, lambda: now)
    for _ in range(3):
        limit.take("alice")

    with pytest.raises(RateLimited) as refused:
        limit.take("alice")
    limit.take("bob")
    now = refused.value.retry_after_s
    limit.take("alice")

    assert refused.value.retry_after_s == pytest.approx(20)
    with pytest.raises(RateLimited):
        limit.take("alice")


def test_one_request_too_many_is_told_when_to_come_back() -> None:
    layer = make_layer(rate_limit=1)
    send_to(layer)

    answer = send_to(layer)

    assert answer.status_code == 429
    assert 1 <= int(answer.headers["retry-after"]) <= 60


def test_health_and_metrics_are_not_limited() -> None:
    layer = make_layer(rate_limit=1)

    assert [send_to(layer, path="/health").status_code for _ in range(3)] == [200] * 3
    assert [send_to(layer, path="/metrics").status_code for _ in range(3)] == [200] * 3


def test_the_clients_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bough.server.http.limits._MAX_CLIENTS", 10)
    limit = RateLimit(1, lambda: 0.0)

    for number in range(100):
        limit.take(f"client {number}")

    assert len(limit._buckets) == 10


def test_while_the_server_shuts_down_new_work_is_refused_and_a_look_is_not() -> None:
    inner = Inner()
    layer = make_layer(inner)
    inner.state.is_draining = True

    refused = send_to(layer, "POST", "/v1/messages", content=b"{}")

    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "5"
    assert refused.json()["type"] == "error"
    assert send_to(layer, path="/api/tags").status_code == 200


def test_bodies_that_are_coming_are_bounded_together() -> None:
    limits = LimitsMiddleware(Inner(), Settings(max_body=1000), error_format_of, body_s=BOUND_S)
    layer = in_app(limits, Inner())
    half = {"type": "http.request", "body": b"x" * 900, "more_body": True}

    async def send_many() -> list[int]:
        statuses: list[int] = []
        settled: Notes[int] = Notes()  # which of them have sent what they send first, or were refused
        may_end = asyncio.Event()

        async def one(number: int) -> None:
            pieces = iter([half])

            async def receive() -> Message:
                found = next(pieces, None)
                if found is None:
                    settled.append(number)
                    await may_end.wait()
                    return {"type": "http.disconnect"}
                return found

            async def send(message: Message) -> None:
                if message["type"] == "http.response.start":
                    statuses.append(message["status"])
                    settled.append(number)

            scope = {"type": "http", "method": "POST", "path": "/api/chat", "headers": [], "http_version": "1.1"}
            await layer({**scope, "query_string": b"", "state": {}}, receive, send)

        tasks = [asyncio.create_task(one(number)) for number in range(60)]
        await settled.until(lambda: len(set(settled)) == len(tasks))
        may_end.set()
        await asyncio.gather(*tasks)
        return statuses

    assert asyncio.run(send_many()) == [503] * (60 - 32 * 1000 // 900)
    assert limits._coming_bytes == 0
