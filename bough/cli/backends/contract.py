"""The interface of a model that `bough run` and its chat use, wherever the model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, Self

from rich import filesize

from bough.types import Chunk, Completion, Message, Progress, Prompt

NO_TEMPLATE = "the model has no chat template: use --raw with a prompt to continue a text"
GivenParams = Mapping[str, Any]
"""Sampling parameters that the user has set, by name; all others are the model's own."""


class Backend(Protocol):
    """One model that answers. Use it in a `with` statement; closing it ends what it has opened, and no server."""

    @property
    def name(self) -> str:
        """The name of the model, for people."""

    @property
    def model(self) -> str:
        """The name or path that opens this model again."""

    @property
    def load_s(self) -> float:
        """How long it took until the model was ready."""

    @property
    def chat_problem(self) -> str:
        """Why the model cannot chat; empty if it can."""

    def greeting(self) -> str:
        """The model, and where it runs, in one short line."""

    def describe(self) -> dict[str, str]:
        """The model, its engine and the memory in use, as names and values for people."""

    def stream(
        self,
        prompt: Prompt,
        given: GivenParams,
        *,
        choice: int = 0,
        is_cancelled: Callable[[], bool],
        on_progress: Callable[[int, int], None],
    ) -> Iterator[Chunk | Completion]:
        """Yield pieces of the answer to messages, or of what follows a text, then the completion.

        With a seed, each `choice` samples differently. Once `is_cancelled`, the next piece is the completion, and the work
        that was done is kept. `on_progress` gets the number of prompt tokens that are cached or computed, and that of all.
        """

    def draw_tree(self, width: int | None) -> str:
        """The tree of all cached prefixes, as lines of text of at most this width."""

    def explain(self, messages: list[Message]) -> Mapping[str, Any]:
        """How much of these messages is cached and why not more: the fields of an `Explanation`."""

    def change_model(self, name: str, progress: Progress) -> None:
        """Answer with another model from now on. If it cannot be loaded, raises BoughError and keeps the one before."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def describe_memory(stats: Mapping[str, Any]) -> dict[str, str]:
    """The size of a tree, and, if the figures have it, the memory that it and the lanes use."""
    facts = {"tree": f"{stats['nodes']:,} nodes, {stats['tokens']:,} tokens, {filesize.decimal(stats['tree_bytes'])}"}
    if "used_bytes" in stats:
        facts["memory"] = f"{filesize.decimal(stats['used_bytes'])} of {filesize.decimal(stats['budget_bytes'])}"
    return facts
