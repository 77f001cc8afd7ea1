"""`bough explain`: how much of a prompt a server would reuse, and why not more."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from bough.cli import options
from bough.cli.client import Client
from bough.cli.columns import describe
from bough.cli.screen import Screen
from bough.cli.words import read_words
from bough.config import load_settings

_SHOWN_BRANCHES = 4


def explain(
    first: Annotated[str | None, typer.Argument(metavar="MODEL", help="A model; not given: the server's own.")] = None,
    rest: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="The prompt, with - for standard input.", show_default=False),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="The model; all words are then the prompt.")] = None,
    system: Annotated[str | None, typer.Option(help="The system text before the prompt.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Take the prompt as it stands, without chat template.")] = False,
    as_json: options.AsJson = False,
    url: options.Url = None,
) -> None:
    """Tell how much of a prompt is known, and where it leaves what is known."""
    asked = read_words([word for word in (first, *(rest or ())) if word], model, sys.stdin)
    if not asked.prompt:
        raise typer.BadParameter("there is no prompt to explain")
    if raw and system is not None:
        raise typer.BadParameter("--system needs the chat template, and --raw goes without it")
    screen = Screen()
    with Client(load_settings(), url) as client:
        found = client.post("/api/cache/explain", model=asked.model, prompt=asked.prompt, system=system, raw=raw)
    if as_json:
        return screen.write_line(json.dumps(found, indent=2, ensure_ascii=False))
    for line in lines(found):
        screen.write_line(line)
    return None


def lines(found: dict[str, Any]) -> Iterator[str]:
    """An explanation for people."""
    yield f"{found['model']}: {found['reason']}"
    facts = {name: f"{found[f'{name}_tokens']:,} tokens" for name in ("prompt", "matched", "cached")}
    if found["prompt_goes_on"]:
        facts["the prompt goes on"] = repr(found["prompt_goes_on"])
    for number, text in enumerate(found["tree_goes_on"][:_SHOWN_BRANCHES], start=1):
        facts[f"the tree goes on ({number})"] = repr(text)
    yield from describe(facts)
