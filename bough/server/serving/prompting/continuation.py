"""Chats that continue from a context: the ids of an earlier prompt and its answer, which the client keeps.

The ids of an answer have no end-of-turn token, so the prompt that follows them begins by ending that turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bough.errors import PromptTooLong, RequestError
from bough.models.encoder import UNLIMITED, PromptLimit
from bough.models.prompts import Prompts
from bough.types import Message

_QUESTION: Message = {"role": "user", "content": "Hello"}
_ANSWER = "Yes"


def continue_context(
    prompts: Prompts,
    context: Sequence[int],
    messages: Sequence[Message],
    limit: PromptLimit = UNLIMITED,
    **options: Any,
) -> list[int]:
    """A prompt that goes on from a context: its ids, the end of that answer, and these messages.

    The options are those of the template. If it does not let a turn stand apart from those before it, the messages follow
    as a chat of their own. Raises PromptTooLong and RequestCancelled, as the limit says.
    """
    begun = list(prompts.encode([_QUESTION], prefill=_ANSWER).ids)
    try:
        chat = [_QUESTION, {"role": "assistant", "content": _ANSWER}, *messages]
        whole = list(prompts.encode(chat, limit=limit, **options).ids)
    except PromptTooLong:
        raise
    except RequestError:  # some templates allow no system message on the way
        whole = []
    is_apart = whole[: len(begun)] == begun
    return [*context, *(whole[len(begun) :] if is_apart else prompts.encode(messages, limit=limit, **options).ids)]
