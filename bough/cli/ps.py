"""`bough ps`: the models that a server has loaded."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from rich import filesize

from bough.cli import options
from bough.cli.client import Client
from bough.cli.columns import align, memory
from bough.cli.screen import Screen
from bough.config import load_settings

_HEADER = ("NAME", "SIZE", "ENGINE", "DEVICE", "CONTEXT", "LANES", "TREE", "UNTIL")
_FOR_EVER_YEARS = 100


def ps(as_json: options.AsJson = False, url: options.Url = None) -> None:
    """List the models that the server has loaded."""
    screen = Screen()
    with Client(load_settings(), url) as client:
        loaded = read_loaded(client)
        server = client.url
    if as_json:
        screen.write_line(json.dumps(loaded, indent=2))
    elif loaded:
        for line in align([_HEADER, *map(_row, loaded)]):
            screen.write_line(line)
    else:
        screen.note(f"no model is loaded at {server}")


def read_loaded(client: Client) -> list[dict[str, Any]]:
    """What the server tells of each loaded model: what it is, and what its tree holds."""
    trees = {each["model"]: each for each in client.get("/api/cache")["models"]}
    return [_facts(each, trees.get(each["name"], {})) for each in client.get("/api/ps")["models"]]


def _facts(model: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
    until = datetime.fromisoformat(model["expires_at"])
    stays = until.year > datetime.now(UTC).year + _FOR_EVER_YEARS
    return {
        "name": model["name"],
        "size_bytes": model["size"],
        "engine": model["engine"],
        "device": "GPU" if model["size_vram"] else "CPU",
        "context_tokens": model["context_length"],
        "lanes": tree.get("lanes"),
        "busy_lanes": tree.get("busy_lanes"),
        "waiting": tree.get("queue"),
        "tree_tokens": tree.get("tokens"),
        "tree_bytes": tree.get("tree_bytes"),
        "until": None if stays else until.isoformat(),
    }


def _row(facts: dict[str, Any]) -> tuple[str, ...]:
    lanes = "" if facts["lanes"] is None else f"{facts['busy_lanes']} of {facts['lanes']} busy"
    tokens = facts["tree_tokens"]
    tree = "" if tokens is None else f"{tokens:,} tokens, {memory(facts['tree_bytes'])}"
    until = "for ever" if facts["until"] is None else ahead(datetime.fromisoformat(facts["until"]))
    size = filesize.decimal(facts["size_bytes"])
    context = f"{facts['context_tokens']:,}"
    return (facts["name"], size, facts["engine"], facts["device"], context, lanes, tree, until)


def ahead(moment: datetime, now: datetime | None = None) -> str:
    """How far ahead a moment is, in its largest unit."""
    seconds = round((moment - (now or datetime.now(UTC))).total_seconds())
    for unit, size in (("day", 86_400), ("hour", 3_600), ("minute", 60), ("second", 1)):
        if seconds >= size:
            number = seconds // size
            return f"{number} {unit}{'s' if number > 1 else ''} from now"
    return "now"
