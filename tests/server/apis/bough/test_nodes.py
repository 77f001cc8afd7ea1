"""Single nodes over HTTP: read, pin and evict them by the numbers that the event stream tells."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.apis.bough.test_events import chat, nodes_of
from tests.server.event_stream import watching
from tests.server.servers import Server

SHARED = "all of these texts begin in the same way, "


@pytest.fixture
def client(served: Server) -> Iterator[httpx.Client]:
    """A client of a server with two texts that share their beginning."""
    with httpx.Client(base_url=served.url, timeout=30) as opened:
        opened.delete("/api/cache").raise_for_status()
        for rest in ("and this is one", "but that is another"):
            chat(opened, SHARED + rest)
        yield opened


def read_tree(client: httpx.Client) -> list[dict[str, Any]]:
    """The nodes of the client's tree, parents first."""
    with watching(client) as stream:
        watched = stream.wait_until(lambda watched: watched.trees.get("tiny"))
        (root,) = watched.trees["tiny"]
        return sorted(nodes_of(watched, root), key=lambda node: node["start"])


def test_a_node_is_read_with_all_of_its_text_and_the_text_before_it(client: httpx.Client) -> None:
    head, *tails = read_tree(client)

    found = [client.get("/api/cache/nodes", params={"node": each["node"]}).json() for each in (head, *tails)]

    assert found[0]["text"] == found[0]["path_text"] == SHARED.strip()
    assert found[0]["children"] == 2 and found[0]["model"] == "tiny" and found[0]["idle_s"] >= 0
    for node, told in zip(found[1:], tails, strict=True):
        assert node["path_text"] == found[0]["text"] + node["text"]
        assert {name: node[name] for name in ("start", "end", "bytes", "tiers", "kept")} == {
            name: told[name] for name in ("start", "end", "bytes", "tiers", "kept")
        }


def test_a_node_that_is_pinned_stays_marked_until_it_is_unpinned(client: httpx.Client) -> None:
    *_, tail = read_tree(client)
    body = {"node": tail["node"]}

    pinned = client.post("/api/cache/nodes/pin", json=body).json()
    kept = client.get("/api/cache/nodes", params=body).json()["kept"]
    unpinned = client.post("/api/cache/nodes/pin", json=body | {"kept": False}).json()

    assert pinned == {"model": "tiny", "root": "", **body, "kept": True, "pinned_tokens": tail["end"]}
    assert kept == [tail["end"]]
    assert unpinned["kept"] is False and unpinned["pinned_tokens"] == 0
    assert client.get("/api/cache/nodes", params=body).json()["kept"] == []


def test_a_node_is_evicted_with_all_below_it_and_its_prompt_is_computed_again(client: httpx.Client) -> None:
    head, *tails = read_tree(client)
    before = client.post("/api/cache/explain", json={"prompt": SHARED + "and this is one", "raw": True}).json()

    found = client.post("/api/cache/nodes/evict", json={"node": head["node"]}).json()

    tokens = head["end"] + sum(each["end"] - each["start"] for each in tails)
    assert found["evicted_nodes"] == 3 and found["evicted_tokens"] == tokens and found["left_nodes"] == 0
    after = client.post("/api/cache/explain", json={"prompt": SHARED + "and this is one", "raw": True}).json()
    assert (before["node"], before["root"]) == (min(each["node"] for each in tails), "")
    assert (after["matched_tokens"], after["node"]) == (0, None)


def test_a_node_that_is_not_there_is_not_found_and_a_wrong_number_is_refused(client: httpx.Client) -> None:
    for path in ("pin", "evict"):
        answer = client.post(f"/api/cache/nodes/{path}", json={"node": 2**40})
        assert answer.status_code == 404 and str(2**40) in answer.json()["error"]
        assert client.post(f"/api/cache/nodes/{path}", json={"node": 0}).status_code == 400
        assert client.post(f"/api/cache/nodes/{path}", json={"node": "1"}).status_code == 400
    assert client.get("/api/cache/nodes", params={"node": 2**40}).status_code == 404
    for wrong in (-1, 2**63, "x"):
        assert client.get("/api/cache/nodes", params={"node": wrong}).status_code == 400


def test_a_key_reaches_no_node_of_another(keyed: Server) -> None:
    with (
        httpx.Client(base_url=keyed.url, headers={"x-api-key": "alices-key"}) as alice,
        httpx.Client(base_url=keyed.url, headers={"x-api-key": "bobs-key"}) as bob,
    ):
        chat(alice, "a text of Alice alone")
        root = alice.post("/api/cache/explain", json={"prompt": "a text of Alice alone", "raw": True}).json()["root"]
        (node, *_) = read_tree(alice)
        body = {"node": node["node"], "root": root}

        refused = [
            bob.get("/api/cache/nodes", params=body),
            bob.post("/api/cache/nodes/pin", json=body),
            bob.post("/api/cache/nodes/evict", json=body),
        ]

        assert [each.status_code for each in refused] == [404] * 3
        assert "Alice" not in "".join(each.text for each in refused)
        assert alice.get("/api/cache/nodes", params=body).json()["root"] == root
        assert httpx.get(f"{keyed.url}/api/cache/nodes", params=body).status_code == 401
