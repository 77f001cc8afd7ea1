"""Request bodies: JSON of bounded depth and size, and routes that answer every error in the format of their API.

Always true of a body that a route sees: its text is valid Unicode (a lone surrogate became U+FFFD, as in other servers),
it is no deeper than `MAX_DEPTH` and has no more values than `bounds` says. `json.loads` holds the interpreter lock, so a
body that would take long is refused before. Whatever a client sends, a route answers with a status that we chose.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict
from starlette.requests import ClientDisconnect

from bough.errors import RequestError
from bough.server.http.bounds import MAX_DEPTH, MAX_DIGITS, MAX_PARTS, MAX_VALUES
from bough.server.http.errors import CLIENT_CLOSED_REQUEST, ErrorFormat, error_response, to_http_error
from bough.server.http.streaming import ClientDisconnected
from bough.server.serving.service import Service

_LARGE_BYTES = 2**16  # larger bodies are read in a thread
_SURELY_FEW_BYTES = MAX_PARTS  # smaller bodies are within all limits
_DIGITS_AS_0 = bytes(0x30 if 0x30 <= code <= 0x39 else 0x20 for code in range(256))


class Wire(BaseModel):
    """A part of a body. Types are strict ("5" is no number), and unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


def get_service(request: Request) -> Service:
    """The service that the application runs."""
    service: Service = request.app.state.service
    return service


def get_salt(request: Request) -> str:
    """The salt of the client: that of its header, or derived from its key."""
    return str(getattr(request.state, "salt", ""))


ServiceOf = Annotated[Service, Depends(get_service)]
SaltOf = Annotated[str, Depends(get_salt)]


class JsonRequest(Request):
    """A request whose body is JSON whatever its headers say: many clients of Ollama send no content type."""

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            body = await self.body()
            is_large = len(body) > _LARGE_BYTES
            self._json = await asyncio.to_thread(read_json, body) if is_large else read_json(body)
        return self._json


def read_json(body: bytes) -> Any:
    """The value in a body. Raises RequestError if it is not JSON, not UTF-8, too deep, or has too many values."""
    try:
        text = body.decode("utf-8")
        if len(body) > _SURELY_FEW_BYTES:
            _check_size(_drop_texts(body))
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
    may_have_surrogates = b"\\ud" in body or b"\\uD" in body
    return _replace_surrogates(value) if may_have_surrogates else value


def _drop_texts(body: bytes) -> bytes:
    """The body without its texts and names of fields. Raises RequestError for more of them than it may have values."""
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_texts = plain.count(b'"') // 2
    if num_texts > 2 * MAX_VALUES:  # each value may have a name
        raise RequestError(f"the body has {num_texts:,} texts, and may have {2 * MAX_VALUES:,}")
    return b"".join(plain.split(b'"')[::2])


def _check_size(plain: bytes) -> None:
    """Raise RequestError for a body, given without its texts, that would take long to read."""
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
        groups = [inner for group in groups for inner in _look_inside(group)]
    if groups:
        raise RequestError(f"the body is nested deeper than {MAX_DEPTH} levels")


def _look_inside(values: Iterable[Any]) -> Iterator[Iterable[Any]]:
    """The contents of the lists and objects among some values."""
    for each in values:
        if isinstance(each, list):
            yield each
        elif isinstance(each, dict):
            yield each.values()
        elif isinstance(each, float) and not math.isfinite(each):
            raise RequestError("the body has a number that is not finite")


def _replace_surrogates(value: Any) -> Any:
    """The value with valid text only."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_replace_surrogates(each) for each in value]
    if isinstance(value, dict):
        return {_replace_surrogates(key): _replace_surrogates(each) for key, each in value.items()}
    return value


def route_class(format_error: ErrorFormat) -> type[APIRoute]:
    """A class of routes that read bodies as above and answer every error in this format."""

    class Route(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def answer(request: Request) -> Response:
                try:
                    return await handle(JsonRequest(request.scope, request.receive, request._send))
                except (ClientDisconnect, ClientDisconnected):
                    return Response(status_code=CLIENT_CLOSED_REQUEST)
                except Exception as error:
                    return error_response(to_http_error(error), format_error)

            return answer

    return Route
