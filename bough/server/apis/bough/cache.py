"""The tree over HTTP: look at it, ask why something was not reused, fill it, keep parts of it, empty it, carry it away.

Where clients have keys, each sees and changes what its own salt holds, and nothing else. Without keys everybody sees all;
who sends a salt means that one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import Field

from bough.cache.admin.view import NodeView, TreeView
from bough.cache.disk import DiskError
from bough.config import Settings
from bough.errors import RequestError, TooLarge, Unavailable
from bough.models.prompts import Encoded
from bough.server.apis.bough.transfers import SentOnce, make_file, spool, temporary_file
from bough.server.http.bounds import SHORT_NAME
from bough.server.http.errors import Fault, answer_fault, plain_shape
from bough.server.http.messages import Messages, Tools
from bough.server.http.streaming import unless_gone
from bough.server.http.wire import SaltOf, ServiceOf, Wire, route_class
from bough.server.serving.ask import Ask, ToolChoice, count_chars
from bough.server.serving.loaded import LoadedModel
from bough.server.serving.prompting.tools import prepare
from bough.server.serving.service import Service
from bough.system.resources import free_disk_bytes
from bough.types import Prompt

router = APIRouter(prefix="/api/cache", route_class=route_class(plain_shape), tags=["cache"])

_BUDGETS = ("cache", "lanes", "device_bytes", "host_bytes", "disk_bytes", "disk_free_bytes", "disk_ttl_s", "salt_share")
_SUMMED = ("nodes", "tokens", "pages", "restore_points", "kept", "tree_bytes")


class PrefixBody(Wire):
    """A prefix: messages, or a text (what a user says, unless `raw`), with what goes before it."""

    model: Annotated[str, SHORT_NAME] | None = None
    messages: Messages | None = Field(default=None, min_length=1)
    prompt: str | None = Field(default=None, min_length=1)
    system: str | None = None
    tools: Tools | None = None
    raw: bool = False


def get_scope(request: Request, salt: SaltOf) -> str | None:
    """The salt that the caller's view ends at; None: it sees all."""
    return None if getattr(request.state, "sees_all", False) and not salt else salt


ScopeOf = Annotated[str | None, Depends(get_scope)]
ModelName = Annotated[str | None, Query(description="A model; without one, that which was used last.")]


@router.get("")
async def read_figures(request: Request, service: ServiceOf, scope: ScopeOf, model: ModelName = None) -> JSONResponse:
    """What each loaded model's tree holds, and what it may hold."""
    chosen = service.models.list() if model is None else [await _require_loaded(service, model)]
    figures = [{"model": each.name, **await unless_gone(request, _figures(service, each, scope))} for each in chosen]
    return JSONResponse({"models": figures, "settings": _budgets(service.settings)})


async def _require_loaded(service: Service, model: str) -> LoadedModel:
    loaded = service.models.find((await asyncio.to_thread(service.catalog.files, model)).name)
    if loaded is None:
        raise RequestError(f"the model {model!r} is not loaded: there are no figures of it")
    return loaded


async def _figures(service: Service, loaded: LoadedModel, scope: str | None) -> dict[str, Any]:
    if scope is None:
        exact = await service.look(loaded, loaded.runner.cache.stats)
        return {**loaded.worker.snapshot(), **exact}
    tree = await service.look(loaded, lambda: loaded.runner.cache.tree(scope))
    return sum_up(tree.nodes)


def sum_up(nodes: Iterable[NodeView]) -> dict[str, int]:
    """The figures of one salt's tree: the same names as those of the whole."""
    totals = dict.fromkeys(_SUMMED, 0)
    for node in nodes:
        counts = (1, node.num_tokens, node.num_pages, len(node.points), len(node.kept), node.nbytes)
        for name, number in zip(_SUMMED, counts, strict=True):
            totals[name] += number
    return totals


def _budgets(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in _BUDGETS}


@router.get("/tree")
async def read_tree(
    request: Request,
    service: ServiceOf,
    scope: ScopeOf,
    model: ModelName = None,
    salt: Annotated[str | None, Query(description="Only the tree of this salt, for who sees all.")] = None,
    format: Annotated[Literal["json", "text"], Query(description="Plain data, or a drawing.")] = "json",
    ids: Annotated[bool, Query(description="The token ids of each edge, too.")] = False,
) -> Response:
    """The tree of one model: every edge with its text, where it lies, what is kept and what is in use."""
    chosen = salt if scope is None else scope
    async with _using(service, model) as loaded:
        tree = await unless_gone(request, service.look(loaded, lambda: loaded.runner.cache.tree(chosen)))
    if format == "text":
        return PlainTextResponse(await asyncio.to_thread(str, tree))
    return await asyncio.to_thread(_tree_as_json, loaded.name, tree, ids)


def _tree_as_json(model: str, tree: TreeView, has_ids: bool) -> JSONResponse:
    try:
        return JSONResponse({"model": model, "roots": tree.as_dict(has_ids=has_ids)})
    except RecursionError:
        depth = max(node.depth for node in tree.nodes)
        raise RequestError(f"the tree is {depth + 1} levels deep, too deep for JSON: ask with format=text") from None


@asynccontextmanager
async def _using(service: Service, model: str | None) -> AsyncIterator[LoadedModel]:
    """The model that was named, loaded if need be; without a name, the one that was used last."""
    latest = [each.name for each in service.models.list()[:1]]
    async with service.models.using(model or next(iter(latest), service.settings.model)) as loaded:
        yield loaded


@router.get("/explain")
async def explain_text(
    service: ServiceOf,
    salt: SaltOf,
    prompt: Annotated[str, Query(min_length=1)],
    model: ModelName = None,
    raw: bool = False,
) -> JSONResponse:
    """How much of a text would be reused, and why not more."""
    return await explain(PrefixBody(model=model, prompt=prompt, raw=raw), service, salt)


@router.post("/explain")
async def explain(body: PrefixBody, service: ServiceOf, salt: SaltOf) -> JSONResponse:
    """How much of a prompt would be reused, and why not more."""
    check_prefix(body)
    async with _using(service, body.model) as loaded:
        prefix, runner = to_prefix(body, loaded), loaded.runner
        ids = await _encode(service, loaded, runner.prompts.encode, prefix)
        found = await service.on_engine(loaded, lambda: runner.cache.explain(ids, salt=salt))
    return JSONResponse({"model": loaded.name, **asdict(found)})


@dataclass(frozen=True)
class Prefix:
    """A prompt, and how it is rendered."""

    prompt: Prompt
    options: dict[str, Any]


def check_prefix(body: PrefixBody) -> None:
    """Raise RequestError unless a body has messages or a text, and not both."""
    if (body.messages is None) == (body.prompt is None):
        raise RequestError("give either messages or prompt")
    if body.system is not None and (body.raw or body.messages is not None):
        raise RequestError("system goes with a prompt that is not raw; among messages, write it as the first of them")
    if body.raw and (body.tools or body.messages is not None):
        raise RequestError("raw goes with a prompt and without tools: nothing is rendered")


def to_prefix(body: PrefixBody, loaded: LoadedModel) -> Prefix:
    """The prefix as a chat with this model would give it to the template, so that it is the same tokens."""
    if body.raw and body.prompt is not None:
        return Prefix(body.prompt, {"raw": True})
    if body.messages is not None:
        messages = [message.to_message() for message in body.messages]
    else:
        system = [{"role": "system", "content": body.system}] if body.system else []
        messages = [*system, {"role": "user", "content": body.prompt}]
    knows_tools = "tools" in loaded.info.capabilities
    given = prepare(messages, body.tools or (), ToolChoice(), template_knows_tools=knows_tools)
    return Prefix(given.messages, {"tools": given.tools})


async def _encode(service: Service, loaded: LoadedModel, encode: Callable[..., Encoded], prefix: Prefix) -> Sequence[int]:
    """The ids of a prefix, found in a thread: the engine's own has better things to do."""
    prompt: Any = prefix.prompt
    num_chars = len(prompt) if isinstance(prompt, str) else count_chars(prompt)
    return (await service.encode(loaded, encode, prompt, num_chars, prefix.options)).ids


@router.post("/warm")
async def warm(body: PrefixBody, request: Request, service: ServiceOf, salt: SaltOf) -> JSONResponse:
    """Compute a prefix and keep it, so that the first request that begins with it is quick."""
    check_prefix(body)
    async with _using(service, body.model) as loaded:
        ask = _to_ask(to_prefix(body, loaded), loaded.name, salt)
        completion = await unless_gone(request, service.warm(ask))
    usage = completion.usage
    counts = {name: getattr(usage, name) for name in ("prompt_tokens", "cached_tokens", "computed_tokens")}
    return JSONResponse({"model": loaded.name, **counts})


def _to_ask(prefix: Prefix, model: str, salt: str) -> Ask:
    if isinstance(prefix.prompt, str):
        return Ask(model, text=prefix.prompt, salt=salt)
    messages: Any = prefix.prompt
    return Ask(model, messages=messages, tools=prefix.options["tools"] or (), salt=salt)


@router.post("/pin")
async def pin(body: PrefixBody, service: ServiceOf, salt: SaltOf) -> Response:
    """Let a prefix that is known outlive what nobody asked to keep; 409 if not all of it is known."""
    return await _pin(body, service, salt, kept=True)


@router.post("/unpin")
async def unpin(body: PrefixBody, service: ServiceOf, salt: SaltOf) -> Response:
    """Let a prefix go when its time comes, like any other; 409 if not all of it is known."""
    return await _pin(body, service, salt, kept=False)


async def _pin(body: PrefixBody, service: Service, salt: str, *, kept: bool) -> Response:
    check_prefix(body)
    async with _using(service, body.model) as loaded:
        prefix, runner = to_prefix(body, loaded), loaded.runner
        ids = await _encode(service, loaded, runner.prompts.encode_prefix, prefix)
        found = await service.on_engine(loaded, lambda: runner.cache.pin(ids, kept, salt=salt))
        is_kept = await service.on_engine(loaded, lambda: runner.cache.is_kept(ids, salt=salt))
    known = f"{found.matched_tokens} of the {found.prompt_tokens} tokens are known"
    if found.matched_tokens < found.prompt_tokens:
        return answer_fault(Fault(409, f"{known}: warm the prefix first"), plain_shape)
    if is_kept is not kept:
        return answer_fault(
            Fault(409, f"{known}, and cannot be gone on from at their end: warm the prefix first"), plain_shape
        )
    return JSONResponse({"model": loaded.name, "kept": kept, **asdict(found)})


@router.delete("")
async def clear(service: ServiceOf, scope: ScopeOf, model: ModelName = None) -> JSONResponse:
    """Forget all that the caller sees, of one model or of every loaded one, on disk for good."""
    names = [each.name for each in service.models.list()] if model is None else [model]
    for name in names:
        async with _using(service, name) as loaded:
            cache = loaded.runner.cache
            await service.on_engine(loaded, partial(cache.clear, scope))
    return JSONResponse({"cleared": names})


@router.post("/export", response_class=Response)
async def export(service: ServiceOf, salt: SaltOf, model: ModelName = None) -> Response:
    """What the caller's salt has on disk, as one archive that `import` takes."""
    async with _using(service, model) as loaded:
        require_room(service.settings, loaded.worker.snapshot().get("disk_bytes", 0))
        try:
            file = await asyncio.to_thread(make_file, _folder(service))
        except OSError as error:
            raise Unavailable(f"there is no place for the archive: {error.strerror or error}") from error
        try:
            await service.on_engine(loaded, lambda: loaded.runner.cache.export_file(file, salt))
        except DiskError as error:
            file.unlink(missing_ok=True)
            raise Unavailable(str(error).replace(str(file), "the archive")) from error
        except BaseException:
            file.unlink(missing_ok=True)
            raise
    return SentOnce(file, media_type="application/x-tar", filename=f"{Path(loaded.name).name}.bough.tar")


@router.post("/import")
async def import_archive(request: Request, service: ServiceOf, salt: SaltOf, model: ModelName = None) -> Response:
    """Add an archive, sent as the body, to the tree of the caller's salt. Only while nothing else runs."""
    room_bytes = require_room(service.settings, int(request.headers.get("content-length", 0)))
    try:
        with temporary_file(_folder(service)) as file:
            await spool(request.stream(), file, min(service.settings.max_import_bytes, room_bytes))
            async with _using(service, model) as loaded:
                with _told_without(file):
                    await asyncio.to_thread(loaded.runner.cache.check_archive, file)
                    found = await service.on_engine(loaded, lambda: loaded.runner.cache.take_archive(file, salt))
    except TooLarge as error:
        return answer_fault(Fault(413, str(error), headers={"Connection": "close"}), plain_shape)
    except OSError as error:
        raise Unavailable(f"the archive could not be taken in: {error.strerror or error}") from error
    return JSONResponse({"model": loaded.name, **asdict(found)})


@contextmanager
def _told_without(file: Path) -> Iterator[None]:
    """What is wrong with an archive is the client's mistake, and told without where the file lies."""
    try:
        yield
    except DiskError as error:
        raise RequestError(str(error).replace(str(file), "the archive")) from error


def require_room(settings: Settings, num_bytes: int) -> int:
    """How large a file may be that leaves free what has to be. Raises Unavailable if one of this size would not."""
    free_bytes = free_disk_bytes(settings.cache_folder)
    room_bytes = free_bytes - settings.disk_free_bytes
    if num_bytes > room_bytes:
        left = f"{free_bytes:,} are free on the disk, and {settings.disk_free_bytes:,} of them are left alone"
        raise Unavailable(f"the archive may have {num_bytes:,} bytes: {left}")
    return room_bytes


def _folder(service: Service) -> Path:
    return service.settings.cache_folder / "transfers"
