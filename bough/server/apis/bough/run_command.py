"""Answers for `bough run` and `bough.connect`, with all that a model in their own process would return.

Parameters have the names of `SamplingParams`, and those that are not given are the model's own. A stream has a JSON object
in each line: `progress` (tokens of the prompt that are done, and all), `text` with `num_tokens`, and at its end
`completion`, or `error`. Thinking is part of the text; calls of tools are only part of the completion's.
"""

from __future__ import annotations

import time
from dataclasses import asdict, fields, replace
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from bough.config import Settings
from bough.errors import RequestError
from bough.prompting.ask import Ask, ToolChoice
from bough.sampling_params import unset_names
from bough.server.apis.answering import SaltOf, ServiceOf, open_answer
from bough.server.apis.ollama.wire import Ids, Messages, Tools
from bough.server.http.bounds import SHORT_NAME, check_schema
from bough.server.http.errors import format_plain_error, to_http_error
from bough.server.http.json_routes import Wire, route_class
from bough.server.http.streaming import NDJSON, ClosingStream, Pieces, cancel_on_disconnect, json_line
from bough.server.serving.answer import Answer, Delta, PromptProgress
from bough.types import SamplingParams

router = APIRouter(prefix="/api/run", route_class=route_class(format_plain_error), tags=["run"])

_NAMES = frozenset(each.name for each in fields(SamplingParams))
_LARGEST = 2**63
_FIRST_WAIT_S = 30.0


class LoadBody(Wire):
    """A model by name; without one, the server's default model."""

    model: Annotated[str, SHORT_NAME] | None = None


class RunBody(LoadBody):
    """Messages, a text or token ids, and the other options of a request of the library.

    A text is continued as it is, or without `raw` is a user's message. With a seed, each `choice` samples differently.
    """

    messages: Messages | None = Field(default=None, min_length=1)
    prompt: str | None = Field(default=None, min_length=1)
    ids: Ids | None = Field(default=None, min_length=1)
    raw: bool = True
    tools: Tools | None = None
    tool_choice: Annotated[str, SHORT_NAME] | None = None
    think: bool | None = None
    continues_answer: bool = True
    prompt_logprobs: bool = False
    keep_state: bool = True
    params: dict[str, Any] = Field(default_factory=dict)
    choice: int = Field(default=0, ge=0, lt=2**31)

    def to_ask(self, default_model: str, salt: str) -> Ask:
        """The ask of the body. Raises RequestError unless it has one of messages, text and ids, and for a bad parameter."""
        if sum(each is not None for each in (self.messages, self.prompt, self.ids)) != 1:
            raise RequestError("give one of messages, prompt and ids")
        tools = self.tools or ()
        return Ask(
            self.model or default_model,
            messages=None if self.messages is None else [each.to_message() for each in self.messages],
            text=self.prompt,
            ids=self.ids,
            is_message=not self.raw,
            tools=tools,
            tool_choice=ToolChoice.of(self.tool_choice, tools),
            think=self.think,
            continues_answer=self.continues_answer,
            scores_prompt=self.prompt_logprobs,
            keep_state=self.keep_state,
            params=_read_params(self.params),
            unset=unset_names(self.params),
            first_choice=self.choice,
            keeps_thinking=True,
            salt=salt,
        )


def _read_params(given: dict[str, Any]) -> SamplingParams:
    unknown = sorted(set(given) - _NAMES)
    if unknown:
        raise RequestError(f"unknown parameter {', '.join(unknown)[:200]}; there are {', '.join(sorted(_NAMES))}")
    for name, value in given.items():
        if isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
            raise RequestError(f"{name} is a number of more than 64 bits")
    check_schema(given.get("format"), "format")
    return SamplingParams(**given)


@router.post("/load")
async def load(body: LoadBody, request: Request, service: ServiceOf) -> Response:
    """Load a model, and describe it and how long that took."""
    began_s = time.perf_counter()
    name = body.model or service.settings.model
    keep_alive_s = None if _short_keep_alive(service.settings) is None else _FIRST_WAIT_S
    loaded = await cancel_on_disconnect(request, service.load(name, keep_alive_s))
    return JSONResponse(
        {
            "model": name,
            "engine": loaded.engine,
            "weights": loaded.weights,
            "step": loaded.step,
            "device": "GPU" if loaded.device_bytes else "CPU",
            "context_tokens": loaded.context_tokens,
            "has_template": bool(loaded.entry.template),
            "load_s": time.perf_counter() - began_s,
        }
    )


def _short_keep_alive(settings: Settings) -> float | None:
    """How long models stay loaded, if that is so short that one would be loaded twice: to be described, and to answer."""
    usual_s = settings.keep_alive
    return usual_s if usual_s is not None and usual_s < _FIRST_WAIT_S else None


@router.post("")
async def run(body: RunBody, request: Request, service: ServiceOf, salt: SaltOf) -> Response:
    """The next message of a conversation, or what follows a text."""
    ask = replace(body.to_ask(service.settings.model, salt), keep_alive_s=_short_keep_alive(service.settings))
    answer = await open_answer(request, service, ask)
    return ClosingStream(write_lines(answer), NDJSON, answer.close)


async def write_lines(answer: Answer) -> Pieces:
    """The lines of a stream. An error on the way is the last line."""
    usage = answer.started.usage
    yield json_line({"progress": [usage.cached_tokens, usage.prompt_tokens]})
    try:
        async for event in answer:
            if isinstance(event, PromptProgress):
                yield json_line({"progress": [event.done_tokens, event.total_tokens]})
            elif isinstance(event, Delta):
                yield json_line({"text": event.text, "num_tokens": event.num_tokens})
            else:
                yield json_line({"completion": asdict(replace(event.completion, tool_calls=event.tool_calls))})
    except Exception as error:
        yield json_line(format_plain_error(to_http_error(error)))
