"""The meaning of each name that clients use.

A name is, in this order: an alias of the settings, a model or an alias in the model folder, a name that a pattern of the
settings matches. The model that the server was started with may be outside the folder. Any thread may call this.
"""

from __future__ import annotations

from dataclasses import dataclass

from bough.errors import ModelNotFound
from bough.models import ModelFiles, ModelFolder
from bough.models.aliases import Alias, AliasRules, Overlay
from bough.models.sources import find_local
from bough.prompting.ask import Ask
from bough.server.serving.catalog.overlay import apply_overlay


@dataclass(frozen=True)
class ResolvedName:
    """The model of a name, and the alias if it is not the model's own name."""

    name: str
    files: ModelFiles
    alias: Alias | None = None

    @property
    def overlay(self) -> Overlay:
        return self.alias.overlay if self.alias else Overlay()


class ModelNames:
    """The names in the model folder and in the settings, and that of a model outside the folder, if there is one."""

    def __init__(self, store: ModelFolder, rules: AliasRules, outside: ModelFiles | None) -> None:
        self._rules = rules
        self._store = store
        self._outside = outside

    def all(self) -> set[str]:
        """Every name but those that only patterns match."""
        outside = {self._outside.name} if self._outside else set()
        return outside | self._store.names() | set(self._rules.names)

    def has_name(self, name: str) -> bool:
        """Whether a model or an alias has this very name; patterns do not count."""
        plain = name.removesuffix(":latest")
        return plain in self._rules.names or self.look_up(plain) is not None

    def complete(self, ask: Ask) -> Ask:
        """The ask with what a created model adds to it, if its name is that of one."""
        found = self.stands_for(ask.model) if ask.model else None
        if found is None or found.alias is None or found.alias.overlay.is_empty:
            return ask
        return apply_overlay(ask, found.alias.overlay)

    def stands_for(self, name: str) -> ResolvedName | None:
        """The model or alias that a name means; None if it means nothing."""
        plain = name.removesuffix(":latest")
        target = self._rules.names.get(plain)
        found = self.look_up(plain if target is None else target)
        if found is None and target is None and (target := self._rules.match(plain)) is not None:
            return self.look_up(target)
        return found

    def look_up(self, name: str) -> ResolvedName | None:
        """The model or alias of that very name; None if there is none, or the name is not valid."""
        if self.is_outside(name):
            assert self._outside is not None
            return ResolvedName(name, self._outside)
        try:
            files = find_local(self._store, name)
            return ResolvedName(name, files, self._store.find_alias(name)) if files else None
        except ModelNotFound:
            return None

    def is_outside(self, name: str) -> bool:
        return self._outside is not None and name.removesuffix(":latest") == self._outside.name
