"""The messages in an edge of the tree: where each begins, its role, and its first words.

The tree stores tokens only. Chat templates begin a message with a special token that has the role in it (`<|user|>`) or
behind it (`<|im_start|>user`); this module looks for these. A text without them has no messages.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from bough.models.tokenizer import Tokenizer

MOST_AT_EACH_END = 6  # of an edge with more messages only its first and its last are listed
_HEADER_TOKENS = 4  # the most tokens of a role behind its special token
_WORDS_TOKENS = 32
_WORDS_CHARACTERS = 80

_OPENERS = {"im_start", "start_header_id", "start_of_turn", "turn", "start", "start_of_role"}
_ROLES = {
    **dict.fromkeys(("system", "developer", "system_prompt"), "system"),
    **dict.fromkeys(("user", "human", "inst"), "user"),
    **dict.fromkeys(("assistant", "model", "/inst"), "assistant"),
    **dict.fromkeys(("tool", "tools", "functions", "ipython", "observation", "tool_results", "tool_response"), "tool"),
}

EdgeMessage = tuple[int, str | None, str]
"""Offset in the edge, role, first words.

The role is None for what an earlier edge has begun, and "" if it is an unknown one or the edge ends before it.
"""


class MessageFinder:
    """Finds messages by one tokenizer. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        names = {
            index: _name_of(tokenizer.token_bytes(index).decode("utf-8", "replace")) for index in tokenizer.special_ids
        }
        self._names = {index: name for index, name in names.items() if name in _OPENERS or name in _ROLES}
        self._is_marker = np.zeros(max(self._names, default=0) + 2, dtype=bool)  # by id; the last is for any other
        self._is_marker[list(self._names)] = True

    def find(self, edge: bytes) -> list[EdgeMessage]:
        """The messages in an edge of packed ids; none if no message begins in it. Costs a scan and few words."""
        ids, other = np.frombuffer(edge, dtype=np.int32), len(self._is_marker) - 1
        starts = np.flatnonzero(self._is_marker[np.where((ids < 0) | (ids > other), other, ids)]).tolist()
        if not starts:
            return []
        if len(starts) > 2 * MOST_AT_EACH_END:
            starts = [*starts[:MOST_AT_EACH_END], *starts[-MOST_AT_EACH_END:]]
        begun = [] if starts[0] == 0 else [(0, None, _shorten(self._read_words(ids)))]
        return [*begun, *(self._read(ids, start) for start in starts)]

    def _read_words(self, ids: NDArray[np.int32]) -> str:
        """The text of the first tokens, up to the next message."""
        said = [index for index in ids[: _HEADER_TOKENS + _WORDS_TOKENS].tolist() if index >= 0]  # below 0 is no text
        end = next((at for at, index in enumerate(said) if index in self._names), len(said))
        return self._tokenizer.decode(said[:end])

    def _read(self, ids: NDArray[np.int32], start: int) -> EdgeMessage:
        name, text = self._names[int(ids[start])], self._read_words(ids[start + 1 :]).lstrip()
        if name in _OPENERS:
            found = re.match(r"[A-Za-z_]+", text)
            name = found[0].lower() if found else ""
            text = text[len(name) :].lstrip()
        role = _ROLES.get(name, "")
        if role == "user" and text.startswith("<tool_response>"):
            role = "tool"  # some templates write results as the user's
        return start, role, _shorten(text.strip())


def _shorten(text: str) -> str:
    return f"{text[: _WORDS_CHARACTERS - 1]}…" if len(text) > _WORDS_CHARACTERS else text


def _name_of(token: str) -> str:
    """The word of a special token: `im_start` of `<|im_start|>`."""
    return re.sub(r"[^a-z_/]", "", token.lower()).removesuffix("_token").strip("_")
