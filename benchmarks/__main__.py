"""`python -m benchmarks NAME`: the commands, in the order of the help. They compare figures within one run."""

from __future__ import annotations

import sys

import typer

from benchmarks.core.command import core
from benchmarks.events.command import events
from benchmarks.gaps.command import gaps
from benchmarks.gpu.command import gpu
from benchmarks.hostile import hostile
from benchmarks.http import http
from benchmarks.library.command import library
from benchmarks.llama_cpp import llama_cpp
from benchmarks.quality.command import quality
from benchmarks.replicas.command import replicas
from benchmarks.router import router
from benchmarks.store import store
from benchmarks.streams.command import streams
from bough.errors import BoughError

app = typer.Typer(help="Measure the parts of Bough on this machine.", no_args_is_help=True)

for command in (core, router, replicas, store, quality, llama_cpp, gpu, library, http, streams, events, hostile, gaps):
    app.command()(command)

if __name__ == "__main__":
    try:
        app(prog_name="python -m benchmarks")
    except BoughError as error:
        sys.exit(f"error: {error}")
