"""Splits an answer into text, thinking and tool calls, as its pieces come."""

from __future__ import annotations

from bough.models.answers.thinking import ThinkingParser
from bough.models.answers.tool_calls import ToolCallParser
from bough.models.tokenizer import Tokenizer
from bough.server.serving.ask import Ask, Delta, Finished, FinishReason, ScoredToken
from bough.server.serving.prompting.prompt import PreparedPrompt
from bough.types import Alternative, Chunk, Completion, TokenLogprob, ToolCall


class AnswerParser:
    """Reads one choice. What is not certain yet, such as half of a tag, comes with a later piece."""

    def __init__(self, prepared: PreparedPrompt, tokenizer: Tokenizer, choice: int, ask: Ask) -> None:
        self._tokenizer = tokenizer
        self._choice = choice
        self._is_single = ask.tool_choice.is_single
        self._counts_thinking = ask.counts_thinking
        self._thoughts = ThinkingParser(prepared.starts_thinking) if prepared.splits_thinking else None
        self._calls = ToolCallParser(prepared.tools.keys(), is_forced=prepared.is_forced, schemas=prepared.tools)
        self._is_plain = self._thoughts is None and not prepared.tools  # all of it is text
        self._text: list[str] = []
        self._thinking: list[str] = []
        self._found: list[ToolCall] = []
        self._logprobs: list[ScoredToken] = []
        self._prompt_logprobs: list[ScoredToken] = []

    def add(self, chunk: Chunk) -> Delta:
        """What the next piece adds to the choice."""
        if self._is_plain and not chunk.logprobs and not chunk.prompt_logprobs:
            self._text.append(chunk.text)
            return Delta(self._choice, chunk.text, num_tokens=len(chunk.token_ids))
        thinking, text = "", chunk.text
        if self._thoughts is not None:
            thought = self._thoughts.add(chunk.text)
            thinking, text = thought.thinking, thought.text
        return self._keep(thinking, text, chunk, is_end=False)

    def finish(self, completion: Completion) -> tuple[Delta, Finished]:
        """What was held back, and then the whole choice."""
        thought = self._thoughts.flush() if self._thoughts is not None else None
        thinking, text = (thought.thinking, thought.text) if thought is not None else ("", "")
        last = self._keep(thinking, text, Chunk(""), is_end=True)
        reason: FinishReason = "stop" if completion.finish_reason == "cancelled" else completion.finish_reason
        whole_thinking = "".join(self._thinking)
        return last, Finished(
            self._choice,
            "".join(self._text),
            whole_thinking,
            tuple(self._found),
            "tool_calls" if self._found else reason,
            completion,
            tuple(self._logprobs),
            len(self._tokenizer.encode(whole_thinking)) if whole_thinking and self._counts_thinking else 0,
            tuple(self._prompt_logprobs),
        )

    def _keep(self, thinking: str, text: str, chunk: Chunk, *, is_end: bool) -> Delta:
        found = self._calls.add(text)
        text, calls = found.text, list(found.calls)
        if is_end:
            rest = self._calls.flush()
            text, calls = text + rest.text, [*calls, *rest.calls]
        if self._is_single:
            calls = calls[: max(0, 1 - len(self._found))]
        logprobs = tuple(self._score(each, each.top) for each in chunk.logprobs)
        self._text.append(text)
        self._thinking.append(thinking)
        self._found += calls
        self._logprobs += logprobs
        prompt_logprobs = tuple(self._score(each, each.top) for each in chunk.prompt_logprobs)
        self._prompt_logprobs += prompt_logprobs
        return Delta(self._choice, text, thinking, tuple(calls), logprobs, len(chunk.token_ids), prompt_logprobs)

    def _score(self, token: TokenLogprob | Alternative, top: tuple[Alternative, ...] = ()) -> ScoredToken:
        data = self._tokenizer.token_bytes(token.token_id)
        return ScoredToken(data, token.logprob, tuple(self._score(each) for each in top))
