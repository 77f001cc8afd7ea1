"""The pages for browsers, which need no key: they are the same on every server.

At `/` there is a chat and the tree at work; other clients get the text that Ollama's look for. The page loads nothing from
other hosts, and a strict Content-Security-Policy forbids it. `/docs` shows every route, to read and to try, drawn by
Swagger UI from the files of the package fastapi-offline, so that it works without the internet.
"""

from __future__ import annotations

import os
from os import PathLike
from pathlib import Path
from typing import Any

import fastapi_offline
from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse, HTMLResponse, PlainTextResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from bough.server.http.security import DOCS_PATH, SCHEMA_PATH

FOLDER = Path(__file__).parents[2] / "web"

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
# The operating system's table may have other types, and a browser would then refuse the file.
_MEDIA_TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}

_DOCS_FOLDER = Path(fastapi_offline.__file__).parent / "static"
_SCRIPT, _STYLE = "swagger-ui-bundle.js", "swagger-ui.css"
_DOCS_TYPES = {_SCRIPT: "text/javascript", _STYLE: "text/css"}

router = APIRouter()


@router.get("/", response_class=PlainTextResponse)
@router.head("/", include_in_schema=False)
async def greet(request: Request) -> Response:
    """The page for a browser; for others the text by which clients of Ollama know that there is a server."""
    if "text/html" in request.headers.get("accept", ""):
        return FileResponse(FOLDER / "index.html", headers=_HEADERS | {"Vary": "Accept"})
    return PlainTextResponse("Ollama is running", headers={"Vary": "Accept"})


class WebFiles(StaticFiles):
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


@router.get(DOCS_PATH, include_in_schema=False)
async def read_docs() -> HTMLResponse:
    """The page on the routes. Its addresses are relative, so that it also works below another path."""
    name = DOCS_PATH.removeprefix("/")
    return get_swagger_ui_html(
        openapi_url=SCHEMA_PATH.removeprefix("/"),
        title="Bough",
        swagger_js_url=f"{name}/{_SCRIPT}",
        swagger_css_url=f"{name}/{_STYLE}",
        swagger_favicon_url="data:,",  # none
    )


@router.get(f"{DOCS_PATH}/{_SCRIPT}", include_in_schema=False)
@router.get(f"{DOCS_PATH}/{_STYLE}", include_in_schema=False)
async def read_docs_file(request: Request) -> Response:
    name = _STYLE if request.url.path.endswith(_STYLE) else _SCRIPT
    return FileResponse(_DOCS_FOLDER / name, media_type=_DOCS_TYPES[name])


def ask_for_key(app: FastAPI) -> None:
    """Say in the schema that every route needs a key, so that the page asks for one."""
    make_schema = app.openapi

    def make_schema_with_key() -> dict[str, Any]:
        schema = make_schema()
        schema.setdefault("components", {})["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"key": []}]
        return schema

    app.openapi = make_schema_with_key  # type: ignore[method-assign]
