"""The models in memory, what each is used for, and the requests that run on them."""

from bough.server.serving.loaded.model import LoadedModel, Start, start_model
from bough.server.serving.loaded.models import LoadedModels

__all__ = ["LoadedModel", "LoadedModels", "Start", "start_model"]
