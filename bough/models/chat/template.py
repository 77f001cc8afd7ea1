"""The chat template: messages to text and tokens, with the offsets at which the messages end.

Always true of what `render` returns:
- the tokens are those of `apply_chat_template`, unless the client typed a control token (see control_tokens);
- no token that the client typed is a control token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from bough.errors import RequestError
from bough.models.chat.boundaries import RenderedChat, RenderMemo, find_boundaries
from bough.models.chat.control_tokens import ControlTokens
from bough.models.chat.messages import check_messages
from bough.models.chat.render_program import RenderRequest
from bough.models.chat.renderer import shared_renderer
from bough.models.encoder import UNLIMITED, Encoder, PromptLimit
from bough.types import Boundary, Message

Tools = Sequence[Mapping[str, Any]]
_PROBE = [{"role": "user", "content": "x"}]
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": "probe", "description": "p", "parameters": {"type": "object", "properties": {}}},
}
_THINKING_WORDS = ("enable_thinking", "reasoning_content", "<think>", "thinking")


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt: its tokens, their text, and the offsets worth a restore point, in order."""

    ids: list[int]
    boundaries: list[Boundary]
    text: str


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
            return self.text(_PROBE, [_PROBE_TOOL], True, {}) != self.text(_PROBE, None, True, {})
        except RequestError:
            return False

    @property
    def supports_thinking(self) -> bool:
        """Whether the template mentions thinking."""
        return any(word in self._source for word in _THINKING_WORDS)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Tools | None = None,
        prefill: str = "",
        limit: PromptLimit = UNLIMITED,
        **options: Any,
    ) -> RenderedPrompt:
        """The prompt for the next message, or for the rest of one that begins with `prefill`.

        Raises RequestError if the messages, tools or template do not allow one.
        """
        if not self.is_present:
            raise RequestError("the model has no chat template: send a prompt instead of messages")
        checked, given = self._check(messages, limit), list(tools) if tools else None
        text = self.text(checked, given, add_generation_prompt, options)
        if given and text == self.text(checked, None, add_generation_prompt, options):
            raise RequestError("the model's chat template does not support tools")
        self._encoder.require_fits(len(text), limit)
        marks, marked_text = None, text
        if marked := self._control.mark(checked, given):
            checked, given, marks = marked.messages, marked.tools, marked.marks
            marked_text = self.text(checked, given, add_generation_prompt, options)
            if marks.drop(marked_text) != text:
                raise RequestError(
                    "the messages contain special tokens, and the chat template does not let them stay plain text"
                )
        encoded = self._control.encode(marked_text, marks, limit)
        chat = RenderedChat(
            checked,
            [given, options],
            marked_text,
            encoded,
            render=lambda others: self.text(others, given, False, options),
            encode=lambda part: self._control.encode(part, marks),
        )
        boundaries = find_boundaries(chat, self._hard_ids, self._memo)
        begun = self._control.encode_inside(prefill) if prefill else []
        return RenderedPrompt(encoded.ids + begun, boundaries, text + prefill)

    def count(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Tools | None = None,
        prefill: str = "",
        limit: PromptLimit = UNLIMITED,
        **options: Any,
    ) -> int:
        """The number of ids that `render` would return, in less time."""
        checked, given = self._check(messages, limit), list(tools) if tools else None
        num_begun = len(self._control.encode_inside(prefill)) if prefill else 0
        marked = self._control.mark(checked, given)
        if marked is None:
            return num_begun + self._encoder.count(self.text(checked, given, True, options), limit)
        text = self.text(marked.messages, marked.tools, True, options)
        return num_begun + len(self._control.encode(text, marked.marks, limit).ids)

    def text(
        self, messages: list[Message], tools: list[Any] | None, add_generation_prompt: bool, options: dict[str, Any]
    ) -> str:
        """Render the messages. Raises RequestError with the template's message if it refuses them, or TemplateLimit."""
        try:
            source = self._hf.get_chat_template(self._given, tools)
        except ValueError as error:  # several templates, none of them the default
            raise RequestError(f"the model's chat template cannot be chosen: {error}") from error
        values = {**self._hf.special_tokens_map, **options}
        return shared_renderer().render(RenderRequest(source, messages, tools, add_generation_prompt, values))

    def _check(self, messages: Sequence[Mapping[str, Any]], limit: PromptLimit) -> list[Message]:
        """The messages as the template can render them. A developer is the system if the template does not know the role.

        Raises PromptTooLong for messages that cannot fit, before anything is rendered. Those of the assistant do not count,
        because templates may leave out parts of them.
        """
        checked = check_messages(messages)
        if "developer" not in self._source:
            checked = [{**each, "role": "system"} if each["role"] == "developer" else each for each in checked]
        num_chars = sum(len(each["content"]) for each in checked if each["role"] != "assistant")
        self._encoder.require_fits(num_chars, limit)
        return checked

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
