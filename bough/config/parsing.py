"""From text to values: sizes, times, numbers, aliases. Pure: what is wrong raises ValueError."""

from __future__ import annotations

from typing import Any

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
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}


def parse_bytes(value: int | str) -> int:
    """Bytes from a number or from text like "512M" or "1.5 GB" (powers of 1,024)."""
    if not isinstance(value, str):
        return parse_int(value)
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


def parse_int(value: Any) -> int:
    if isinstance(value, float) and not value.is_integer():
        raise ValueError(value)
    return int(value)


def parse_bool(value: Any) -> bool:
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
