"""What a client asks, as one value for the library and all APIs. Each of them translates its own form to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bough.errors import RequestError
from bough.types import Message, SamplingParams, Tool

ToolMode = Literal["auto", "none", "required"]


@dataclass(frozen=True)
class ToolChoice:
    """Whether the answer may, must not or must call a tool; with `name`, that tool. A grammar enforces `required`."""

    mode: ToolMode = "auto"
    name: str | None = None
    is_single: bool = False  # at most one call

    @classmethod
    def of(cls, choice: str | None, tools: Sequence[Tool]) -> ToolChoice:
        """The choice by its word, or by the name of a tool, which must be called then. Raises RequestError."""
        if choice in (None, "auto"):
            return cls()
        if choice == "none":
            return cls("none")
        names = [tool["function"]["name"] for tool in tools]
        if not names or (choice != "required" and choice not in names):
            known = f"the tools are {', '.join(names)}" if names else "there are no tools"
            raise RequestError(
                f"tool_choice is {choice!r:.80}, and {known}; it may be auto, none, required or a tool's name"
            )
        return cls("required", None if choice == "required" else choice, is_single=True)

    def offer(self, tools: Sequence[Tool]) -> Sequence[Tool]:
        """The tools for the prompt: none, if the model must not call one."""
        return () if self.mode == "none" else tools


@dataclass(frozen=True)
class Ask:
    """One request. Exactly one of `messages` (a chat), `text` (continued without a template) and `ids` is given.

    Messages are those of OpenAI: role, content (text, or parts of type text), and for tools `tool_calls` (with arguments as
    an object), `tool_call_id` and `name`; an assistant's may have `reasoning_content`.
    """

    model: str
    messages: Sequence[Message] | None = None
    text: str | None = None
    ids: Sequence[int] | None = None
    is_message: bool = False  # if the model has a chat template, `text` is a user's message
    params: SamplingParams = field(default_factory=SamplingParams)
    unset: frozenset[str] = frozenset()  # names of `params` that are the API's defaults: the model's own replace them
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    needs_tool_template: bool = False  # refuse tools if the model's chat template does not support them
    context: Sequence[int] = ()  # ids of an earlier prompt and its answer, which the messages continue
    continues_answer: bool = True  # if the last message is an assistant's without tool calls, the answer goes on with it
    may_lack_template: bool = False  # without a chat template the texts of the messages are continued as one text
    think: bool | None = None  # None: the default of the template
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # values for the template
    echoes: bool = False  # return the prompt's text, too
    scores_prompt: bool = False  # return the prompt's log-probabilities, too, as many as `params.logprobs` says
    suffix: str | None = None  # the answer goes between `text` and this
    counts_thinking: bool = False  # return the number of tokens of the thinking; this costs a call of the tokenizer
    keeps_thinking: bool = False  # thinking stays part of the text
    num_choices: int = 1
    first_choice: int = 0  # with a seed, each number of a choice has its own text
    context_tokens: int | None = None  # a smaller context than the model's
    truncates: bool = False  # drop the oldest messages of a chat that is too long, instead of refusing it
    keep_state: bool = True  # False: nothing of the request is kept for reuse
    keep_alive_s: float | None = None  # None: the server's default; inf: for ever; 0: unload afterwards
    salt: str = ""
    template: str | None = None  # a chat template in Jinja instead of the model's own

    @property
    def num_chars(self) -> int:
        """The approximate length of the prompt, in characters or ids."""
        contents = [message.get("content") or "" for message in self.messages or ()]
        parts = [part for content in contents for part in ([content] if isinstance(content, str) else content)]
        texts = [part if isinstance(part, str) else str(part.get("text", "")) for part in parts]
        return sum(map(len, (self.text or "", self.suffix or "", self.ids or (), self.context, *texts)))


def tenant_of(salt: str) -> str:
    """The part that all salts derived from one key share; after a slash comes the client's own refinement."""
    return salt.partition("/")[0]
