"""Which words are models: of a running server, of this machine, or names that can be fetched.

`bough.models`, which takes a while to import, is imported only when a name has to be looked up.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from bough.cli.client import Client
from bough.cli.prompt_args import PromptArgs, is_like_a_path
from bough.config import Settings
from bough.errors import ModelNotFound

_LEAST_LIKENESS = 0.75  # of a name to one that it may be a misspelling of


class KnownModels:
    """The models that a command can name, with a server or without."""

    def __init__(self, settings: Settings, client: Client | None) -> None:
        self._settings = settings
        self._client = client

    def has(self, name: str) -> bool:
        """Whether a word is a model: in the server, here, by its form a path, or one that can be fetched."""
        if is_like_a_path(name) or (self._client is not None and self._client.has_model(name)):
            return True
        return is_here(name, self._settings) or can_fetch(name)

    def is_model(self, args: PromptArgs) -> bool:
        """Whether the word that was taken for a model is one; if not, it begins the prompt.

        Raises ModelNotFound if more words follow it, or if it is a model's name misspelt.
        """
        if not args.is_guess or not args.model or self.has(args.model):
            return True
        missing, near = f"there is no model {args.model!r}", self._find_near(args.model)
        if near:
            raise ModelNotFound(f"{missing}; did you mean {near}?")
        if not args.is_alone:
            raise ModelNotFound(f"{missing}; if {args.model!r} is part of the prompt, give the model with --model")
        return False

    def _find_near(self, name: str) -> str | None:
        """The model whose name was misspelt as this one, if any."""
        from bough.models import ModelFolder
        from bough.models.fetching.short_names import SHORT_NAMES

        served = self._client.get("/api/tags")["models"] if self._client is not None else []
        names = [each["name"] for each in served]
        names += [model.name for model in ModelFolder(self._settings.models_folder).list()]
        names += [each for known in SHORT_NAMES for each in known.names]
        plain = {each.removesuffix(":latest").lower(): each.removesuffix(":latest") for each in names}
        near = difflib.get_close_matches(name.lower(), plain, n=1, cutoff=_LEAST_LIKENESS)
        return plain[near[0]] if near else None


def is_here(name: str, settings: Settings) -> bool:
    """Whether a name is that of a model on this machine, or of a model's folder in the working folder."""
    from bough.models import ModelFolder
    from bough.models.files import is_model_path

    try:
        return is_model_path(Path(name)) or ModelFolder(settings.models_folder).find(name) is not None
    except ModelNotFound:
        return False  # not a valid name


def can_fetch(name: str) -> bool:
    """Whether a model of this name can be fetched: a known name, or `org/name` on the hub. Uses no network."""
    from bough.models import can_pull

    return can_pull(name)
