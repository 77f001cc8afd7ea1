"""The request and the events of an answer that all APIs share. Each API translates its own format to and from these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from bough.tokens import NO_TOKENS, Tokens
from bough.types import Completion, Message, SamplingParams, Tool, ToolCall, Usage

ToolMode = Literal["auto", "none", "required"]
FinishReason = Literal["stop", "length", "loop", "tool_calls"]


@dataclass(frozen=True)
class ToolChoice:
    """Whether the answer may, must not or must call a tool; with `name`, that tool. A grammar enforces `required`."""

    mode: ToolMode = "auto"
    name: str | None = None
    is_single: bool = False  # at most one call

    def offer(self, tools: Sequence[Tool]) -> Sequence[Tool]:
        """The tools for the prompt: none, if the model must not call one."""
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
    echoes: bool = False  # return the prompt's text, too
    scores_prompt: bool = False  # return the prompt's log-probabilities, too, as many as `params.logprobs` says
    suffix: str | None = None  # the answer goes between `text` and this
    counts_thinking: bool = False  # return the number of tokens of the thinking; this costs a call of the tokenizer
    keeps_thinking: bool = False  # thinking stays part of the text
    num_choices: int = 1
    first_choice: int = 0  # with a seed, each number of a choice has its own text
    context_tokens: int | None = None  # a smaller context than the model's
    truncates: bool = False  # drop the oldest messages of a chat that is too long, instead of refusing it
    keep_alive_s: float | None = None  # None: the server's default; inf: for ever; 0: unload afterwards
    salt: str = ""
    template: str | None = None  # a chat template in Jinja instead of the model's own

    @property
    def num_chars(self) -> int:
        """The approximate length of the prompt, in characters or ids."""
        contents = [message.get("content") or "" for message in self.messages or ()]
        parts = [part for content in contents for part in ([content] if isinstance(content, str) else content)]
        texts = [part if isinstance(part, str) else str(part.get("text", "")) for part in parts]
        return sum(map(len, (self.text or "", self.suffix or "", self.ids or (), self.context, *texts)))


def tenant_of(salt: str) -> str:
    """The part that all salts derived from one key share; after a slash comes the client's own refinement."""
    return salt.partition("/")[0]


@dataclass(frozen=True)
class LeftOut:
    """What a prompt that was too long lacks: whole messages, and the beginning of a text or of the last message."""

    num_messages: int = 0
    is_text_cut: bool = False


NOTHING_LEFT_OUT = LeftOut()


@dataclass(frozen=True)
class ScoredToken:
    """The bytes of a token, the log of its probability, and the likeliest tokens at its place."""

    data: bytes
    logprob: float
    top: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True)
class EchoedPrompt:
    """A prompt as the client gets it back: its text and, if it is scored, each token's bytes and start in the text."""

    text: str
    tokens: tuple[bytes, ...] = ()
    offsets: tuple[int, ...] = ()


@dataclass(frozen=True)
class Started:
    """The first choice has its lane: nothing can be refused any more. `usage` is its own, without completion tokens yet.

    Tokens that are still being read from disk count as cached; the completions have the final figures. `params` include the
    model's own defaults. `digest` is that of the model's weights; `is_stored` says whether the answer's state is kept for
    reuse. `echo` is the prompt, if it was asked for; `left_out` is what it lacks.
    """

    usage: Usage
    load_s: float = 0.0
    prompt: Tokens = NO_TOKENS
    params: SamplingParams = field(default_factory=SamplingParams)
    digest: str = ""
    is_stored: bool = True
    echo: EchoedPrompt | None = None
    left_out: LeftOut = NOTHING_LEFT_OUT


@dataclass(frozen=True)
class PromptProgress:
    """The number of evaluated tokens of the prompt."""

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
    num_tokens: int = 0  # generated for it; the text of some may come with a later piece
    prompt_logprobs: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True)
class Finished:
    """One whole choice. The first has `prompt_logprobs` if asked: those of the prompt's tokens from the second on."""

    choice: int
    text: str
    thinking: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    completion: Completion
    logprobs: tuple[ScoredToken, ...] = ()
    thinking_tokens: int = 0
    prompt_logprobs: tuple[ScoredToken, ...] = ()


Event = PromptProgress | Delta | Finished


@dataclass(frozen=True)
class Answered:
    started: Started
    choices: tuple[Finished, ...]
