"""Tokenizing with a loaded model, below HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bough.config import Settings
from bough.errors import RequestError
from bough.models.prompts import Prompts
from bough.models.tokenizer import Tokenizer
from bough.prompting.ask import Ask
from bough.prompting.prompt import ModelFacts
from bough.server.serving.catalog import Catalog
from bough.server.serving.loaded import LoadedModels
from bough.server.serving.loaded.model import PromptThreads
from bough.server.serving.tokens import TokenOptions, TokenService
from tests.models.tiny_tokenizer import byte_level

Run = Callable[[Coroutine[Any, Any, None]], None]


class OneModel:
    """A loaded model that has only a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        generator = SimpleNamespace(facts=ModelFacts("one", Prompts(tokenizer, 500), 8))
        self._loaded = SimpleNamespace(generator=generator, threads=PromptThreads())

    def choose_name(self, name: str | None) -> str:
        return name or "one"

    @asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[Any]:
        yield self._loaded


def make_service(hf: Any) -> TokenService:
    return TokenService(Settings(), cast(LoadedModels, OneModel(Tokenizer(hf))), catalog=cast(Catalog, None))


def test_a_prompt_may_be_longer_than_the_context_and_not_longer_than_allowed(run: Run) -> None:
    async def work() -> None:
        tokens = make_service(byte_level())
        found = await tokens.tokenize(Ask("", text="1 2 " * 10), TokenOptions(), max_tokens=21)
        assert len(found.ids) == 21 and found.context_tokens == 8
        with pytest.raises(RequestError, match=r"^the prompt has 21 tokens, and may have 20$"):
            await tokens.tokenize(Ask("", text="1 2 " * 10), TokenOptions(), max_tokens=20)

    run(work())


def test_ids_of_a_model_without_a_tokenizer_have_no_text(run: Run) -> None:
    async def work() -> None:
        with pytest.raises(RequestError, match="has no tokenizer"):
            await make_service(None).detokenize(None, [1])

    run(work())
