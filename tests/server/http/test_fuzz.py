"""Whatever clients send, the server answers soon, never by a mistake of its own, and does not grow."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings

from tests.server.mutation import BODIES, mutate
from tests.server.servers import Server, StartProcess

SEED = 20261115
ANSWER_S = 20.0
WARM_UP = 100  # requests after which every part of the server has been used
GROWN_BYTES = 192 * 2**20
MAY_REFUSE = {  # the tiny model lies outside the model folder and ranks nothing, and this tree may not know the prefix
    "/api/copy",
    "/api/delete",
    "/api/create",
    "/v1/rerank",
    "/api/cache/keep",
    "/api/cache/unkeep",
    "/api/cache/nodes/keep",
    "/api/cache/nodes/evict",
    "/api/cache/import",
}
# Long answers and large trees would only take time: what is looked for lies in the reading of requests.
BOUNDS = {"context": 512, "device_memory": 64 * 2**20, "disk": 64 * 2**20, "keep_alive": "never"}


@pytest.fixture(scope="module")
def served(tiny_process: StartProcess) -> Server:
    return tiny_process(**BOUNDS)


@pytest.fixture
def client(served: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=ANSWER_S) as opened:
        yield opened
    assert served.process.poll() is None, served.log[-4000:]


def resident_bytes(server: Server) -> int:
    """The memory that the server's process takes."""
    status = Path(f"/proc/{server.process.pid}/status")
    if not status.exists():
        pytest.skip("memory is read from /proc")
    found = re.search(r"VmRSS:\s+(\d+) kB", status.read_text())
    assert found
    return int(found[1]) * 1024


def throw(client: httpx.Client, server: Server, number: int) -> int:
    """Send so many mutated bodies; returns by how much the server grew after the first of them."""
    random, routes, grown_from = Random(SEED), list(BODIES), 0
    for index in range(number):
        method, path = random.choice(routes)
        body = mutate(BODIES[method, path], random)
        what, deadline = f"{method} {path} {body[:500]!r}", time.monotonic() + ANSWER_S
        try:
            answer = client.request(method, path, content=body)
        except httpx.TimeoutException:
            pytest.fail(f"{what} had no answer for {ANSWER_S:.0f} s")
        assert answer.status_code < 500, f"{what}: {answer.status_code} {answer.text[:500]}"
        assert time.monotonic() < deadline, f"{what} took longer than {ANSWER_S:.0f} s"
        if index == min(WARM_UP, number - 1):
            grown_from = resident_bytes(server)
    return resident_bytes(server) - grown_from


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("method", "path"), list(BODIES))
def test_what_the_mutations_begin_with_makes_sense(client: httpx.Client, method: str, path: str, streams: bool) -> None:
    answer = client.request(method, path, json=BODIES[method, path] | {"stream": streams})

    assert answer.status_code in (200, 400, 404, 409) if path in MAY_REFUSE else answer.status_code == 200, answer.text


def test_no_body_breaks_the_server(client: httpx.Client, served: Server) -> None:
    assert throw(client, served, 600) < GROWN_BYTES


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_body_of_ten_thousand_breaks_the_server(client: httpx.Client, served: Server) -> None:
    assert throw(client, served, 10_000) < GROWN_BYTES


def test_after_all_that_it_still_answers_rightly(client: httpx.Client, served: Server) -> None:
    throw(client, served, 50)

    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}
    first, second = (client.post("/v1/chat/completions", json=body).json() for _ in range(2))

    assert first["choices"] == second["choices"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == second["usage"]["prompt_tokens"] - 1


def test_everything_that_takes_a_body_is_thrown_at(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    taking = {(method.upper(), path) for path, of in paths.items() for method in of if method in ("post", "delete", "put")}
    left_out = {  # these fetch models, take no body, or are the same route by another name
        ("POST", "/api/pull"),
        ("POST", "/api/push"),
        ("POST", "/api/blobs/{digest}"),
        ("POST", "/v2/rerank"),
        ("POST", "/rerank"),
    }

    assert taking - left_out == set(BODIES)


def probe(served: Server, max_examples: int) -> Counter[int]:
    """Send what the schema of each route allows, and what it does not; returns how often each status came."""
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    statuses: Counter[int] = Counter()
    quick = settings(
        max_examples=max_examples,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path == "/api/pull":  # would ask other machines
            continue

        @quick
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            sent = case.as_transport_kwargs(base_url=served.url)
            with requests.request(**sent, timeout=ANSWER_S, stream=True) as answer:
                statuses[answer.status_code] += 1
                assert answer.status_code < 500, f"{case.method} {case.path} {case.body!r}: {answer.text[:500]}"
                if case.path != "/api/events":  # which goes on for ever
                    _ = answer.content

        check()
    return statuses


def test_no_request_that_the_schema_allows_breaks_the_server(served: Server) -> None:
    statuses = probe(served, max_examples=2)

    assert statuses[200] > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_none_of_many_requests_that_the_schema_allows_breaks_the_server(served: Server) -> None:
    assert probe(served, max_examples=200)[200] > 0
