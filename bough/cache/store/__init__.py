"""The store tier: pages and restore points in objects that several machines share, found by their tokens alone."""

from bough.cache.store.format import Section
from bough.cache.store.objects import Listed, NotPlain, ObjectStore, Stored, StoreError
from bough.cache.store.paths import StorePath
from bough.cache.store.shared import SharedStore

__all__ = ["Listed", "NotPlain", "ObjectStore", "Section", "SharedStore", "StoreError", "StorePath", "Stored"]
