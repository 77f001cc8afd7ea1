"""Ollama's API for making models: a name for a model that is here, with a system prompt, parameters and so on of its own.

No weights are made or taken: the new model shares the loaded model and the tree of the one that it is made from.

Older clients send a Modelfile: a list of instructions in any case, each with its value on the same line or between quotes,
three of which allow several lines. A line that begins with # is a comment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import Field, ValidationError

from bough.errors import RequestError
from bough.models.aliases import Overlay
from bough.server.apis.answering import ServiceOf
from bough.server.apis.ollama.wire import Messages, NamedRequest, Options
from bough.server.http import bounds
from bough.server.http.errors import format_plain_error
from bough.server.http.json_routes import route_class, with_fields
from bough.server.http.streaming import NDJSON, json_line
from bough.system.threads import run_in_thread
from bough.types import Message

router = APIRouter(route_class=route_class(format_plain_error), tags=["Ollama"])

_STATUSES = ("reading model metadata", "creating system layer", "writing manifest", "success")
_UNSUPPORTED = ("adapters", "files", "quantize", "quantization", "path", "renderer", "parser", "draft")
INSTRUCTIONS = ("FROM", "SYSTEM", "TEMPLATE", "PARAMETER", "MESSAGE", "LICENSE")
_TEXTS = {"FROM": "source", "SYSTEM": "system", "TEMPLATE": "template"}
_LONG_QUOTE = '"""'
_QUOTED = r'[^\n]*?"{3}[\s\S]*?"{3,}'  # a value may end with a quote of its own
_INSTRUCTION = re.compile(rf"\s*(?:#[^\n]*|(?P<name>\S+)[ \t]*(?:(?P<quoted>{_QUOTED})|(?P<line>[^\n]*)))")


@dataclass
class Modelfile:
    """The values of a Modelfile, under the names of the fields of `/api/create`."""

    source: str = ""
    system: str = ""
    template: str = ""
    license: list[str] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)


def parse_modelfile(text: str) -> Modelfile:
    """Read a Modelfile. Raises RequestError, with its name, for an instruction that is not supported."""
    found = Modelfile()
    for name, value in _instructions(text):
        if name in _TEXTS:
            setattr(found, _TEXTS[name], _unquote(value))
        elif name == "LICENSE":
            found.license.append(_unquote(value))
        else:
            first, _, rest = (_unquote(value) if name == "PARAMETER" else value).partition(" ")
            content = _unquote(rest.strip())
            if name == "MESSAGE":
                found.messages.append({"role": first.lower(), "content": content})
            elif first == "stop":  # may be given several times
                found.parameters.setdefault("stop", []).append(content)
            else:
                found.parameters[first] = _read_number(content)
    return found


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    """The names and values of the instructions; values still have their quotes."""
    for found in _INSTRUCTION.finditer(text):
        if found["name"] is None:  # a comment
            continue
        name = found["name"].upper()
        if name not in INSTRUCTIONS:
            known = ", ".join(INSTRUCTIONS)
            raise RequestError(f"the Modelfile has {found['name'][:40]!r}, which is not supported; there are {known}")
        if found["quoted"] is None and _LONG_QUOTE in found["line"]:
            raise RequestError(f'the Modelfile has {name} with """ that no other """ ends')
        yield name, (found["quoted"] or found["line"]).strip()


def _unquote(value: str) -> str:
    if value.startswith(_LONG_QUOTE) and value.endswith(_LONG_QUOTE) and len(value) >= 2 * len(_LONG_QUOTE):
        return value[len(_LONG_QUOTE) : -len(_LONG_QUOTE)]
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' else value


def _read_number(text: str) -> Any:
    """The number or truth value that a text stands for; other texts as they are, for the check of the options to refuse."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def write_parameters(parameters: Mapping[str, Any]) -> str:
    """The parameters, one per line, and one line for each stop string."""
    return "\n".join(f"{name:<30} {json.dumps(value, ensure_ascii=False)}" for name, value in _pairs(parameters))


def _pairs(parameters: Mapping[str, Any]) -> list[tuple[str, Any]]:
    lists = {name: value if isinstance(value, list | tuple) else [value] for name, value in parameters.items()}
    return [(name, each) for name, values in lists.items() for each in values]


def write_modelfile(source: str, template: str, parameters: Mapping[str, Any], overlay: Overlay) -> str:
    """The text that would make the model again."""
    lines = [f"FROM {source}", f"TEMPLATE {_quote(template)}"]
    lines += [f"SYSTEM {_quote(overlay.system)}"] if overlay.system else []
    lines += [f"PARAMETER {name} {_quote(value)}" for name, value in _pairs(parameters)]
    lines += [f"MESSAGE {each['role']} {_quote(each['content'])}" for each in overlay.messages]
    lines += [f"LICENSE {_quote(overlay.license)}"] if overlay.license else []
    return "\n".join([*lines, ""])


def _quote(value: Any) -> str:
    return f"{_LONG_QUOTE}{value}{_LONG_QUOTE}" if isinstance(value, str) else str(value)


@with_fields(dict.fromkeys(_UNSUPPORTED, Any))
class CreateRequest(NamedRequest):
    """The body of /api/create: fields, or the text of a Modelfile as older clients send it."""

    from_: Annotated[str, bounds.SHORT_NAME] | None = Field(default=None, alias="from")
    modelfile: str | None = None
    system: str | None = None
    template: str | None = None
    parameters: dict[str, Any] | None = None
    messages: Messages | None = None
    license: Annotated[str | list[str] | None, bounds.at_most(bounds.MAX_LICENSES)] = None
    stream: bool | None = None

    def read(self) -> tuple[str, Overlay]:
        """The model that it is made from, and what is added. Raises RequestError for a field that is not supported."""
        for name in _UNSUPPORTED:
            if getattr(self, name):
                raise RequestError(f"{name} is not supported: a model is made from one that is here, without new weights")
        bounds.check_text(self.modelfile or "", "modelfile", bounds.MAX_MODELFILE_CHARACTERS)
        found = parse_modelfile(self.modelfile or "")
        source, template = self.from_ or found.source, self.template or found.template
        bounds.check_text(template, "TEMPLATE", bounds.MAX_TEMPLATE_CHARACTERS)
        if not source:
            raise RequestError("there is no model to make it from: give `from`, or FROM in the Modelfile")
        licenses = [self.license] if isinstance(self.license, str) else self.license or []
        return source, Overlay(
            system=self.system or found.system,
            template=template,
            parameters=check_parameters({**found.parameters, **(self.parameters or {})}),
            messages=tuple([each.to_message() for each in self.messages or ()] or found.messages),
            license="\n\n".join(licenses or found.license),
        )


@router.post("/api/create")
async def create(body: CreateRequest, service: ServiceOf) -> Response:
    """Make a model from another: the same weights under a new name, with a system prompt and so on.

    It has a thread of its own: a slow template must not take one from those that all requests share.
    """
    source, overlay = body.read()
    await run_in_thread(service.catalog.create, body.wanted, source, overlay)
    if body.stream is False:
        return JSONResponse({"status": "success"})
    return StreamingResponse((json_line({"status": status}) for status in _STATUSES), media_type=NDJSON)


def check_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters in the types of Ollama's options. Raises RequestError for one that is unknown or of a wrong type."""
    unknown = [name for name in parameters if name not in Options.model_fields]
    if unknown:
        known = ", ".join(Options.model_fields)
        raise RequestError(f"the parameter {unknown[0][:40]!r} is not supported; there are {known}")
    try:
        return Options.model_validate(dict(parameters)).model_dump(exclude_none=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise RequestError(f"the parameter {first['loc'][0]} is wrong: {first['msg']}") from error
