"""One chat: the conversation so far, the parameters, and the model that answers.

Always true: the exchanges are whole. A question without an answer is not part of the conversation.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from bough.cli.terminal.answer import stream_answer, summarise
from bough.cli.terminal.screen import Screen
from bough.runner import Runner
from bough.types import Completion, Message, SamplingParams


@dataclass(frozen=True)
class Exchange:
    """A question and its answer."""

    question: str
    answer: str


@dataclass
class Conversation:
    """The system text and the exchanges so far."""

    system: str = ""
    exchanges: list[Exchange] = field(default_factory=list)

    def messages(self, question: str, last: int | None = None) -> list[Message]:
        """The prompt that asks `question` after the exchanges up to `last`."""
        said: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        for each in self.exchanges[:last]:
            said += [{"role": "user", "content": each.question}, {"role": "assistant", "content": each.answer}]
        return [*said, {"role": "user", "content": question}]


class TerminalChat:
    """A conversation with one model, shown on a screen. Commands change its fields; setting `is_over` ends the loop."""

    def __init__(
        self,
        runner: Runner,
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
        self._load_s = load_s
        self._num_retries = 0

    def answer(self, question: str) -> None:
        """Answer a question and add the exchange to the conversation."""
        self._num_retries = 0
        exchange = self._ask(question)
        if exchange:
            self.conversation.exchanges.append(exchange)

    def retry(self) -> None:
        """Answer the last question again and replace its answer. With a seed, each retry samples differently."""
        exchanges = self.conversation.exchanges
        if not exchanges:
            return self.screen.note("there is no answer to try again")
        if self.params.temperature == 0:
            self.screen.note("at temperature 0 the answer stays the same; try /set temperature 0.8")
        self._num_retries += 1
        exchanges[-1] = self._ask(exchanges[-1].question, last=-1) or exchanges[-1]
        return None

    def _ask(self, question: str, last: int | None = None) -> Exchange | None:
        """The question with its answer, or None if the person stopped it before the first word."""
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
