"""Flags that several commands share. One that is not given is None, and leaves the setting as it is."""

from __future__ import annotations

from typing import Annotated

import typer

_SETTINGS = "Settings (also BOUGH_* variables and bough.toml)"

Context = Annotated[
    int | None, typer.Option(help="Tokens a conversation may have; 0: what the model allows.", rich_help_panel=_SETTINGS)
]
Threads = Annotated[int | None, typer.Option(help="CPU threads; 0: the engine chooses.", rich_help_panel=_SETTINGS)]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.", rich_help_panel=_SETTINGS)]
Dtype = Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.", rich_help_panel=_SETTINGS)]
Attention = Annotated[
    str | None, typer.Option(help="auto, bough, or a name that transformers knows.", rich_help_panel=_SETTINGS)
]
Memory = Annotated[
    str | None, typer.Option(help="Memory for lanes and pages together, such as 2GB, or auto.", rich_help_panel=_SETTINGS)
]
HostMemory = Annotated[
    str | None,
    typer.Option(
        help="Memory of the host for pages that leave a GPU, such as 16GB, auto, or 0.", rich_help_panel=_SETTINGS
    ),
]
Disk = Annotated[
    str | None, typer.Option(help="Disk for all trees together, such as 50GB, auto, or 0.", rich_help_panel=_SETTINGS)
]
DiskFree = Annotated[
    str | None, typer.Option(help="Never leave less than this free on the disk.", rich_help_panel=_SETTINGS)
]
DiskTTL = Annotated[
    str | None,
    typer.Option(help="Delete from the disk what was not used for so long: 7d, 12h, never.", rich_help_panel=_SETTINGS),
]
SaltShare = Annotated[
    float | None, typer.Option(help="The largest share of each place for one salt, up to 1.", rich_help_panel=_SETTINGS)
]
Cache = Annotated[
    bool | None, typer.Option("--cache/--no-cache", help="Reuse the state of known prefixes.", rich_help_panel=_SETTINGS)
]
TrustRemoteCode = Annotated[
    bool | None, typer.Option("--trust-remote-code", help="Run code that came with the model.", rich_help_panel=_SETTINGS)
]
