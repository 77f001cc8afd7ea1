"""Which names are models on this machine, or could be. These functions import `bough.models`, which takes a while."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from bough.config import Settings

_LEAST_LIKENESS = 0.75


def is_here(name: str, settings: Settings) -> bool:
    """Whether a name is that of a model on this machine, or of a model's folder in the working folder."""
    from bough.errors import ModelNotFound
    from bough.models import Store
    from bough.models.files import CONFIG_FILE

    try:
        return (Path(name) / CONFIG_FILE).is_file() or Store(settings.models_folder).find(name) is not None
    except ModelNotFound:
        return False  # not a valid name


def can_fetch(name: str) -> bool:
    """Whether a model of this name can be fetched: a known name, or `org/name` on the hub. Uses no network."""
    from bough.models import can_pull

    return can_pull(name)


def list_names(settings: Settings) -> list[str]:
    """The models on this machine, and the known names."""
    from bough.models import Store
    from bough.models.fetching.short_names import SHORT_NAMES

    return [
        *(model.name for model in Store(settings.models_folder).list()),
        *(name for each in SHORT_NAMES for name in each.names),
    ]


def find_near(name: str, names: Iterable[str]) -> str | None:
    """The name that this one is a misspelling of, if any."""
    plain = {each.removesuffix(":latest").lower(): each.removesuffix(":latest") for each in names}
    near = difflib.get_close_matches(name.lower(), plain, n=1, cutoff=_LEAST_LIKENESS)
    return plain[near[0]] if near else None
