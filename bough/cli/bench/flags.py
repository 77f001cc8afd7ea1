"""What the benchmarks read from the command line: flags that several share, lists of numbers, and the model to load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bough.bench.workload import SHAPES
from bough.config import WEIGHTS
from bough.runner import Runner

Json = Annotated[bool, typer.Option("--json", help="End with one line of JSON.")]
Engine = Annotated[str | None, typer.Option(help="auto, torch or mlx.")]
Model = Annotated[str | None, typer.Option("--model", "-m", help="The model to run; not given: the default model.")]
Threads = Annotated[int | None, typer.Option(help="Threads of the engine.")]
Shape = Annotated[str | None, typer.Option(help="Random weights instead of a model: llama-8b or tiny.")]
Weights = Annotated[str, typer.Option(help=f"Some of {', '.join(WEIGHTS)}, separated by commas.")]
Png = Annotated[Path | None, typer.Option(help="Where to write a plot.")]


def load_model(model: str | None, shape: str | None, **settings: Any) -> Runner:
    """A model without a tree on disk, or random weights of a named shape."""
    from bough.runner import load
    from bough.runtime import load_shape

    return Runner(load_shape(read_shape(shape), **settings)) if shape else load(model, disk=0, **settings)


def read_shape(name: str) -> dict[str, Any]:
    if name not in SHAPES:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(SHAPES)}")
    return SHAPES[name]


def read_numbers(text: str, least: int = 1) -> list[int]:
    """Numbers, separated by commas."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and int(part) >= least for part in parts):
        raise typer.BadParameter(f"{text!r} is not a list of numbers from {least} on, such as 1,4,8")
    return [int(part) for part in parts]


def read_weights(text: str) -> list[str]:
    """Values of the setting `weights`, separated by commas, each once."""
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in WEIGHTS:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(WEIGHTS)}")
    return list(dict.fromkeys(names))
