"""Settings: built once from flags, `BOUGH_*` variables and `bough.toml`, then passed down."""

from bough.config.reading import (
    find_given,
    find_package_index,
    limit_thread_spinning,
    load_settings,
    parse_bytes,
    parse_seconds,
    parse_switch,
    read_cluster_secret,
)
from bough.config.settings import DEFAULT_MODEL, ENGINES, SIZES, TIMES, WEIGHTS, Settings, parse_aliases

__all__ = [
    "DEFAULT_MODEL",
    "ENGINES",
    "SIZES",
    "TIMES",
    "WEIGHTS",
    "Settings",
    "find_given",
    "find_package_index",
    "limit_thread_spinning",
    "load_settings",
    "parse_aliases",
    "parse_bytes",
    "parse_seconds",
    "parse_switch",
    "read_cluster_secret",
]
