"""Ollama's API for making models: a name for a model that is here, with a system prompt, parameters and so on of its own.

No weights are made or taken: the new model shares the loaded model and the tree of the one that it is made from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import Field, ValidationError

from bough.errors import RequestError
from bough.models.aliases import Overlay
from bough.server.apis.ollama.modelfile import Modelfile, parse_modelfile
from bough.server.apis.ollama.wire import NamedRequest, Options
from bough.server.http.bounds import (
    MAX_LICENSES,
    MAX_MODELFILE_CHARACTERS,
    MAX_TEMPLATE_CHARACTERS,
    SHORT_NAME,
    at_most,
    check_text,
)
from bough.server.http.errors import format_plain_error
from bough.server.http.messages import Messages
from bough.server.http.streaming import NDJSON, json_line
from bough.server.http.wire import ServiceOf, route_class
from bough.system.threads import run_in_thread

router = APIRouter(route_class=route_class(format_plain_error), tags=["Ollama"])

_STATUSES = ("reading model metadata", "creating system layer", "writing manifest", "success")
_UNSUPPORTED = ("adapters", "files", "quantize", "quantization", "path", "renderer", "parser", "draft")


class CreateRequest(NamedRequest):
    """The body of /api/create: fields, or the text of a Modelfile as older clients send it."""

    from_: Annotated[str, SHORT_NAME] | None = Field(default=None, alias="from")
    modelfile: str | None = None
    system: str | None = None
    template: str | None = None
    parameters: dict[str, Any] | None = None
    messages: Messages | None = None
    license: Annotated[str | list[str] | None, at_most(MAX_LICENSES)] = None
    stream: bool | None = None
    adapters: Any = None
    files: Any = None
    quantize: Any = None
    quantization: Any = None
    path: Any = None
    renderer: Any = None
    parser: Any = None
    draft: Any = None

    def read(self) -> Modelfile:
        """What is to be made. Raises RequestError, which names it, for what is not supported."""
        for name in _UNSUPPORTED:
            if getattr(self, name):
                raise RequestError(f"{name} is not supported: a model is made from one that is here, without new weights")
        check_text(self.modelfile or "", "modelfile", MAX_MODELFILE_CHARACTERS)
        found = parse_modelfile(self.modelfile or "")
        licenses = [self.license] if isinstance(self.license, str) else self.license or []
        made = Modelfile(
            self.from_ or found.source,
            self.system or found.system,
            self.template or found.template,
            licenses or found.license,
            {**found.parameters, **(self.parameters or {})},
            [each.to_message() for each in self.messages or ()] or found.messages,
        )
        check_text(made.template, "TEMPLATE", MAX_TEMPLATE_CHARACTERS)
        if not made.source:
            raise RequestError("there is no model to make it from: give `from`, or FROM in the Modelfile")
        return made


@router.post("/api/create")
async def create(body: CreateRequest, service: ServiceOf) -> Response:
    """Make a model from another: the same weights under a new name, with a system prompt and so on.

    It has a thread of its own: a slow template must not take one from those that all requests share.
    """
    made = body.read()
    overlay = Overlay(
        system=made.system,
        template=made.template,
        parameters=check_parameters(made.parameters),
        messages=tuple(made.messages),
        license="\n\n".join(made.license),
    )
    await run_in_thread(service.catalog.create, body.wanted, made.source, overlay)
    if body.stream is False:
        return JSONResponse({"status": "success"})
    return StreamingResponse(_write_lines(), media_type=NDJSON)


def _write_lines() -> Iterator[str]:
    for status in _STATUSES:
        yield json_line({"status": status})


def check_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters in the types of Ollama's options. Raises RequestError for one that is unknown or of a wrong type."""
    unknown = [name for name in parameters if name not in Options.model_fields]
    if unknown:
        raise RequestError(
            f"the parameter {unknown[0][:40]!r} is not supported; there are {', '.join(Options.model_fields)}"
        )
    try:
        return Options.model_validate(dict(parameters)).model_dump(exclude_none=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise RequestError(f"the parameter {first['loc'][0]} is wrong: {first['msg']}") from error
