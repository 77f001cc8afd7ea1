"""What the benchmarks read from the command line: flags that several share, lists of numbers, and the model to load."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bough.bench.workload import SHAPES
from bough.runner import Runner

Json = Annotated[bool, typer.Option("--json", help="End with one line of JSON.")]
Engine = Annotated[str | None, typer.Option(help="auto, torch or mlx.")]
Model = Annotated[str | None, typer.Option("--model", "-m", help="The model to run; not given: the default model.")]
Threads = Annotated[int | None, typer.Option(help="Threads of the engine.")]
Shape = Annotated[str | None, typer.Option(help="Random weights instead of a model: llama-8b or tiny.")]


def load_model(model: str | None, shape: str | None, **settings: Any) -> Runner:
    """A model without a tree on disk, or random weights of a named shape."""
    from bough.runner import load, load_shape

    return load_shape(read_shape(shape), **settings) if shape else load(model, disk=0, **settings)


def read_shape(name: str) -> dict[str, Any]:
    if name not in SHAPES:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(SHAPES)}")
    return SHAPES[name]


def read_numbers(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",") if part.strip().isdecimal()]
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter(f"{text!r} is not a list of numbers such as 1,4,8")
    return numbers
