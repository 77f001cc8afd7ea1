"""Flags that several commands share. A flag that is not given is None and does not change its setting."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

import typer

from bough.config import Settings, load_settings

_SETTINGS_NAMES = {each.name for each in fields(Settings)}

_SAMPLING = "Sampling"

MaxTokens = Annotated[
    int | None,
    typer.Option(help="The largest number of tokens to generate; -1: to the context's end.", rich_help_panel=_SAMPLING),
]
Temperature = Annotated[float | None, typer.Option(help="0: always take the most likely token.", rich_help_panel=_SAMPLING)]
TopK = Annotated[int | None, typer.Option(help="Sample from the k most likely tokens; 0: all.", rich_help_panel=_SAMPLING)]
TopP = Annotated[
    float | None,
    typer.Option(help="Sample from the most likely tokens up to this total probability.", rich_help_panel=_SAMPLING),
]
MinP = Annotated[
    float | None,
    typer.Option(help="Drop tokens below this fraction of the best probability.", rich_help_panel=_SAMPLING),
]
RepeatPenalty = Annotated[
    float | None, typer.Option(help="Above 1: repeat less; 1: no penalty.", rich_help_panel=_SAMPLING)
]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text.", rich_help_panel=_SAMPLING)]
Stop = Annotated[list[str] | None, typer.Option(help="End the answer before this text.", rich_help_panel=_SAMPLING)]
Format = Annotated[str | None, typer.Option(help='"json", or a file with a JSON schema.', rich_help_panel=_SAMPLING)]

_SETTINGS = "Settings (also BOUGH_* variables and bough.toml)"

Context = Annotated[
    int | None,
    typer.Option(help="Tokens that a conversation may have; 0: the model's own limit.", rich_help_panel=_SETTINGS),
]
Threads = Annotated[
    int | None, typer.Option(help="CPU threads; 0: one for each core that may be used.", rich_help_panel=_SETTINGS)
]
Engine = Annotated[str | None, typer.Option(help="auto, torch or mlx.", rich_help_panel=_SETTINGS)]
Device = Annotated[
    str | None,
    typer.Option(help="auto or cpu; with torch cuda, cuda:1 or mps; with mlx gpu.", rich_help_panel=_SETTINGS),
]
Dtype = Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.", rich_help_panel=_SETTINGS)]
Weights = Annotated[
    str | None,
    typer.Option(help="On a CPU: auto, packed, float32, q8_0, q4_0 or int4.", rich_help_panel=_SETTINGS),
]
Attention = Annotated[
    str | None, typer.Option(help="auto, bough, or a name that transformers knows.", rich_help_panel=_SETTINGS)
]
DeviceMemory = Annotated[
    str | None,
    typer.Option(
        "--device-memory",
        "--memory",
        help="Memory for lanes and pages together, such as 2GB, or auto.",
        rich_help_panel=_SETTINGS,
    ),
]
HostMemory = Annotated[
    str | None,
    typer.Option(
        help="Host memory for pages that are demoted from a GPU, such as 16GB, auto, or 0.", rich_help_panel=_SETTINGS
    ),
]
Disk = Annotated[
    str | None, typer.Option(help="Disk space for all trees together, such as 50GB, auto, or 0.", rich_help_panel=_SETTINGS)
]
DiskFree = Annotated[str | None, typer.Option(help="Disk space that Bough always leaves free.", rich_help_panel=_SETTINGS)]
DiskTTL = Annotated[
    str | None,
    typer.Option(help="Delete pages on disk that were unused for this long: 7d, 12h, never.", rich_help_panel=_SETTINGS),
]
StoreUrl = Annotated[
    str | None,
    typer.Option(
        "--store",
        help="The URL of a store that machines share: s3://bucket/path, gs://…, az://…, or a folder.",
        rich_help_panel=_SETTINGS,
    ),
]
StoreSecretFile = Annotated[
    str | None,
    typer.Option(help="A file with the secret of the machines that share the store.", rich_help_panel=_SETTINGS),
]
StoreBudget = Annotated[
    str | None, typer.Option(help="The most that the store may hold, such as 1TB, or none.", rich_help_panel=_SETTINGS)
]
StoreTTL = Annotated[
    str | None,
    typer.Option(help="Delete what was not used in the store for this long: 30d, never.", rich_help_panel=_SETTINGS),
]
SaltShare = Annotated[
    float | None,
    typer.Option(help="The largest share of each tier that one salt may use, up to 1.", rich_help_panel=_SETTINGS),
]
Cache = Annotated[
    bool | None, typer.Option("--cache/--no-cache", help="Reuse the state of known prefixes.", rich_help_panel=_SETTINGS)
]
TrustRemoteCode = Annotated[
    bool | None,
    typer.Option("--trust-remote-code", help="Run Python code that comes with the model.", rich_help_panel=_SETTINGS),
]
AnswerTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        help="The most tokens of an answer without a limit of its own; 0: by the context; -1: no limit.",
        rich_help_panel=_SETTINGS,
    ),
]
LoopGuard = Annotated[
    bool | None,
    typer.Option(
        "--loop-guard/--no-loop-guard", help="End an answer that repeats itself again and again.", rich_help_panel=_SETTINGS
    ),
]
Lanes = Annotated[
    int | None, typer.Option(help="Requests that run at the same time; 0: as memory allows.", rich_help_panel=_SETTINGS)
]

_SERVER = "Server settings"

Host = Annotated[str | None, typer.Option(help="The address to listen at.", rich_help_panel=_SERVER)]
Port = Annotated[int | None, typer.Option(help="The port to listen at; 0: any free port.", rich_help_panel=_SERVER)]
Aliases = Annotated[
    list[str] | None,
    typer.Option(
        "--alias",
        "--aliases",
        metavar="NAME=MODEL",
        help="Another name of a model, such as gpt-4o=smollm2 or claude-*=smollm2; may be given several times.",
        show_default=False,
        rich_help_panel=_SERVER,
    ),
]
KeysFile = Annotated[
    str | None,
    typer.Option(help="A file with one API key per line; only clients with a key are served.", rich_help_panel=_SERVER),
]
Origins = Annotated[
    str | None,
    typer.Option(
        help="Web origins that may send requests besides local ones, separated by commas.", rich_help_panel=_SERVER
    ),
]
AllowedHosts = Annotated[
    str | None,
    typer.Option(help="Host names of this server besides local ones, separated by commas.", rich_help_panel=_SERVER),
]
KeepAlive = Annotated[
    str | None, typer.Option(help="How long unused models stay loaded: 5m, 1h, never.", rich_help_panel=_SERVER)
]
MaxModels = Annotated[
    int | None, typer.Option(help="Models loaded at the same time; 0: as memory allows.", rich_help_panel=_SERVER)
]
Ray = Annotated[
    str | None,
    typer.Option(
        help="Run replicas on Ray Serve: local (a cluster of this machine), auto, or a cluster's address.",
        metavar="ADDRESS",
        rich_help_panel=_SERVER,
    ),
]
Replicas = Annotated[int | None, typer.Option(help="Replicas on Ray; 0: as many as needed.", rich_help_panel=_SERVER)]
Queue = Annotated[int | None, typer.Option(help="Requests that may wait for a lane.", rich_help_panel=_SERVER)]
RequestTimeout = Annotated[
    str | None, typer.Option(help="The longest time that a request may take: 10m, never.", rich_help_panel=_SERVER)
]
Watchdog = Annotated[
    str | None, typer.Option(help="Give up on a step of the engine after this time.", rich_help_panel=_SERVER)
]
StopAfter = Annotated[
    str | None, typer.Option(help="How long a stopping server waits for running answers.", rich_help_panel=_SERVER)
]
MaxBody = Annotated[str | None, typer.Option(help="The largest request body, such as 8MB.", rich_help_panel=_SERVER)]
RateLimit = Annotated[
    int | None, typer.Option(help="Requests per minute from one client; 0: no limit.", rich_help_panel=_SERVER)
]
VerifyCache = Annotated[
    float | None,
    typer.Option(help="The share of answers to compute again without the cache and compare.", rich_help_panel=_SERVER),
]
SortTools = Annotated[
    bool | None,
    typer.Option(
        "--sort-tools/--keep-tools",
        help="Sort the tools of a request, so that more prefixes are equal.",
        rich_help_panel=_SERVER,
    ),
]
LogJson = Annotated[
    bool | None, typer.Option("--log-json/--log-text", help="Log requests as JSON.", rich_help_panel=_SERVER)
]

Model = Annotated[str | None, typer.Option("--model", "-m", help="The model; all arguments are then the prompt.")]
Url = Annotated[str | None, typer.Option("--url", help="The server's address; not given: the server that runs here.")]
IsLocal = Annotated[bool, typer.Option("--local", help="Do not use a running server.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AsJsonObject = Annotated[bool, typer.Option("--json", help="Print a JSON object.")]


def settings_of(ctx: typer.Context) -> dict[str, Any]:
    """The flags of a command that are settings, by the names of the settings. Flags that were not given are None.

    A sampling flag is none, also if a setting has its name: `bough run --max-tokens` is about this one answer.
    """
    sampling = {param.name for param in ctx.command.params if getattr(param, "rich_help_panel", None) == _SAMPLING}
    given = {name: value for name, value in ctx.params.items() if name in _SETTINGS_NAMES - sampling}
    return {name: (list(value) or None) if isinstance(value, list | tuple) else value for name, value in given.items()}


def read_settings(ctx: typer.Context) -> Settings:
    """The settings of a command with its flags. Errors name the flags as they were typed."""
    return load_settings(settings_of(ctx), are_flags=True)
