"""Both trace formats are read into the same form, and what cannot be read says where."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from bough.errors import RequestError
from bough.replay.trace import Trace, TraceRequest
from bough.replay.trace_file import TOOLS, read_trace
from bough.types import Boundary, Mark


def row(timestamp: int, input_length: int, output_length: int, hash_ids: list[int]) -> str:
    fields = {"timestamp": timestamp, "input_length": input_length, "output_length": output_length}
    return json.dumps(fields | {"hash_ids": hash_ids})


def write(folder: Path, *lines: str) -> Path:
    file = folder / "trace.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


def test_a_reply_has_the_ids_that_the_next_turn_shows_and_else_ids_of_its_own(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        row(0, 1100, 500, [1, 2, 3]),  # two full blocks, and three with the reply
        row(1500, 1024, 600, [1, 9]),  # the same, but nobody goes on from there
        row(2000, 1030, 600, [1, 2, 7]),  # goes on from the first, but is too short to show its reply
        row(2500, 1700, 400, [1, 2, 8, 4]),
    )

    trace = read_trace(file)

    assert (trace.name, trace.block_tokens) == ("trace.jsonl", 512)
    assert trace.requests == [
        TraceRequest(0.0, 1100, [1, 2], [1, 2, 8]),
        TraceRequest(1.5, 1024, [1, 9], [1, 9, 10**12]),
        TraceRequest(2.0, 1030, [1, 2], [1, 2, 8]),
        TraceRequest(2.5, 1700, [1, 2, 8], [1, 2, 8, 10**12 + 1]),
    ]


def test_a_prompt_of_less_than_a_block_stores_only_fresh_blocks(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, row(0, 100, 1000, [1])))
    assert trace.requests == [TraceRequest(0.0, 100, [], [10**12, 10**12 + 1])]


def test_a_gzipped_trace_is_read_like_a_plain_one(tmp_path: Path) -> None:
    plain = write(tmp_path, row(0, 1024, 0, [1, 2]))
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_trace(packed).requests == read_trace(plain).requests


def run(*messages: tuple[str, str | None], **calls: Any) -> dict[str, Any]:
    return {"traj": [{"role": role, "content": text} | (calls if text is None else {}) for role, text in messages]}


def test_a_message_list_has_a_request_for_each_assistant_message(tmp_path: Path) -> None:
    system, question, answer = ("system", "s" * 200), ("user", "q" * 100), ("assistant", "a" * 100)
    calls = [{"name": "look"}]
    file = tmp_path / "runs.json"
    file.write_text(json.dumps([run(system, question, answer, question, ("assistant", None), tool_calls=calls)]))

    first, second = read_trace(file).requests

    prompt = len(TOOLS) + len("<system><user>") + 300
    assert (first.prompt_tokens, len(first.prompt)) == (prompt // 4, prompt // 64)
    assert len(first.stored) == (prompt + len("<assistant>") + 100) // 64
    assert second.prompt[: len(first.stored)] == first.stored
    assert len(second.stored) == (prompt + len("<assistant><user><assistant>") + 200 + len(json.dumps(calls))) // 64


def test_a_message_list_tells_where_its_system_part_and_its_messages_end_in_blocks(tmp_path: Path) -> None:
    system, question, answer = ("system", "s" * 200), ("user", "q" * 100), ("assistant", "a" * 100)
    file = tmp_path / "runs.json"
    file.write_text(json.dumps([run(system, question, answer, ("tool", "t" * 90), answer)]))

    first, second = read_trace(file).requests

    system_end = len(TOOLS) + len("<system>") + 200
    question_end = system_end + len("<user>") + 100
    tool_end = question_end + len("<assistant><tool>") + 190
    marks = [Boundary(system_end // 64, Mark.SYSTEM_END), Boundary(system_end // 64, Mark.LAST_USER_START)]
    asked = Boundary(question_end // 64, Mark.MESSAGE_END)
    assert list(first.boundaries) == [*marks, asked]
    assert list(second.boundaries) == [*marks, asked, Boundary(tool_end // 64, Mark.MESSAGE_END)]


def test_without_a_system_message_the_system_part_is_the_tools(tmp_path: Path) -> None:
    file = tmp_path / "runs.json"
    file.write_text(json.dumps([run(("assistant", "hello"))]))
    (only,) = read_trace(file).requests
    assert only.boundaries == (Boundary(len(TOOLS) // 64, Mark.SYSTEM_END),)


def test_runs_arrive_at_times_drawn_from_one_seed(tmp_path: Path) -> None:
    file = tmp_path / "runs.json"
    chats = [run(("user", "hello"), ("assistant", "b" * 400)), run(("tool", "x"), ("assistant", "c"))]
    file.write_text(json.dumps(chats))

    chance = random.Random(1)
    first_s = chance.expovariate(1 / 20)
    first_asked_s = first_s + chance.lognormvariate(3.0, 1.0)
    second_asked_s = first_s + chance.expovariate(1 / 20) + chance.lognormvariate(0.7, 0.8)
    trace = read_trace(file)
    assert trace.block_tokens == 16
    assert [request.time_s for request in trace.requests] == sorted([first_asked_s, second_asked_s])


def test_all_runs_share_the_stand_in_for_tools(tmp_path: Path) -> None:
    file = tmp_path / "runs.json"
    file.write_text(json.dumps([run(("user", text * 99), ("assistant", "yes")) for text in "ab"]))
    first, second = (request.stored for request in read_trace(file).requests)
    assert first[:140] == second[:140] == list(range(140))
    assert not {*first[140:]} & {*second[140:]}


def test_renumbering_keeps_what_is_equal_and_counts_from_0() -> None:
    marks = (Boundary(1, Mark.SYSTEM_END),)
    trace = Trace(
        "t", 4, [TraceRequest(0.0, 8, [70, 80], [70, 80, 10**12]), TraceRequest(1.0, 8, [70, 90], [70, 90], marks)]
    )
    first, second = trace.renumbered().requests
    assert (first.prompt, first.stored) == ([0, 1], [0, 1, 2])
    assert second.stored == [0, 3]
    assert (first.boundaries, second.boundaries) == ((), marks)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("7", "line 2: a request is a JSON object, not int"),
        ('{"timestamp": 1}', "line 2: the field 'hash_ids' is missing"),
        (row(0, -1, 5, []), "line 2: lengths of -1 and 5 tokens"),
        (row(0, 1, 5, []).replace("[]", '["a"]'), "line 2: hash_ids must be a list of integers"),
        (row(0, 1, 5, []).replace("5", "null"), "line 2: "),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(RequestError, match=f"trace.jsonl, {message}"):
        read_trace(write(tmp_path, row(0, 512, 0, [1]), line))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1", "line 1: not JSON"),
        ('[{"traj": []}, 3]', "run 2: no list of messages"),
        ('[{"traj": [{"content": "who?"}]}]', "run 1: no list of messages"),
        ("[]", "the trace has 0 requests"),
        ("", "the trace has 0 requests"),
    ],
)
def test_a_message_list_that_cannot_be_read_says_why(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "runs.json"
    file.write_text(text)
    with pytest.raises(RequestError, match=message):
        read_trace(file)


def test_files_that_are_missing_or_damaged_are_errors_with_their_name(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"there is no file .*none\.jsonl"):
        read_trace(tmp_path / "none.jsonl")
    damaged = tmp_path / "damaged.jsonl.gz"
    damaged.write_bytes(gzip.compress(b"{}" * 100)[:-9])
    with pytest.raises(RequestError, match=r"damaged\.jsonl\.gz cannot be read"):
        read_trace(damaged)
    damaged.write_bytes(b"plain text")
    with pytest.raises(RequestError, match=r"damaged\.jsonl\.gz cannot be read"):
        read_trace(damaged)
