"""A conversation with a model, as an object that can be forked and rewound.

A chat is a list of messages; the state of its prefix is in the tree of the model. So a fork costs nothing: the common part
of two chats is computed and kept once.

Always true: a turn is part of the chat as a whole or not at all. If `send` fails or is cancelled, or a stream is left
before its end, the chat is as before. A chat answers one message at a time; a turn that is garbage is over.
"""

from __future__ import annotations

import copy
import json
import threading
import weakref
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any, Protocol, Self, Unpack, overload

from bough.errors import BoughError, RequestError
from bough.runner.options import (
    ChatOptions,
    PromptOptions,
    RequestOptions,
    SendOptions,
    check_chat_options,
    plain_options,
)
from bough.system.folders import write_private
from bough.types import Chunk, Completion, Message, Prompt

Content = str | Message | Sequence[Message]
"""The text of a user, or messages, such as the results of tools."""

Pieces = Generator[Chunk | Completion, None, None]
AsyncPieces = AsyncGenerator[Chunk | Completion, None]

_FORMAT = "bough chat 1"
_PREFIX_OPTIONS = ("salt", "tools", "template_kwargs")


class KeptPrefixes(Protocol):
    def keep(self, prompt: Prompt, kept: bool = True, *, salt: str = "", **template: Any) -> object: ...


class ChatModel(Protocol):
    @property
    def name(self) -> str: ...
    def generate(self, prompt: Prompt, /, **options: Unpack[RequestOptions]) -> Completion: ...
    def stream(self, prompt: Prompt, /, **options: Unpack[RequestOptions]) -> Pieces: ...
    async def agenerate(self, prompt: Prompt, /, **options: Unpack[RequestOptions]) -> Completion: ...
    def astream(self, prompt: Prompt, /, **options: Unpack[RequestOptions]) -> AsyncPieces: ...
    def warm(self, prompt: Prompt, /, **options: Unpack[PromptOptions]) -> Completion: ...
    @property
    def cache(self) -> KeptPrefixes: ...


class Chat:
    """A conversation. `options` are those of all its requests; a request may replace them."""

    def __init__(self, model: ChatModel, messages: Sequence[Message] = (), **options: Unpack[ChatOptions]) -> None:
        check_chat_options(options)
        self._model = model
        self._messages = [_checked(each) for each in messages]
        self._options: Any = plain_options(options)
        self._kept: list[Message] | None = None
        self._begins = threading.Lock()  # held while a turn begins, or turns are taken back
        self._turn: weakref.ref[ChatTurn] | None = None  # the last that was begun

    @property
    def messages(self) -> list[Message]:
        """All messages so far; changing this copy changes nothing."""
        return copy.deepcopy(self._messages)

    @property
    def num_turns(self) -> int:
        """The number of messages of the user; each begins a turn."""
        return len(self._turn_starts())

    def __len__(self) -> int:
        return len(self._messages)

    def __repr__(self) -> str:
        kept = ", kept" if self._kept is not None else ""
        return f"<Chat with {self._model.name}: {self.num_turns} turns, {len(self)} messages{kept}>"

    def send(self, content: Content, **options: Unpack[SendOptions]) -> Completion:
        """Send a message and wait for the answer. Both become part of the chat."""
        with self._asking(content, options) as turn:
            return turn.end(self._model.generate(turn.messages, **turn.options))

    async def asend(self, content: Content, **options: Unpack[SendOptions]) -> Completion:
        """As `send`, in a task. If the task is cancelled, the chat is as before."""
        with self._asking(content, options) as turn:
            return turn.end(await self._model.agenerate(turn.messages, **turn.options))

    def stream(self, content: Content, **options: Unpack[SendOptions]) -> Pieces:
        """As `send`, but yield the answer in pieces, then the completion. It begins with the first piece."""
        with self._asking(content, options) as turn:
            for piece in self._model.stream(turn.messages, **turn.options):
                yield turn.end(piece) if isinstance(piece, Completion) else piece

    def stream_text(self, content: Content, **options: Unpack[SendOptions]) -> Generator[str, None, None]:
        """As `stream`, but only the text."""
        for piece in self.stream(content, **options):
            if isinstance(piece, Chunk) and piece.text:
                yield piece.text

    async def astream(self, content: Content, **options: Unpack[SendOptions]) -> AsyncPieces:
        """As `stream`, for `async for`."""
        with self._asking(content, options) as turn:
            async with aclosing(self._model.astream(turn.messages, **turn.options)) as pieces:
                async for piece in pieces:
                    yield turn.end(piece) if isinstance(piece, Completion) else piece

    async def astream_text(self, content: Content, **options: Unpack[SendOptions]) -> AsyncGenerator[str, None]:
        """As `astream`, but only the text."""
        async with aclosing(self.astream(content, **options)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Chunk) and piece.text:
                    yield piece.text

    def begin(self, content: Content, options: Mapping[str, Any]) -> ChatTurn:
        """Begin a turn whose request the caller makes. It must call `close` on the turn."""
        messages = _listed(content)
        check_chat_options(options, SendOptions)
        with self._begins:
            if self._is_answering:
                raise RequestError(
                    "the chat is answering already: close that stream, or fork the chat to ask two things at once"
                )
            turn = ChatTurn(self, [*self._messages, *messages], {**self._options, **plain_options(options)})
            self._turn = weakref.ref(turn)
        return turn

    @property
    def _is_answering(self) -> bool:
        turn = self._turn() if self._turn is not None else None
        return turn is not None and not turn.is_closed

    @contextmanager
    def _asking(self, content: Content, options: Mapping[str, Any]) -> Iterator[ChatTurn]:
        turn = self.begin(content, options)
        try:
            yield turn
        finally:
            turn.close()

    @overload
    def fork(self) -> Chat: ...
    @overload
    def fork(self, number: int) -> list[Chat]: ...
    def fork(self, number: int | None = None) -> Chat | list[Chat]:
        """Another chat with the same messages, or a list of `number` chats. Nothing is computed. None of them is kept."""
        if number is None:
            return Chat(self._model, self._messages, **self._options)
        if not isinstance(number, int) or number < 0:
            raise RequestError(f"a chat cannot be forked {number!r} times")
        return [self.fork() for _ in range(number)]

    def rewind(self, turns: int = 1) -> list[Message]:
        """Take back the last turns, each from the user's message on; return their messages. Computed state is kept."""
        with self._begins:
            if self._is_answering:
                raise RequestError("the chat is answering: wait for the answer, or cancel it")
            starts = self._turn_starts()
            if not isinstance(turns, int) or not 0 <= turns <= len(starts):
                raise RequestError(f"the chat has {len(starts)} turns, and {turns!r} cannot be taken back")
            start = starts[len(starts) - turns] if turns else len(self._messages)
            removed, self._messages = self._messages[start:], self._messages[:start]
        return removed

    def _turn_starts(self) -> list[int]:
        return [number for number, message in enumerate(self._messages) if message.get("role") == "user"]

    def keep(self) -> None:
        """Compute the state of the chat if need be, and keep it in place of the state kept before. Raises DoesNotFit."""
        messages = self._messages
        if messages == self._kept:
            return
        if messages:
            self._model.warm(messages, **self._prefix_options())
        self.unkeep()
        self._kept = messages or None

    def unkeep(self) -> None:
        """Undo `keep`, even if another chat keeps the same messages."""
        if self._kept is not None:
            self._model.cache.keep(self._kept, kept=False, **self._prefix_options())
            self._kept = None

    pin, unpin = keep, unkeep  # the earlier names

    def _prefix_options(self) -> Any:
        return {name: value for name, value in self._options.items() if name in _PREFIX_OPTIONS}

    def as_dict(self) -> dict[str, Any]:
        """The chat as plain data for `from_dict`."""
        options = copy.deepcopy(dict(self._options))
        if isinstance(biases := options.get("logit_bias"), Mapping):
            options["logit_bias"] = list(biases.items())  # JSON has no numbers as keys
        return {"format": _FORMAT, "model": self._model.name, "messages": self.messages, "options": options}

    def save(self, file: str | Path) -> None:
        """Write the chat as JSON, readable by its owner alone. If that fails, BoughError is raised and nothing changes."""
        file = Path(file)
        try:
            write_private(file, json.dumps(self.as_dict(), ensure_ascii=False, indent=1))
        except (OSError, RecursionError, TypeError, ValueError) as error:
            raise BoughError(f"the chat was not saved to {file}: {error}") from error

    @classmethod
    def load(cls, model: ChatModel, file: str | Path) -> Self:
        """Read a chat that was saved. Raises BoughError if it cannot be read, or is no chat."""
        try:
            plain = json.loads(Path(file).read_text(encoding="utf-8"))
        except (OSError, RecursionError, ValueError) as error:
            raise BoughError(f"the chat in {file} cannot be read: {error}") from error
        return cls.from_dict(model, plain)

    @classmethod
    def from_dict(cls, model: ChatModel, plain: Mapping[str, Any]) -> Self:
        """Make a chat of the result of `as_dict`. Raises BoughError for other data."""
        if not isinstance(plain, Mapping) or plain.get("format") != _FORMAT:
            found = plain.get("format") if isinstance(plain, Mapping) else type(plain).__name__
            raise BoughError(f"this is no chat: its format is {found!r:.80}, and must be {_FORMAT!r}")
        messages, options = plain.get("messages"), plain.get("options", {})
        if not isinstance(messages, list) or not isinstance(options, dict):
            raise BoughError("this is no chat: it has no list of messages, or no object of options")
        check_chat_options(options)
        return cls(model, messages, **options)


class ChatTurn:
    """A question that is being answered, with the messages and options of its request."""

    def __init__(self, chat: Chat, messages: list[Message], options: Any) -> None:
        self.messages = messages
        self.options = options
        self.is_closed = False
        self._chat = chat

    def end(self, completion: Completion) -> Completion:
        """Add the question and its answer to the chat, unless the answer was cancelled."""
        if completion.finish_reason != "cancelled":
            self._chat._messages = [*self.messages, self._write_answer(completion)]
        return completion

    def _write_answer(self, completion: Completion) -> Message:
        """The answer as a message. One that had to be a call is nothing but the call, which the template writes its way."""
        if not completion.tool_calls or self.options.get("tool_choice") in (None, "auto"):
            return {"role": "assistant", "content": completion.text}
        functions = [{"name": each.name, "arguments": each.arguments} for each in completion.tool_calls]
        calls = zip(completion.tool_calls, functions, strict=True)
        written = [{"id": call.id, "type": "function", "function": function} for call, function in calls]
        return {"role": "assistant", "content": "", "tool_calls": written}

    def close(self) -> None:
        self.is_closed = True


def _listed(content: Content) -> list[Message]:
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    return [_checked(each) for each in (content if isinstance(content, Sequence) else [content])]


def _checked(message: Any) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"a message is a mapping with a role, not {message!r:.200}")
    return copy.deepcopy(dict(message))
