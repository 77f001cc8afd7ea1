"""What the APIs share: the service and the salt of a request, answers whole or as streams, and parts of both."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Protocol, TypeVar

from fastapi import Depends, Request
from fastapi.responses import JSONResponse, Response

from bough.prompting.ask import Ask
from bough.server.http.streaming import EVENT_STREAM, ClosingStream, Pieces, cancel_on_disconnect, sse_comment
from bough.server.serving.answer import Answer, Answered, PromptProgress, ScoredToken, Started
from bough.server.serving.service import Service

Body = TypeVar("Body", bound="StreamableBody")


async def get_service(request: Request) -> Service:  # a plain function would run in a thread
    service: Service = request.app.state.service
    return service


async def get_salt(request: Request) -> str:
    return str(getattr(request.state, "salt", ""))


ServiceOf = Annotated[Service, Depends(get_service)]
SaltOf = Annotated[str, Depends(get_salt)]  # of the client: that of its header, or derived from its key


class StreamableBody(Protocol):
    """The body of a request that may ask for a stream."""

    @property
    def stream(self) -> bool | None: ...


async def open_answer(request: Request, service: Service, ask: Ask) -> Answer:
    """An answer that has begun. It is closed if the client disconnects meanwhile."""
    return await cancel_on_disconnect(request, service.open(ask), Answer.close)


async def answer_ask(
    request: Request,
    service: Service,
    ask: Ask,
    body: Body,
    write_whole: Callable[[Answered, Body], Any],
    write_events: Callable[[Answer, Body], Pieces],
) -> Response:
    """Answer an ask as events, or whole as JSON. Raises the error of a request that fails before its answer begins."""
    if not body.stream:
        answered = await cancel_on_disconnect(request, service.complete(ask))
        return JSONResponse(write_whole(answered, body), headers=write_left_out(answered.started))
    answer = await open_answer(request, service, ask)
    return ClosingStream(write_events(answer, body), EVENT_STREAM, answer.close, write_left_out(answer.started))


def write_left_out(started: Started) -> dict[str, str]:
    """Headers that say what the prompt lacks; none if it is whole."""
    left_out = started.left_out
    headers = {"X-Bough-Messages-Left-Out": str(left_out.num_messages)} if left_out.num_messages else {}
    return headers | ({"X-Bough-Text-Cut": "true"} if left_out.is_text_cut else {})


def progress_comment(progress: PromptProgress) -> str:
    """A comment for the progress of a long prompt; "" at its end, where the answer begins."""
    if progress.done_tokens >= progress.total_tokens:
        return ""
    return sse_comment(f"prefill {progress.done_tokens}/{progress.total_tokens}")


def write_logprobs(logprobs: Sequence[ScoredToken], least: float = -math.inf) -> list[dict[str, Any]]:
    """Tokens with their alternatives, as the chats of Ollama and OpenAI report them."""

    def write(token: ScoredToken) -> dict[str, Any]:
        text = token.data.decode("utf-8", "replace")
        return {"token": text, "logprob": max(token.logprob, least), "bytes": list(token.data)}

    return [{**write(each), "top_logprobs": [write(other) for other in each.top]} for each in logprobs]
