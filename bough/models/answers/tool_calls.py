"""Tool calls in the text of an answer.

Always true of a `ToolCallParser`:
- however the text is cut into pieces, the same text and the same calls are returned;
- text without a call is returned unchanged;
- a call has the name of a tool that was offered, and a JSON object as its arguments.

`_Progress` keeps how far each search has come in the text that is held back, so that an answer costs O(its length), in
however many pieces it comes.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from bough.models.answers.partial_json import CutOff, Scan, read_all, read_value
from bough.models.answers.thinking import ThinkingParser, len_undecided
from bough.types import ToolCall

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_CALLS = "[TOOL_CALLS]"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PYTHON_TAG = "<|python_tag|>"
_MARKER = re.compile("|".join(map(re.escape, (_CALL, _CALLS))))
_OPENING = re.compile(r'\[?\s*(?:\{\s*(?:"(?P<key>[^"]*)(?P<closed>")?)?)?')
_NAMING = re.compile(r'\[?\s*\{\s*"name"\s*:\s*"(?P<name>[^"]*)(?P<closed>")?')
_FUNCTION_NAME = re.compile(r"<function=(?P<name>[^>]*)(?P<closed>>)?")
_PARAMETER = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL)
_CALL_KEYS = ("name", "arguments", "parameters", "type", "function", "id")
_BLANKS = re.compile(r"\s*")
_SEPARATORS = re.compile(r"[\s;]*")


@dataclass(frozen=True)
class ToolCallPiece:
    """The certain part of the answer after a piece: text, and then complete calls."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class _Read:
    """The first `length` characters of the held text: calls without ids, or text if there are none."""

    length: int
    calls: tuple[ToolCall, ...] = ()


class _NotACall(Exception):
    """The text is no call, whatever follows."""


class _Incomplete(Exception):
    """The text may become a call when more follows."""


@dataclass
class _Progress:
    """How far reading has come in the held text; reset when the parser returns some of it."""

    whole_end: int = 0  # the end of the last value, if the answer is nothing but calls so far
    whole_calls: list[ToolCall] = field(default_factory=list)  # the calls up to there
    scan: Scan | None = None
    value: _Read | None = None  # found by `scan`
    closing_start: int = 0  # no closing tag that ends the function's call begins before this


class _Stage(Enum):
    FORCED = "the answer is a call by its grammar"
    START = "the whole answer may be calls without markers"
    TEXT = "only markers begin calls"


class ToolCallParser:
    """Splits tool calls from the text of one answer.

    It knows <tool_call> with JSON or with <function=...> in it, [TOOL_CALLS] with a list, and answers that are as a whole a
    list of calls, or calls one after another. `schemas` are the tools' parameters by name: <function=...> needs them,
    because it does not tell texts from numbers. Blanks around calls are dropped unless there is text on both sides.
    """

    def __init__(
        self,
        tool_names: Collection[str],
        *,
        is_forced: bool = False,
        schemas: Mapping[str, Any] | None = None,
        make_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}",
    ) -> None:
        self._names = frozenset(tool_names)
        self._schemas = schemas or {}
        self._make_id = make_id
        self._stage = _Stage.FORCED if is_forced else _Stage.START
        self._held = ""
        self._progress = _Progress()
        self._blanks = ""
        self._has_text = False
        self._has_calls = False

    def add(self, text: str) -> ToolCallPiece:
        """Add the next piece of the answer, and return the part that is certain now."""
        return self._find(text, is_end=False)

    def flush(self) -> ToolCallPiece:
        """Return the text that was held back at the end of the answer, as calls or as text."""
        found = self._find("", is_end=True)
        blanks, self._blanks = self._blanks, ""
        return found if self._has_calls else ToolCallPiece(found.text + blanks, found.calls)

    def _find(self, text: str, is_end: bool) -> ToolCallPiece:
        if not self._names:
            return ToolCallPiece(text)
        held, self._held = self._held, ""
        held += text  # in place, because nothing else refers to it
        self._held = held
        del held
        texts: list[str] = []
        calls: list[ToolCall] = []
        while self._held and (read := self._read(is_end)) is not None:
            taken, self._held = self._held[: read.length], self._held[read.length :]
            self._progress = _Progress()
            calls += [replace(call, id=self._make_id()) for call in read.calls]
            self._has_calls = bool(calls) or self._has_calls
            texts += [] if read.calls else [self._hold_blanks(taken)]
        return ToolCallPiece("".join(texts), tuple(calls))

    def _hold_blanks(self, text: str) -> str:
        """The text up to its last blanks, which are held back until other text follows."""
        text = self._blanks + text
        given = text.rstrip()
        self._blanks = text[len(given) :]
        if self._has_calls and not self._has_text:
            given = given.lstrip()
        self._has_text = self._has_text or bool(given)
        return given

    def _read(self, is_end: bool) -> _Read | None:
        """Read the beginning of the held text; None if it is not certain yet."""
        if self._stage is not _Stage.TEXT:
            try:
                return self._read_whole(is_end)
            except _Incomplete:
                if not is_end:
                    return None
            except _NotACall:
                pass
            self._stage = _Stage.TEXT
        return self._read_text(is_end)

    def _read_whole(self, is_end: bool) -> _Read:
        """Read the whole held text as calls; of a forced answer its one call."""
        progress = self._progress
        while True:
            end = progress.whole_end or self._skip_start()
            if progress.whole_calls:
                end = progress.whole_end = _skip(_SEPARATORS, self._held, end)
                if is_end and end == len(self._held):
                    return _Read(end, tuple(progress.whole_calls))
            value = self._read_json(end)
            if self._stage is _Stage.FORCED:
                self._stage = _Stage.TEXT
                return value
            progress.whole_calls += value.calls
            progress.whole_end = value.length

    def _skip_start(self) -> int:
        """The start of the first value: after blanks and a tag of Llama's."""
        start = _skip(_BLANKS, self._held, 0)
        if self._held.startswith(_PYTHON_TAG, start):
            return _skip(_BLANKS, self._held, start + len(_PYTHON_TAG))
        if _PYTHON_TAG.startswith(self._held[start:]):
            raise _Incomplete
        return start

    def _read_text(self, is_end: bool) -> _Read | None:
        marker = _MARKER.search(self._held)
        if marker is None:
            length = len(self._held) - (0 if is_end else len_undecided(self._held, (_CALL, _CALLS)))
            return _Read(length) if length else None
        if marker.start():
            return _Read(marker.start())
        try:
            return self._read_marked(marker[0], is_end)
        except _Incomplete:
            return _Read(marker.end()) if is_end else None
        except _NotACall:
            return _Read(marker.end())

    def _read_marked(self, marker: str, is_end: bool) -> _Read:
        """Read the calls after the marker at the beginning of the held text."""
        start = _skip(_BLANKS, self._held, len(marker))
        if marker == _CALLS:
            return self._read_json(start)
        if self._held.startswith("<", start):
            return self._read_function(start, is_end)
        read = self._read_json(start)
        end = self._find_end(read.length, is_end)
        return read if end is None else _Read(end, read.calls)

    def _find_end(self, position: int, is_end: bool) -> int | None:
        """The end of the closing tag that follows; None if other text follows. The last one may be missing."""
        start = _skip(_BLANKS, self._held, position)
        if self._held.startswith(_CALL_END, start):
            return start + len(_CALL_END)
        if not _CALL_END.startswith(self._held[start:]):
            return None
        if is_end:
            return len(self._held)
        raise _Incomplete

    def _read_json(self, start: int) -> _Read:
        progress = self._progress
        if progress.scan is None or progress.scan.start != start:
            progress.scan, progress.value = Scan(start), None
        if progress.value is not None:
            return progress.value
        if not self._may_open(start):
            raise _NotACall
        if not progress.scan.is_due(self._held):
            raise _Incomplete
        try:
            found = read_value(self._held, start)
            progress.value = _Read(found.end, tuple(self._calls_in(found.value)))
            return progress.value
        except CutOff as error:
            raise _Incomplete from error
        except ValueError as error:
            raise _NotACall from error

    def _may_open(self, start: int) -> bool:
        """Whether the text from `start` may be a call, by its first key, and if that is the name, its value."""
        opening = _OPENING.match(self._held, start)
        assert opening is not None
        if opening.end() < len(self._held) and not opening["closed"]:
            return False
        if not _may_be(opening, "key", _CALL_KEYS):
            return False
        naming = _NAMING.match(self._held, start)
        return naming is None or _may_be(naming, "name", self._names)

    def _calls_in(self, value: Any) -> list[ToolCall]:
        if isinstance(value, list) and value:
            return [call for each in value for call in self._calls_in(each)]
        if not isinstance(value, dict):
            raise _NotACall
        inner = value["function"] if isinstance(value.get("function"), dict) else value
        arguments = inner.get("arguments", inner.get("parameters"))
        if isinstance(arguments, str):  # some models write JSON within a string
            try:
                arguments = read_all(arguments)
            except ValueError as error:  # also if they are cut off: the string itself is not
                raise _NotACall from error
        name = inner.get("name")
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            raise _NotACall
        return [ToolCall("", name, arguments)]

    def _read_function(self, start: int, is_end: bool) -> _Read:
        """Read a call whose arguments are between tags of their own."""
        opening = _FUNCTION_NAME.match(self._held, start)
        if opening is None:
            raise _Incomplete if _FUNCTION.startswith(self._held[start:]) else _NotACall
        if not _may_be(opening, "name", self._names):
            raise _NotACall
        closing = self._held.find(_FUNCTION_END, max(opening.end(), self._progress.closing_start))
        while closing >= 0:
            self._progress.closing_start = closing
            end = self._find_end(closing + len(_FUNCTION_END), is_end)
            if end is not None:
                name, schema = opening["name"], self._schemas.get(opening["name"])
                found = _PARAMETER.findall(self._held[opening.end() : closing])
                return _Read(end, (ToolCall("", name, {key: _typed(text, schema, key) for key, text in found}),))
            closing = self._held.find(_FUNCTION_END, closing + 1)
        self._progress.closing_start = max(opening.end(), len(self._held) - len(_FUNCTION_END) + 1)
        raise _Incomplete


def find_calls(text: str, tools: Iterable[Mapping[str, Any]], *, starts_thinking: bool = False) -> tuple[ToolCall, ...]:
    """The calls of these tools, in OpenAI's format, in a whole answer. Calls in its thinking do not count.

    `starts_thinking`: the prompt opened the thinking, so that the answer begins inside.
    """
    functions = [tool.get("function", tool) for tool in tools]
    schemas = {each["name"]: each.get("parameters") for each in functions if isinstance(each.get("name"), str)}
    thinking = ThinkingParser(starts_thinking)
    answer = thinking.add(text).text + thinking.flush().text
    parser = ToolCallParser(schemas.keys(), schemas=schemas)
    return (*parser.add(answer).calls, *parser.flush().calls)


def _may_be(match: re.Match[str], group: str, words: Iterable[str]) -> bool:
    """Whether a word, of which more may follow, can be one of these."""
    found = match[group]
    return found is None or any(word == found if match["closed"] else word.startswith(found) for word in words)


def _skip(pattern: re.Pattern[str], text: str, start: int) -> int:
    match = pattern.match(text, start)
    assert match is not None
    return match.end()


def _typed(text: str, schema: Any, key: str) -> Any:
    """The value of a parameter: its text if the schema wants a string, or else the JSON in it."""
    for step in ("properties", key, "type"):
        schema = schema.get(step) if isinstance(schema, Mapping) else None
    if schema == "string":
        return text
    try:
        return read_all(text)
    except ValueError:
        return text
