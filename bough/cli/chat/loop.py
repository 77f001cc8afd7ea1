"""The interactive chat: a loop of messages and answers over one conversation."""

from __future__ import annotations

from collections.abc import Callable

from bough.cli.chat import commands
from bough.cli.chat.conversation import Conversation, Exchange
from bough.cli.terminal.answer import Interruption, stream_answer, summarise
from bough.cli.terminal.screen import Screen
from bough.errors import BoughError
from bough.runner import Runner
from bough.types import Completion, SamplingParams

HOW_TO_LEAVE = "Ctrl-C again, or /bye, leaves"
ReadMessage = Callable[[], str]


class Chat:
    """A conversation with one model. `read` gives the next message and raises EOFError when there are no more."""

    def __init__(
        self,
        runner: Runner,
        read: ReadMessage,
        screen: Screen,
        *,
        params: SamplingParams | None = None,
        system: str = "",
        is_verbose: bool = False,
        load_s: float = 0.0,
    ) -> None:
        self.runner = runner
        self.screen = screen
        self.params = params or SamplingParams()
        self.conversation = Conversation(system)
        self.is_verbose = is_verbose
        self.is_over = False
        self._read = read
        self._load_s = load_s
        self._num_retries = 0

    def loop(self) -> None:
        """Talk until the person leaves: by /bye, Ctrl-D, or Ctrl-C twice at the prompt.

        A first Ctrl-C drops the message that is being typed. Errors are told, and the chat goes on.
        """
        is_warned = False
        while not self.is_over:
            try:
                message = self._read()
            except EOFError:
                return self.screen.write_line()
            except KeyboardInterrupt:
                self.screen.write_line()
                if is_warned:
                    return None
                is_warned = True
            else:
                is_warned = self._take_whole(message)
            if is_warned:
                self.screen.note(HOW_TO_LEAVE)
        return None

    def _take_whole(self, message: str) -> bool:
        """Take the message and tell its errors. Returns whether a Ctrl-C came too late to stop the answer."""
        with Interruption() as late:
            try:
                self.take(message)
            except BoughError as error:
                self.screen.end_line()
                self.screen.error(str(error))
        return late.has_come()

    def take(self, message: str) -> None:
        """Obey a command or answer a message."""
        if message.startswith("/"):
            commands.obey(self, message)
        elif message:
            self._num_retries = 0
            exchange = self._ask(message)
            if exchange:
                self.conversation.exchanges.append(exchange)

    def retry(self) -> None:
        """Answer the last question again, in place of its answer. With a seed, each try draws anew."""
        exchanges = self.conversation.exchanges
        if not exchanges:
            return self.screen.note("there is no answer to try again")
        if self.params.temperature == 0:
            self.screen.note("at temperature 0 the answer stays the same; try /set temperature 0.8")
        self._num_retries += 1
        exchanges[-1] = self._ask(exchanges[-1].question, last=-1) or exchanges[-1]
        return None

    def _ask(self, question: str, last: int | None = None) -> Exchange | None:
        """The exchange that came of the question, or None if it was stopped before the first word."""
        messages = self.conversation.messages(question, last)
        completion = stream_answer(self.runner, messages, self.params, self.screen, choice=self._num_retries)
        self._finish(completion)
        if completion.finish_reason == "cancelled" and not completion.text:
            return None
        return Exchange(question, completion.text)

    def _finish(self, completion: Completion) -> None:
        self.screen.end_line()
        if completion.finish_reason == "cancelled":
            self.screen.note("(stopped)" if completion.text else "(stopped before the first word)")
        elif completion.finish_reason == "length":
            self.screen.note(f"(cut off after {completion.usage.completion_tokens:,} tokens)")
        if self.is_verbose:
            for line in summarise(completion, self._load_s):
                self.screen.note(line)
        self.screen.write_line()
