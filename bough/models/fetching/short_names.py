"""Short names for well-known models: `qwen3:4b` stands for a repository on the Hugging Face hub.

A name has a tag for the size; without one it stands for the usual size of the family. Where the original repository is
gated, the name stands for a copy that is not; the licence is the model's own in any case. Sizes are of the files when this
list was written: `pull` asks the hub for the real ones.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ShortName:
    """A name, and what it stands for. `repository` is empty for the model that comes in a wheel from the package index."""

    name: str
    repository: str
    num_parameters: int
    download_bytes: int
    license: str
    is_usual: bool = False  # whether the name without its tag stands for this one

    @property
    def family(self) -> str:
        return self.name.partition(":")[0]

    @property
    def names(self) -> tuple[str, ...]:
        """All names of this model."""
        return (self.family, self.name) if self.is_usual else (self.name,)


SHORT_NAMES = (
    ShortName("smollm2:135m", "", 134_515_008, 98_000_000, "apache-2.0", is_usual=True),
    ShortName("smollm2:360m", "HuggingFaceTB/SmolLM2-360M-Instruct", 361_821_120, 728_000_000, "apache-2.0"),
    ShortName("smollm2:1.7b", "HuggingFaceTB/SmolLM2-1.7B-Instruct", 1_711_376_384, 3_430_000_000, "apache-2.0"),
    ShortName("qwen3:0.6b", "Qwen/Qwen3-0.6B", 596_049_920, 1_520_000_000, "apache-2.0"),
    ShortName("qwen3:1.7b", "Qwen/Qwen3-1.7B", 1_720_574_976, 4_080_000_000, "apache-2.0"),
    ShortName("qwen3:4b", "Qwen/Qwen3-4B", 4_022_468_096, 8_060_000_000, "apache-2.0", is_usual=True),
    ShortName("qwen3:8b", "Qwen/Qwen3-8B", 8_190_735_360, 16_400_000_000, "apache-2.0"),
    ShortName("llama3.2:1b", "unsloth/Llama-3.2-1B-Instruct", 1_235_814_400, 2_490_000_000, "llama3.2"),
    ShortName("llama3.2:3b", "unsloth/Llama-3.2-3B-Instruct", 3_212_749_824, 6_450_000_000, "llama3.2", is_usual=True),
    ShortName("gemma3:1b", "unsloth/gemma-3-1b-it", 999_885_952, 2_040_000_000, "gemma"),
    ShortName("gemma3:4b", "unsloth/gemma-3-4b-it", 4_300_079_472, 8_640_000_000, "gemma", is_usual=True),
    ShortName("gpt-oss:20b", "openai/gpt-oss-20b", 20_914_757_184, 13_800_000_000, "apache-2.0", is_usual=True),
    ShortName("phi4-mini:3.8b", "microsoft/Phi-4-mini-instruct", 3_836_021_760, 7_690_000_000, "mit", is_usual=True),
    ShortName("mistral:7b", "unsloth/mistral-7b-instruct-v0.3", 7_248_023_552, 14_500_000_000, "apache-2.0", is_usual=True),
)


def find_short_name(name: str) -> ShortName | None:
    """What a name stands for; None if it is not one of these. Case does not matter."""
    return next((each for each in SHORT_NAMES if name.lower() in each.names), None)
