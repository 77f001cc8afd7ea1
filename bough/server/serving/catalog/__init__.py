"""The catalog: which models and names there are, and how the APIs describe them."""

from bough.server.serving.catalog.catalog import Catalog
from bough.server.serving.catalog.entries import CatalogEntry, LoadedEntry, human_number

__all__ = ["Catalog", "CatalogEntry", "LoadedEntry", "human_number"]
