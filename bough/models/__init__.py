"""Models: from a name to local files, and from messages to token ids with the boundaries between them."""

import logging

from bough.models.chat.template import Rendered
from bough.models.files import ModelFiles
from bough.models.fingerprint import check_packed
from bough.models.info import ModelInfo, describe
from bough.models.pulling import Announce, PullPlan, can_pull, pull
from bough.models.sources import GgufSupport, convert_if_needed, resolve, why_not_packed
from bough.models.store import Store
from bough.models.tokenizer import Tokenizer, load_tokenizer
from bough.models.weights import check_weights
from bough.types import Progress, SilentProgress

# We use transformers for tokenizers and configurations, so its warning that torch is missing does not matter.
logging.getLogger("transformers").addFilter(lambda record: "PyTorch was not found" not in record.getMessage())

__all__ = [
    "Announce",
    "GgufSupport",
    "ModelFiles",
    "ModelInfo",
    "Progress",
    "PullPlan",
    "Rendered",
    "SilentProgress",
    "Store",
    "Tokenizer",
    "can_pull",
    "check_packed",
    "check_weights",
    "convert_if_needed",
    "describe",
    "load_tokenizer",
    "pull",
    "resolve",
    "why_not_packed",
]
