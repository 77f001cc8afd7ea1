"""Models: from a name to local files, and from messages to token ids with the boundaries between them."""

import logging

from bough.models.chat.template import Rendered
from bough.models.files import ModelFiles
from bough.models.info import ModelInfo, describe
from bough.models.sources import GgufSupport, can_pull, convert_if_needed, pull, resolve
from bough.models.store import Store
from bough.models.tokenizer import Tokenizer, load_tokenizer
from bough.models.weights import check_weights
from bough.types import Progress, SilentProgress

# We use transformers for tokenizers and configurations, so its warning that torch is missing does not matter.
logging.getLogger("transformers").addFilter(lambda record: "PyTorch was not found" not in record.getMessage())

__all__ = [
    "GgufSupport",
    "ModelFiles",
    "ModelInfo",
    "Progress",
    "Rendered",
    "SilentProgress",
    "Store",
    "Tokenizer",
    "can_pull",
    "check_weights",
    "convert_if_needed",
    "describe",
    "load_tokenizer",
    "pull",
    "resolve",
]
