"""The application: all APIs and the middleware around them.

From outside in: the log sees every request, security lets in who may ask, limits bound what is asked, then come the routes.
These layers are plain ASGI: a stream passes through them piece by piece, and a client that hangs up is noticed.
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
from bough.server.apis.anthropic import messages as anthropic
from bough.server.apis.anthropic import models as anthropic_models
from bough.server.apis.bough import cache as cache_api
from bough.server.apis.bough import docs, health, nodes, page
from bough.server.apis.bough import events as events_api
from bough.server.apis.bough import run as run_api
from bough.server.apis.bough import tokens as tokens_api
from bough.server.apis.ollama import answers as ollama
from bough.server.apis.ollama import create as ollama_create
from bough.server.apis.ollama import embeddings as ollama_embeddings
from bough.server.apis.ollama import models as ollama_models
from bough.server.apis.openai import chat as openai_chat
from bough.server.apis.openai import completions as openai_completions
from bough.server.apis.openai import embeddings as openai_embeddings
from bough.server.apis.openai import models as openai_models
from bough.server.apis.openai import rerank as openai_rerank
from bough.server.apis.openai import responses as openai_responses
from bough.server.apis.openai import wire as openai_wire
from bough.server.http.errors import Api, ErrorFormat, HttpError, api_of, error_response, format_plain_error
from bough.server.http.limits import LimitsMiddleware
from bough.server.http.logs import LogsMiddleware
from bough.server.http.security import PAGE_PATH, SCHEMA_PATH, Authenticator, SecurityMiddleware
from bough.server.serving.catalog import Catalog
from bough.server.serving.loaded import LoadedModels
from bough.server.serving.loaded_model import Start, start_model
from bough.server.serving.service import Service
from bough.system.distribution import VERSION
from bough.types import Progress

_ROUTERS = (
    ollama.router,
    ollama_models.router,
    ollama_create.router,
    ollama_embeddings.router,
    anthropic_models.router,  # before OpenAI's: it takes the same paths from clients of Anthropic's API
    openai_chat.router,
    openai_completions.router,
    openai_embeddings.router,
    openai_rerank.router,
    openai_models.router,
    openai_responses.router,
    anthropic.router,
    cache_api.router,
    nodes.router,
    events_api.router,
    run_api.router,
    tokens_api.router,
    health.router,
    docs.router,
    page.router,
)
_ERROR_FORMATS: dict[Api, ErrorFormat] = {
    "ollama": format_plain_error,
    "openai": openai_wire.format_error,
    "anthropic": anthropic.format_error,
    "bough": format_plain_error,
}


def make_app(settings: Settings, service: Service) -> FastAPI:
    """The application of a service. Closing it closes the service: models are unloaded, and their trees are saved.

    Raises SettingsError if the file of keys cannot be used.
    """
    authenticator = Authenticator(settings)
    app = FastAPI(
        title="Bough",
        version=VERSION,
        lifespan=_lifespan,
        openapi_url=SCHEMA_PATH,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    app.state.is_starting = app.state.is_draining = False
    for router in _ROUTERS:
        app.include_router(router)
    app.mount(PAGE_PATH, page.PageFiles(directory=page.FOLDER))
    if settings.keys_file is not None:
        docs.ask_for_key(app)
    app.add_exception_handler(HTTPException, _answer_unmatched)
    app.add_middleware(
        LimitsMiddleware, settings=settings, error_format_of=error_format_of
    )  # the last that is added is the outermost
    app.add_middleware(SecurityMiddleware, settings=settings, error_format_of=error_format_of, authenticator=authenticator)
    app.add_middleware(LogsMiddleware, metrics=service.metrics)
    return app


def make_service(
    settings: Settings, files: ModelFiles, progress: Progress | None = None, start: Start | None = None
) -> Service:
    """A service whose default model is this one, under the name that clients use. `progress` is told how models load;
    `start` loads them, in this process if it is not given.

    Raises SettingsError for an alias of the settings that stands for nothing.
    """
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
    """The format of errors of the API that owns a path."""
    return _ERROR_FORMATS[api_of(path)]


async def _answer_unmatched(request: Request, error: Exception) -> Response:
    """Answer a request that no route matches, in the format of the API that its path belongs to."""
    assert isinstance(error, HTTPException)
    place = f"{request.method} {request.url.path[:200]}"
    texts = {404: f"there is no {place} here", 405: f"the method is not allowed: {place}"}
    http_error = HttpError(
        error.status_code, texts.get(error.status_code, str(error.detail)), headers=dict(error.headers or {})
    )
    return error_response(http_error, error_format_of(request.url.path))
