"""Short names for models that can be fetched, and which of these models fit into this machine's memory.

A short name has a tag for the size; without one it stands for the usual size of the family: `qwen3` is `qwen3:4b`. Most
have two sources: a repository of the Hugging Face hub with weights in 16 bits, and one with GGUF files. If the original
repository is gated, the name stands for a copy that is not; the licence is the model's own in any case. Sizes are of the
files when this list was written: `pull` asks the hub for the real ones.

Models whose rotations are scaled (Llama 3.2, Gemma 3, Phi 4) have no GGUF source: those files could not be tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Fit = Literal["yes", "tight", "no"]

_MB = 10**6
_STATE_SHARE = 0.25  # of the weights: room for the state of some thousand tokens
_PROGRAM_BYTES = 500 * _MB
_OTHERS_SHARE = 0.25  # of the machine's memory: room for other programs


@dataclass(frozen=True)
class ModelSource:
    """Where the files are. `repository` is empty for the default model, which comes from the package index.

    `quantization` is that of a GGUF file, and empty for safetensors.
    """

    repository: str
    download_bytes: int
    quantization: str = ""


@dataclass(frozen=True)
class ShortName:
    """A name and its model. A size of 0 megabytes means that there is no such source."""

    name: str
    repository: str
    num_parameters: int
    license: str
    original_mb: int
    gguf_mb: int = 0
    gguf_repository: str = ""  # if it is not the repository's name with -GGUF
    quantization: str = "Q4_K_M"
    original_type: str = "16 bits"
    is_usual: bool = False  # the family's name stands for this one

    @property
    def family(self) -> str:
        return self.name.partition(":")[0]

    @property
    def names(self) -> tuple[str, ...]:
        return (self.family, self.name) if self.is_usual else (self.name,)

    def source(self, prefers_gguf: bool) -> ModelSource:
        """The GGUF file or the weights in 16 bits, whichever is preferred, or else the other."""
        if self.gguf_mb and (prefers_gguf or not self.original_mb):
            repository = self.gguf_repository or (f"{self.repository}-GGUF" if self.repository else "")
            return ModelSource(repository, self.gguf_mb * _MB, self.quantization)
        return ModelSource(self.repository, self.original_mb * _MB)

    def needed_bytes(self, prefers_gguf: bool) -> int:
        """About how much memory the model takes: its weights, some state, and the program.

        Weights that are not from a GGUF file take two bytes each in memory, also if they are packed in the file.
        """
        source = self.source(prefers_gguf)
        weights_bytes = source.download_bytes
        if not source.quantization:
            weights_bytes = max(weights_bytes, 2 * self.num_parameters)
        return int(weights_bytes * (1 + _STATE_SHARE)) + _PROGRAM_BYTES


_SMOLLM2 = "HuggingFaceTB/SmolLM2"

SHORT_NAMES = (
    ShortName("smollm2:135m", "", 134_515_008, "apache-2.0", 0, 98, quantization="Q4_1", is_usual=True),
    ShortName("smollm2:360m", f"{_SMOLLM2}-360M-Instruct", 361_821_120, "apache-2.0", 728, 386, quantization="Q8_0"),
    ShortName("smollm2:1.7b", f"{_SMOLLM2}-1.7B-Instruct", 1_711_376_384, "apache-2.0", 3_430, 1_056),
    ShortName("qwen3:0.6b", "Qwen/Qwen3-0.6B", 596_049_920, "apache-2.0", 1_520, 639, quantization="Q8_0"),
    ShortName("qwen3:1.7b", "Qwen/Qwen3-1.7B", 1_720_574_976, "apache-2.0", 4_080, 1_834, quantization="Q8_0"),
    ShortName("qwen3:4b", "Qwen/Qwen3-4B", 4_022_468_096, "apache-2.0", 8_060, 2_497, is_usual=True),
    ShortName("qwen3:8b", "Qwen/Qwen3-8B", 8_190_735_360, "apache-2.0", 16_400, 5_028),
    ShortName("qwen3:14b", "Qwen/Qwen3-14B", 14_768_307_200, "apache-2.0", 29_540, 9_002),
    ShortName("qwen3:30b", "Qwen/Qwen3-30B-A3B", 30_532_122_624, "apache-2.0", 61_060, 18_557),
    ShortName(
        "qwen2.5-coder:7b", "Qwen/Qwen2.5-Coder-7B-Instruct", 7_615_616_512, "apache-2.0", 15_230, 4_683, is_usual=True
    ),
    ShortName("llama3.2:1b", "unsloth/Llama-3.2-1B-Instruct", 1_235_814_400, "llama3.2", 2_490),
    ShortName("llama3.2:3b", "unsloth/Llama-3.2-3B-Instruct", 3_212_749_824, "llama3.2", 6_450, is_usual=True),
    ShortName("gemma3:1b", "unsloth/gemma-3-1b-it", 999_885_952, "gemma", 2_040),
    ShortName("gemma3:4b", "unsloth/gemma-3-4b-it", 4_300_079_472, "gemma", 8_640, is_usual=True),
    ShortName(
        "gpt-oss:20b", "openai/gpt-oss-20b", 20_914_757_184, "apache-2.0", 13_800, original_type="MXFP4", is_usual=True
    ),
    ShortName("phi4-mini:3.8b", "microsoft/Phi-4-mini-instruct", 3_836_021_760, "mit", 7_690, is_usual=True),
    ShortName(
        "mistral:7b",
        "unsloth/mistral-7b-instruct-v0.3",
        7_248_023_552,
        "apache-2.0",
        14_500,
        4_373,
        gguf_repository="bartowski/Mistral-7B-Instruct-v0.3-GGUF",
        is_usual=True,
    ),
)


def find_short_name(name: str) -> ShortName | None:
    """The entry of a short name in any case, or None."""
    return next((each for each in SHORT_NAMES if name.lower() in each.names), None)


@dataclass(frozen=True)
class CatalogueModel:
    """A model that can be fetched by a short name, as this machine would fetch it.

    `weights` is the quantization of its weights, or "16 bits". `needed_bytes` is about the memory that it takes. It fits
    ("yes") if other programs keep a quarter of the machine's memory, only just ("tight") if it takes nearly all.
    """

    name: str
    names: tuple[str, ...]
    repository: str
    weights: str
    num_parameters: int
    download_bytes: int
    license: str
    needed_bytes: int
    fits: Fit


def list_catalogue(memory_bytes: int, prefers_gguf: bool) -> list[CatalogueModel]:
    """Every short name, for a machine with this much memory."""
    return [_describe(each, memory_bytes, prefers_gguf) for each in SHORT_NAMES]


def _describe(short: ShortName, memory_bytes: int, prefers_gguf: bool) -> CatalogueModel:
    source, needed_bytes = short.source(prefers_gguf), short.needed_bytes(prefers_gguf)
    is_roomy = needed_bytes <= memory_bytes * (1 - _OTHERS_SHARE)
    return CatalogueModel(
        short.name,
        short.names,
        source.repository,
        source.quantization or short.original_type,
        short.num_parameters,
        source.download_bytes,
        short.license,
        needed_bytes,
        "yes" if is_roomy else "tight" if needed_bytes <= memory_bytes else "no",
    )
