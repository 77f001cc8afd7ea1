"""The settings: their names, defaults and ranges, and a sentence on each for the settings reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import platformdirs

from bough.errors import SettingsError

DEFAULT_MODEL = "smollm2"
ENGINES = ("torch", "mlx")
MIN_SECRET_CHARACTERS = 16
WEIGHTS = ("auto", "packed", "float32", "q8_0", "q4_0")
ACTIVATIONS = ("exact", "int8")
KV = ("auto", "float32", "float16", "bfloat16", "int8")
LOAD = ("run", "serve")
SERVE = ("serve",)
"""The commands that have a flag for a setting."""


@dataclass(frozen=True)
class _Range:
    """The values that a setting may have; `text` completes "must be"."""

    holds: Callable[[Any], bool]
    text: str


def _at_least(least: int) -> _Range:
    return _Range(lambda value: value >= least, f"at least {least}")


def _one_of(*names: str) -> _Range:
    return _Range(lambda value: value in names, f"{', '.join(names[:-1])} or {names[-1]}")


_TIME = _Range(lambda seconds: 0 <= seconds < math.inf, "a time of at least 0")
_TIME_ABOVE_0 = _Range(lambda seconds: 0 < seconds < math.inf, "a time above 0")


def _about(
    help: str,
    commands: tuple[str, ...] = (),
    *,
    flag: str = "",
    metavar: str | None = None,
    unit: Literal["", "size", "time"] = "",
    range: _Range | None = None,
    none: tuple[str, ...] = ("auto",),
) -> Mapping[str, Any]:
    """All that the settings reference, the commands' flags and the checks are made from.

    `commands` have a flag for the setting, whose name is the setting's if `flag` is empty. `none` are the words that stand
    for None where the setting may be None.
    """
    known = {"help": help, "commands": commands, "flag": flag, "metavar": metavar}
    return known | {"unit": unit, "range": range, "none": none}


def _setting(default: Any, help: str, commands: tuple[str, ...] = (), **more: Any) -> Any:
    return field(default=default, metadata=_about(help, commands, **more))


_count = partial(_setting, range=_at_least(0))
_size = partial(_count, unit="size")
_time = partial(_setting, unit="time", range=_TIME_ABOVE_0)


@dataclass(frozen=True)
class Settings:
    """Every setting of Bough with its default.

    Sizes are bytes, times seconds; flags, variables and files may also say "2GB", "512M", "7d" and "12h". The three tiers
    that keep state have a size each: None ("auto") is derived from the machine, 0 turns the tier off.
    """

    model: str = _setting(DEFAULT_MODEL, "The model to load: a local name, a hub id, a folder or a GGUF file.")
    engine: str = _setting(
        "auto", 'The engine that runs the model: "auto", "torch" or "mlx".', LOAD, range=_one_of("auto", *ENGINES)
    )
    device: str = _setting(
        "auto", 'The device: "auto" or "cpu"; with torch "cuda", "cuda:1" or "mps"; with mlx "gpu".', LOAD
    )
    dtype: str = _setting("auto", 'The number format of the weights: "auto", "float32", "bfloat16" or "float16".', LOAD)
    weights: str = _setting(
        "auto",
        'How weights are kept in memory on a CPU: as in the model\'s file ("packed"), as "float32", or quantized to '
        '"q8_0" or "q4_0"; "auto" is "packed" where that can be done, else "float32".',
        LOAD,
        range=_one_of(*WEIGHTS),
    )
    activations: str = _setting(
        "exact",
        'How activations are rounded with packed weights on a CPU: "exact" is 16 bits, which gives the tokens of float32; '
        '"int8" is 8 bits, as in llama.cpp: faster with many rows, but in effect another model, with trees of its own.',
        LOAD,
        range=_one_of(*ACTIVATIONS),
    )
    kv: str = _setting(
        "auto",
        'The type in which keys and values are kept, in all tiers: "float32", "float16", "bfloat16", or "int8" with a '
        'scale for each 32 numbers; "auto" is "float16" on a CPU for models whose weights have 16 bits or fewer, else the '
        "type that the model computes with.",
        LOAD,
        range=_one_of(*KV),
    )
    threads: int = _count(
        0, "The number of CPU threads that compute; with 0 one for each core that this process may use.", LOAD
    )
    context: int = _count(0, "The most tokens that one sequence may have; with 0 the model's own limit.", LOAD)
    lanes: int = _count(0, "The number of requests that run together; with 0 as many as memory and device allow.", SERVE)
    chunk: int = _count(0, "The most tokens in one prefill chunk; with 0 the size adapts to the speed of the device.")
    max_tokens: int = _setting(
        0,
        "The most tokens of an answer for which a request sets no limit; with 0 a quarter of the context, from 256 to "
        "8,192; with -1 as many as the context has room for.",
        SERVE,
        range=_at_least(-1),
    )
    loop_guard: bool = _setting(True, "Whether an answer ends when it repeats the same tokens again and again.", SERVE)
    cache: bool = _setting(True, "Whether the state of prompts is kept and reused between requests.", LOAD)
    device_memory: int | None = _size(
        None, 'Memory for lanes and pages on the device; "auto" derives it from the device.', LOAD
    )
    host_memory: int | None = _size(
        None,
        'Host memory for pages that leave a device with memory of its own; "auto" derives it, 0 turns the tier off.',
        LOAD,
    )
    disk: int | None = _size(
        None, 'Disk space for all trees together; "auto" derives it from the free space, 0 turns the tier off.', LOAD
    )
    disk_free: int = _size(2 * 2**30, "Free disk space that the trees never use up.", LOAD)
    disk_ttl: float | None = _time(
        None,
        'Seconds without use after which state is deleted from disk; "never" keeps it for ever.',
        LOAD,
        none=("auto", "never"),
    )
    store: str = _setting(
        "",
        "The URL of a store that machines share, below the disk: s3://…, gs://…, az://…, or a folder; by default none.",
        LOAD,
    )
    store_secret_file: Path | None = field(
        default=None,
        metadata=_about(
            "A file with the secret under which everything in the store is named, the same on all machines; "
            '"none" is no file.',
            LOAD,
            none=("none", ""),
        ),
    )
    store_budget: int | None = _size(
        None,
        'The most that the whole store may hold; beyond it the oldest is deleted. "none" sets no limit.',
        LOAD,
        none=("none", "auto"),
    )
    store_ttl: float | None = _time(
        None,
        'Seconds without use, to about a day, after which state is deleted from the store; "never" keeps it for ever.',
        LOAD,
        none=("never", "auto"),
    )
    salt_share: float = _setting(
        1.0,
        "The largest share of each tier that one salt may take, above 0 and at most 1.",
        LOAD,
        range=_Range(lambda share: 0 < share <= 1, "above 0 and at most 1"),
    )
    trust_remote_code: bool = _setting(False, "Whether to run Python code that comes with a model's files.", LOAD)
    aliases: str = _setting(
        "",
        'Other names of models, such as "gpt-4o=smollm2, claude-*=smollm2"; in a file also a list. "*" is any text.',
        SERVE,
        flag="--alias",
        metavar="NAME=MODEL",
    )
    host: str = _setting(
        "127.0.0.1", "The address that the server listens at and that the client commands connect to.", SERVE
    )
    port: int = _count(
        11435, "The port that the server listens at and the client commands connect to; 0 takes a free one.", SERVE
    )
    api_key: str = field(
        default="", repr=False, metadata=_about("The key that the client commands send to a server that asks for one.")
    )
    keys_file: Path | None = field(
        default=None,
        metadata=_about(
            'A file with one API key on each line; clients need one of them; "none" serves clients without a key.',
            SERVE,
            none=("none", ""),
        ),
    )
    origins: str = _setting(
        "", 'Origins of web pages that may call the server besides local ones, separated by commas; "*" allows all.', SERVE
    )
    allowed_hosts: str = _setting(
        "", 'Host names that the server answers to besides local ones, separated by commas; "*" allows all.', SERVE
    )
    keep_alive: float | None = _time(
        300.0,
        'Seconds that a model stays loaded after its last use; "never" or -1 never unloads it.',
        SERVE,
        range=_TIME,
        none=("never",),
    )
    max_models: int = _count(0, "The most models loaded at the same time; with 0 as many as memory allows.", SERVE)
    ray: str = _setting(
        "",
        'Run replicas of the model on Ray Serve: "local" starts a cluster of this machine, "auto" or an address uses one '
        "that runs; empty: no Ray.",
        SERVE,
        metavar="ADDRESS",
    )
    replicas: int = _count(0, "The number of replicas on Ray; with 0 as many as are needed, up to one for each GPU.", SERVE)
    queue: int = _count(64, "The most requests that may wait for a lane; further ones are refused.", SERVE)
    request_timeout: float | None = _time(
        None, 'The most seconds that one request may take, waiting included; "never" sets no limit.', SERVE, none=("never",)
    )
    stop_after: float = _time(30.0, "Seconds that a stopping server waits for the answers under way.", SERVE, range=_TIME)
    max_body: int = _size(8 * 2**20, "The largest body of a request; 8 MB are about 2 million tokens of text.", SERVE)
    rate_limit: int = _count(0, "The most requests in one minute by one client; 0 sets no limit.", SERVE)
    verify_cache: float = _setting(
        0.0,
        "The share of cache hits, from 0 to 1, that are computed again without reuse and compared.",
        SERVE,
        range=_Range(lambda share: 0 <= share <= 1, "at least 0 and at most 1"),
    )
    sort_tools: bool = _setting(
        False,
        "Whether tools are given to the chat template sorted by name, so that their order does not prevent reuse.",
        SERVE,
    )
    log_json: bool = _setting(False, "Whether each request is logged as a JSON object instead of a line for people.", SERVE)
    data_folder: Path = field(
        default_factory=lambda: platformdirs.user_data_path("bough"),
        metadata=_about("The folder with the models; by default the platform's folder for user data."),
    )
    cache_folder: Path = field(
        default_factory=lambda: platformdirs.user_cache_path("bough"),
        metadata=_about(
            "The folder with the trees on disk, self-check results and temporary files; by default the platform's folder "
            "for caches."
        ),
    )

    def __post_init__(self) -> None:
        if problem := find_problem(vars(self)):
            raise SettingsError(" ".join(problem))

    @property
    def models_folder(self) -> Path:
        return self.data_folder / "models"

    @property
    def trees_folder(self) -> Path:
        """The folder of the trees on disk, with a folder for each."""
        return self.cache_folder / "trees"

    @property
    def logs_folder(self) -> Path:
        """The folder of the servers' log files, one for each port."""
        return self.cache_folder / "logs"


SIZES = tuple(each.name for each in fields(Settings) if each.metadata["unit"] == "size")
TIMES = tuple(each.name for each in fields(Settings) if each.metadata["unit"] == "time")


def find_problem(values: Mapping[str, Any]) -> tuple[str, str] | None:
    """The name of the first setting with a wrong value, and the end of a sentence that begins with the name."""
    for each in fields(Settings):
        value, allowed = values[each.name], each.metadata["range"]
        if value is not None and allowed is not None and not allowed.holds(value):
            return each.name, f"is {value!r}, and must be {allowed.text}"
    if values["port"] > 65_535:
        return "port", f"is {values['port']}, and must be at most 65,535"
    if values["store"] and values["store_secret_file"] is None:
        return "store", "is set, and needs a secret that all machines have: set store_secret_file"
    try:
        parse_aliases(values["aliases"])
    except ValueError as error:
        return "aliases", str(error)
    return None


def parse_aliases(text: str) -> dict[str, str]:
    """The aliases in the text of the setting: what each name or pattern stands for. Raises ValueError."""
    found: dict[str, str] = {}
    for each in filter(None, (part.strip() for part in text.split(","))):
        name, equals, target = (part.strip().removesuffix(":latest") for part in each.partition("="))
        if not equals or not name or not target or "=" in target or "*" in target or any(map(str.isspace, name + target)):
            raise ValueError(f"has {each!r}, and must have NAME=MODEL, such as gpt-4o=smollm2")
        if found.setdefault(name, target) != target:
            raise ValueError(f"has {name!r} twice, for {found[name]!r} and for {target!r}")
    return found
