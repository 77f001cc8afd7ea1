"""The page: a chat, and the tree at work. Browsers get it at `/`; others get the text that Ollama's clients look for.

Its files are shipped with Bough and need no key: they are the same on every server. They load nothing from other hosts, and
a strict Content-Security-Policy forbids it.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, PlainTextResponse, Response
from starlette.staticfiles import StaticFiles

FOLDER = Path(__file__).parents[2] / "web"

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}

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

    def file_response(self, *args: object, **kwargs: object) -> Response:
        response = super().file_response(*args, **kwargs)  # type: ignore[arg-type]
        response.headers.update(_HEADERS)
        return response
