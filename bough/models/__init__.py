"""Models: from a name to local files, and from messages to token ids with the boundaries between them."""

import logging

from bough.models.files import ModelFiles
from bough.models.fingerprint import check_packed
from bough.models.info import ModelInfo, describe
from bough.models.pulling import Announce, PullPlan, can_pull, pull
from bough.models.sources import GgufSupport, convert_if_needed, resolve
from bough.models.store import ModelFolder
from bough.models.tokenizer import Tokenizer, load_tokenizer
from bough.models.weights.check import check_weights
from bough.types import Progress

# We use transformers for tokenizers and configurations, so its warning that torch is missing does not matter.
logging.getLogger("transformers").addFilter(lambda record: "PyTorch was not found" not in record.getMessage())

__all__ = [
    "Announce",
    "GgufSupport",
    "ModelFiles",
    "ModelFolder",
    "ModelInfo",
    "Progress",
    "PullPlan",
    "Tokenizer",
    "can_pull",
    "check_packed",
    "check_weights",
    "convert_if_needed",
    "describe",
    "load_tokenizer",
    "pull",
    "resolve",
]
