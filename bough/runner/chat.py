"""A conversation with a model, as an object that can be forked and rewound.

A chat is a list of messages; the state of its prefix is in the tree of the model. So a fork costs nothing: what two chats
have in common is computed and kept once.

Always true: a turn is part of the chat as a whole or not at all. If `send` fails or is cancelled, or a stream is left
before its end, the chat is as it was before. A chat answers one message at a time; a turn that nobody refers to any more is
over.
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
from bough.runner.options import ChatOptions, PromptOptions, RequestOptions, SendOptions, check_chat_options
from bough.runtime.cache_handle import CacheHandle
from bough.system.folders import write_private
from bough.types import Chunk, Completion, Message, Prompt

Content = str | Message | Sequence[Message]
"""What is sent: the text of a user, or messages, such as the results of tools."""

Pieces = Generator[Chunk | Completion, None, None]
AsyncPieces = AsyncGenerator[Chunk | Completion, None]

_FORMAT = "bough chat 1"
_PREFIX_OPTIONS = ("salt", "tools", "template_kwargs")


class ChatModel(Protocol):
    """What a chat asks of its model. A `Runner` is one."""

    @property
    def name(self) -> str: ...
    def generate(self, prompt: Prompt, /, **options: Unpack[RequestOptions]) -> Completion: ...
    def stream(self, prompt: Prompt, /, **options: Unpack[RequestOptions]) -> Pieces: ...
    async def agenerate(self, prompt: Prompt, /, **options: Unpack[RequestOptions]) -> Completion: ...
    def astream(self, prompt: Prompt, /, **options: Unpack[RequestOptions]) -> AsyncPieces: ...
    def warm(self, prompt: Prompt, /, **options: Unpack[PromptOptions]) -> Completion: ...
    @property
    def cache(self) -> CacheHandle: ...


class Chat:
    """A conversation. `options` are those of all its requests, where a single one does not say otherwise."""

    def __init__(self, model: ChatModel, messages: Sequence[Message] = (), **options: Unpack[ChatOptions]) -> None:
        check_chat_options(options)
        self._model = model
        self._messages = [_checked(each) for each in messages]
        self._options = options
        self._pinned: list[Message] | None = None
        self._begins = threading.Lock()  # while a turn begins, or turns are taken back
        self._turn: weakref.ref[Turn] | None = None  # the last that was begun

    @property
    def messages(self) -> list[Message]:
        """All messages so far; changing this copy changes nothing."""
        return copy.deepcopy(self._messages)

    @property
    def num_turns(self) -> int:
        """How many messages of the user there are; each begins a turn."""
        return len(self._turn_starts())

    def __len__(self) -> int:
        return len(self._messages)

    def __repr__(self) -> str:
        pinned = ", pinned" if self._pinned is not None else ""
        return f"<Chat with {self._model.name}: {self.num_turns} turns, {len(self)} messages{pinned}>"

    # Asking

    def send(self, content: Content, **options: Unpack[SendOptions]) -> Completion:
        """Send a message and wait for the answer. Both are part of the chat afterwards."""
        with self._asking(content, options) as turn:
            return turn.end(self._model.generate(turn.messages, **turn.options))

    async def asend(self, content: Content, **options: Unpack[SendOptions]) -> Completion:
        """As `send`, in a task. If the task is cancelled, the chat is as it was before."""
        with self._asking(content, options) as turn:
            return turn.end(await self._model.agenerate(turn.messages, **turn.options))

    def stream(self, content: Content, **options: Unpack[SendOptions]) -> Pieces:
        """As `send`; yields the answer in pieces, then the completion. It begins when the first piece is asked for."""
        with self._asking(content, options) as turn:
            for piece in self._model.stream(turn.messages, **turn.options):
                yield turn.end(piece) if isinstance(piece, Completion) else piece

    def stream_text(self, content: Content, **options: Unpack[SendOptions]) -> Generator[str, None, None]:
        """As `stream`; yields the text alone."""
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
        """As `astream`; yields the text alone."""
        async with aclosing(self.astream(content, **options)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Chunk) and piece.text:
                    yield piece.text

    def begin(self, content: Content, *options: Mapping[str, Any]) -> Turn:
        """A turn that the caller asks for itself, together with others. Call `close` on it, whatever happens.

        `options` replace those of the chat, and later ones earlier ones.
        """
        given, messages = _merged(*options), _listed(content)
        check_chat_options(given, SendOptions)
        with self._begins:
            if self._is_answering:
                raise RequestError(
                    "the chat is answering already: close that stream, or fork the chat to ask two things at once"
                )
            turn = Turn(self, [*self._messages, *messages], _merged(self._options, given))
            self._turn = weakref.ref(turn)
        return turn

    @property
    def _is_answering(self) -> bool:
        turn = self._turn() if self._turn is not None else None
        return turn is not None and not turn.is_closed

    @contextmanager
    def _asking(self, content: Content, options: Mapping[str, Any]) -> Iterator[Turn]:
        turn = self.begin(content, options)
        try:
            yield turn
        finally:
            turn.close()

    # Branches

    @overload
    def fork(self) -> Chat: ...
    @overload
    def fork(self, number: int) -> list[Chat]: ...
    def fork(self, number: int | None = None) -> Chat | list[Chat]:
        """Another chat that goes on from here, or a list of `number` chats. Nothing is computed. None of them is pinned."""
        if number is None:
            return Chat(self._model, self._messages, **self._options)
        if not isinstance(number, int) or number < 0:
            raise RequestError(f"a chat cannot be forked {number!r} times")
        return [self.fork() for _ in range(number)]

    def rewind(self, turns: int = 1) -> list[Message]:
        """Take back the last turns, each from the user's message on; returns their messages. What was computed is kept."""
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

    # Keeping

    def pin(self) -> None:
        """Compute the state of the chat as it is now, if need be, and keep it: it is evicted last.

        What an earlier call kept is not kept any longer. Raises DoesNotFit, and then what was kept before still is.
        """
        messages = self._messages
        if messages == self._pinned:
            return
        if messages:
            self._model.warm(messages, **self._prefix_options())
        self.unpin()
        self._pinned = messages or None

    def unpin(self) -> None:
        """Keep the state that `pin` kept no longer than any other, also if another chat has pinned the same messages."""
        if self._pinned is not None:
            self._model.cache.pin(self._pinned, kept=False, **self._prefix_options())
            self._pinned = None

    def _prefix_options(self) -> Any:
        return {name: value for name, value in self._options.items() if name in _PREFIX_OPTIONS}

    def as_dict(self) -> dict[str, Any]:
        """The chat as plain data, from which `load` makes it again."""
        options = copy.deepcopy(dict(self._options))
        if isinstance(biases := options.get("logit_bias"), Mapping):
            options["logit_bias"] = list(biases.items())  # JSON has no numbers as keys
        return {"format": _FORMAT, "model": self._model.name, "messages": self.messages, "options": options}

    def save(self, file: str | Path) -> None:
        """Write the chat as JSON, readable by its owner alone. Raises BoughError if that fails, and changes nothing."""
        file = Path(file)
        try:
            write_private(file, json.dumps(self.as_dict(), ensure_ascii=False, indent=1))
        except (OSError, RecursionError, TypeError, ValueError) as error:
            raise BoughError(f"the chat was not saved to {file}: {error}") from error

    @classmethod
    def load(cls, model: ChatModel, file: str | Path) -> Self:
        """The chat that was saved. Raises BoughError if it cannot be read, or is no chat."""
        try:
            plain = json.loads(Path(file).read_text(encoding="utf-8"))
        except (OSError, RecursionError, ValueError) as error:
            raise BoughError(f"the chat in {file} cannot be read: {error}") from error
        return cls.from_dict(model, plain)

    @classmethod
    def from_dict(cls, model: ChatModel, plain: Mapping[str, Any]) -> Self:
        """The chat of which `as_dict` told. Raises BoughError if it is none."""
        if not isinstance(plain, Mapping) or plain.get("format") != _FORMAT:
            found = plain.get("format") if isinstance(plain, Mapping) else type(plain).__name__
            raise BoughError(f"this is no chat: its format is {found!r:.80}, and must be {_FORMAT!r}")
        messages, options = plain.get("messages"), plain.get("options", {})
        if not isinstance(messages, list) or not isinstance(options, dict):
            raise BoughError("this is no chat: it has no list of messages, or no object of options")
        check_chat_options(options)
        return cls(model, messages, **options)


class Turn:
    """A question that is being answered. `messages` are the prompt of the request, `options` its options."""

    def __init__(self, chat: Chat, messages: list[Message], options: Any) -> None:
        self.messages = messages
        self.options = options
        self.is_closed = False
        self._chat = chat

    def end(self, completion: Completion) -> Completion:
        """Make the question and its answer part of the chat, unless the answer was cancelled."""
        if completion.finish_reason != "cancelled":
            self._chat._messages = [*self.messages, {"role": "assistant", "content": completion.text}]
        return completion

    def close(self) -> None:
        """Let the chat take another question."""
        self.is_closed = True


def _merged(*options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for each in options for name, value in each.items()}


def _listed(content: Content) -> list[Message]:
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    return [_checked(each) for each in (content if isinstance(content, Sequence) else [content])]


def _checked(message: Any) -> Message:
    """A copy of a message. Raises RequestError if it is none."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"a message is a mapping with a role, not {message!r:.200}")
    return copy.deepcopy(dict(message))
