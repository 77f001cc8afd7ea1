"""Text to token ids and back over HTTP, as llama.cpp and vLLM have it.

Both call it /tokenize and /detokenize with other fields. Here one route takes either body, and answers with the fields of
both. llama.cpp's `content` has no start token unless asked for; vLLM's `prompt` has one unless refused.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from bough.errors import RequestError
from bough.prompting.ask import Ask
from bough.server.apis.answering import ServiceOf
from bough.server.apis.ollama.wire import Messages, Tools
from bough.server.http.bounds import FAIL_FAST, MAX_IDS, SHORT_NAME, at_most
from bough.server.http.errors import format_plain_error
from bough.server.http.json_routes import Wire, route_class
from bough.server.http.streaming import cancel_on_disconnect
from bough.server.serving.tokens import TokenizedText, TokenOptions

router = APIRouter(route_class=route_class(format_plain_error), tags=["tokens"])


class TokenizeRequest(Wire):
    """A text as llama.cpp sends it (`content`), or as vLLM does (`prompt`), or messages.

    Without a model, the one that was used last is meant.
    """

    model: Annotated[str, SHORT_NAME] | None = None

    content: str | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False

    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    def to_ask(self) -> Ask:
        """The text or messages. Raises RequestError unless there is exactly one of content, prompt and messages."""
        if sum(each is not None for each in (self.content, self.prompt, self.messages)) != 1:
            raise RequestError("give one of content, prompt and messages")
        if self.messages is None:
            return Ask(self.model or "", text=self.prompt if self.content is None else self.content)
        if self.add_special_tokens:
            raise RequestError("add_special_tokens goes with a prompt: the chat template adds them to messages")
        return Ask(
            self.model or "",
            messages=[message.to_message() for message in self.messages],
            tools=self.tools or (),
            continues_answer=False,
            template_kwargs={"add_generation_prompt": self.add_generation_prompt},
        )

    def options(self) -> TokenOptions:
        """How to tokenize it, with the defaults of llama.cpp or of vLLM."""
        return TokenOptions(
            has_start=self.add_special if self.content is not None else self.add_special_tokens is not False,
            has_special=self.parse_special,
            has_pieces=self.with_pieces or self.return_token_strs,
        )


class DetokenizeRequest(Wire):
    """Token ids. Without a model, the one that was used last is meant."""

    model: Annotated[str, SHORT_NAME] | None = None
    tokens: Annotated[list[int], FAIL_FAST, at_most(MAX_IDS)]


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request, service: ServiceOf) -> JSONResponse:
    """The token ids of a text or of messages."""
    tokens = await cancel_on_disconnect(request, service.tokens.tokenize(body.to_ask(), body.options(), MAX_IDS))
    return await asyncio.to_thread(lambda: JSONResponse(write_tokens(tokens, body)))


def write_tokens(tokens: TokenizedText, body: TokenizeRequest) -> dict[str, Any]:
    ids: list[Any] = list(tokens.ids)
    if body.with_pieces:
        pairs = zip(tokens.ids, tokens.pieces, strict=True)
        ids = [{"id": token_id, "piece": _write_piece(piece)} for token_id, piece in pairs]
    strings = [piece.decode("utf-8", "replace") for piece in tokens.pieces] if body.return_token_strs else None
    return {"tokens": ids, "count": len(ids), "max_model_len": tokens.context_tokens, "token_strs": strings}


def _write_piece(piece: bytes) -> str | list[int]:
    """The text of a token, or its bytes if these are part of a character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request, service: ServiceOf) -> JSONResponse:
    """The text of token ids, special tokens included."""
    text = await cancel_on_disconnect(request, service.tokens.detokenize(body.model, body.tokens))
    return JSONResponse({"content": text, "prompt": text})
