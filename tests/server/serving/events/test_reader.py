"""What waits for a reader: the newest state, never a log, and never more than one tree."""

from __future__ import annotations

import json

from bough.server.serving.events.reader import MOST_REQUESTS, PIECE_NODES, EventReader
from tests.server.watched import Watched


def node(key: int, text: str = "") -> str:
    return json.dumps({"node": key, "text": text})


def read(reader: EventReader, watched: Watched | None = None) -> Watched:
    """Take all that waits for a reader."""
    watched = watched or Watched()
    for event, text in reader.take():
        watched.apply(event, text)
    return watched


def make_reader(salt: str | None = None, model: str | None = None) -> EventReader:
    return EventReader(salt, model, 0.1)


def test_a_later_state_replaces_an_earlier_one_that_was_not_read() -> None:
    reader = make_reader()
    for number in range(3):
        reader.send_tree("m", {"": {1: node(1, f"text {number}")}}, is_reset=False)
        reader.send_request("m", "", "a", json.dumps({"root": "", "id": "a", "state": number}))
        reader.send_figures("m", json.dumps({"model": "m", "requests": number}))
        reader.send_models(json.dumps({"models": [{"model": "m", "number": number}]}))

    watched = read(reader)

    assert [name for name, _ in watched.events] == ["models", "tree", "request", "figures"]
    assert watched.trees["m"][""][1]["text"] == "text 2"
    assert watched.requests["", "a"]["state"] == watched.figures["m"]["requests"] == 2
    assert read(reader).events == []


def test_a_reset_replaces_all_that_waits_and_what_goes_after_it_is_never_told() -> None:
    reader = make_reader()
    reader.send_tree("m", {"": {1: node(1), 2: None}}, is_reset=False)
    reader.send_tree("m", {"": {3: node(3), 4: node(4)}}, is_reset=True)
    reader.send_tree("m", {"": {3: None, 5: node(5)}}, is_reset=False)

    (told,) = read(reader).named("tree")

    assert told["reset"] and not told["more"]
    assert [each["node"] for each in told["roots"][0]["nodes"]] == [4, 5]
    assert told["roots"][0]["gone"] == []


def test_what_is_gone_is_told_by_its_number() -> None:
    reader, watched = make_reader(), Watched()
    reader.send_tree("m", {"": {1: node(1), 2: node(2)}, "other": {3: node(3)}}, is_reset=True)
    read(reader, watched)

    reader.send_tree("m", {"": {1: None}, "other": {3: None}}, is_reset=False)
    read(reader, watched)

    assert {root: set(nodes) for root, nodes in watched.trees["m"].items()} == {"": {2}}


def test_a_large_tree_comes_in_pieces_of_which_the_first_resets_and_the_last_says_that_it_is_the_last() -> None:
    reader = make_reader()
    reader.send_tree("m", {"": {key: node(key) for key in range(2 * PIECE_NODES + 1)}}, is_reset=True)

    watched = read(reader)

    assert [(told["reset"], told["more"]) for told in watched.named("tree")] == [
        (True, True),
        (False, True),
        (False, False),
    ]
    assert len(watched.trees["m"][""]) == 2 * PIECE_NODES + 1


def test_an_empty_tree_is_told_too() -> None:
    reader = make_reader()
    reader.send_tree("m", {}, is_reset=True)

    assert read(reader).named("tree") == [{"model": "m", "reset": True, "roots": [], "more": False}]


def test_a_reader_of_one_salt_is_told_nothing_of_another() -> None:
    reader = make_reader(salt="mine")
    reader.send_tree("m", {"mine": {1: node(1)}, "other": {2: node(2)}}, is_reset=True)
    reader.send_tree("m", {"other": {3: node(3), 2: None}}, is_reset=False)
    reader.send_request("m", "other", "a", "{}")

    (told,) = read(reader).named("tree")

    assert [root["root"] for root in told["roots"]] == ["mine"]
    assert read(reader).events == []


def test_a_reader_of_one_model_is_told_nothing_of_another() -> None:
    reader = make_reader(model="m")
    reader.send_tree("other", {"": {1: node(1)}}, is_reset=True)
    reader.send_request("other", "", "a", "{}")
    reader.send_figures("other", "{}")

    assert read(reader).events == []


def test_requests_of_two_salts_may_have_the_same_id() -> None:
    reader = make_reader()
    for salt in ("a", "b"):
        reader.send_request("m", salt, "same", json.dumps({"root": salt, "id": "same"}))

    assert set(read(reader).requests) == {("a", "same"), ("b", "same")}


def test_of_too_many_requests_those_that_changed_last_are_told() -> None:
    reader = make_reader()
    for number in [*range(MOST_REQUESTS), 0, MOST_REQUESTS]:
        reader.send_request("m", "", str(number), json.dumps({"root": "", "id": str(number)}))

    told = {request_id for _, request_id in read(reader).requests}

    assert len(told) == MOST_REQUESTS
    assert {"0", str(MOST_REQUESTS)} < told and "1" not in told


def test_nothing_of_a_model_that_is_unloaded_waits() -> None:
    reader = make_reader()
    reader.send_tree("m", {"": {1: node(1)}}, is_reset=True)
    reader.send_figures("m", "{}")
    assert reader.num_waiting("m") == 1

    reader.forget_model("m")

    assert reader.num_waiting("m") == 0
    assert read(reader).events == []


def test_an_event_is_written_when_it_is_asked_for() -> None:
    reader = make_reader()
    reader.send_tree("m", {"": {key: node(key) for key in range(2 * PIECE_NODES)}}, is_reset=True)
    frames = reader.take()
    next(frames)

    reader.send_tree("m", {"": {0: node(0, "new")}}, is_reset=False)

    assert len(list(frames)) == 1  # what came meanwhile waits for the next time
    assert read(reader).trees["m"][""][0]["text"] == "new"
