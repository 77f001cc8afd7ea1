"""`bough tree` and `bough explain`: of a running server if there is one, else of the tree on disk.

On disk no model is loaded: the index has the tree, and the tokenizer gives its texts. Nothing is changed. Another process
may use the tree; what it has only in memory is not shown.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from bough.cache.admin.drawing import LEAST_WIDTH, MIN_TOKENS, MOST_WIDTH
from bough.cache.admin.node_view import Decode
from bough.cache.admin.trees import TreeInfo, list_trees, open_stored
from bough.cache.admin.view import look_up, view_tree
from bough.cache.disk import DiskError
from bough.cache.prefix_cache import PrefixCache
from bough.cli import options
from bough.cli.backends.known_models import KnownModels
from bough.cli.cache.trees import is_of
from bough.cli.client import Client, find_client
from bough.cli.prompt_args import read_prompt_args
from bough.cli.terminal.columns import describe
from bough.cli.terminal.screen import Screen, neutralise
from bough.config import Settings, load_settings
from bough.errors import ModelError, ModelNotFound, Unavailable
from bough.models import GgufSupport, ModelFiles, resolve
from bough.models.prompts import Prompts
from bough.models.tokenizer import load_decoder, load_tokenizer
from bough.types import Message

_SHOWN_BRANCHES = 4
_WATCH_S = 1.0
_NO_CONVERSION = GgufSupport(is_readable=True, is_convertible=False)  # only the tokenizer is needed

Salt = Annotated[str | None, typer.Option(help="Only the tree of this salt.")]


def tree(
    model: Annotated[str | None, typer.Argument(help="A model, or a tree on disk; not given: the default model.")] = None,
    salt: Salt = None,
    depth: Annotated[int | None, typer.Option(min=1, help="The most levels to draw; what is below is counted.")] = None,
    min_tokens: Annotated[
        int, typer.Option(min=0, help="Join edges of fewer tokens with what follows; count ends of fewer.")
    ] = MIN_TOKENS,
    is_watched: Annotated[
        bool, typer.Option("--watch", help="Draw the tree of a running server whenever it changes.")
    ] = False,
    as_json: options.AsJson = False,
    url: options.Url = None,
    is_local: options.IsLocal = False,
) -> None:
    """Draw the tree: each edge with its text and its tier, what is kept and what is in use.

    What was used last comes first. Without a running server the tree on disk is drawn. No model is loaded for that.

    --watch looks at the server every second until Ctrl-C. In a pipe each tree that differs from the one before is written.
    """
    screen, settings = Screen(), load_settings()
    client = find_client(settings, url, is_local=is_local)
    if client is None:
        if is_watched:
            raise Unavailable("--watch needs a running server; `bough serve` starts one")
        return _draw_stored(model, salt, None if as_json else (_width(), depth, min_tokens), settings, screen)

    def draw() -> str:
        if as_json:
            return json.dumps(client.get("/api/cache/tree", model=model, salt=salt), indent=2, ensure_ascii=False)
        sizes = {"width": str(_width()), "depth": None if depth is None else str(depth), "min_tokens": str(min_tokens)}
        return client.get_text("/api/cache/tree", model=model, salt=salt, format="text", **sizes)

    with client:
        return _watch(draw, screen) if is_watched else screen.write_line(draw())


def _watch(draw: Callable[[], str], screen: Screen) -> None:
    """Write the tree whenever it has changed, until Ctrl-C. On a terminal it fills the screen, from its top."""
    console = Console(highlight=False)
    shown = draw()  # an error is written before the screen is taken
    with console.screen() if screen.is_terminal else nullcontext() as full_screen:
        while True:
            if full_screen is None:
                screen.write_line(shown)
            else:
                full_screen.update(Text(neutralise(shown), no_wrap=True))
            before = shown
            while shown == before:
                time.sleep(_WATCH_S)
                shown = draw()


def _width() -> int:
    """The columns of the terminal, or of the variable COLUMNS; 80 without either."""
    return min(max(LEAST_WIDTH, shutil.get_terminal_size().columns), MOST_WIDTH)


def _draw_stored(
    model: str | None, salt: str | None, sizes: tuple[int, int | None, int] | None, settings: Settings, screen: Screen
) -> None:
    """Draw the tree on disk in these sizes: width, depth and shortest edge; as JSON without any."""
    with _open(model, settings, screen) as stored:
        decode = _make_decoder(stored, settings, screen)
        found = view_tree(stored.cache, stored.cache.clock.now(), decode, salt)
        if sizes is None:
            plain = {"model": stored.tree.model, "roots": json.loads(found.to_json(has_ids=False))}
            return screen.write_line(json.dumps(plain, indent=2, ensure_ascii=False))
        return screen.write_line(found.draw(*sizes))


def explain(
    first: Annotated[str | None, typer.Argument(metavar="MODEL", help="A model; not given: the default model.")] = None,
    rest: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="The prompt, with - for standard input.", show_default=False),
    ] = None,
    model: options.Model = None,
    system: Annotated[str | None, typer.Option(help="The system prompt.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Take the prompt as it is, without the chat template.")] = False,
    as_json: options.AsJson = False,
    url: options.Url = None,
    is_local: options.IsLocal = False,
) -> None:
    """Show how much of a prompt is cached, and where it diverges from the tree.

    A word that is no model is the prompt, as for `bough run`. Without a running server the tree on disk is looked at. No
    model is loaded for that.
    """
    if raw and system is not None:
        raise typer.BadParameter("--system needs the chat template, and --raw does not use it")
    screen, settings = Screen(), load_settings()
    client = find_client(settings, url, is_local=is_local)
    name, text = _read_args([word for word in (first, *(rest or ())) if word], model, settings, client)
    if client is None:
        messages = [{"role": "system", "content": system}] if system else []
        prompt = text if raw else [*messages, {"role": "user", "content": text}]
        found = _explain_stored(name, prompt, settings, screen)
    else:
        with client:
            found = client.post("/api/cache/explain", model=name, prompt=text, system=system, raw=raw)
    if as_json:
        return screen.write_line(json.dumps(found, indent=2, ensure_ascii=False))
    screen.write_lines(_explain_lines(found))
    return None


def _read_args(
    words: Sequence[str], model: str | None, settings: Settings, client: Client | None
) -> tuple[str | None, str]:
    """The model and the prompt. The first word may also be the name of a tree on disk, whose model may be gone."""
    args = read_prompt_args(words, model, sys.stdin)
    is_tree = any(is_of(tree, args.model or "") for tree in list_trees(settings.trees_folder))
    if not is_tree and not KnownModels(settings, client).is_model(args):
        args = args.as_prompt()
    if not args.prompt:
        hint = f": {args.model!r} is a model; --model NAME makes all words the prompt" if args.is_alone else ""
        raise typer.BadParameter(f"there is no prompt to explain{hint}")
    return args.model, args.prompt


def _explain_stored(
    model: str | None, prompt: str | Sequence[Message], settings: Settings, screen: Screen
) -> dict[str, Any]:
    with _open(model, settings, screen) as stored:
        if stored.files is None:
            raise ModelNotFound(f"the files of {stored.tree.model} are not here: without its tokenizer nothing is matched")
        tokenizer = load_tokenizer(stored.files, settings.trust_remote_code)
        prompts = Prompts(tokenizer, vocab_size=0)
        encoded = prompts.encode(prompt)
        packed = encoded.tokens.key
        found = look_up(stored.cache, packed, "").explain(packed, prompts.decode, encoded.boundaries)
        return {"model": stored.tree.model, **asdict(found)}


def _explain_lines(found: dict[str, Any]) -> Iterator[str]:
    yield f"{found['model']}: {found['reason']}"
    facts = {name: f"{found[f'{name}_tokens']:,} tokens" for name in ("prompt", "matched", "cached")}
    if found["prompt_goes_on"]:
        facts["the prompt continues"] = repr(found["prompt_goes_on"])
    for number, text in enumerate(found["tree_goes_on"][:_SHOWN_BRANCHES], start=1):
        facts[f"the tree continues ({number})"] = repr(text)
    for name, known in found.get("replicas", {}).items():
        facts[name] = f"{known['matched_tokens']:,} matched, {known['cached_tokens']:,} cached"
    yield from describe(facts)


@dataclass(frozen=True)
class _Stored:
    """A tree on disk, restored, and the files of its model, if they are here."""

    tree: TreeInfo
    cache: PrefixCache
    files: ModelFiles | None


@contextmanager
def _open(model: str | None, settings: Settings, screen: Screen) -> Iterator[_Stored]:
    """Open the tree on disk of a model, or of the default model, and note its name."""
    tree = _choose(model, settings, screen)
    owner = f", in use by process {tree.owner_pid}: what that has in memory only is not shown" if tree.owner_pid else ""
    screen.note(f"the tree on disk {tree.name}{owner}")
    with open_stored(tree.folder, tree.fingerprint, tree.page_tokens, settings.disk_ttl) as cache:
        yield _Stored(tree, cache, _find_files(tree, model, settings))


def _choose(model: str | None, settings: Settings, screen: Screen) -> TreeInfo:
    """The tree of a model that was used last. Raises DiskError, with the names that there are, if it has none."""
    name = model or settings.model
    names = [name, *([Path(name).expanduser().resolve().name] if Path(name).expanduser().is_dir() else [])]
    trees = [tree for tree in list_trees(settings.trees_folder) if not tree.problem]
    found = [tree for tree in trees if any(is_of(tree, each) for each in names)]
    if not found and model is None and len({tree.model for tree in trees}) == 1:
        found = trees
    if not trees:
        raise DiskError("no server is running, and there are no trees on disk yet")
    if not found:
        there = ", ".join(sorted({tree.model or tree.name for tree in trees}))
        raise DiskError(f"no server is running, and {name!r} has no tree on disk; there are {there}")
    newest = max(found, key=lambda tree: tree.last_used)
    if others := [tree.name for tree in found if tree is not newest]:
        screen.note(f"{newest.name} was used last; there are {', '.join(others)}, too")
    return newest


def _find_files(tree: TreeInfo, model: str | None, settings: Settings) -> ModelFiles | None:
    """The files of a tree's model, by the name or folder that was given, or by the name that the tree has."""
    for name in (model, tree.model):
        try:
            files = resolve(name, settings, _NO_CONVERSION) if name else None
        except ModelError:
            continue
        if files is not None and is_of(tree, files.name):
            return files
    return None


def _make_decoder(stored: _Stored, settings: Settings, screen: Screen) -> Decode:
    """The function from an edge to its text; without the model's files there are no texts."""
    if stored.files is None:
        screen.note(f"the files of {stored.tree.model} are not here: no texts")
        return lambda ids: ""
    return load_decoder(stored.files, settings.trust_remote_code)
