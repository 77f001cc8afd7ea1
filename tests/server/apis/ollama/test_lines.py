"""The lines of a stream for Ollama's clients, without a model: what an answer's events come to."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from bough.errors import TimedOut
from bough.server.apis.ollama.answers import LineWriter, write_chat, write_lines, write_response
from bough.server.serving.answer import Delta, Event, Finished, PromptProgress, Started, ToolCall
from bough.tokens import Tokens
from bough.types import Completion, Timings, Usage
from tests.server.scripted_answer import LOOP

CALL = ToolCall("call_1", "add", {"a": 1})
COMPLETION = Completion("Yes.", (7, 8), "stop", Usage(10, 6, 6, 4, 2), Timings(prefill_s=0.25, decode_s=0.5, total_s=0.75))


class ScriptedAnswer:
    """An answer with these events, which may end in an error."""

    started = Started(Usage(10), load_s=1.5, prompt=Tokens.of((1, 2)))

    def __init__(self, *events: Event | Exception) -> None:
        self._events = events

    async def batches(self) -> Any:
        for event in self._events:
            if isinstance(event, Exception):
                raise event
            yield [event]


def lines_of(answer: Any, writer: LineWriter) -> list[dict[str, Any]]:
    async def collect() -> list[dict[str, Any]]:
        return [json.loads(line) async for line in write_lines(answer, writer)]

    return asyncio.run(collect())


def finish(text: str = "Yes.", thinking: str = "", *calls: ToolCall) -> Finished:
    return Finished(0, text, thinking, calls, "tool_calls" if calls else "stop", COMPLETION)


def test_what_goes_wrong_on_the_way_is_the_last_line():
    answer = ScriptedAnswer(Delta(text="Ye"), TimedOut("the request took longer than 1 s"))

    first, last = lines_of(answer, LineWriter("m", write_chat))

    assert first["message"] == {"role": "assistant", "content": "Ye"}
    assert last == {"error": "the request took longer than 1 s"}


def test_a_piece_without_text_makes_no_line():
    answer = ScriptedAnswer(PromptProgress(1, 2), Delta(), Delta(text="Yes."), finish())

    assert len(lines_of(answer, LineWriter("m", write_chat))) == 2


def test_thinking_and_calls_have_their_own_fields():
    answer = ScriptedAnswer(Delta(thinking="Hm."), Delta(tool_calls=(CALL,)), finish("", "Hm.", CALL))

    thought, called, last = lines_of(answer, LineWriter("m", write_chat))

    assert thought["message"]["thinking"] == "Hm."
    assert called["message"]["tool_calls"] == [
        {"id": "call_1", "function": {"index": 0, "name": "add", "arguments": {"a": 1}}}
    ]
    assert last["done_reason"] == "stop"


def test_calls_are_numbered_through_the_whole_answer():
    answer = ScriptedAnswer(Delta(tool_calls=(CALL,)), Delta(tool_calls=(CALL, CALL)), finish("", "", CALL))

    *lines, _ = lines_of(answer, LineWriter("m", write_chat))

    assert [[call["function"]["index"] for call in line["message"]["tool_calls"]] for line in lines] == [[0], [1, 2]]


def test_the_last_line_says_that_an_answer_repeated_itself():
    (last,) = lines_of(ScriptedAnswer(LOOP), LineWriter("m", write_chat))

    assert last["done_reason"] == "loop"


def test_the_last_line_counts_cached_tokens_and_measures_in_nanoseconds():
    (last,) = lines_of(ScriptedAnswer(finish()), LineWriter("m", write_chat))

    assert (last["prompt_eval_count"], last["prompt_eval_cached_count"], last["eval_count"]) == (10, 6, 2)
    assert (last["prompt_eval_duration"], last["eval_duration"]) == (250_000_000, 500_000_000)
    assert last["load_duration"] == 1_500_000_000
    assert last["total_duration"] > 0


@pytest.mark.parametrize(("reason", "num_tokens"), [("stop", 1), ("length", 0)])
def test_an_answer_that_ends_at_once_has_the_token_that_ended_it(reason, num_tokens):
    nothing = Completion("", (), reason, Usage(10, 6, 6, 4, 0))

    (last,) = lines_of(ScriptedAnswer(Finished(0, "", "", (), reason, nothing)), LineWriter("m", write_chat))

    assert (last["eval_count"], last["done_reason"]) == (num_tokens, reason)


def test_a_prompt_is_answered_in_response_and_gives_its_context_back():
    answer = ScriptedAnswer(Delta(text="Yes.", thinking="Hm."), finish())

    first, last = lines_of(answer, LineWriter("m", write_response, gives_context=True))

    assert (first["response"], first["thinking"]) == ("Yes.", "Hm.")
    assert (last["response"], last["context"]) == ("", [1, 2, 7, 8])
