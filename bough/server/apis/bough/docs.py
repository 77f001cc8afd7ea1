"""`/docs`: every route with its fields, to read and to try, drawn by Swagger UI.

Its files are shipped with Bough, so that the page works without the internet. It needs no key: it is the same on every
server. Trying a route needs one where the server has keys; the page then asks for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse, HTMLResponse, Response

from bough.server.http.security import DOCS_PATH, SCHEMA_PATH

router = APIRouter(prefix=DOCS_PATH, include_in_schema=False)

_FOLDER = Path(__file__).parents[2] / "swagger_ui"
_SCRIPT, _STYLE = "swagger-ui-bundle.js", "swagger-ui.css"
_EMPTY_ICON = "data:,"


@router.get("")
async def read_page() -> HTMLResponse:
    """The page. Its addresses are relative, so that it also works below another path."""
    name = DOCS_PATH.removeprefix("/")
    return get_swagger_ui_html(
        openapi_url=SCHEMA_PATH.removeprefix("/"),
        title="Bough",
        swagger_js_url=f"{name}/{_SCRIPT}",
        swagger_css_url=f"{name}/{_STYLE}",
        swagger_favicon_url=_EMPTY_ICON,
    )


@router.get(f"/{_SCRIPT}")
async def read_script() -> Response:
    return FileResponse(_FOLDER / _SCRIPT, media_type="text/javascript")


@router.get(f"/{_STYLE}")
async def read_style() -> Response:
    return FileResponse(_FOLDER / _STYLE, media_type="text/css")


def ask_for_key(app: FastAPI) -> None:
    """Say in the schema that every route needs a key, so that the page asks for one."""
    make_schema = app.openapi

    def make_schema_with_key() -> dict[str, Any]:
        schema = make_schema()
        schema.setdefault("components", {})["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"key": []}]
        return schema

    app.openapi = make_schema_with_key  # type: ignore[method-assign]
