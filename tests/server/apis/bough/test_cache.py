"""The tree over HTTP, on a running server."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from bough.config import Settings
from bough.errors import Unavailable
from bough.server.log_format import JsonFormatter
from bough.server.serving.transfers import make_file, require_room
from bough.system.resources import free_disk_bytes
from tests.cache.admin.members import read_members, write_members
from tests.server.servers import Address
from tests.waiting import wait_until

SYSTEM = "You are a helpful assistant, and the capital of France is Paris. "


@pytest.fixture
def client(served: Address) -> Iterator[httpx.Client]:
    """A client of a server whose tree is empty."""
    with httpx.Client(base_url=served.url, timeout=30) as opened:
        opened.delete("/api/cache").raise_for_status()
        yield opened


def messages(text: str = "What is the capital?") -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


def chat(client: httpx.Client, text: str = "What is the capital?", **headers: str) -> dict[str, Any]:
    options = {"num_predict": 4, "temperature": 0}
    body = {"model": "tiny", "messages": messages(text), "stream": False, "options": options}
    answer = client.post("/api/chat", json=body, headers=headers).raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def num_tokens(client: httpx.Client, **headers: str) -> int:
    found: int = client.get("/api/cache", headers=headers).raise_for_status().json()["models"][0]["tokens"]
    return found


def test_the_figures_tell_what_a_chat_left_behind(client: httpx.Client) -> None:
    chat(client)

    found = client.get("/api/cache").json()

    assert found["models"][0]["model"] == "tiny"
    assert found["models"][0]["tokens"] > 0
    assert found["settings"]["disk"] > 0


def test_the_tree_shows_the_text_of_each_edge_and_ids_only_if_asked(client: httpx.Client) -> None:
    chat(client)

    plain, with_ids = (client.get("/api/cache/tree", params={"ids": ids}).json() for ids in (False, True))

    (node,) = plain["roots"][""]
    assert "capital of France" in node["text"]
    assert "token_ids" not in node
    assert len(with_ids["roots"][""][0]["token_ids"]) == node["end"]


def test_the_tree_can_be_drawn(client: httpx.Client) -> None:
    chat(client)

    answer = client.get("/api/cache/tree", params={"format": "text"})

    assert answer.headers["content-type"].startswith("text/plain")
    assert "└─ [0," in answer.text


def test_a_drawing_has_no_more_columns_than_it_may_have(client: httpx.Client) -> None:
    chat(client)

    wide, narrow = (client.get("/api/cache/tree", params={"format": "text", "width": width}).text for width in (400, 50))

    assert SYSTEM.strip() in wide
    assert max(map(len, narrow.splitlines())) <= 50 and SYSTEM.strip() not in narrow
    for width in (39, 1001, "x"):
        assert client.get("/api/cache/tree", params={"format": "text", "width": width}).status_code == 400


def test_a_drawing_has_the_levels_and_the_edges_that_were_asked_for(client: httpx.Client) -> None:
    chat(client, "What else?")
    chat(client, "What now?")

    def draw(**params: int) -> list[str]:
        return client.get("/api/cache/tree", params={"format": "text", **params}).text.splitlines()[1:]

    assert len(draw(depth=1)) == 2 and "branches" in draw(depth=1)[1]
    assert draw(min_tokens=9_999) == ["└─ … 2 ends of fewer than 9,999 tokens"]
    assert client.get("/api/cache/tree", params={"depth": 0}).status_code == 400


def test_a_prompt_is_explained_as_the_chat_would_find_it(client: httpx.Client) -> None:
    chat(client)

    found = client.post("/api/cache/explain", json={"model": "tiny", "messages": messages("What else?")}).json()

    again = chat(client, "What else?")
    assert found["prompt_tokens"] == again["prompt_eval_count"]
    assert 0 < found["cached_tokens"] == again["prompt_eval_cached_count"]
    assert "leaves the tree" in found["reason"] and "system text" not in found["reason"]


def test_an_agents_prompt_that_parts_from_others_before_its_tools_end_is_explained(client: httpx.Client) -> None:
    chat(client)

    body = {"model": "tiny", "messages": [{"role": "system", "content": f"{SYSTEM} You work in /here."}, *messages()[1:]]}
    found = client.post("/api/cache/explain", json=body).json()

    matched, system = found["matched_tokens"], found["system_tokens"]
    assert 0 < matched < system < found["prompt_tokens"]
    assert f"after {matched} tokens, within its system text and tools ({system} tokens)" in found["reason"]


def test_a_text_can_be_explained_by_a_link(client: httpx.Client) -> None:
    found = client.get("/api/cache/explain", params={"prompt": "Hello"}).json()

    assert found["matched_tokens"] == 0


def test_a_warmed_prefix_serves_the_first_chat(client: httpx.Client) -> None:
    warmed = client.post("/api/cache/warm", json={"model": "tiny", "messages": messages()[:1]}).json()

    assert warmed["computed_tokens"] == warmed["prompt_tokens"] > 0
    assert chat(client)["prompt_eval_cached_count"] >= warmed["prompt_tokens"] - 1


def test_what_is_warm_costs_nothing_the_second_time(client: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": "Hello there", "system": SYSTEM}

    first, second = (client.post("/api/cache/warm", json=body).json() for _ in range(2))

    assert second["cached_tokens"] == first["prompt_tokens"] - 1


@pytest.mark.parametrize(("keep", "unkeep"), [("keep", "unkeep"), ("pin", "unpin")])  # present names, and earlier ones
def test_a_known_prefix_can_be_kept_and_then_kept_no_longer(client: httpx.Client, keep: str, unkeep: str) -> None:
    chat(client)
    body = {"model": "tiny", "messages": messages()}

    changed = client.post(f"/api/cache/{keep}", json=body)
    num_kept = client.get("/api/cache").json()["models"][0]["kept"]
    client.post(f"/api/cache/{unkeep}", json=body).raise_for_status()

    assert changed.status_code == 200 and changed.json()["kept"] is True
    assert num_kept == 1
    assert client.get("/api/cache").json()["models"][0]["kept"] == 0


def test_a_prefix_that_is_not_known_cannot_be_kept(client: httpx.Client) -> None:
    answer = client.post("/api/cache/keep", json={"model": "tiny", "messages": messages()})

    assert answer.status_code == 409
    assert "0 of the " in answer.json()["error"]


def test_deleting_forgets_everything(client: httpx.Client) -> None:
    chat(client)
    chat(client, **{"X-Bough-Salt": "team"})

    answer = client.delete("/api/cache", params={"model": "tiny"})

    assert answer.json() == {"cleared": ["tiny"]}
    assert num_tokens(client) == 0
    assert chat(client)["prompt_eval_cached_count"] == 0


def test_deleting_with_a_salt_forgets_that_one_alone(client: httpx.Client) -> None:
    chat(client)
    chat(client, **{"X-Bough-Salt": "team"})

    client.delete("/api/cache", headers={"X-Bough-Salt": "team"}).raise_for_status()

    assert num_tokens(client, **{"X-Bough-Salt": "team"}) == 0
    assert num_tokens(client) > 0


def test_a_tree_can_be_carried_away_and_brought_back(client: httpx.Client, served: Address) -> None:
    chat(client)
    archive = client.post("/api/cache/export", params={"model": "tiny"})
    client.delete("/api/cache").raise_for_status()

    brought = client.post("/api/cache/import", content=archive.content, params={"model": "tiny"})

    assert archive.headers["content-type"] == "application/x-tar"
    assert brought.status_code == 200 and brought.json()["num_items"] > 0
    assert chat(client)["prompt_eval_cached_count"] > 0
    assert list((served.cache_folder / "transfers").iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"junk", b"\0" * 10_240])
def test_what_is_no_archive_is_refused_and_changes_nothing(client: httpx.Client, served: Address, content: bytes) -> None:
    chat(client)
    before = client.get("/api/cache").json()["models"][0]

    answer = client.post("/api/cache/import", content=content)

    assert answer.status_code == 400
    assert str(served.cache_folder) not in answer.text
    after = client.get("/api/cache").json()["models"][0]
    assert [after[name] for name in ("tokens", "tree_bytes")] == [before[name] for name in ("tokens", "tree_bytes")]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": []},
        {"prompt": ""},
        {"prompt": "x", "messages": [{"role": "user", "content": "x"}]},
        {"prompt": "x", "raw": True, "system": "y"},
        {"messages": [{"role": "user", "content": 5}]},
        {"prompt": "x", "tools": [{"type": "function"}]},
    ],
)
@pytest.mark.parametrize("path", ["explain", "warm", "pin"])
def test_a_prefix_that_makes_no_sense_is_refused(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    assert client.post(f"/api/cache/{path}", json=body).status_code == 400


def test_an_unknown_model_is_not_found(client: httpx.Client) -> None:
    answers = [
        client.get("/api/cache/tree?model=none"),
        client.delete("/api/cache?model=none"),
        client.get("/api/cache?model=no"),
    ]

    assert [answer.status_code for answer in answers] == [404] * 3


# With keys


@pytest.fixture
def people(keyed: Address) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """Alice and Bob, who have nothing in the tree yet."""
    with (
        httpx.Client(base_url=keyed.url, timeout=30, headers={"Authorization": "Bearer alices-key"}) as alice,
        httpx.Client(base_url=keyed.url, timeout=30, headers={"x-api-key": "bobs-key"}) as bob,
    ):
        for client in (alice, bob):
            client.delete("/api/cache").raise_for_status()
        yield alice, bob


def test_what_one_key_computed_another_never_reuses(people: tuple[httpx.Client, httpx.Client]) -> None:
    alice, bob = people
    chat(alice)

    assert chat(bob)["prompt_eval_cached_count"] == 0
    assert chat(alice)["prompt_eval_cached_count"] > 0


def test_each_key_sees_and_counts_its_own_tree_alone(people: tuple[httpx.Client, httpx.Client]) -> None:
    alice, bob = people
    secret = f"the number {secrets.randbelow(10**9)}"
    chat(alice, secret)

    seen = [bob.get("/api/cache/tree", params=params) for params in ({}, {"salt": ""}, {"format": "text"})]

    assert all(secret not in answer.text for answer in seen)
    assert secret in alice.get("/api/cache/tree").text
    assert num_tokens(bob) == 0 < num_tokens(alice)


def test_one_key_cannot_empty_the_tree_of_another(people: tuple[httpx.Client, httpx.Client]) -> None:
    alice, bob = people
    chat(alice)

    bob.delete("/api/cache").raise_for_status()
    bob.delete("/api/cache", headers={"X-Bough-Salt": "x"}).raise_for_status()

    assert num_tokens(alice) > 0


def test_a_key_exports_what_is_its_own(people: tuple[httpx.Client, httpx.Client]) -> None:
    alice, bob = people
    chat(alice)

    sizes = [len(client.post("/api/cache/export").raise_for_status().content) for client in (alice, bob)]

    assert sizes[0] > sizes[1]


def test_no_key_is_in_the_log(
    keyed: Address, people: tuple[httpx.Client, httpx.Client], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="bough")
    for client in people:
        chat(client)
    httpx.get(f"{keyed.url}/api/tags", headers={"x-api-key": "a-wrong-key"})

    def read_log() -> str:
        return "\n".join(map(JsonFormatter().format, list(caplog.records)))

    wait_until(lambda: '"path": "/api/tags", "status": 401' in read_log(), describe=read_log)
    assert not any(key in read_log() for key in ("alices-key", "bobs-key", "a-wrong-key"))


@pytest.mark.parametrize(("name", "value"), [("page_tokens", 10**30), ("fingerprint", None), ("format", 1)])
def test_an_archive_that_makes_no_sense_is_refused_and_leaves_no_trace(
    client: httpx.Client, tmp_path: Path, name: str, value: object
) -> None:
    client.post("/api/cache/warm", json={"model": "tiny", "messages": messages()}).raise_for_status()
    archive = tmp_path / "archive.tar"
    archive.write_bytes(client.post("/api/cache/export").raise_for_status().content)
    head, *members = read_members(archive)
    write_members(archive, [replace(head, content=json.dumps(json.loads(head.content) | {name: value}).encode()), *members])

    answer = client.post("/api/cache/import", content=archive.read_bytes())

    assert answer.status_code == 400 and "not an archive of a tree" in answer.text
    assert client.get("/health").json()["disk"] == "ok"
    assert chat(client)["prompt_eval_cached_count"] > 0


def test_a_file_that_vanishes_meanwhile_does_not_keep_another_from_being_made(tmp_path: Path) -> None:
    (tmp_path / "transfers").mkdir()
    (tmp_path / "transfers" / "gone.tar").symlink_to(tmp_path / "nowhere")

    assert make_file(Settings(cache_folder=tmp_path)).read_bytes() == b""


def test_a_body_of_unknown_size_may_fill_the_disk_only_as_far_as_the_settings_allow(tmp_path: Path) -> None:
    free_bytes = free_disk_bytes(tmp_path)
    settings = Settings(cache_folder=tmp_path, disk_free=free_bytes // 2)

    assert require_room(settings, 0) <= free_disk_bytes(tmp_path) - free_bytes // 2
    with pytest.raises(Unavailable, match="must stay free"):
        require_room(settings, free_bytes)
