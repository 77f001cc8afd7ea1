"""The chat template: messages to text and tokens, with the offsets at which the messages end.

Always true of what `render` returns:
- the tokens are those of `apply_chat_template`, unless the client typed a control token (see control_tokens);
- no token that the client typed is a control token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from bough.errors import RequestError
from bough.models.chat.boundaries import find_boundaries
from bough.models.chat.control_tokens import ControlTokens, Marks
from bough.models.chat.memo import RenderMemo
from bough.models.chat.messages import check_messages
from bough.models.chat.render_program import RenderRequest
from bough.models.chat.renderer import shared_renderer
from bough.models.encoder import UNLIMITED, EncodedText, Encoder, PromptLimit
from bough.types import Boundary, Message

Tools = Sequence[Mapping[str, Any]]
_PROBE = [{"role": "user", "content": "x"}]
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": "probe", "description": "p", "parameters": {"type": "object", "properties": {}}},
}
_THINKING_WORDS = ("enable_thinking", "reasoning_content", "<think>", "thinking")


@dataclass(frozen=True)
class Rendered:
    """A prompt: its tokens, their text, and the offsets worth a restore point, in order."""

    ids: list[int]
    boundaries: list[Boundary]
    text: str


@dataclass(frozen=True)
class Chat:
    """A checked conversation with its tools and template options."""

    template: Template
    messages: list[Message]
    tools: list[Any] | None
    options: dict[str, Any]

    @property
    def seed(self) -> Any:
        """Everything that a rendering depends on besides the messages."""
        return [self.tools, self.options]

    def text(self, messages: list[Message] | None = None, add_generation_prompt: bool = False) -> str:
        """The rendering of these messages, or of others instead. Raises RequestError if the template refuses."""
        chosen = self.messages if messages is None else messages
        return self.template.text(chosen, self.tools, add_generation_prompt, self.options)


class Template:
    """The chat template of a transformers tokenizer, which may have none; or another, `source`, in Jinja."""

    def __init__(self, hf: Any, encoder: Encoder, source: str = "") -> None:
        self._hf = hf
        self._encoder = encoder
        self._memo = RenderMemo()
        self._given = source or None

    @property
    def is_present(self) -> bool:
        return bool(self._given or self._hf.chat_template)

    @cached_property
    def supports_tools(self) -> bool:
        """Whether tools change the rendering."""
        try:
            with_tools = self.text(_PROBE, [_PROBE_TOOL], True, {})
            return with_tools != self.text(_PROBE, None, True, {})
        except RequestError:
            return False

    @property
    def supports_thinking(self) -> bool:
        """Whether the template mentions thinking."""
        return any(word in self._source for word in _THINKING_WORDS)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Tools | None,
        options: dict[str, Any],
        prefill: str = "",
        limit: PromptLimit = UNLIMITED,
    ) -> Rendered:
        """The prompt for the next answer, which begins with `prefill`.

        Raises RequestError if the messages, tools or template do not allow one; PromptTooLong and RequestCancelled, as the
        limit says.
        """
        if not self.is_present:
            raise RequestError("the model has no chat template: send a prompt instead of messages")
        chat = Chat(self, self._known_roles(check_messages(messages)), list(tools) if tools else None, options)
        self._require_fits(chat.messages, limit)
        text = chat.text(add_generation_prompt=add_generation_prompt)
        if chat.tools and text == replace(chat, tools=None).text(add_generation_prompt=add_generation_prompt):
            raise RequestError("the model's chat template does not support tools")
        rendered = self._encode(chat, text, add_generation_prompt, limit)
        return self._begun(rendered, prefill) if prefill else rendered

    def count(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Tools | None,
        options: dict[str, Any],
        prefill: str = "",
        limit: PromptLimit = UNLIMITED,
    ) -> int:
        """How many tokens the prompt has. Does not find its boundaries.

        Raises PromptTooLong and RequestCancelled, as the limit says.
        """
        known, given = self._known_roles(check_messages(messages)), list(tools) if tools else None
        self._require_fits(known, limit)
        begun = len(self._control.encode_inside(prefill)) if prefill else 0
        marked = self._control.mark(known, given)
        if marked is None:
            return begun + self._encoder.count(self.text(known, given, True, options), limit)
        text = self.text(marked.messages, marked.tools, True, options)
        return begun + len(self._control.encode(text, marked.marks, limit).ids)

    def _require_fits(self, messages: Sequence[Message], limit: PromptLimit) -> None:
        """Raise PromptTooLong for messages that cannot fit, before anything is rendered.

        Messages of the assistant do not count, because templates may leave out parts of them.
        """
        heard = [message for message in messages if message["role"] != "assistant"]
        self._encoder.require_fits(sum(len(message["content"]) for message in heard), limit)

    def _begun(self, rendered: Rendered, prefill: str) -> Rendered:
        """A prompt with the beginning of its answer, which has no control tokens either."""
        return replace(rendered, ids=rendered.ids + self._control.encode_inside(prefill), text=rendered.text + prefill)

    def text(
        self, messages: list[Message], tools: list[Any] | None, add_generation_prompt: bool, options: dict[str, Any]
    ) -> str:
        """The rendering of the messages.

        Raises RequestError, with the template's message, if it refuses them, and TemplateLimit if it takes too much.
        """
        try:
            source = self._hf.get_chat_template(self._given, tools)
        except ValueError as error:  # several templates, none of them the default
            raise RequestError(f"the model's chat template cannot be chosen: {error}") from error
        values = {**self._hf.special_tokens_map, **options}
        return shared_renderer().render(RenderRequest(source, messages, tools, add_generation_prompt, values))

    def _encode(self, chat: Chat, text: str, add_generation_prompt: bool, limit: PromptLimit) -> Rendered:
        self._encoder.require_fits(len(text), limit)
        marked = self._control.mark(chat.messages, chat.tools)
        if marked is None:
            return self._finish(chat, text, None, limit)
        chat = replace(chat, messages=marked.messages, tools=marked.tools)
        marked_text = chat.text(add_generation_prompt=add_generation_prompt)
        if marked.marks.drop(marked_text) != text:
            raise RequestError(
                "the messages contain special tokens, and the chat template does not let them stay plain text"
            )
        return self._finish(chat, marked_text, marked.marks, limit)

    def _finish(self, chat: Chat, text: str, marks: Marks | None, limit: PromptLimit) -> Rendered:
        def encode(part: str) -> EncodedText:
            return self._control.encode(part, marks)

        encoded = self._control.encode(text, marks, limit)
        boundaries = find_boundaries(chat, text, encode, encoded, self._hard_ids, self._memo)
        return Rendered(encoded.ids, boundaries, marks.drop(text) if marks else text)

    def _known_roles(self, messages: list[Message]) -> list[Message]:
        """Make a developer message a system message, for templates that do not know the role."""
        if "developer" in self._source:
            return messages
        return [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]

    @cached_property
    def _source(self) -> str:
        """The source of all templates; there may be several, by name."""
        found = self._given or self._hf.chat_template or ""
        return found if isinstance(found, str) else "\n".join(map(str, found.values()))

    @cached_property
    def _control(self) -> ControlTokens:
        return ControlTokens(self._hf.backend_tokenizer, self._source, self._encoder)

    @cached_property
    def _hard_ids(self) -> frozenset[int]:
        """Added tokens. Text before one never merges with text after it."""
        return frozenset(self._hf.backend_tokenizer.get_added_tokens_decoder())
