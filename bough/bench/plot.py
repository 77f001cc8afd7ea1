"""Plots as files: what needs matplotlib, and says so if it is missing."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bough.errors import RequestError
from bough.system.distribution import install_command


def require_matplotlib() -> None:
    """Raise RequestError, with the command to install it, if matplotlib is missing."""
    try:
        importlib.import_module("matplotlib.backends.backend_agg")
    except ImportError as error:
        raise RequestError(f"plots need matplotlib: {install_command('bench')} ({error})") from error


@contextmanager
def drawing(file: Path, width: float = 8, height: float = 4.5) -> Iterator[Any]:
    """A matplotlib figure to draw on, which is written at the end. Raises RequestError if it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    yield figure
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:  # ValueError: a suffix that matplotlib does not know
        raise RequestError(f"the plot cannot be written: {error}") from error
