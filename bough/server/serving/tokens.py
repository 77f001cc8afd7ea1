"""Text and messages to token ids and back, and their number, by a model's tokenizer, in its threads for prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bough.config import Settings
from bough.errors import PromptTooLong, RequestError
from bough.models.encoder import PromptLimit
from bough.prompting.ask import Ask
from bough.prompting.prompt import ModelFacts, encode_ask
from bough.server.serving.catalog import Catalog
from bough.server.serving.loaded import LoadedModel, LoadedModels

_COUNTED_CONTEXTS = 4  # a prompt of more contexts than these is not counted to its end


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
    """Tokenizes with loaded models."""

    def __init__(self, settings: Settings, models: LoadedModels, catalog: Catalog) -> None:
        self._settings = settings
        self._models = models
        self._catalog = catalog

    async def tokenize(self, ask: Ask, options: TokenOptions, max_tokens: int) -> TokenizedText:
        """The tokens of a text or of messages. RequestError for more than `max_tokens`, which may be many contexts."""

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

    async def count(self, ask: Ask) -> int:
        """The number of tokens of an ask's prompt. Raises PromptTooLong if it is many times the context."""
        async with self._models.using(ask.model, ask.keep_alive_s) as loaded:
            return await self._count(ask, loaded)

    async def require_fit(self, ask: Ask) -> None:
        """Raise PromptTooLong unless the prompt of an ask leaves room in the model's context."""
        async with self._models.using(ask.model, ask.keep_alive_s) as loaded:
            num_tokens, context = await self._count(ask, loaded), loaded.facts().context_tokens
        if num_tokens + (ask.params.max_tokens != 0) > context:
            raise PromptTooLong(num_tokens, context)

    async def _count(self, ask: Ask, loaded: LoadedModel) -> int:
        def count(is_cancelled: Callable[[], bool]) -> int:
            whole = self._catalog.names.complete(ask)
            facts = loaded.facts(whole.template)
            limit = PromptLimit(_COUNTED_CONTEXTS * facts.context_tokens, is_cancelled)
            return len(encode_ask(whole, facts, limit, sorts_tools=self._settings.sort_tools).tokens)

        return await loaded.threads.run(count, ask.num_chars)

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
