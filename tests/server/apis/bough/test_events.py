"""`/api/events` on running servers: what clients see, with and without keys, and how a stream ends."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bough.models import ModelFiles
from tests.server.event_stream import watching
from tests.server.in_process import make_words_folder, serving
from tests.server.servers import Address, running, stop
from tests.server.watched import Watched

NUM_ENDLESS = 2**16


@pytest.fixture
def client(served: Address) -> Iterator[httpx.Client]:
    """A client of a server whose tree is empty."""
    with httpx.Client(base_url=served.url, timeout=30) as opened:
        opened.delete("/api/cache").raise_for_status()
        yield opened


def chat(client: httpx.Client, text: str, num_tokens: int = 4, **headers: str) -> httpx.Response:
    body = {"model": "tiny", "prompt": text, "raw": True, "stream": False, "options": {"num_predict": num_tokens}}
    return client.post("/api/generate", json=body, headers=headers).raise_for_status()


def ended(watched: Watched, request_id: str) -> list[dict[str, Any]]:
    """The requests that have ended and have this id."""
    return [each for (_, own), each in watched.requests.items() if own == request_id and each["state"] == "done"]


def nodes_of(watched: Watched, root: str = "") -> list[dict[str, Any]]:
    return list(watched.trees.get("tiny", {}).get(root, {}).values())


def test_the_stream_tells_who_it_is_the_models_the_tree_requests_and_figures(client: httpx.Client) -> None:
    text = "the capital of France is Paris, says the page"
    with watching(client) as stream:
        stream.wait_until(lambda watched: watched.trees)
        answer = chat(client, text)
        request_id = answer.headers["x-request-id"]
        stream.wait_until(lambda watched: ended(watched, request_id) and nodes_of(watched))
        before = stream.watched.figures["tiny"]["requests"]
        watched = stream.wait_until(lambda watched: watched.figures["tiny"]["requests"] >= max(1, before))

    assert [name for name, _ in watched.events[:2]] == ["hello", "models"]
    assert watched.hello["version"] == 1 and watched.hello["scope"] == "all" and watched.hello["interval_s"] == 0.1
    assert [(each["model"], each["is_default"]) for each in watched.models] == [("tiny", True)]
    (request,) = ended(watched, request_id)
    assert request["prompt_tokens"] == answer.json()["prompt_eval_count"] and request["completion_tokens"] == 4
    assert request["cached_tokens"] == 0 and "no conversation in the tree begins like this" in request["reason"]
    (node,) = nodes_of(watched)
    assert request["node"] == node["node"] and node["text"].startswith(text) and node["parent"] is None
    assert node["end"] == request["offset"] and node["tiers"] and node["bytes"] > 0


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[httpx.Client]:
    """A client of a server whose model has so long a context that an answer goes on until the client leaves."""
    files = ModelFiles("tiny", make_words_folder(tmp_path / "tiny", context_tokens=2 * NUM_ENDLESS))
    with serving(files, tmp_path, disk=0) as address, httpx.Client(base_url=address.url, timeout=30) as opened:
        yield opened


def test_two_requests_with_the_same_id_are_told_apart(endless: httpx.Client) -> None:
    same, client = {"x-request-id": "mine"}, endless
    body = {"model": "tiny", "prompt": "first", "stream": True, "max_tokens": NUM_ENDLESS, "ignore_eos": True}
    with watching(client) as stream, client.stream("POST", "/v1/completions", json=body, headers=same) as first:
        lines = first.iter_lines()
        next(lines)  # it runs
        chat(client, "second", **same)
        watched = stream.wait_until(lambda watched: ended(watched, "mine#2"))
        assert watched.requests["", "mine"]["state"] in ("computing", "answering")
        first.close()
        stream.wait_until(lambda watched: watched.requests["", "mine"]["state"] == "cancelled")


def test_a_text_that_looks_like_an_event_is_only_text(client: httpx.Client) -> None:
    hostile = 'a\n\nevent: models\ndata: {"models":[]}\r\n\r\n\u2028 </script>'
    with watching(client) as stream:
        request_id = chat(client, hostile).headers["x-request-id"]
        watched = stream.wait_until(lambda watched: ended(watched, request_id) and nodes_of(watched))

    assert nodes_of(watched)[0]["text"].startswith(hostile)
    assert watched.models != []


def test_a_client_may_ask_for_one_model_and_how_often(client: httpx.Client) -> None:
    with watching(client, model="tiny:latest", interval=0.5) as stream:
        watched = stream.wait_until(lambda watched: "tiny" in watched.figures)

    assert watched.hello["interval_s"] == 0.5
    assert client.get("/api/events", params={"model": "nobody"}).status_code == 404
    for interval in ("0.01", "11", "nan", "x"):
        assert client.get("/api/events", params={"interval": interval}).status_code == 400


def test_a_client_with_a_salt_sees_the_tree_of_that_salt(client: httpx.Client) -> None:
    mine = {"X-Bough-Salt": f"mine {secrets.token_hex(4)}"}
    chat(client, "the text of nobody")
    with httpx.Client(base_url=client.base_url, headers=mine) as own, watching(own) as stream:
        chat(client, "the text of nobody, once more")
        request_id = chat(client, "my text", **mine).headers["x-request-id"]
        watched = stream.wait_until(lambda watched: ended(watched, request_id) and nodes_of(watched, mine["X-Bough-Salt"]))

    assert watched.hello["scope"] == "own"
    assert "nobody" not in str(watched.events)


def test_a_client_that_stops_reading_delays_nobody(served: Address, client: httpx.Client) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    with socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.connect((host, int(port)))
        silent.sendall(b"GET /api/events?interval=0.1 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with watching(client) as stream:
            for number in range(3):
                request_id = chat(client, f"{number}: {secrets.token_hex(400)}").headers["x-request-id"]
                stream.wait_until(lambda watched, own=request_id: ended(watched, own))
            assert len(nodes_of(stream.wait_until(lambda watched: len(nodes_of(watched)) >= 3))) >= 3


def test_a_server_that_is_told_to_end_ends_its_streams_at_once(tiny_model: Path, tmp_path: Path) -> None:
    with (
        running(str(tiny_model), tmp_path, data_folder=tmp_path / "data", stop_after=600) as server,
        httpx.Client(base_url=server.url) as client,
        watching(client) as stream,
    ):
        stream.wait_until(lambda watched: watched.trees)
        stop(server)
        stream.wait_until_over()


# With keys


def test_each_key_sees_its_own_text_requests_and_figures_alone(keyed: Address) -> None:
    secrets_of = {name: f"the secret of {name} is {secrets.token_hex(8)}" for name in ("alice", "bob")}
    salt = {"X-Bough-Salt": secrets.token_hex(8)}  # nothing was asked with it before
    with (
        httpx.Client(base_url=keyed.url, headers=salt | {"x-api-key": "alices-key"}) as alice,
        httpx.Client(base_url=keyed.url, headers=salt | {"x-api-key": "bobs-key"}) as bob,
        watching(alice) as hers,
        watching(bob) as his,
    ):
        ids = {}
        for name, client in (("alice", alice), ("bob", bob)):
            chat(client, secrets_of[name], **{"x-request-id": "shared"})
            ids[name] = chat(client, secrets_of[name]).headers["x-request-id"]
        seen = {}
        for name, stream in (("alice", hers), ("bob", his)):
            stream.wait_until(lambda watched, name=name: ended(watched, ids[name]) and watched.trees["tiny"])
            seen[name] = stream.wait_until(lambda watched: watched.figures["tiny"]["requests"] == 2)

    for name, other in (("alice", "bob"), ("bob", "alice")):
        told = str(seen[name].events)
        assert secrets_of[name] in told and secrets_of[other] not in told
        assert {own for _, own in seen[name].requests} == {"shared", ids[name]}
        assert len(seen[name].trees["tiny"]) == len({root for root, _ in seen[name].requests}) == 1
        assert set(seen[name].figures["tiny"]) == {
            *("model", "nodes", "tokens", "tiers", "requests", "prompt_tokens", "cached_tokens", "computed_tokens"),
            *("completion_tokens", "prefill_tokens_per_s"),
        }
    assert seen["alice"].trees["tiny"].keys().isdisjoint(seen["bob"].trees["tiny"])


def test_without_a_key_nothing_is_told(keyed: Address) -> None:
    for headers in ({}, {"x-api-key": "a-wrong-key"}):
        assert httpx.get(f"{keyed.url}/api/events", headers=headers).status_code == 401
