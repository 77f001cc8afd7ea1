"""From what a client asks to what is to be computed, for the library and the server.

Messages, tools and thinking are rendered and encoded, parameters get the model's own defaults, and the prompt must fit the
context.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from bough.errors import PromptTooLong, RequestError
from bough.generate.request import Request, default_max_tokens
from bough.models.chat.boundaries import common_length
from bough.models.chat.messages import prepare_messages
from bough.models.encoder import UNLIMITED, PromptLimit
from bough.models.prompts import EncodedPrompt, LeftOut, Prompts
from bough.prompting.ask import Ask
from bough.prompting.forced_calls import schema_of_call
from bough.prompting.truncation import shorten
from bough.sampling_params import NO_DEFAULTS, TO_THE_END, ModelDefaults
from bough.tokens import TOKEN_BYTES
from bough.types import Message, SamplingParams, Tool

_ROOM_TOKENS = 128  # reserved for an answer of unknown length when a chat is shortened
_TOKENS_AROUND, _BYTES_PER_TOKEN = 5, 4  # for estimates: tokens that a template adds to a message, and bytes per token
_SURELY_TOO_LONG = 4  # times the limit: an estimate above this is not tried
_QUESTION: Message = {"role": "user", "content": "Hello"}
_ANSWER = "Yes"
_RESYNC_CHARS = 1024  # after a cut in a text, its tokens are the same again within this many characters


@dataclass(frozen=True)
class ModelFacts:
    """The properties of a loaded model that its prompts and the lengths of its answers depend on."""

    name: str
    prompts: Prompts
    context_tokens: int
    max_tokens: int = 0  # of an answer without a limit of its own; 0: by the context
    defaults: ModelDefaults = NO_DEFAULTS

    @property
    def has_template(self) -> bool:
        return self.prompts.has_template

    @property
    def knows_tools(self) -> bool:
        return self.has_template and self.prompts.tokenizer.template.supports_tools

    @property
    def knows_thinking(self) -> bool:
        return self.has_template and self.prompts.tokenizer.template.supports_thinking

    def with_template(self, source: str) -> ModelFacts:
        """The same with another chat template, in Jinja."""
        return replace(self, prompts=self.prompts.with_template(source))


@dataclass(frozen=True)
class AnswerFormat:
    """How an answer is read: the parameters of each tool that was offered, by name, and its thinking."""

    tools: Mapping[str, Any]
    is_forced: bool = False
    splits_thinking: bool = False
    starts_thinking: bool = False

    @classmethod
    def of(cls, ask: Ask, model: ModelFacts, request: Request) -> AnswerFormat:
        splits = (request.is_chat or bool(ask.context)) and model.knows_thinking and not ask.keeps_thinking
        offered = [tool["function"] for tool in ask.tool_choice.offer(ask.tools)]
        return cls(
            {function["name"]: function.get("parameters") for function in offered},
            is_forced=ask.tool_choice.mode == "required",
            splits_thinking=splits,
            starts_thinking=splits and model.prompts.starts_thinking(request.tokens),
        )


def prepare_request(ask: Ask, model: ModelFacts, *, sorts_tools: bool = False) -> Request:
    """What is to be computed for the first choice of an ask. Raises RequestError and PromptTooLong."""
    return make_request(ask, model, encode_to_fit(ask, model, sorts_tools=sorts_tools))


def encode_to_fit(
    ask: Ask, model: ModelFacts, *, sorts_tools: bool = False, is_cancelled: Callable[[], bool] = lambda: False
) -> EncodedPrompt:
    """The prompt of an ask, which fits the context. Raises RequestError, PromptTooLong and RequestCancelled."""
    return encode_ask(ask, model, PromptLimit(_context_of(ask, model), is_cancelled), sorts_tools=sorts_tools)


def make_request(
    ask: Ask, model: ModelFacts, prompt: EncodedPrompt, *, tenant: str = "", deadline_s: float = math.inf
) -> Request:
    """What is to be computed for the first choice of an ask with this prompt. Raises RequestError and PromptTooLong."""
    params = _bounded(ask, model, len(prompt.tokens))
    if ask.tool_choice.mode == "required":
        params = replace(params, format=schema_of_call(ask.tools, ask.tool_choice.name))
    return Request.of(
        prompt,
        params,
        salt=ask.salt,
        tenant=tenant,
        deadline_s=deadline_s,
        choice=ask.first_choice,
        keep_state=ask.keep_state,
        scores_prompt=ask.scores_prompt,
    )


def encode_ask(ask: Ask, model: ModelFacts, limit: PromptLimit = UNLIMITED, *, sorts_tools: bool = False) -> EncodedPrompt:
    """The prompt of an ask. Raises as `encode_to_fit`. An ask that `truncates` needs a limit."""
    return _encode(_resolve(ask, model, limit), model, limit, sorts_tools)


def encode_prefix(
    ask: Ask, model: ModelFacts, limit: PromptLimit = UNLIMITED, *, sorts_tools: bool = False
) -> EncodedPrompt:
    """The part of a prompt that stays the same if its text continues, or if another message follows."""
    encoded = encode_ask(ask, model, limit, sorts_tools=sorts_tools)
    if not encoded.is_chat:
        return encoded
    if ask.text is not None:
        longer = replace(ask, text=f"{ask.text} and so on")
    else:
        longer = replace(ask, template_kwargs={**ask.template_kwargs, "add_generation_prompt": False})
    other = encode_ask(longer, model, limit, sorts_tools=sorts_tools)
    shared = common_length(encoded.tokens.key, other.tokens.key) // TOKEN_BYTES or len(encoded.tokens)
    boundaries = [each for each in encoded.boundaries if each.offset <= shared]
    return EncodedPrompt(encoded.tokens[:shared], boundaries, is_chat=True)


def _context_of(ask: Ask, model: ModelFacts) -> int:
    return min(ask.context_tokens or model.context_tokens, model.context_tokens)


def _resolve(ask: Ask, model: ModelFacts, limit: PromptLimit) -> Ask:
    """The ask as the model can have it: a text as a message, messages as a text, or as ids that continue a context."""
    if ask.text is not None and ask.is_message and model.has_template:
        return replace(ask, text=None, messages=[{"role": "user", "content": ask.text}])
    if ask.messages is None:
        return ask
    if ask.may_lack_template and not model.has_template:
        return replace(ask, messages=None, context=(), text="\n\n".join(map(_text_of, ask.messages)))
    if not ask.context:
        return ask
    options = {} if ask.think is None else {"enable_thinking": ask.think}
    messages, limit = list(ask.messages), replace(limit, max_tokens=model.context_tokens)
    if ask.truncates:  # only the end of a longer message is used
        longest = model.context_tokens * model.prompts.tokenizer.encoder.token_bytes
        messages[-1] = {**messages[-1], "content": _text_of(messages[-1])[-longest:]}
        limit = replace(limit, max_tokens=None)
    return replace(ask, messages=None, ids=continue_context(model.prompts, ask.context, messages, limit, **options))


def _encode(ask: Ask, model: ModelFacts, limit: PromptLimit, sorts_tools: bool) -> EncodedPrompt:
    if ask.messages is not None:
        return _encode_chat(ask, model, limit, sorts_tools)
    if ask.suffix is not None:
        assert ask.text is not None
        if model.prompts.tokenizer.infill is None:
            raise RequestError(f"{model.name} does not support insert")
        return model.prompts.encode_infill(ask.text, ask.suffix, limit)
    prompt = ask.text if ask.text is not None else list(ask.ids or ())
    if not ask.truncates:
        return model.prompts.encode(prompt, limit=limit)
    kept_tokens = _tokens_for_prompt(ask, limit)
    if isinstance(prompt, str):
        longest = kept_tokens * model.prompts.tokenizer.encoder.token_bytes
        prompt = prompt[-(longest + _RESYNC_CHARS) :]
    encoded = model.prompts.encode(prompt)
    if len(encoded.tokens) <= kept_tokens:
        return encoded
    return EncodedPrompt(encoded.tokens[-kept_tokens:], left_out=LeftOut(is_text_cut=True))


def _encode_chat(ask: Ask, model: ModelFacts, limit: PromptLimit, sorts_tools: bool) -> EncodedPrompt:
    assert ask.messages is not None
    if ask.tools and ask.needs_tool_template and not model.knows_tools:
        raise RequestError(f"{model.name} does not support tools")
    if ask.think and not model.knows_thinking:
        raise RequestError(f'"{model.name}" does not support thinking')
    tools = sorted(ask.tools, key=lambda tool: str(tool["function"]["name"])) if sorts_tools else ask.tools
    rendering = _Rendering(ask, model, tools, limit)
    if not ask.truncates:
        return rendering.encode(ask.messages)
    most = _tokens_for_prompt(ask, limit)
    if sum(map(rendering.estimate, ask.messages)) <= _SURELY_TOO_LONG * most:
        with suppress(PromptTooLong):
            encoded = rendering.encode(ask.messages)
            if len(encoded.tokens) <= most:
                return encoded
    kept = shorten(ask.messages, most, rendering)
    left_out = LeftOut(len(ask.messages) - len(kept), is_text_cut=kept[-1] is not ask.messages[-1])
    return replace(rendering.encode(kept), left_out=left_out)


@dataclass(frozen=True)
class _Rendering:
    ask: Ask
    model: ModelFacts
    tools: Sequence[Tool]
    limit: PromptLimit

    def encode(self, messages: Sequence[Message]) -> EncodedPrompt:
        prompt, options = self._given(messages)
        return self.model.prompts.encode(prompt, limit=self.limit, **options)

    def estimate(self, message: Message) -> int:
        return _TOKENS_AROUND + len(_text_of(message).encode("utf-8", "surrogatepass")) // _BYTES_PER_TOKEN

    def count(self, messages: Sequence[Message]) -> int:
        prompt, options = self._given(messages)
        try:
            return self.model.prompts.count(prompt, limit=self.limit, **options)
        except PromptTooLong as error:
            return error.prompt_tokens

    def _given(self, messages: Sequence[Message]) -> tuple[list[Message], dict[str, Any]]:
        tools = self.ask.tool_choice.offer(self.tools)
        given = prepare_messages(messages, tools, template_knows_tools=self.model.knows_tools)
        options: dict[str, Any] = {**self.ask.template_kwargs, "tools": given.tools}
        if self.ask.think is not None and self.model.knows_thinking:
            options["enable_thinking"] = self.ask.think
        is_begun = len(messages) > 1 and messages[-1].get("role") == "assistant" and not messages[-1].get("tool_calls")
        if not (is_begun and self.ask.continues_answer):
            return given.messages, options
        begun = _text_of(given.messages[-1]).rstrip()  # spaces at the end would mislead the model
        return given.messages[:-1], options | {"prefill": begun}

    def cut(self, text: str, num_tokens: int, at_most: int) -> str:
        tokenizer = self.model.prompts.tokenizer
        end = text[-at_most * tokenizer.encoder.token_bytes :]
        ids = tokenizer.encode(end)
        is_long = len(end) < len(text) or len(ids) > at_most
        return tokenizer.decode(ids[-at_most:] if is_long else ids[num_tokens + 1 :])


def _text_of(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)


def _bounded(ask: Ask, model: ModelFacts, num_tokens: int) -> SamplingParams:
    """The parameters with the model's own, and a length that fits the context if the ask has one. Raises PromptTooLong."""
    params, context = model.defaults.fill(ask.params, ask.unset), _context_of(ask, model)
    room, wanted = context - num_tokens, params.max_tokens
    if room < 1 and wanted != 0:
        raise PromptTooLong(num_tokens, context)
    if ask.context_tokens is None:
        return params
    if wanted is None:
        wanted = model.max_tokens or default_max_tokens(context)
    return replace(params, max_tokens=room if wanted == TO_THE_END else min(wanted, room))


def _tokens_for_prompt(ask: Ask, limit: PromptLimit) -> int:
    """The most tokens of a prompt that is shortened; the rest of the context is for the answer."""
    assert limit.max_tokens is not None
    wanted = ask.params.max_tokens
    if wanted is None or wanted == TO_THE_END:
        wanted = _ROOM_TOKENS
    room = max(1, min(wanted, limit.max_tokens // 4))
    return max(1, limit.max_tokens - room)


def continue_context(
    prompts: Prompts, context: Sequence[int], messages: Sequence[Message], limit: PromptLimit = UNLIMITED, **options: Any
) -> list[int]:
    """A prompt that continues a context, the ids of an earlier prompt and its answer: it ends that answer's turn first.

    The ids of an answer have no end-of-turn token. The options are those of the template. If the template renders a turn
    differently behind others, the messages follow as a chat of their own. Raises PromptTooLong and RequestCancelled.
    """
    begun = prompts.encode([_QUESTION], prefill=_ANSWER).tokens.ids
    try:
        chat = [_QUESTION, {"role": "assistant", "content": _ANSWER}, *messages]
        whole = prompts.encode(chat, limit=limit, **options).tokens.ids
    except PromptTooLong:
        raise
    except RequestError:  # some templates allow no system message on the way
        whole = []
    is_apart = whole[: len(begun)] == begun
    return [*context, *(whole[len(begun) :] if is_apart else prompts.encode(messages, limit=limit, **options).tokens)]
