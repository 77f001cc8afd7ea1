"""The application: all APIs and the middleware around them.

From outside in: the log, security (no access), limits (too large, too many), and then the routes. These layers are plain
ASGI: a stream passes through them piece by piece, and a client that disconnects is noticed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from bough.config import Settings
from bough.models import ModelFiles
from bough.server.apis import models as model_lists
from bough.server.apis.anthropic import messages as anthropic
from bough.server.apis.bough import cache, catalogue, health, page, run_command, tokens
from bough.server.apis.ollama import answers as ollama
from bough.server.apis.ollama import create as ollama_create
from bough.server.apis.ollama import models as ollama_models
from bough.server.apis.openai import chat as openai_chat
from bough.server.apis.openai import completions as openai_completions
from bough.server.apis.openai import embeddings as openai_embeddings
from bough.server.apis.openai import responses as openai_responses
from bough.server.apis.openai import wire as openai_wire
from bough.server.http.errors import ErrorFormat, error_response, format_plain_error, to_http_error
from bough.server.http.json_routes import Api, api_of
from bough.server.http.limits import LimitsMiddleware
from bough.server.http.security import PAGE_PATH, SCHEMA_PATH, Authenticator, SecurityMiddleware
from bough.server.logs import LogsMiddleware
from bough.server.serving.catalog import Catalog
from bough.server.serving.loaded import LoadedModels, Start, start_model
from bough.server.serving.service import Service
from bough.system.distribution import VERSION
from bough.types import Progress

_ROUTERS = (
    openai_chat.router,
    openai_responses.router,
    openai_completions.router,
    openai_embeddings.router,
    anthropic.router,
    ollama.router,
    ollama_models.router,
    ollama_create.router,
    model_lists.anthropic_router,  # before OpenAI's: it takes the same paths from clients of Anthropic's API
    model_lists.openai_router,
    cache.router,
    catalogue.router,
    run_command.router,
    tokens.router,
    health.router,
    page.router,
)
_ERROR_FORMATS: dict[Api, ErrorFormat] = {"openai": openai_wire.format_error, "anthropic": anthropic.format_error}


def make_app(settings: Settings, service: Service) -> FastAPI:
    """The application of a service, which it closes at its end. Raises SettingsError if the file of keys cannot be used."""
    authenticator = Authenticator(settings)
    app = FastAPI(
        title="Bough", version=VERSION, lifespan=_lifespan, openapi_url=SCHEMA_PATH, docs_url=None, redoc_url=None
    )
    app.state.service = service
    app.state.is_starting = app.state.is_draining = False
    for router in _ROUTERS:
        app.include_router(router)
    app.mount(PAGE_PATH, page.WebFiles(directory=page.FOLDER))
    if settings.keys_file is not None:
        page.ask_for_key(app)
    app.add_exception_handler(HTTPException, _answer_unmatched)
    # The last that is added is the outermost.
    app.add_middleware(LimitsMiddleware, settings=settings, error_format_of=error_format_of)
    app.add_middleware(SecurityMiddleware, settings=settings, error_format_of=error_format_of, authenticator=authenticator)
    app.add_middleware(LogsMiddleware, metrics=service.metrics)
    return app


def make_service(
    settings: Settings, files: ModelFiles, progress: Progress | None = None, start: Start | None = None
) -> Service:
    """A service with this default model; `start` loads models, by default in this process. Raises SettingsError."""
    settings = replace(settings, model=files.name)
    catalog = Catalog(settings, files)
    catalog.check_aliases()
    start = start or partial(start_model, progress=progress)
    return Service(settings, LoadedModels(settings, catalog, start=start), catalog)


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    try:
        yield
    finally:
        app.state.is_draining = True
        await app.state.service.close()


def error_format_of(path: str) -> ErrorFormat:
    return _ERROR_FORMATS.get(api_of(path), format_plain_error)


async def _answer_unmatched(request: Request, error: Exception) -> Response:
    """Answer a request that no route matches, in the format of the API that its path belongs to."""
    http_error = to_http_error(error)
    place = f"{request.method} {request.url.path[:200]}"
    texts = {404: f"there is no {place} here", 405: f"the method is not allowed: {place}"}
    http_error = replace(http_error, text=texts.get(http_error.status, http_error.text))
    return error_response(http_error, error_format_of(request.url.path))
