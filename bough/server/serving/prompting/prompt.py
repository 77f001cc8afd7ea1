"""The prompt of an ask: renders messages, tools and thinking, encodes them, and checks that they fit the context."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from bough.errors import PromptTooLong, RequestError
from bough.generate.request import default_max_tokens
from bough.models.chat.tools import prepare_messages
from bough.models.encoder import PromptLimit
from bough.models.prompts import Encoded, Prompts
from bough.server.serving.ask import Ask, EchoedPrompt
from bough.server.serving.prompting.continuation import continue_context
from bough.server.serving.prompting.echo import make_echo
from bough.server.serving.prompting.tools import forced_format
from bough.server.serving.prompting.truncation import shorten
from bough.system.threads import lower_priority
from bough.types import TO_THE_END, Message, SamplingParams, Tool

Result = TypeVar("Result")

LARGE_CHARS = 2**18  # a prompt of more characters is large
_NUM_THREADS = 4
_ROOM_TOKENS = 128
"""Tokens reserved for an answer of unknown length when a chat is shortened."""

_TOKENS_AROUND, _BYTES_PER_TOKEN = 5, 4
"""For estimates: tokens that a template adds to a message, and bytes per token."""

_SURELY_TOO_LONG = 4  # times the limit: an estimate above this is not tried
_RESYNC_CHARS = 1024  # after a cut in a text, its tokens are the same again within this many characters


@dataclass(frozen=True)
class ModelFacts:
    """The properties of a loaded model that its prompts depend on."""

    name: str
    prompts: Prompts
    context_tokens: int
    knows_tools: bool
    knows_thinking: bool
    has_template: bool = True
    max_tokens: int = 0  # of an answer without a limit of its own; 0: by the context


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt, ready to run, and how to read its answer."""

    encoded: Encoded
    params: SamplingParams
    tools: Mapping[str, Any]  # the parameters of each tool that was offered, by name
    is_forced: bool = False
    splits_thinking: bool = False
    starts_thinking: bool = False
    echo: EchoedPrompt | None = None


def prepare_prompt(
    ask: Ask,
    model: ModelFacts,
    *,
    sorts_tools: bool = False,
    max_tokens: int | None = None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> PreparedPrompt:
    """The prompt of an ask, of at most `max_tokens`, by default what the context holds.

    Raises RequestError for what this model cannot do, PromptTooLong and RequestCancelled.
    """
    ask = _resolve(ask, model, is_cancelled)
    context = min(ask.context_tokens or model.context_tokens, model.context_tokens)
    encoded = _encode(ask, model, PromptLimit(max_tokens or context, is_cancelled), sorts_tools)
    params = _bounded(ask, model, encoded, context)
    offered = ask.tools if ask.tool_choice.mode != "none" else ()
    forced = forced_format(ask.tools, ask.tool_choice)
    splits = (ask.messages is not None or bool(ask.context)) and model.knows_thinking and not ask.keeps_thinking
    return PreparedPrompt(
        encoded,
        params if forced is None else replace(params, format=forced),
        {tool["function"]["name"]: tool["function"].get("parameters") for tool in offered},
        is_forced=forced is not None,
        splits_thinking=splits,
        starts_thinking=splits and model.prompts.starts_thinking(encoded),
        echo=make_echo(ask, encoded.ids, model.prompts.tokenizer) if ask.echoes else None,
    )


def _resolve(ask: Ask, model: ModelFacts, is_cancelled: Callable[[], bool]) -> Ask:
    """The ask with a text instead of messages if the model has no template, and with ids if it continues a context."""
    if ask.messages is None:
        return ask
    if ask.may_lack_template and not model.has_template:
        return replace(ask, messages=None, context=(), text="\n\n".join(map(_text_of, ask.messages)))
    if not ask.context:
        return ask
    options = {} if ask.think is None else {"enable_thinking": ask.think}
    messages, limit = list(ask.messages), PromptLimit(model.context_tokens, is_cancelled)
    if ask.truncates:  # only the end of a longer message is used
        longest = model.context_tokens * model.prompts.tokenizer.encoder.token_bytes
        messages[-1] = {**messages[-1], "content": _text_of(messages[-1])[-longest:]}
        limit = replace(limit, max_tokens=None)
    return replace(ask, messages=None, ids=continue_context(model.prompts, ask.context, messages, limit, **options))


def _encode(ask: Ask, model: ModelFacts, limit: PromptLimit, sorts_tools: bool) -> Encoded:
    if ask.messages is not None:
        return _encode_chat(ask, model, limit, sorts_tools)
    if ask.suffix is not None:
        return _encode_infill(ask, model, limit)
    prompt = ask.text if ask.text is not None else list(ask.ids or ())
    if not ask.truncates:
        return model.prompts.encode(prompt, raw=True, limit=limit)
    kept_tokens = _tokens_for_prompt(ask, limit)
    if isinstance(prompt, str):
        longest = kept_tokens * model.prompts.tokenizer.encoder.token_bytes
        prompt = prompt[-(longest + _RESYNC_CHARS) :]
    encoded = model.prompts.encode(prompt, raw=True)
    return Encoded(encoded.ids[-kept_tokens:]) if len(encoded.ids) > kept_tokens else encoded


def _encode_infill(ask: Ask, model: ModelFacts, limit: PromptLimit) -> Encoded:
    assert ask.text is not None and ask.suffix is not None
    if model.prompts.tokenizer.infill is None:
        raise RequestError(f"{model.name} does not support insert")
    return model.prompts.encode_infill(ask.text, ask.suffix, limit)


def _encode_chat(ask: Ask, model: ModelFacts, limit: PromptLimit, sorts_tools: bool) -> Encoded:
    assert ask.messages is not None
    if ask.tools and ask.needs_tool_template and not model.knows_tools:
        raise RequestError(f"{model.name} does not support tools")
    if ask.think and not model.knows_thinking:
        raise RequestError(f'"{model.name}" does not support thinking')
    tools = sorted(ask.tools, key=_name) if sorts_tools else ask.tools
    rendering = _Rendering(ask, model, tools, limit)
    if not ask.truncates:
        return rendering.encode(ask.messages)
    return _encode_shortened(ask.messages, rendering, _tokens_for_prompt(ask, limit))


def _encode_shortened(messages: Sequence[Message], rendering: _Rendering, max_tokens: int) -> Encoded:
    """The messages as ids, the oldest left out where there would be more than `max_tokens`."""
    encoded = None
    if sum(map(rendering.estimate, messages)) <= _SURELY_TOO_LONG * max_tokens:
        encoded = rendering.try_encode(messages)
    if encoded is not None and len(encoded.ids) <= max_tokens:
        return encoded
    return rendering.encode(shorten(messages, max_tokens, rendering))


@dataclass(frozen=True)
class _Rendering:
    """How the messages of one ask are measured and encoded."""

    ask: Ask
    model: ModelFacts
    tools: Sequence[Tool]
    limit: PromptLimit

    def encode(self, messages: Sequence[Message]) -> Encoded:
        prompt, options = self._given(messages)
        return self.model.prompts.encode(prompt, limit=self.limit, **options)

    def try_encode(self, messages: Sequence[Message]) -> Encoded | None:
        """As `encode`, but None if there are too many tokens."""
        try:
            return self.encode(messages)
        except PromptTooLong:
            return None

    def estimate(self, message: Message) -> int:
        return _TOKENS_AROUND + len(_text_of(message).encode("utf-8", "surrogatepass")) // _BYTES_PER_TOKEN

    def count(self, messages: Sequence[Message]) -> int:
        prompt, options = self._given(messages)
        try:
            return self.model.prompts.count(prompt, limit=self.limit, **options)
        except PromptTooLong as error:
            return error.prompt_tokens

    def _given(self, messages: Sequence[Message]) -> tuple[list[Message], dict[str, Any]]:
        """The messages for the template, and its options."""
        given = prepare_messages(
            messages, self.ask.tool_choice.offer(self.tools), template_knows_tools=self.model.knows_tools
        )
        options: dict[str, Any] = {"tools": given.tools}
        if self.ask.think is not None and self.model.knows_thinking:
            options["enable_thinking"] = self.ask.think
        if not _has_begun(messages):
            return given.messages, options
        begun = _text_of(given.messages[-1]).rstrip()  # spaces at the end would mislead the model
        return given.messages[:-1], options | {"prefill": begun}

    def cut(self, text: str, num_tokens: int, at_most: int) -> str:
        tokenizer = self.model.prompts.tokenizer
        end = text[-at_most * tokenizer.encoder.token_bytes :]
        ids = tokenizer.encode(end)
        is_long = len(end) < len(text) or len(ids) > at_most
        return tokenizer.decode(ids[-at_most:] if is_long else ids[num_tokens + 1 :])


def _has_begun(messages: Sequence[Message]) -> bool:
    """Whether the last message is the beginning of the answer."""
    return len(messages) > 1 and messages[-1].get("role") == "assistant" and not messages[-1].get("tool_calls")


def _text_of(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)


def _bounded(ask: Ask, model: ModelFacts, encoded: Encoded, context: int) -> SamplingParams:
    """The parameters with a length that fits the context, if the ask has one of its own. Raises PromptTooLong."""
    room, wanted = context - len(encoded.ids), ask.params.max_tokens
    if room < 1 and wanted != 0:
        raise PromptTooLong(len(encoded.ids), context)
    if ask.context_tokens is None:
        return ask.params
    if wanted is None:
        wanted = model.max_tokens or default_max_tokens(context)
    return replace(ask.params, max_tokens=room if wanted == TO_THE_END else min(wanted, room))


def _tokens_for_prompt(ask: Ask, limit: PromptLimit) -> int:
    """How many tokens of the context a prompt that is shortened may take; the rest is for the answer."""
    assert limit.max_tokens is not None
    wanted = ask.params.max_tokens
    if wanted is None or wanted == TO_THE_END:
        wanted = _ROOM_TOKENS
    room = max(1, min(wanted, limit.max_tokens // 4))
    return max(1, limit.max_tokens - room)


def _name(tool: Tool) -> str:
    return str(tool["function"]["name"])


class PromptThreads:
    """The threads in which one model's prompts are prepared: rendered, encoded, and their grammars compiled.

    Each model has its own, because chat templates come with models and may take long: one model's prompts never wait for
    another's. Only one thread at a time runs Python, so there are few of them. Large prompts run one after the other, in a
    thread of lower priority. The threads end with this object.
    """

    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(_NUM_THREADS, "bough-prompts")
        self._large = ThreadPoolExecutor(1, "bough-large-prompts", initializer=lower_priority)

    async def run(self, work: Callable[[Callable[[], bool]], Result], num_chars: int = 0) -> Result:
        """Run work on a prompt of this length. The work gets a function that says whether the caller was cancelled."""
        gone = threading.Event()
        executor = self._large if num_chars > LARGE_CHARS else self._small
        try:
            return await asyncio.get_running_loop().run_in_executor(executor, work, gone.is_set)
        finally:
            gone.set()
