"""From what a client asks for to what a model is given: tools, thinking, the beginning of an answer, and what must fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bough.errors import PromptTooLong, RequestError
from bough.prompts import Encoded, Prompts
from bough.server.ask import Ask, Tool
from bough.server.tools import forced_format, prepare
from bough.server.truncation import shorten
from bough.types import Message, SamplingParams

_THINK = "<think>"
_ROOM_TOKENS = 128
"""What is left for an answer of unknown length when a chat is shortened."""


@dataclass(frozen=True)
class ModelFacts:
    """What of a loaded model a prompt depends on."""

    name: str
    prompts: Prompts
    context_tokens: int
    knows_tools: bool
    knows_thinking: bool


@dataclass(frozen=True)
class Prepared:
    """A prompt, ready to run, and how to read its answer."""

    encoded: Encoded
    params: SamplingParams
    tools: Mapping[str, Any]  # the parameters of each tool that was offered, by name
    is_forced: bool = False
    splits_thinking: bool = False
    starts_thinking: bool = False


def prepare_ask(ask: Ask, model: ModelFacts, *, sorts_tools: bool = False) -> Prepared:
    """The prompt of an ask. Raises RequestError for what this model cannot do, and PromptTooLong."""
    context = min(ask.context_tokens or model.context_tokens, model.context_tokens)
    encoded = _encode(ask, model, context, sorts_tools)
    params = _bounded(ask, encoded, context)
    offered = ask.tools if ask.tool_choice.mode != "none" else ()
    forced = forced_format(ask.tools, ask.tool_choice)
    splits = (ask.messages is not None or ask.is_chat) and model.knows_thinking
    return Prepared(
        encoded,
        params if forced is None else replace(params, format=forced),
        {tool["function"]["name"]: tool["function"].get("parameters") for tool in offered},
        is_forced=forced is not None,
        splits_thinking=splits,
        starts_thinking=splits and model.prompts.decode(encoded.ids[-8:]).rstrip().endswith(_THINK),
    )


def _encode(ask: Ask, model: ModelFacts, context: int, sorts_tools: bool) -> Encoded:
    if ask.messages is not None:
        return _encode_chat(ask, model, context, sorts_tools)
    prompt = ask.text if ask.text is not None else list(ask.ids or ())
    encoded = model.prompts.encode(prompt, raw=True)
    limit = context - _room(ask, context)
    if ask.truncates and len(encoded.ids) > limit:
        return Encoded(encoded.ids[-limit:])
    return encoded


def _encode_chat(ask: Ask, model: ModelFacts, context: int, sorts_tools: bool) -> Encoded:
    assert ask.messages is not None
    if ask.tools and ask.needs_tool_template and not model.knows_tools:
        raise RequestError(f"{model.name} does not support tools")
    if ask.think and not model.knows_thinking:
        raise RequestError(f'"{model.name}" does not support thinking')
    tools = sorted(ask.tools, key=_name) if sorts_tools else ask.tools
    rendering = _Rendering(ask, model, tools)
    if not ask.truncates:
        return rendering.encode(ask.messages)
    limit = context - _room(ask, context)
    encoded = rendering.encode(shorten(ask.messages, limit, rendering.count, rendering.cut))
    excess = len(encoded.ids) - limit
    if excess > 0:  # special tokens in the text, which count as one and are encoded letter by letter
        encoded = rendering.encode(shorten(ask.messages, limit - excess, rendering.count, rendering.cut))
    return encoded


@dataclass(frozen=True)
class _Rendering:
    """How the messages of one ask are encoded."""

    ask: Ask
    model: ModelFacts
    tools: Sequence[Tool]

    def encode(self, messages: Sequence[Message]) -> Encoded:
        prompt, options = self._given(messages)
        return self.model.prompts.encode(prompt, **options)

    def count(self, messages: Sequence[Message]) -> int:
        """How many tokens the prompt has, about: special tokens in the text count as one."""
        prompt, options = self._given(messages)
        return self.model.prompts.count(prompt, **options)

    def _given(self, messages: Sequence[Message]) -> tuple[list[Message], dict[str, Any]]:
        """The messages for the template, and its options."""
        given = prepare(messages, self.tools, self.ask.tool_choice, template_knows_tools=self.model.knows_tools)
        options: dict[str, Any] = {"tools": given.tools}
        if self.ask.think is not None and self.model.knows_thinking:
            options["enable_thinking"] = self.ask.think
        if not _has_begun(messages):
            return given.messages, options
        begun = _text_of(given.messages[-1]).rstrip()  # blanks at its end would mislead the model
        return given.messages[:-1], options | {"prefill": begun}

    def cut(self, text: str, num_tokens: int) -> str:
        """A text without about so many tokens at its beginning."""
        tokenizer = self.model.prompts.tokenizer
        return tokenizer.decode(tokenizer.encode(text)[num_tokens + 1 :])


def _has_begun(messages: Sequence[Message]) -> bool:
    """Whether the last message is the beginning of the answer."""
    return len(messages) > 1 and messages[-1].get("role") == "assistant" and not messages[-1].get("tool_calls")


def _text_of(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)


def _bounded(ask: Ask, encoded: Encoded, context: int) -> SamplingParams:
    """The parameters with a length that fits the context. Raises PromptTooLong."""
    room, wanted = context - len(encoded.ids), ask.params.max_tokens
    if room < 1 and wanted != 0:
        raise PromptTooLong(len(encoded.ids), context)
    if ask.context_tokens is None:
        return ask.params
    return replace(ask.params, max_tokens=room if wanted is None else min(wanted, room))


def _room(ask: Ask, context: int) -> int:
    wanted = ask.params.max_tokens
    return max(1, min(_ROOM_TOKENS if wanted is None else wanted, context // 4))


def _name(tool: Tool) -> str:
    return str(tool["function"]["name"])
