"""Prompts as users of the library give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bough.errors import RequestError
from bough.models.chat.messages import check_messages, read_calls
from bough.prompting.ask import Ask
from bough.types import Prompt, Tool


def read_prompt(prompt: Prompt, *, raw: bool = False, tools: Sequence[Tool] | None = None, **template_kwargs: Any) -> Ask:
    """The ask of a text, messages, or token ids. Raises RequestError for anything else.

    A text is a user's message if the model has a chat template; with `raw`, or without one, it is continued as it is. All
    messages are part of the prompt, and the answer is the next one.
    """
    known: Any = {"tools": tuple(tools or ()), "template_kwargs": template_kwargs, "continues_answer": False}
    if isinstance(prompt, str):
        return Ask("", text=prompt, is_message=not raw, **known)
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        prompt = _listed(prompt)
    if len(prompt) > 0 and isinstance(prompt[0], Mapping):
        messages: Any = prompt
        return Ask("", messages=read_calls(check_messages(messages)), **known)
    ids: Any = prompt
    return Ask("", ids=ids, **known)


def _listed(prompt: Any) -> list[Any]:
    """The elements of an array or tensor of ids. Raises RequestError for other types."""
    if not hasattr(prompt, "tolist") or isinstance(listed := prompt.tolist(), int | float):
        raise RequestError(f"a prompt is a text, messages, or token ids, not {type(prompt).__name__}")
    return list(listed)
