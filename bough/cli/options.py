"""Flags that several commands share. One that is not given is None, and leaves the setting as it is."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

import typer

from bough.config import Settings

_SETTING_OF_FLAG = {
    "memory": "device_bytes",
    "host_memory": "host_bytes",
    "disk": "disk_bytes",
    "disk_free": "disk_free_bytes",
    "disk_ttl": "disk_ttl_s",
    "keep_alive": "keep_alive_s",
    "request_timeout": "request_timeout_s",
    "watchdog": "watchdog_s",
    "stop_after": "stop_s",
    "max_body": "max_body_bytes",
    "max_import": "max_import_bytes",
}
_SETTINGS_NAMES = {each.name for each in fields(Settings)}

_SETTINGS = "Settings (also BOUGH_* variables and bough.toml)"

Context = Annotated[
    int | None, typer.Option(help="Tokens a conversation may have; 0: what the model allows.", rich_help_panel=_SETTINGS)
]
Threads = Annotated[int | None, typer.Option(help="CPU threads; 0: the engine chooses.", rich_help_panel=_SETTINGS)]
Engine = Annotated[str | None, typer.Option(help="auto, torch or mlx.", rich_help_panel=_SETTINGS)]
Device = Annotated[
    str | None,
    typer.Option(help="auto or cpu; with torch cuda, cuda:1 or mps; with mlx gpu.", rich_help_panel=_SETTINGS),
]
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
Lanes = Annotated[
    int | None, typer.Option(help="Requests that run together; 0: as memory allows.", rich_help_panel=_SETTINGS)
]

_SERVER = "Server (settings, too)"

Host = Annotated[str | None, typer.Option(help="The address to listen at.", rich_help_panel=_SERVER)]
Port = Annotated[int | None, typer.Option(help="The port to listen at; 0: any free one.", rich_help_panel=_SERVER)]
KeysFile = Annotated[
    str | None, typer.Option(help="A file with a key a line: serve only who has one.", rich_help_panel=_SERVER)
]
Origins = Annotated[
    str | None, typer.Option(help="Web pages that may ask besides local ones, with commas.", rich_help_panel=_SERVER)
]
AllowedHosts = Annotated[
    str | None, typer.Option(help="Names of this machine besides local ones, with commas.", rich_help_panel=_SERVER)
]
KeepAlive = Annotated[
    str | None, typer.Option(help="How long unused models stay loaded: 5m, 1h, never.", rich_help_panel=_SERVER)
]
MaxModels = Annotated[
    int | None, typer.Option(help="Models loaded at the same time; 0: as memory allows.", rich_help_panel=_SERVER)
]
Queue = Annotated[int | None, typer.Option(help="Requests that may wait.", rich_help_panel=_SERVER)]
RequestTimeout = Annotated[
    str | None, typer.Option(help="The longest that a request may take: 10m, never.", rich_help_panel=_SERVER)
]
Watchdog = Annotated[
    str | None, typer.Option(help="Give up on a step of the engine after so long.", rich_help_panel=_SERVER)
]
StopAfter = Annotated[
    str | None, typer.Option(help="How long to wait for answers under way at the end.", rich_help_panel=_SERVER)
]
MaxBody = Annotated[str | None, typer.Option(help="The largest request, such as 8MB.", rich_help_panel=_SERVER)]
MaxImport = Annotated[str | None, typer.Option(help="The largest tree to import.", rich_help_panel=_SERVER)]
RateLimit = Annotated[
    int | None, typer.Option(help="Requests a minute by one client; 0: any number.", rich_help_panel=_SERVER)
]
VerifyCache = Annotated[
    float | None, typer.Option(help="The share of answers to compute again and compare.", rich_help_panel=_SERVER)
]
SortTools = Annotated[
    bool | None, typer.Option("--sort-tools/--keep-tools", help="Sort tools for more reuse.", rich_help_panel=_SERVER)
]
LogJson = Annotated[
    bool | None, typer.Option("--log-json/--log-text", help="Log requests as JSON.", rich_help_panel=_SERVER)
]

Url = Annotated[str | None, typer.Option("--url", help="The server; not given: that of the settings host and port.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AsJsonObject = Annotated[bool, typer.Option("--json", help="Print a JSON object.")]


def settings_of(ctx: typer.Context) -> dict[str, Any]:
    """The settings among the flags of a command, by their own names; those that were not given are None."""
    named = {_SETTING_OF_FLAG.get(flag, flag): value for flag, value in ctx.params.items()}
    return {name: value for name, value in named.items() if name in _SETTINGS_NAMES}
