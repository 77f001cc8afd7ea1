"""The items of an OpenAI response, and their events. Whole and streamed responses are written by the same class.

Always true: the sequence numbers are 0, 1, 2, …; at most one item is open; every item that was added is done before the
response ends, unless it fails.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from bough.server.apis.answering import write_logprobs
from bough.server.apis.openai.wire import LEAST_LOGPROB, count, make_id, write_loop
from bough.server.http.errors import to_http_error
from bough.server.http.streaming import to_json
from bough.server.serving.answer import Delta, Finished, ScoredToken, Started
from bough.types import ToolCall

Item = dict[str, Any]
Event = dict[str, Any]


class ResponseWriter:
    """Writes the events of one response and keeps its items. `echo` has the fields of the request that it repeats."""

    def __init__(self, started: Started, echo: dict[str, Any]) -> None:
        self._started = started
        self._echo = echo
        self._id = make_id("resp_")
        self._created_at = int(time.time())
        self._done: list[Item] = []
        self._open: Item | None = None
        self._waiting: list[ScoredToken] = []  # of tokens whose text is still held back
        self._num_events = 0

    def start(self) -> Iterator[Event]:
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def add(self, delta: Delta | Finished) -> Iterator[Event]:
        self._waiting += delta.logprobs
        if delta.thinking:
            yield from self._grow("reasoning", delta.thinking)
        if delta.text:
            yield from self._grow("message", delta.text)
        for call in delta.tool_calls:
            yield from self._call(call)

    def finish(self, finished: Finished) -> Iterator[Event]:
        """The events that end the response. One without any other item has a message without text."""
        if self._open is None and not any(item["type"] != "reasoning" for item in self._done):
            yield from self._begin("message")
        is_cut = finished.finish_reason in ("length", "loop")
        status = "incomplete" if is_cut else "completed"
        yield from self._close(status)
        loop = write_loop(finished) if finished.finish_reason == "loop" else {}
        reason = {"reason": "max_output_tokens", **loop} if is_cut else None
        more = {"incomplete_details": reason, "completed_at": None if is_cut else int(time.time())}
        response = self._response(status, **more, usage=self._usage(finished))
        yield self._event(f"response.{status}", response=response)

    def fail(self, error: Exception) -> Event:
        """The event that ends a response that failed half-way."""
        http_error = to_http_error(error)
        code = "rate_limit_exceeded" if http_error.status == 429 else "server_error"
        details = {"code": code, "message": http_error.text}
        return self._event("response.failed", response=self._response("failed", error=details))

    def _grow(self, kind: str, text: str) -> Iterator[Event]:
        if self._open is not None and self._open["type"] != kind:
            yield from self._close("completed")
        if self._open is None:
            yield from self._begin(kind)
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += text
        if kind == "reasoning":
            yield self._event("response.reasoning_text.delta", delta=text, **self._where())
            return
        written = self._take_logprobs()
        part["logprobs"] += written
        yield self._event("response.output_text.delta", delta=text, logprobs=written, **self._where())

    def _begin(self, kind: str) -> Iterator[Event]:
        """Open an item with one part, of which nothing is there yet."""
        if kind == "reasoning":
            self._open = {"id": make_id("rs_"), "type": kind, "summary": [], "content": [], "status": "in_progress"}
            part: Item = {"type": "reasoning_text", "text": ""}
        else:
            self._open = {"id": make_id("msg_"), "type": kind, "role": "assistant", "content": [], "status": "in_progress"}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield self._event("response.output_item.added", output_index=len(self._done), item=_copy(self._open))
        self._open["content"].append(part)
        yield self._event("response.content_part.added", part=_copy(part), **self._where())

    def _close(self, status: str) -> Iterator[Event]:
        """Finish the open item, if there is one."""
        if self._open is None:
            return
        part = self._open["content"][0]
        if self._open["type"] == "reasoning":
            yield self._event("response.reasoning_text.done", text=part["text"], **self._where())
        else:
            part["logprobs"] += self._take_logprobs()
            more = {"text": part["text"], "logprobs": part["logprobs"]}
            yield self._event("response.output_text.done", **more, **self._where())
        yield self._event("response.content_part.done", part=part, **self._where())
        self._open["status"] = status
        yield from self._finish_item(self._open)
        self._open = None

    def _call(self, call: ToolCall) -> Iterator[Event]:
        yield from self._close("completed")
        item = {"id": make_id("fc_"), "type": "function_call", "call_id": call.id, "name": call.name}
        where = {"item_id": item["id"], "output_index": len(self._done)}
        arguments = to_json(call.arguments)
        added = {**item, "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=len(self._done), item=added)
        yield self._event("response.function_call_arguments.delta", delta=arguments, **where)
        yield self._event("response.function_call_arguments.done", arguments=arguments, name=call.name, **where)
        yield from self._finish_item({**item, "arguments": arguments, "status": "completed"})

    def _finish_item(self, item: Item) -> Iterator[Event]:
        yield self._event("response.output_item.done", output_index=len(self._done), item=item)
        self._done.append(item)

    def _take_logprobs(self) -> list[Item]:
        taken, self._waiting = self._waiting, []
        return write_logprobs(taken, LEAST_LOGPROB)

    def _where(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._done), "content_index": 0}

    def _event(self, kind: str, **more: Any) -> Event:
        event = {"type": kind, "sequence_number": self._num_events, **more}
        self._num_events += 1
        return event

    def _usage(self, finished: Finished) -> dict[str, Any]:
        counts = count([finished])
        written = counts.prompt_tokens - counts.matched_tokens if self._started.is_stored else 0
        return {
            "input_tokens": counts.prompt_tokens,
            "input_tokens_details": {"cached_tokens": counts.cached_tokens, "cache_write_tokens": written},
            "output_tokens": counts.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
            "total_tokens": counts.prompt_tokens + counts.completion_tokens,
        }

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        start = {"id": self._id, "object": "response", "created_at": self._created_at, "status": status}
        return {**start, **self._echo, "output": list(self._done), **more}


def _copy(item: Item) -> Item:
    """The item as it is now: what was added to a stream does not change with what comes later."""
    return {key: list(value) if isinstance(value, list) else value for key, value in item.items()}
