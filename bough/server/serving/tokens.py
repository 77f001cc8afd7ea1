"""Text and messages to token ids and back, by a model's tokenizer, in its threads for prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bough.errors import PromptTooLong, RequestError
from bough.models.encoder import PromptLimit
from bough.prompting.ask import Ask
from bough.prompting.prompt import ModelFacts, encode_ask
from bough.server.serving.loaded import LoadedModels


@dataclass(frozen=True)
class TokenizedText:
    """Token ids with the bytes of each, and the size of the model's context."""

    ids: Sequence[int]
    pieces: Sequence[bytes]
    context_tokens: int


@dataclass(frozen=True)
class TokenOptions:
    """How a prompt becomes tokens.

    A text gets the model's start token (`has_start`), and its special tokens are read as such (`has_special`).
    `has_pieces` asks for the bytes of each token.
    """

    has_start: bool = False
    has_special: bool = True
    has_pieces: bool = False


class TokenService:
    """Tokenizes with loaded models. No prompt may have more than `max_tokens`, which may be many times a context."""

    def __init__(self, models: LoadedModels) -> None:
        self._models = models

    async def tokenize(self, ask: Ask, options: TokenOptions, max_tokens: int) -> TokenizedText:
        """The tokens of a text or of messages. Raises RequestError if there are too many of them."""

        def work(is_cancelled: Callable[[], bool]) -> TokenizedText:
            facts = loaded.generator.facts
            try:
                ids = _encode(ask, facts, options, PromptLimit(max_tokens, is_cancelled))
            except PromptTooLong as error:
                number = f"{'at least ' * error.is_least}{error.prompt_tokens:,}"
                raise RequestError(f"the prompt has {number} tokens, and may have {max_tokens:,}") from error
            pieces = [facts.prompts.tokenizer.token_bytes(each) for each in ids] if options.has_pieces else []
            return TokenizedText(ids, pieces, facts.context_tokens)

        async with self._models.using(self._models.choose_name(ask.model)) as loaded:
            return await loaded.threads.run(work, ask.num_chars)

    async def detokenize(self, model: str | None, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included. Raises RequestError for an id outside the vocabulary."""

        def work(is_cancelled: Callable[[], bool]) -> str:
            prompts = loaded.generator.facts.prompts
            known = prompts.encode(ids).tokens  # checks them
            if not prompts.tokenizer.has_text:
                raise RequestError("the model has no tokenizer: its token ids have no text")
            return prompts.decode(known)

        async with self._models.using(self._models.choose_name(model)) as loaded:
            return await loaded.threads.run(work, len(ids))


def _encode(ask: Ask, facts: ModelFacts, options: TokenOptions, limit: PromptLimit) -> Sequence[int]:
    if ask.messages is not None:
        return encode_ask(ask, facts, limit).tokens
    tokenizer = facts.prompts.tokenizer
    ids = tokenizer.encode(ask.text or "", limit, has_start=options.has_start, has_special=options.has_special)
    limit.check(len(ids))
    return ids
