"""The store tier: pages and restore points in objects that several machines share, found by their tokens alone."""

from bough.cache.store.format import Section, StorePath
from bough.cache.store.objects import ListedObject, NotPlain, ObjectStore, StoredObject, StoreError
from bough.cache.store.shared import SharedStore

__all__ = ["ListedObject", "NotPlain", "ObjectStore", "Section", "SharedStore", "StoreError", "StorePath", "StoredObject"]
