"""`bough tree --live`: events are mirrored and drawn; a real server is watched, goes away, and is waited for."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from bough.cli.client import Client
from bough.cli.live.frame import draw_frame, draw_request
from bough.cli.live.mirror import MOST_ENDED, Mirror
from bough.cli.live.views import JsonLines, RequestLines
from bough.cli.live.watch import watch
from bough.cli.terminal.screen import Screen
from bough.config import Settings
from tests.models.web_server import Site, serving
from tests.server.servers import Server, make_chat_folder, running, stop
from tests.waiting import wait_until

MODEL = {"model": "tiny", "context_tokens": 2048, "engine": "torch", "device": "CPU", "is_default": True}
FIGURES = {
    "model": "tiny",
    "nodes": 2,
    "tokens": 30,
    "tiers": {"device": {"bytes": 2**20, "budget_bytes": 2**30}, "disk": {"bytes": 2**21, "budget_bytes": 2**31}},
    "lane_bytes": 2**22,
    "lanes": 8,
    "busy_lanes": 1,
    "queue": 3,
    "prompt_tokens": 200,
    "cached_tokens": 150,
}


def node(key: int, parent: int | None, start: int, end: int, **other: Any) -> dict[str, Any]:
    told = {"node": key, "parent": parent, "start": start, "end": end, "text": f"text of {key}", "bytes": 2**20}
    rest = {"pages": 1, "tiers": {"device": 1}, "points": [], "kept": [], "in_use": False, "hits": 0, "last_used": key}
    return told | rest | other


def tree(*nodes: dict[str, Any], gone: tuple[int, ...] = (), reset: bool = False, more: bool = False) -> dict[str, Any]:
    return {"model": "tiny", "reset": reset, "roots": [{"root": "", "nodes": nodes, "gone": gone}], "more": more}


def request(request_id: str, state: str, **other: Any) -> dict[str, Any]:
    told = {"id": request_id, "model": "tiny", "root": "", "state": state, "prompt_tokens": 100, "cached_tokens": 20}
    told |= {"done_tokens": 60, "completion_tokens": 0, "node": None, "queue_s": 0.0}
    return told | {"first_token_s": None, "total_s": 1.0, "without_s": None} | other


def mirror(*events: tuple[str, dict[str, Any]]) -> Mirror:
    made = Mirror()
    for name, data in (("models", {"models": [MODEL]}), ("figures", FIGURES), *events):
        made.apply(name, data)
        made.check()
    return made


def draw(made: Mirror, width: int = 120, height: int = 40) -> list[str]:
    return [line.plain for line in draw_frame(made, "http://box", width, height)]


def keys(made: Mirror) -> set[int]:
    return set(made.trees["tiny"].get("", {}))


def test_a_tree_that_comes_in_pieces_is_whole_after_the_last():
    made = mirror(("tree", tree(node(2, 1, 10, 20), reset=True, more=True)))
    assert made.is_partial

    made.apply("tree", tree(node(1, None, 0, 10)))

    made.check()
    assert not made.is_partial and keys(made) == {1, 2}


def test_changes_replace_nodes_and_remove_those_that_are_gone():
    made = mirror(
        ("tree", tree(node(1, None, 0, 10), node(2, 1, 10, 20), reset=True)),
        ("tree", tree(node(3, None, 0, 4), node(1, 3, 4, 10, hits=7), gone=(2,))),
    )

    assert keys(made) == {1, 3}
    assert made.trees["tiny"][""][1].hits == 7


def test_a_reset_forgets_what_was_told_before():
    made = mirror(("tree", tree(node(1, None, 0, 10), reset=True)), ("tree", tree(node(9, None, 0, 3), reset=True)))

    assert keys(made) == {9}


def test_the_tree_and_the_figures_of_an_unloaded_model_are_forgotten():
    made = mirror(("tree", tree(node(1, None, 0, 10), reset=True, more=True)), ("models", {"models": []}))

    assert (made.trees, made.figures, made.is_partial) == ({}, {}, False)
    assert "no model is loaded: a request loads one" in draw(made)


def test_requests_that_have_ended_come_last_and_are_bounded():
    ends = [("request", request(f"r{number}", "done")) for number in range(MOST_ENDED + 5)]
    made = mirror(("request", request("late", "computing")), *ends, ("request", request("late", "failed")))

    assert (made.running, len(made.ended)) == ([], MOST_ENDED)
    assert [each.request_id for each in made.ended[:2]] == ["late", f"r{MOST_ENDED + 4}"]


def test_an_event_that_is_not_known_changes_nothing():
    assert mirror(("weather", {"sun": True})) == mirror()


def test_a_frame_tells_requests_figures_and_each_edge_with_its_tier_in_words():
    made = mirror(
        (
            "tree",
            tree(
                node(1, None, 0, 10, kept=[10], points=[4, 10], hits=3),
                node(2, 1, 10, 30, tiers={"disk": 2}, bytes=0, in_use=True),
                reset=True,
            ),
        ),
        ("request", request("req_abcdefghij", "computing", node=2)),
    )

    assert draw(made) == [
        "bough at http://box · Ctrl-C ends",
        "computing  abcdefgh  ███████░░░░░ 60 of 100 prompt tokens · 20 cached · 40 computed",
        "",
        "tiny  torch on CPU · context 2,048 · 1 of 8 lanes busy · 3 waiting · 75 % of 200 prompt tokens reused",
        "2 nodes · 30 tokens · device 1.0 MiB of 1.0 GiB · disk 2.0 MiB of 2.0 GiB · lanes 4.0 MiB",
        "root",
        '└─ [0, 10) "text of 1"  10 tokens · 1 on device · 1.0 MiB · 1 kept · 3 uses · 2 restore points',
        '   └─▶[10, 30) "text of 2"  20 tokens · 2 on disk · in use · 0 uses',
    ]


def test_the_line_of_an_answer_tells_its_first_token_and_what_the_tree_saved():
    told = {"completion_tokens": 7, "first_token_s": 0.25, "without_s": 1.5, "queue_s": 2.0, "done_tokens": 100}
    (found,) = mirror(("request", request("a", "answering", **told))).running

    assert draw_request(found, 200).plain.split("  ")[-1].strip() == (
        "100 prompt tokens · 20 cached · 80 computed · 7 answered · "
        "first token 250 ms, without the tree about 1.50 s · waited 2.00 s"
    )


def test_without_room_for_all_nodes_the_paths_of_requests_and_the_last_used_are_shown():
    others = [node(key, 1, 10, 20 + key) for key in range(3, 100)]
    old = node(2, 1, 10, 20, last_used=0)
    made = mirror(
        ("tree", tree(node(1, None, 0, 10, last_used=0), old, *others, reset=True)),
        ("request", request("a", "answering", node=2)),
    )

    lines = draw(made, height=14)

    assert len(lines) == 14 and lines[-1] == "… and 92 more nodes"
    assert [line.split('"')[1] for line in lines if "text of" in line] == [
        f"text of {key}" for key in (1, 2, 95, 96, 97, 98, 99)
    ]


@pytest.mark.parametrize("width", [20, 47, 80, 200])
@pytest.mark.parametrize("height", [1, 5, 12, 60])
def test_no_frame_is_larger_than_the_screen(width, height):
    deep = [node(key, key - 1 or None, 10 * (key - 1), 10 * key, text="雪 and more " * 9) for key in range(1, 40)]
    requests = [("request", request(f"r{number}", "computing", node=39)) for number in range(9)]
    lines = draw_frame(mirror(("tree", tree(*deep, reset=True)), *requests), "http://box", width, height)

    assert len(lines) <= height
    assert max(line.cell_len for line in lines) <= width


def test_a_text_cannot_control_the_terminal():
    made = mirror(
        ("tree", tree(node(1, None, 0, 10, text="\x1b[2J\x9b gone"), reset=True)),
        ("request", request("\x1b]0;", "failed", error="\x1b[31m")),
    )

    assert not any("\x1b" in line or "\x9b" in line for line in draw(made))


def stream(*events: tuple[str, dict[str, Any]]) -> bytes:
    frames = [f"event: {name}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n" for name, data in events]
    return (": \n\n" + ": \n\n".join(frames)).encode()


def client_of(site: Site) -> Client:
    return Client(Settings(), site.url)


class Enough(Exception):
    pass


def test_waits_become_longer_while_the_server_is_gone(capsys):
    waits: list[float] = []
    with ExitStack() as held:
        site = held.enter_context(serving(Site(files={"/api/events": stream(("hello", {}))})))

        def wait(wait_s: float) -> None:
            waits.append(wait_s)
            held.close()
            if len(waits) == 7:
                raise Enough

        with pytest.raises(Enough):
            watch(lambda: client_of(site), JsonLines(Screen()), None, wait=wait)

    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    shown = capsys.readouterr()
    assert shown.out == '{"event": "hello", "data": {}}\n'
    assert f"the server at {site.url} has ended: trying again in 0.5 s" in shown.err


def test_in_a_pipe_there_is_a_line_for_each_state_of_a_request(capsys):
    text = "\u2028 is no end of a line"
    states = [request("a", "computing"), request("a", "computing", done_tokens=90), request("a", "failed", error=text)]
    site = Site(files={"/api/events": stream(("hello", {}), *(("request", each) for each in states))})

    def wait(wait_s: float) -> None:
        raise Enough

    with serving(site), pytest.raises(Enough):
        watch(lambda: client_of(site), RequestLines(Screen()), None, wait=wait)

    lines = capsys.readouterr().out.split("\n")
    assert [line.split()[0] for line in lines if line] == ["computing", "failed"]
    assert "is no end of a line" in lines[1]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("live")
    folder = make_chat_folder(home / "tiny")
    with running(str(folder), home, engine="torch", data_folder=home / "data", keep_alive="never") as server:
        yield server


def read_until(lines: Iterator[str], event: str, made: Mirror) -> dict[str, Any]:
    """Take in events up to one of this name."""
    for line in lines:
        found = json.loads(line)
        made.apply(found["event"], found["data"])
        made.check()
        if found["event"] == event:
            return dict(found["data"])
    raise AssertionError(f"the events ended without {event}")


def test_a_real_server_is_mirrored_until_it_ends_and_ctrl_c_ends_the_command(served, tmp_path: Path):
    messages = [{"role": "user", "content": "hello there"}]
    body = {"model": "tiny", "messages": messages, "stream": False, "options": {"num_predict": 2}}
    command = [sys.executable, "-m", "bough", "tree", "tiny:latest", "--live", "--json", "--url", served.url]
    with (
        (tmp_path / "notes").open("w+") as notes,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=notes, text=True) as process,
    ):
        assert process.stdout is not None
        lines, made = iter(process.stdout), Mirror()
        assert read_until(lines, "hello", made)["scope"] == "all"
        assert httpx.post(f"{served.url}/api/chat", json=body, timeout=60).status_code == 200
        while not made.ended or not made.trees.get("tiny"):
            read_until(lines, "request" if not made.ended else "tree", made)

        frame = "\n".join(draw(made, width=400))
        assert "hello there" in frame and "on device" in frame
        assert "done " in frame and "2 answered" in frame

        stop(served)
        wait_until(lambda: process.poll() is not None or "trying again" in (tmp_path / "notes").read_text())
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130


def test_without_a_server_one_line_says_how_to_start_one(invoke, monkeypatch):
    monkeypatch.setenv("BOUGH_PORT", "9")

    result = invoke("tree", "--live")

    assert (result.exit_code, result.stderr) == (1, "error: no server at http://127.0.0.1:9; `bough serve` starts one\n")


def test_a_live_tree_is_not_that_on_disk(invoke):
    assert invoke("tree", "--live", "--local").exit_code == 2
