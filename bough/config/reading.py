"""Settings from flags, `BOUGH_*` variables and `bough.toml`, in this order.

This is the only module that touches the environment or reads the settings file. `bough.toml` is looked for in the working
folder, then in the platform's configuration folder; its keys are the names of the settings. A value keeps its origin, so
that errors about it use the words that were typed.
"""

from __future__ import annotations

import difflib
import math
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import platformdirs

from bough.config.parsing import parse_bool, parse_bytes, parse_int, parse_seconds
from bough.config.settings import MIN_SECRET_CHARACTERS, SIZES, TIMES, Settings, find_problem
from bough.errors import SettingsError

_OLD_NAMES = {
    "memory": "device_memory",
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
    "store_budget": ("none", "auto"),
    "store_ttl": ("never", "auto"),
    "store_secret_file": ("none", ""),
    "keep_alive": ("never",),
    "request_timeout": ("never",),
    "keys_file": ("none", ""),
}
_FOR_BUILDING = ("BOUGH_NO_KERNELS", "BOUGH_KERNELS_ISA")  # which setup.py reads
_NOT_FROM_THE_WORKING_FOLDER = ("trust_remote_code", "host", "origins", "allowed_hosts", "store")
_FORMS = {"int": "a whole number", "float": "a number", "bool": "true or false", "Path": "a path", "str": "text"}
_FIELD_TYPES: dict[str, str] = {each.name: str(each.type) for each in fields(Settings)}
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
    if problem := find_problem(vars(Settings()) | values):
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
        if name.startswith("BOUGH_") and name not in _FOR_BUILDING
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
    for each in sorted(given, key=lambda each: each.name not in _OLD_NAMES):
        if each.name in _OLD_NAMES:
            each = replace(each, name=_OLD_NAMES[each.name], is_old_name=True)
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
            return parse_bytes(value) if name in SIZES else parse_int(value)
        if kind == "float":
            return _parse_time(name, value) if name in TIMES else float(value)
        if kind == "bool":
            return parse_bool(value)
        if kind == "Path":
            return Path(value).expanduser()
        return ",".join(map(str, value)) if isinstance(value, list) else str(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise SettingsError(f"{given.words} is {value!r}, and must be {_form(name, kind)}") from error


def _form(name: str, kind: str) -> str:
    """The form of a value of this setting, as the end of a sentence."""
    form = "a size such as 2GB" if name in SIZES else "a time such as 7d" if name in TIMES else _FORMS.get(kind, kind)
    words = _WORDS_FOR_NONE.get(name, ("auto",)) if " | " in _FIELD_TYPES[name] else ()
    return " or ".join((form, *filter(None, words)))


def _parse_time(name: str, value: Any) -> float | None:
    """Seconds. A negative or infinite `keep_alive` means for ever, as with Ollama."""
    seconds = parse_seconds(value)
    return None if name == "keep_alive" and (seconds < 0 or seconds == math.inf) else seconds


def read_cluster_secret(settings: Settings) -> bytes:
    """The key that all machines of a cluster have; nothing without one. Raises SettingsError if its file is no secret."""
    text, file = settings.store_secret, settings.store_secret_file
    if not text and file is not None:
        try:
            text = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"store_secret_file is {file}, which cannot be read: {error}") from error
        if len(text) < MIN_SECRET_CHARACTERS:
            raise SettingsError(f"the secret in {file} has {len(text)} characters, and must have {MIN_SECRET_CHARACTERS}")
    return blake2b(text.encode(), digest_size=32, person=b"bough cluster").digest() if text else b""


def limit_thread_spinning() -> None:
    """Make OpenMP's waiting threads sleep soon, unless the user chose otherwise. Call it before torch is imported.

    Threads that spin for long slow everything down as soon as another program needs a core: a prefill of one second then
    takes half a minute. Threads that never spin make a short prefill a fifth slower. The tokenizer's own threads are turned
    off for the same reason: each thread tokenizes for itself, at its own priority.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
