"""The request and the events of an answer that all APIs share. Each API translates its own format to and from these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from bough.types import Completion, Message, SamplingParams, Tool, ToolCall, Usage

"""A tool as OpenAI and Ollama write it: {"type": "function", "function": {"name", "description", "parameters"}}."""

ToolMode = Literal["auto", "none", "required"]
FinishReason = Literal["stop", "length", "loop", "tool_calls"]


@dataclass(frozen=True)
class ToolChoice:
    """Whether the answer may, must not or must call a tool; with `name`, that tool. A grammar enforces `required`."""

    mode: ToolMode = "auto"
    name: str | None = None
    is_single: bool = False  # at most one call

    def offer(self, tools: Sequence[Tool]) -> Sequence[Tool]:
        """The tools that the model is told of: none, if it must not call one."""
        return () if self.mode == "none" else tools


@dataclass(frozen=True)
class Ask:
    """One request. Exactly one of `messages` (a chat), `text` (continued without a template) and `ids` is given.

    Messages are those of OpenAI: role, content (text, or parts of type text), and for tools `tool_calls` (with arguments as
    an object), `tool_call_id` and `name`; an assistant's may have `reasoning_content`. If the last message is an
    assistant's without tool calls, the answer continues it.
    """

    model: str
    messages: Sequence[Message] | None = None
    text: str | None = None
    ids: Sequence[int] | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    unset: frozenset[str] = frozenset()  # names of `params` that are the API's defaults: the model's own replace them
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    needs_tool_template: bool = False  # refuse tools if the model's chat template does not support them
    context: Sequence[int] = ()  # ids of an earlier prompt and its answer, which the messages continue
    may_lack_template: bool = False  # without a chat template the texts of the messages are continued as one text
    think: bool | None = None  # None: the default of the template
    echoes: bool = False  # tell the prompt's text, too
    scores_prompt: bool = False  # tell the prompt's log-probabilities, too, as many as `params.logprobs` says
    suffix: str | None = None  # the answer goes between `text` and this
    counts_thinking: bool = False  # tell how many tokens the thinking has; this costs a call of the tokenizer
    keeps_thinking: bool = False  # thinking stays part of the text
    num_choices: int = 1
    first_choice: int = 0  # the number of the first choice: with a seed, each number has its own text
    context_tokens: int | None = None  # a smaller context than the model's
    truncates: bool = False  # drop the oldest messages of a chat that is too long, instead of refusing it
    keep_alive_s: float | None = None  # None: the server's default; inf: for ever; 0: unload afterwards
    salt: str = ""
    template: str | None = None  # a chat template in Jinja instead of the model's own

    @property
    def num_chars(self) -> int:
        """The approximate length of the prompt, in characters or ids."""
        plain = len(self.text or "") + len(self.suffix or "") + len(self.ids or ()) + len(self.context)
        return plain + _count_chars(self.messages or ())


def tenant_of(salt: str) -> str:
    """The part that all salts derived from one key share; what follows a slash is the client's own refinement."""
    return salt.partition("/")[0]


def _count_chars(messages: Sequence[Message]) -> int:
    """How many characters the texts of messages have."""
    contents = [message.get("content") or "" for message in messages]
    parts = [part for content in contents for part in ([content] if isinstance(content, str) else content)]
    return sum(len(part if isinstance(part, str) else str(part.get("text", ""))) for part in parts)


@dataclass(frozen=True)
class ScoredToken:
    """A token of an answer as its bytes, with the log of its probability, and the likeliest tokens at its place."""

    data: bytes
    logprob: float
    top: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True)
class EchoedPrompt:
    """A prompt as the client gets it back: its text and, if it is scored, each token's bytes and where in the text it
    begins."""

    text: str
    tokens: tuple[bytes, ...] = ()
    offsets: tuple[int, ...] = ()


@dataclass(frozen=True)
class Started:
    """The first choice has its lane: nothing can be refused any more. `usage` is its own, without completion tokens yet.

    Tokens that are still being read from disk count as cached, until it is known how many were. The final figures are those
    of the completions.
    `params` are those that the answer is sampled with, the model's own defaults included. `digest` is that of the model's
    weights; `is_stored` says whether the answer's state is kept for reuse. `echo` is the prompt, if it was asked for.
    """

    usage: Usage
    load_s: float = 0.0
    prompt_ids: Sequence[int] = ()
    params: SamplingParams = field(default_factory=SamplingParams)
    digest: str = ""
    is_stored: bool = True
    echo: EchoedPrompt | None = None


@dataclass(frozen=True)
class Progress:
    """How many tokens of the prompt are evaluated."""

    done_tokens: int
    total_tokens: int


@dataclass(slots=True)  # not frozen: one is made for every token
class Delta:
    """A piece of one choice: whole characters, and whole tool calls. The prompt's log-probabilities come with the first
    choice, before its text."""

    choice: int = 0
    text: str = ""
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[ScoredToken, ...] = ()
    num_tokens: int = 0  # that were generated for it; the text of some may come with a later piece
    prompt_logprobs: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True)
class Finished:
    """One choice is complete. `text`, `thinking`, `tool_calls` and `logprobs` are all of it.

    `prompt_logprobs`, if they were asked for, are those of the prompt's tokens from the second on, with the first choice.
    """

    choice: int
    text: str
    thinking: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    completion: Completion
    logprobs: tuple[ScoredToken, ...] = ()
    thinking_tokens: int = 0
    prompt_logprobs: tuple[ScoredToken, ...] = ()


Event = Progress | Delta | Finished


@dataclass(frozen=True)
class Answered:
    """A whole answer, its choices in order."""

    started: Started
    choices: tuple[Finished, ...]
