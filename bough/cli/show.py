"""`bough show`: what a model is, and what the engine can do right with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich import filesize

from bough import models
from bough.cli import options, work
from bough.cli.columns import align, count, describe
from bough.cli.screen import Screen
from bough.config import Settings, load_settings
from bough.engines.contract import Engine
from bough.models import ModelFiles, ModelInfo
from bough.runner import gguf_support, make_engine


def show(
    ctx: typer.Context,
    model: Annotated[str | None, typer.Argument(help="A name, a folder or a GGUF file; none: the default model.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Load the model and tell what the engine's self-check found.")
    ] = True,
    engine: options.Engine = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    attention: options.Attention = None,
    trust_remote_code: options.TrustRemoteCode = None,
) -> None:
    """Tell what a model is and what the engine can do right with it."""
    screen = Screen()
    settings = load_settings(options.settings_of(ctx))
    with work.shown(screen.notes, stays=False) as progress:
        files = models.resolve(settings.model, settings, gguf_support(settings), progress)
        progress.start("reading the model's files", None)
        info = models.describe(files)
        progress.finish()
    if as_json:
        found = {"engine": _check(files, settings, screen)} if check else {}
        return screen.write_line(json.dumps(asdict(info) | found, indent=2))
    _write_info(screen, info)
    if check:
        _write_engine(screen, _check(files, settings, screen))
    return None


def _check(files: ModelFiles, settings: Settings, screen: Screen) -> dict[str, Any]:
    """What there is to tell about the engine with this model, as plain data."""
    with work.shown(screen.notes, stays=False) as progress:
        engine = make_engine(files, settings, progress)
    try:
        return _facts(engine)
    finally:
        engine.close()


def _facts(engine: Engine) -> dict[str, Any]:
    groups = [asdict(group) | {"kind": group.kind.value} for group in engine.groups]
    return {
        "runs_on": engine.describe(),
        "context_tokens": engine.context_tokens,
        "capabilities": asdict(engine.capabilities),
        "groups": groups,
    }


def _write_info(screen: Screen, info: ModelInfo) -> None:
    facts = {
        "architecture": info.architecture,
        "parameters": count(info.num_parameters),
        "context": f"{info.context_tokens:,} tokens" if info.context_tokens else "",
        "dtype": info.dtype,
        "quantization": info.quantization,
        "size": filesize.decimal(info.size_bytes),
        "source": info.source,
        "sha256": info.digest.removeprefix("sha256:"),
        "chat template": _yes_or_no(info.has_chat_template),
        "capabilities": ", ".join(info.capabilities),
    }
    _write_section(screen, info.name, describe(facts))


def _write_engine(screen: Screen, facts: dict[str, Any]) -> None:
    found, runs_on = facts["capabilities"], facts["runs_on"]
    verdict = {
        "chunking": _yes_or_no(found["can_chunk"]),
        "reuse": _yes_or_no(found["can_reuse"]),
        "reuse limit": f"{found['reuse_limit']:,} tokens" if found["reuse_limit"] else "none",
        "attention": runs_on.get("attention", ""),
        "reason": found["reason"],
    }
    _write_section(screen, "engine", describe({name: value for name, value in runs_on.items() if name != "attention"}))
    _write_section(screen, "self-check", describe(verdict))
    differences = {name: f"{value:.1e}" for name, value in found["differences"].items()}
    _write_section(screen, "largest logit differences to one forward pass", describe(differences))
    _write_section(screen, "groups", _group_lines(facts["groups"]))


def _group_lines(groups: Sequence[dict[str, Any]]) -> list[str]:
    rows = [(str(each["index"]), each["kind"], _group_size(each)) for each in groups]
    return ["  " + line for line in align(rows)] if rows else []


def _group_size(group: dict[str, Any]) -> str:
    if group["state_bytes"]:
        return f"{group['state_bytes']:,} bytes a state"
    window = f", window of {group['window']:,} tokens" if group["window"] else ""
    return f"{group['bytes_per_token']:,} bytes a token{window}"


def _write_section(screen: Screen, title: str, lines: Sequence[str]) -> None:
    if lines:
        screen.write_line(title)
        for line in lines:
            screen.write_line(line)
        screen.write_line()


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "no"
