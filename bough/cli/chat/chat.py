"""One chat: the session so far, and the model that answers."""

from __future__ import annotations

from functools import partial

from bough.cli.backends.contract import Backend
from bough.cli.chat.line_editor import PROMPT
from bough.cli.chat.sessions import LAST, ChatSession, Conversation, Exchange, Sessions
from bough.cli.terminal.answer import describe_end, stream_answer, summarise
from bough.cli.terminal.progress import show_progress
from bough.cli.terminal.screen import Screen
from bough.cli.terminal.wrap import WordWrap
from bough.errors import BoughError


class TerminalChat:
    """A session with one model, shown on a screen. Commands change its fields; setting `is_over` ends the loop.

    Without `sessions` nothing is saved.
    """

    def __init__(
        self,
        backend: Backend,
        screen: Screen,
        *,
        session: ChatSession | None = None,
        sessions: Sessions | None = None,
        is_verbose: bool = False,
        wraps: bool = True,
    ) -> None:
        self.backend = backend
        self.screen = screen
        self.session = session or ChatSession()
        self.sessions = sessions
        self.is_verbose = is_verbose
        self.is_over = False
        self._wraps = wraps
        self._num_retries = 0
        self._unanswered: str | None = None  # a question whose answer failed

    @property
    def conversation(self) -> Conversation:
        return self.session.conversation

    def answer(self, question: str) -> None:
        self._num_retries = 0
        self._unanswered = question
        exchange = self._ask(question)
        self._unanswered = None
        if exchange:
            self.conversation.exchanges.append(exchange)

    def retry(self) -> None:
        """Answer the last question again and replace its answer. With a seed, each retry samples differently.

        If the answer to the last question failed, that question is asked again.
        """
        if self._unanswered is not None:
            return self.answer(self._unanswered)
        exchanges = self.conversation.exchanges
        if not exchanges:
            return self.screen.note("there is no answer to try again")
        self._num_retries += 1
        before = exchanges[-1]
        again = self._ask(before.question, last=-1)
        exchanges[-1] = again or before
        if again == before:
            self.screen.note("the answer stays the same, as at temperature 0; try /set temperature 0.8")
        return None

    def show_so_far(self) -> None:
        """Write what was said in the branch that goes on, as it looked when it was said."""
        for each in self.conversation.exchanges:
            self.screen.write_line(PROMPT + each.question)
            self.screen.write(each.answer, WordWrap() if self._wraps else None)
            self.screen.end_line()
            self.screen.write_line()

    def change_model(self, name: str) -> None:
        with show_progress(self.screen.notes, stays=False) as progress:
            self.backend.change_model(name, progress)

    def save(self, name: str) -> None:
        """Save the session under a name, which it keeps. Raises BoughError if it cannot be saved."""
        if self.sessions is None:
            raise BoughError("chats are not saved with --no-history")
        self.session.model = self.backend.model
        self.sessions.save(self.session, name)
        self.session.name = name

    def keep(self) -> None:
        """Save the session under its name, or as the last one, unless it is empty or chats are not saved."""
        if self.sessions is not None and not self.session.is_empty:
            self.save(self.session.name or LAST)

    def load(self, name: str) -> None:
        """Go on with a chat that was saved; this one is kept."""
        if self.sessions is None:
            raise BoughError("chats are neither saved nor loaded with --no-history")
        loaded = self.sessions.load(name)
        self.keep()
        self.session = loaded

    def _ask(self, question: str, last: int | None = None) -> Exchange | None:
        """The question with its answer, or None if the person stopped it before the first word."""
        messages = self.conversation.messages(question, last)
        open_stream = partial(self.backend.stream, messages, self.session.given, choice=self._num_retries)
        completion = stream_answer(open_stream, self.screen, wraps=self._wraps)
        self.screen.end_line()
        for line in (describe_end(completion), *(summarise(completion, self.backend.load_s) if self.is_verbose else ())):
            if line:
                self.screen.note(line)
        self.screen.write_line()
        if completion.finish_reason == "cancelled" and not completion.text:
            return None
        return Exchange(question, completion.text)
