"""Single nodes over HTTP: read, keep and evict them by the numbers that the event stream tells."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.apis.bough.test_events import chat, nodes_of
from tests.server.event_stream import watching
from tests.server.load import wait_until_at_rest
from tests.server.servers import Address

SHARED = "all of these texts begin in the same way, "


@pytest.fixture
def client(served: Address) -> Iterator[httpx.Client]:
    """A client of a server with two texts that share their beginning."""
    wait_until_at_rest(served)  # what still runs for a client that has gone would come into the tree after it was cleared
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


@pytest.mark.parametrize("route", ["/api/cache/nodes/keep", "/api/cache/nodes/pin"])  # the present name, and an earlier one
def test_a_node_that_is_kept_stays_marked_until_it_is_no_longer(client: httpx.Client, route: str) -> None:
    *_, tail = read_tree(client)
    body = {"node": tail["node"]}

    kept = client.post(route, json=body).json()
    marked = client.get("/api/cache/nodes", params=body).json()["kept"]
    no_longer = client.post(route, json=body | {"kept": False}).json()

    counts = {"kept_tokens": tail["end"], "pinned_tokens": tail["end"]}
    assert kept == {"model": "tiny", "root": "", **body, "kept": True, **counts}
    assert marked == [tail["end"]]
    assert no_longer["kept"] is False and no_longer["kept_tokens"] == no_longer["pinned_tokens"] == 0
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
    for path in ("keep", "evict"):
        answer = client.post(f"/api/cache/nodes/{path}", json={"node": 2**40})
        assert answer.status_code == 404 and str(2**40) in answer.json()["error"]
        assert client.post(f"/api/cache/nodes/{path}", json={"node": 0}).status_code == 400
        assert client.post(f"/api/cache/nodes/{path}", json={"node": "1"}).status_code == 400
    assert client.get("/api/cache/nodes", params={"node": 2**40}).status_code == 404
    for wrong in (-1, 2**63, "x"):
        assert client.get("/api/cache/nodes", params={"node": wrong}).status_code == 400


def test_a_key_reaches_no_node_of_another(keyed: Address) -> None:
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
            bob.post("/api/cache/nodes/keep", json=body),
            bob.post("/api/cache/nodes/evict", json=body),
        ]

        assert [each.status_code for each in refused] == [404] * 3
        assert "Alice" not in "".join(each.text for each in refused)
        assert alice.get("/api/cache/nodes", params=body).json()["root"] == root
        assert httpx.get(f"{keyed.url}/api/cache/nodes", params=body).status_code == 401
