"""Request bodies: JSON of bounded depth and size, and routes that answer every error in the format of their API.

Always true of a body that a route sees: its text is valid Unicode (a lone surrogate became U+FFFD, as in other servers),
it is no deeper than `MAX_DEPTH` and has no more values than `bounds` says. `json.loads` holds the interpreter lock, so a
body that would take long is refused before. Whatever a client sends, a route answers with a status that we chose.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Literal, ParamSpec, TypeVar, get_args

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, create_model
from starlette.requests import ClientDisconnect

from bough.errors import RequestError
from bough.server.http.bounds import MAX_DEPTH, MAX_DIGITS, MAX_PARTS, MAX_VALUES, show
from bough.server.http.errors import CLIENT_CLOSED_REQUEST, ErrorFormat, error_response, to_http_error
from bough.server.log_format import Notices

_LARGE_BYTES = 2**15  # larger bodies are read in a thread: this one takes 10 ms at most
Api = Literal["ollama", "openai", "anthropic", "bough"]
Body = TypeVar("Body", bound="Wire")
Given = ParamSpec("Given")
Result = TypeVar("Result")
_DIGITS_AS_0 = bytes(0x30 if 0x30 <= code <= 0x39 else 0x20 for code in range(256))


class Wire(BaseModel):
    """A part of a body. Types are strict ("5" is no number); unknown fields are ignored, and named in the log."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


def with_fields(named: Mapping[str, Any]) -> Callable[[type[Body]], type[Body]]:
    """Add optional fields to a body, whose names and types are data. They are read by `getattr` and `model_dump`."""

    def add(body: type[Body]) -> type[Body]:
        added: dict[str, Any] = {name: (kind | None, None) for name, kind in named.items()}
        return create_model(body.__name__, __base__=body, __module__=body.__module__, __doc__=body.__doc__, **added)

    return add


class JsonRequest(Request):
    """A request whose body is JSON whatever its headers say: many clients of Ollama send no content type."""

    value: Any = None  # of the body, once it was read

    async def json(self) -> Any:
        body = await self.body()
        self.value = await asyncio.to_thread(read_json, body) if len(body) > _LARGE_BYTES else read_json(body)
        return self.value


async def read_ask(request: Request, to_ask: Callable[Given, Result], *args: Given.args, **named: Given.kwargs) -> Result:
    """What `to_ask` makes of a body; in a thread, if the body is large."""
    if len(await request.body()) <= _LARGE_BYTES:
        return to_ask(*args, **named)
    return await asyncio.to_thread(to_ask, *args, **named)


def read_json(body: bytes) -> Any:
    """The value in a body. Raises RequestError if it is not JSON, not UTF-8, too deep, or has too many values."""
    try:
        text = body.decode("utf-8")
        if len(body) > MAX_PARTS:  # smaller bodies are within all limits
            _check_size(body)
        value = json.loads(text)
        _check_values(value)
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise RequestError(f"the body is nested deeper than {MAX_DEPTH} levels") from error
    except ValueError as error:  # a number with thousands of digits
        raise RequestError(f"the body cannot be read: {error}") from error
    return _replace_surrogates(value) if b"\\ud" in body or b"\\uD" in body else value


def _check_size(body: bytes) -> None:
    """Raise RequestError for a body that would take long to read. Only what is outside of its texts is counted."""
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_texts = plain.count(b'"') // 2
    if num_texts > 2 * MAX_VALUES:  # each value may have a name
        raise RequestError(f"the body has {num_texts:,} texts, and may have {2 * MAX_VALUES:,}")
    plain = b"".join(plain.split(b'"')[::2])
    num_values = plain.count(b",") + 1
    num_parts = sum(map(plain.count, (b"[", b"{", b":", b".", b"e", b"E")))
    if num_values > MAX_VALUES:
        raise RequestError(f"the body has {num_values:,} values, and may have {MAX_VALUES:,}")
    if num_parts > MAX_PARTS:
        raise RequestError(f"the body has {num_parts:,} lists, objects, fields and fractions, and may have {MAX_PARTS:,}")
    if b"0" * MAX_DIGITS in plain.translate(_DIGITS_AS_0):
        raise RequestError(f"the body has a number of {MAX_DIGITS} digits or more")


def _check_values(value: Any) -> None:
    """Raise RequestError for a value that is too deep, or a number in it that is not finite."""
    groups: list[Iterable[Any]] = [(value,)]
    for _ in range(MAX_DEPTH + 2):
        groups = [inner for group in groups for inner in _contents_of(group)]
    if groups:
        raise RequestError(f"the body is nested deeper than {MAX_DEPTH} levels")


def _contents_of(values: Iterable[Any]) -> Iterator[Iterable[Any]]:
    """The contents of the lists and objects among some values."""
    for each in values:
        if isinstance(each, list):
            yield each
        elif isinstance(each, dict):
            yield each.values()
        elif isinstance(each, float) and not math.isfinite(each):
            raise RequestError("the body has a number that is not finite")


def _replace_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_replace_surrogates(each) for each in value]
    if isinstance(value, dict):
        return {_replace_surrogates(key): _replace_surrogates(each) for key, each in value.items()}
    return value


def find_unknown(value: Any, body: type[Wire]) -> Iterator[str]:
    """The fields that a body has without effect, also those of objects in it (`options.grammar`), but not of lists."""
    if not isinstance(value, dict):
        return
    known = _known_fields(body)
    for name, each in value.items():
        if name not in known:
            yield name
        elif (part := known[name]) is not None:
            yield from (f"{name}.{inner}" for inner in find_unknown(each, part))


@cache
def _known_fields(body: type[Wire]) -> Mapping[str, type[Wire] | None]:
    """The names of a body's fields, each with the class of its value if that is an object of named fields, too."""
    found: dict[str, type[Wire] | None] = {}
    for name, field in body.model_fields.items():
        kinds = (field.annotation, *get_args(field.annotation))
        parts = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Wire)]
        found[field.alias or name] = parts[0] if parts else None
    return found


def api_of(path: str) -> Api:
    """The API that a path belongs to, whether or not a route has it."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return "anthropic"
    if path == "/v1" or path.startswith("/v1/") or path in ("/rerank", "/v2/rerank"):
        return "openai"
    if path == "/api/cache" or path.startswith("/api/cache/"):
        return "bough"
    return "ollama" if path in ("/", "/api") or path.startswith("/api/") else "bough"


def _note_unknown(request: JsonRequest, body: type[Wire]) -> None:
    """Name in the log what the body has without effect."""
    notices: Notices = request.app.state.service.notices
    for name in find_unknown(request.value, body):
        notices.add(f"the field {show(name)} of {request.url.path}", "this server does not know it")


def route_class(format_error: ErrorFormat) -> type[APIRoute]:
    """A class of routes that read bodies as above and answer every error in this format."""

    class Route(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()
            body = self.body_field.field_info.annotation if self.body_field else None

            async def answer(request: Request) -> Response:
                read = JsonRequest(request.scope, request.receive, request._send)
                try:
                    return await handle(read)
                except ClientDisconnect:
                    return Response(status_code=CLIENT_CLOSED_REQUEST)
                except Exception as error:
                    return error_response(to_http_error(error), format_error)
                finally:
                    if isinstance(body, type) and issubclass(body, Wire):
                        _note_unknown(read, body)

            return answer

    return Route
