"""The page: a chat, and the tree at work. Browsers get it at `/`; others get the text that Ollama's clients look for.

Its files are shipped with Bough and need no key: they are the same on every server. They load nothing from other hosts, and
a strict Content-Security-Policy forbids it.
"""

from __future__ import annotations

import os
from os import PathLike
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, PlainTextResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

FOLDER = Path(__file__).parents[2] / "web"

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}

_MEDIA_TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}
"""Said here, because the operating system's table may say something else, and a browser would then refuse the file."""

router = APIRouter()


@router.get("/", response_class=PlainTextResponse)
@router.head("/", include_in_schema=False)
async def greet(request: Request) -> Response:
    """The page for a browser; for others the text by which clients of Ollama know that there is a server."""
    if "text/html" in request.headers.get("accept", ""):
        return FileResponse(FOLDER / "index.html", headers=_HEADERS | {"Vary": "Accept"})
    return PlainTextResponse("Ollama is running", headers={"Vary": "Accept"})


class PageFiles(StaticFiles):
    """The files of the page, each with the headers that bind a browser."""

    def file_response(
        self, full_path: str | PathLike[str], stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(_HEADERS)
        media_type = _MEDIA_TYPES.get(Path(full_path).suffix)
        if media_type is not None and response.status_code == 200:
            response.headers["Content-Type"] = media_type
        return response
