"""Text and messages to token ids and back, by a model's tokenizer, without generating anything.

Prompts are encoded and ids decoded in the model's threads for prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bough.errors import PromptTooLong, RequestError
from bough.models.chat.tools import prepare_messages
from bough.models.encoder import PromptLimit
from bough.models.prompts import Prompts
from bough.server.serving.ask import Ask
from bough.server.serving.loaded import LoadedModels
from bough.server.serving.loaded_model import LoadedModel


@dataclass(frozen=True)
class Tokens:
    """Token ids with the bytes of each, and how many the model's context holds."""

    ids: Sequence[int]
    pieces: Sequence[bytes]
    context_tokens: int


@dataclass(frozen=True)
class TokenOptions:
    """How a prompt becomes tokens.

    Of a text: with a start token, if the model has one (`has_start`), and with special tokens in it as such
    (`has_special`). Of messages: up to where the answer begins (`begins_answer`). `has_pieces`: tell the bytes of each
    token, too.
    """

    has_start: bool = False
    has_special: bool = True
    begins_answer: bool = True
    has_pieces: bool = False


class TokenService:
    """Tokenizes with loaded models. No prompt may have more than `max_tokens`, which may be many times a context."""

    def __init__(self, models: LoadedModels) -> None:
        self._models = models

    async def tokenize(self, ask: Ask, options: TokenOptions, max_tokens: int) -> Tokens:
        """The tokens of a text or of messages. Raises RequestError if there are too many of them."""

        def work(is_cancelled: Callable[[], bool]) -> Tokens:
            prompts = loaded.generator.prompts
            try:
                ids = _encode(ask, loaded, options, PromptLimit(max_tokens, is_cancelled))
            except PromptTooLong as error:
                number = f"{'at least ' * error.is_least}{error.prompt_tokens:,}"
                raise RequestError(f"the prompt has {number} tokens, and may have {max_tokens:,}") from error
            pieces = [prompts.tokenizer.token_bytes(each) for each in ids] if options.has_pieces else []
            return Tokens(ids, pieces, loaded.generator.context_tokens)

        async with self._models.using(self._models.choose_name(ask.model)) as loaded:
            return await loaded.threads.run(work, ask.num_chars)

    async def detokenize(self, model: str | None, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included. Raises RequestError for an id outside the vocabulary."""
        async with self._models.using(self._models.choose_name(model)) as loaded:
            return await loaded.threads.run(lambda _: _decode(loaded.generator.prompts, ids), len(ids))


def _encode(ask: Ask, loaded: LoadedModel, options: TokenOptions, limit: PromptLimit) -> Sequence[int]:
    prompts = loaded.generator.prompts
    if ask.messages is None:
        text = ask.text or ""
        ids = prompts.tokenizer.encode_part(text, limit, has_start=options.has_start, has_special=options.has_special)
        limit.check(len(ids))
        return ids
    knows_tools = "tools" in loaded.info.capabilities
    given = prepare_messages(ask.messages, ask.tool_choice.offer(ask.tools), template_knows_tools=knows_tools)
    return prompts.encode(given.messages, tools=given.tools, limit=limit, add_generation_prompt=options.begins_answer).ids


def _decode(prompts: Prompts, ids: Sequence[int]) -> str:
    known = prompts.encode(ids).ids  # checks them
    if not prompts.tokenizer.has_text:
        raise RequestError("the model has no tokenizer: its token ids have no text")
    return prompts.decode(known)
