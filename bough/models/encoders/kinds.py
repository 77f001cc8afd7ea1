"""What a model does: it generates text, makes embeddings, or scores pairs of texts. The configuration tells, and the small
files of sentence-transformers."""

from __future__ import annotations

from enum import Enum

from bough.errors import UnsupportedModel
from bough.models.encoders.files import MODEL_FILE, MODULES_FILE
from bough.models.files import ModelFiles, read_json

_ENCODER_TYPES = frozenset(
    [
        "albert",
        "bert",
        "big_bird",
        "camembert",
        "canine",
        "convbert",
        "data2vec-text",
        "deberta",
        "deberta-v2",
        "distilbert",
        "electra",
        "ernie",
        "esm",
        "esmc",
        "eurobert",
        "flaubert",
        "fnet",
        "funnel",
        "gte",
        "ibert",
        "jina_embeddings_v3",
        "layoutlm",
        "longformer",
        "luke",
        "markuplm",
        "megatron-bert",
        "mobilebert",
        "modernbert",
        "mpnet",
        "mra",
        "nomic_bert",
        "nystromformer",
        "rembert",
        "roberta",
        "roberta-prelayernorm",
        "roc_bert",
        "roformer",
        "splinter",
        "squeezebert",
        "ultrabert",
        "xlm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
        "yoso",
    ]
)
"""The values of `model_type` of encoders: what they generate is no text."""

_CAUSAL_ENDS = ("ForCausalLM", "LMHeadModel")


class ModelKind(Enum):
    """What a model does. The value is what people read."""

    GENERATOR = "generates text"
    EMBEDDER = "makes embeddings"
    RERANKER = "scores pairs of texts"


def find_kind(files: ModelFiles) -> ModelKind:
    """What a model does, by its files. Raises UnsupportedModel if they cannot be read, or name a kind that cannot run."""
    if files.is_gguf:
        return ModelKind.GENERATOR  # others are refused before they have a folder
    architecture = str((files.config.get("architectures") or [""])[0])
    saved_as = _read_saved_kind(files)
    if saved_as is ModelKind.RERANKER or (saved_as is None and architecture.endswith("ForSequenceClassification")):
        return ModelKind.RERANKER
    if saved_as is ModelKind.EMBEDDER:
        return ModelKind.EMBEDDER
    if architecture.endswith(_CAUSAL_ENDS):
        return ModelKind.GENERATOR
    is_encoder = files.config.get("model_type") in _ENCODER_TYPES
    return (
        ModelKind.EMBEDDER if is_encoder or architecture.endswith(("ForMaskedLM", "EncoderModel")) else ModelKind.GENERATOR
    )


def _read_saved_kind(files: ModelFiles) -> ModelKind | None:
    """What sentence-transformers saved the folder as; None if it did not."""
    if not (files.folder / MODULES_FILE).is_file():
        return None
    file = files.folder / MODEL_FILE
    saved = read_json(file).get("model_type", "SentenceTransformer") if file.is_file() else "SentenceTransformer"
    known = {"SentenceTransformer": ModelKind.EMBEDDER, "CrossEncoder": ModelKind.RERANKER}
    if saved not in known:
        raise UnsupportedModel(f"{file} has the model_type {saved!r}, and the kinds that run are {', '.join(known)}")
    return known[saved]
