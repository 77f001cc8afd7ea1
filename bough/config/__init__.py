"""Settings: built once from flags, `BOUGH_*` variables and `bough.toml`, then passed down."""

from bough.config.parsing import parse_aliases, parse_bytes, parse_seconds
from bough.config.reading import find_given, limit_thread_spinning, load_settings, read_cluster_secret
from bough.config.settings import DEFAULT_MODEL, ENGINES, SIZES, TIMES, WEIGHTS, Settings

__all__ = [
    "DEFAULT_MODEL",
    "ENGINES",
    "SIZES",
    "TIMES",
    "WEIGHTS",
    "Settings",
    "find_given",
    "limit_thread_spinning",
    "load_settings",
    "parse_aliases",
    "parse_bytes",
    "parse_seconds",
    "read_cluster_secret",
]
