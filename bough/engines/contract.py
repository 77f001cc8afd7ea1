"""The compute contract between an engine and the rest of Bough.

An engine owns a loaded model and all tensors. Everything above it handles token ids, page handles and opaque logits.
Exactly one thread at a time calls an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bough.cache.tree.state import ContentStore, Group, Lane
from bough.config import Settings
from bough.types import Draw, EncoderInput, SampledToken

Logits = Any
"""Scores over the vocabulary for the next token, as the engine keeps them; valid until the lane's next step."""

ReportProgress = Callable[[str], None]
"""Called with a short text for people when a new stage of the load begins."""


@dataclass(frozen=True)
class EngineCode:
    """The code that computes a model's numbers. State is only used by the code that computed it.

    `versions` are the libraries with their minor versions, for people; `source_hash` is a hash of the files of the model's
    own modules and of those that models share.
    """

    versions: str = ""
    source_hash: str = ""

    def __str__(self) -> str:
        return f"{self.versions} (source {self.source_hash[:8]})" if self.source_hash else self.versions


@dataclass(frozen=True)
class EngineInfo:
    """The facts about a loaded engine that code decides by; `Engine.describe` is for people.

    `device` is the library's own name, such as "cpu", "cuda:0" or "gpu". `dtype` is the type that the model computes in;
    `quantization` is the packing of the weights, and empty if they are not packed. `kv` is the type in which rows of keys
    and values are kept; it is empty if that is `dtype`.
    """

    name: str
    model: str
    device: str
    dtype: str
    quantization: str = ""
    code: EngineCode = field(default_factory=EngineCode)
    kv: str = ""

    @property
    def is_on_cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def weights(self) -> str:
        """The types of computation and weights as one text. Fingerprints of trees on disk contain it: never change it."""
        return f"{self.dtype}, {self.quantization}" if self.quantization else self.dtype

    def describe(self) -> dict[str, str]:
        return {"engine": self.name, "model": self.model, "device": self.device, "dtype": self.weights}


@dataclass(frozen=True)
class Capabilities:
    """What this engine can do right with this model, as the self-check found.

    `can_chunk`: a prompt may be evaluated in several runs. `can_reuse`: a state may be kept, restored and continued.
    `reuse_limit`: sequences longer than this are never reused (rotary scalings that depend on the total length).
    `differences` are the largest logit differences to a one-shot forward, by check. `reason` is why something is off.
    """

    can_chunk: bool = True
    can_reuse: bool = True
    reuse_limit: int | None = None
    reason: str = ""
    differences: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ScoredRun:
    """The logits after the last token of a run, and the probabilities of the tokens that follow those of the run."""

    logits: Logits
    scores: list[SampledToken]


class ModelEngine(Protocol):
    """A loaded model of any kind."""

    @property
    def info(self) -> EngineInfo: ...

    def describe(self) -> dict[str, str]:
        """Name, device, types, versions and more, for people: no code decides by these texts."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_tokens(self) -> int:
        """The most tokens that one sequence or text may have, special tokens included."""
        ...

    @property
    def has_host(self) -> bool:
        """Whether the device's memory is apart from the host's."""
        ...

    def close(self) -> None:
        """Release the model's memory. Neither the engine nor its lanes and pages can be used afterwards."""
        ...


class Engine(ContentStore, ModelEngine, Protocol):
    """A loaded model that evaluates tokens on lanes and looks after their pages."""

    @property
    def state_size(self) -> int:
        """The length of what `evaluate_state` returns; 0 if the model has no head that is known, and so no such state."""
        ...

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def groups(self) -> Sequence[Group]: ...

    @property
    def max_chunk_tokens(self) -> int:
        """The longest run that fits into the room that a lane reserves."""
        ...

    @property
    def num_clipped(self) -> int:
        """How many numbers of keys and values were too large for the type in which they are kept; answers may be wrong."""
        ...

    def default_budget_bytes(self) -> int:
        """The memory for lanes and pages on this device if the settings name no size."""
        ...

    def make_lane(self) -> Lane: ...

    def evaluate(self, lane: Lane, ids: Sequence[int]) -> Logits:
        """Append `ids` (at least one; room is reserved) to the lane and return the logits after the last.

        Raises EngineError if the forward pass fails; the lane's groups may then disagree.
        """
        ...

    def evaluate_scored(self, lane: Lane, ids: Sequence[int], following: Sequence[int], num_top: int) -> ScoredRun:
        """As `evaluate`; also scores, for each of `ids`, the token that follows it, with the `num_top` likeliest there.

        `following` has as many tokens as `ids`, or one less where the prompt ends. This takes memory for the logits of the
        whole run: keep it short.
        """
        ...

    def evaluate_state(self, lane: Lane, ids: Sequence[int]) -> list[float]:
        """As `evaluate`; returns the head's input after the last of `ids` instead of logits, in float32.

        This is the output of the final norm. The model must have a `state_size`.
        """
        ...

    def step(self, lanes: Sequence[Lane], ids: Sequence[int]) -> Sequence[Logits]:
        """Append one id to each lane; the result of each lane does not depend on the others."""
        ...

    def sample(self, logits: Sequence[Logits], draws: Sequence[Draw]) -> list[SampledToken]:
        """Choose one token for each, as `SamplingParams` defines."""
        ...

    def limit_device(self, budget_bytes: int) -> None:
        """Limit the device memory of lanes and pages. Called once, before the first lane is made, if at all."""
        ...

    def limit_host(self, budget_bytes: int) -> None: ...

    def synchronize(self) -> None:
        """Wait until the device has finished all work. Only benchmarks need it."""
        ...


class EncoderEngine(ModelEngine, Protocol):
    """A loaded model that turns each text into one vector, or each pair of texts into one score. It keeps no state."""

    @property
    def dimensions(self) -> int:
        """The length of each vector of `encode`; 1 is a score."""
        ...

    @property
    def max_batch_tokens(self) -> int:
        """The most tokens of one batch, padding included. A longer text is a batch of its own; 0: every text is."""
        ...

    def encode(self, batch: Sequence[EncoderInput]) -> list[list[float]]:
        """The numbers of each text; those of one do not depend on the others, but for rounding.

        Raises EngineError if the forward pass fails, or gives numbers that are not finite.
        """
        ...


class EngineMaker(Protocol):
    """The part of an engine's class that the runner needs."""

    def load(self, folder: Path, settings: Settings, progress: ReportProgress | None = None) -> Engine:
        """Load the model in `folder` and run its self-check. `progress` is called with a text at each stage."""
        ...

    def load_shape(self, config: dict[str, Any], settings: Settings) -> Engine:
        """A model of this transformers configuration with random weights, for `bough bench --shape`."""
        ...
