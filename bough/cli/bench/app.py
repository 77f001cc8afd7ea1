"""The group of the benchmarks: which there are, in the order of the help."""

from __future__ import annotations

import typer

from bough.cli.bench.gpu import gpu
from bough.cli.bench.library import library
from bough.cli.bench.reuse import core, demo, paging, restart, restore, router, store, switch
from bough.cli.bench.servers import events, gaps, hostile, http, peers, streams
from bough.cli.bench.speed import decode, lanes, prefill, quality

app = typer.Typer(help="Measure Bough on this machine, next to simpler ways and other servers.", no_args_is_help=True)

COMMANDS = (
    switch,
    core,
    router,
    restore,
    restart,
    store,
    paging,
    lanes,
    decode,
    prefill,
    quality,
    gpu,
    library,
    http,
    streams,
    events,
    peers,
    hostile,
    gaps,
    demo,
)

for command in COMMANDS:
    app.command()(command)
