"""Splits an answer into text, thinking and tool calls, as its pieces come."""

from __future__ import annotations

from bough.server.serving.ask import Delta, Finished, FinishReason, ToolCall
from bough.server.serving.parsing.thinking import ThoughtSplitter
from bough.server.serving.parsing.tool_calls import CallFinder
from bough.server.serving.prompting.prompt import Prepared
from bough.types import Chunk, Completion


class Sorter:
    """Tells apart what one choice consists of."""

    def __init__(self, prepared: Prepared, choice: int, is_single: bool) -> None:
        self._choice = choice
        self._is_single = is_single
        self._thoughts = ThoughtSplitter(prepared.starts_thinking) if prepared.splits_thinking else None
        self._calls = CallFinder(prepared.tools.keys(), is_forced=prepared.is_forced, schemas=prepared.tools)
        self._text: list[str] = []
        self._thinking: list[str] = []
        self._found: list[ToolCall] = []

    def take(self, chunk: Chunk) -> Delta:
        """A piece of the answer, told apart; what is not certain yet comes later."""
        thinking, text = "", chunk.text
        if self._thoughts is not None:
            thought = self._thoughts.add(chunk.text)
            thinking, text = thought.thinking, thought.text
        return self._keep(thinking, text, chunk, is_end=False)

    def finish(self, completion: Completion) -> tuple[Delta, Finished]:
        """What was held back, and then the whole."""
        thought = self._thoughts.flush() if self._thoughts is not None else None
        thinking, text = (thought.thinking, thought.text) if thought is not None else ("", "")
        last = self._keep(thinking, text, Chunk(""), is_end=True)
        reason: FinishReason = "length" if completion.finish_reason == "length" else "stop"
        return last, Finished(
            self._choice,
            "".join(self._text),
            "".join(self._thinking),
            tuple(self._found),
            "tool_calls" if self._found else reason,
            completion,
        )

    def _keep(self, thinking: str, text: str, chunk: Chunk, *, is_end: bool) -> Delta:
        found = self._calls.add(text)
        text, calls = found.text, list(found.calls)
        if is_end:
            rest = self._calls.flush()
            text, calls = text + rest.text, [*calls, *rest.calls]
        if self._is_single:
            calls = calls[: max(0, 1 - len(self._found))]
        self._text.append(text)
        self._thinking.append(thinking)
        self._found += calls
        return Delta(self._choice, text, thinking, tuple(calls), chunk.logprobs, chunk.token_ids)
