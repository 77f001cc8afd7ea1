"""Files of weights: their headers, and what is wrong with a file that is damaged or truncated."""

from bough.models.weights.check import check_weights, list_shards
from bough.models.weights.gguf_header import GgufHeader, read_gguf_header, require_model_keys
from bough.models.weights.packed import PackedFile, PackedTensor, RowRun, read_packed
from bough.models.weights.safetensors_header import read_shapes

__all__ = [
    "GgufHeader",
    "PackedFile",
    "PackedTensor",
    "RowRun",
    "check_weights",
    "list_shards",
    "read_gguf_header",
    "read_packed",
    "read_shapes",
    "require_model_keys",
]
