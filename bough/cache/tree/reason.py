"""Why a restore point exists: tree and disk both know these numbers, and trees on disk keep them."""

from __future__ import annotations

from enum import IntEnum


class Reason(IntEnum):
    """Why a restore point exists; a larger one is worth more."""

    MESSAGE = 0  # a message boundary
    LAST_USER = 1  # the start of the last user message
    PROMPT_END = 2  # one token before the end of a prompt
    END = 3  # where a lane came to rest
    BRANCH = 4  # where paths part
    SYSTEM = 5  # the end of system text and tools


REASONS = frozenset(map(int, Reason))
