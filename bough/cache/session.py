"""One request's use of the cache: begin → load → publish, capture → close.

A session owns a busy lane and a pin on the path that it stands on. While it `is_loading`, parts of that path are being read
from disk, and the lane is not to be used. Afterwards it keeps the record of what the lane holds; the lane's state is never
ahead of that record, except in the middle of a forward pass.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol, Self

from bough.cache.adoption import Adoption
from bough.cache.finish import Finisher
from bough.cache.record import Capture, CaptureCosts, Recorder
from bough.cache.residency import Residency
from bough.cache.tree.node import Reason
from bough.cache.tree.state import Group, Incoming, Kind, Lane, Source
from bough.cache.tree.tokens import cut, num_tokens, unpack
from bough.errors import EngineError
from bough.types import Boundary, Loading

log = logging.getLogger(__name__)

READ_WAIT_S = 0.01
"""How long a session that loads is left alone: then it is looked again whether waiting is still worth it."""


class ReuseSession(Protocol):
    """What generation needs of a session. The benchmarks run simpler strategies through it, in the same pipeline."""

    @property
    def lane(self) -> Lane: ...
    @property
    def matched(self) -> int: ...
    @property
    def cached(self) -> int: ...
    @property
    def loading(self) -> Loading: ...
    @property
    def is_loading(self) -> bool: ...
    @property
    def loaded_tokens(self) -> int: ...
    def advance_loading(self) -> bool: ...
    def wait_for_reads(self, timeout_s: float) -> None: ...
    def schedule(self, offset: int) -> None: ...
    def next_chunk(self, max_tokens: int) -> list[int]: ...
    def feeding(self, ids: Sequence[int]) -> AbstractContextManager[None]: ...
    def begin_feed(self) -> None: ...
    def end_feed(self, ids: Sequence[int]) -> None: ...
    def publish(self) -> None: ...
    def restart(self) -> None: ...
    def reserve(self, total_tokens: int) -> bool: ...
    def note_prefill(self, seconds: float) -> None: ...
    def close(self) -> None: ...


class Reuse(Protocol):
    """Something that begins sessions."""

    def begin(
        self,
        ids: Sequence[int],
        *,
        boundaries: Sequence[Boundary] = (),
        salt: str = "",
        max_new_tokens: int = 0,
        keep: bool = False,
        store: bool = True,
        reuse: bool = True,
    ) -> ReuseSession: ...


@dataclass(frozen=True)
class SessionContext:
    """What all sessions of a cache share.

    Prompts beyond `reuse_limit` tokens are computed whole, and nothing beyond it is recorded. Restore points inside a
    long prompt are `point_spacing` tokens apart.
    """

    groups: Sequence[Group]
    page_tokens: int
    point_spacing: int
    reuse_limit: int | None
    can_chunk: bool
    costs: CaptureCosts
    residency: Residency
    recorder: Recorder
    finisher: Finisher

    def is_beyond_limit(self, total: int) -> bool:
        return self.reuse_limit is not None and total > self.reuse_limit


class Session:
    """One running request: prompt tokens to feed, a lane to feed them to, and restore points to capture."""

    def __init__(
        self,
        context: SessionContext,
        adoption: Adoption,
        prompt: bytes,
        salt: str,
        *,
        stores: bool,
        captures: Sequence[Capture] = (),
        keep: bool = False,
    ) -> None:
        self.sequence = adoption.sequence
        self.lane: Lane = adoption.sequence.lane  # as a plain field: every step reads it
        self.prompt = prompt
        self.stores = stores
        self.captures: dict[int, Capture] = {}
        self.is_whole = True  # False in the middle of a forward pass, and after one that failed
        self.is_closed = False
        self._context = context
        self._adoption = adoption
        self._prompt_captures = captures
        self._keeps_prompt = keep
        self.salt = salt
        if not adoption.is_loading:
            self._schedule_prompt()

    @property
    def matched(self) -> int:
        """How many tokens of the prompt were found."""
        return self._adoption.matched

    @property
    def cached(self) -> int:
        """How many tokens of the prompt are reused; while the session loads, how many are planned to be."""
        return self._adoption.offset

    @property
    def loading(self) -> Loading:
        return self._adoption.loading

    @property
    def is_loading(self) -> bool:
        """Whether the lane still waits for what is being read from disk."""
        return self._adoption.is_loading

    @property
    def loaded_tokens(self) -> int:
        """How many tokens the lane could stand on with what has been read so far."""
        return self._adoption.loaded_tokens

    def advance_loading(self) -> bool:
        """Take what has been read from disk; returns whether the session still loads. Never waits."""
        if self._adoption.is_loading and self._adoption.advance():
            self.captures = {at: each for at, each in self.captures.items() if at >= max(1, self.cached)}
            self._schedule_prompt()
        return self._adoption.is_loading

    def wait_for_reads(self, timeout_s: float) -> None:
        """Wait until the disk or the shared store has read something more, or the time is over. Any thread may wait."""
        disk, shared = self._context.residency.memory.disk, self._context.residency.memory.shared
        if shared is not None and self._adoption.is_fetching:
            shared.reader.wait(timeout_s)
        elif disk is not None:
            disk.reader.wait(timeout_s)

    def finish_loading(self) -> None:
        """Wait until everything is read that is worth it. For callers that have nothing else to do."""
        while self.advance_loading():
            self.wait_for_reads(READ_WAIT_S)

    @property
    def tokens(self) -> array[int]:
        """The tokens that the lane holds for certain."""
        return self.sequence.tokens

    @property
    def offset(self) -> int:
        """How many tokens the lane holds for certain."""
        return self.sequence.offset

    @property
    def prompt_tokens(self) -> int:
        return num_tokens(self.prompt)

    def _schedule_prompt(self) -> None:
        """Plan the restore points of the prompt: only where a group needs them, or one was asked to be kept."""
        total = self.prompt_tokens
        if self._keeps_prompt:
            self.schedule(total, Reason.END, kept=True)
        if not self._context.costs.needs_points:
            return
        for capture in self._prompt_captures:
            self.schedule(capture.offset, capture.reason)
        for offset in range(self._context.point_spacing, total, self._context.point_spacing):
            self.schedule(offset, Reason.BRANCH)
        if self._context.residency.memory.shared is not None:  # which takes whole pages, and points in these, alone
            self.schedule((total - 1) // self._context.page_tokens * self._context.page_tokens, Reason.BRANCH)
        if self.cached < self.matched or self._adoption.is_branch:
            self.schedule(min(self.matched, total - 1), Reason.BRANCH)
        self.schedule(total - 1, Reason.PROMPT_END)

    def schedule(self, offset: int, reason: Reason = Reason.BRANCH, *, kept: bool = False) -> None:
        """Ask for a restore point at `offset`; nothing happens if the lane is beyond it.

        Where the lane stands just now, windows can still be captured after the next run, recurrent states cannot.
        """
        if offset >= max(1, self.sequence.offset) and self.stores:
            known = self.captures.get(offset, Capture(offset, reason))
            self.captures[offset] = known.united(reason, kept=kept)

    def next_chunk(self, max_tokens: int) -> list[int]:
        """The prompt tokens to evaluate next; empty when the prompt is done.

        A chunk ends at a scheduled capture only if a recurrent group needs that, else at a page border where it can.
        """
        context, start, total = self._context, self.sequence.offset, self.prompt_tokens
        if not context.can_chunk or context.is_beyond_limit(total):
            return unpack(cut(self.prompt, start))
        end = min(start + max_tokens, total)
        border = end // context.page_tokens * context.page_tokens
        if start < border and end < total:
            end = border
        if any(group.kind is Kind.RECURRENT for group in context.groups):
            end = min((offset for offset in self.captures if start < offset < end), default=end)
        return unpack(cut(self.prompt, start, end))

    @contextmanager
    def feeding(self, ids: Sequence[int]) -> Iterator[None]:
        """The lane is fed `ids` inside this context; if it is left by an error, the lane's groups may disagree."""
        self.begin_feed()
        yield
        self.end_feed(ids)

    def begin_feed(self) -> None:
        """The lane is about to be fed. Until `end_feed` its groups may disagree; `feeding` calls both."""
        self.is_whole = False

    def end_feed(self, ids: Sequence[int]) -> None:
        """The lane was fed `ids` without an error."""
        self.sequence.tokens.extend(ids)
        self.is_whole = True

    def publish(self) -> None:
        """Hand what the lane holds to the tree: others can use it from now on, while this request goes on."""
        assert self.is_whole and not self.is_closed
        if not self.stores:
            return
        limit, end = self._context.reuse_limit, self.sequence.offset
        end = end if limit is None else min(end, limit)
        due = [self.captures.pop(offset) for offset in list(self.captures) if offset <= end]
        self._context.recorder.record(self.sequence, end, due)

    def restart(self) -> None:
        """Publish what the lane holds, then start the lane again at 0; from now on nothing is recorded."""
        self.publish()
        self.stores = False
        self._reserve_anew()
        self.sequence.tokens = array("i")
        self.lane.adopt(0, {group: Source() for group in self._context.groups})

    def reserve(self, total_tokens: int) -> bool:
        """Make room for a sequence of `total_tokens`; False if the budget does not allow it now."""
        has_room = self._context.residency.room.reserve(self.sequence.slot, total_tokens)
        if has_room:
            self.sequence.total_tokens = max(self.sequence.total_tokens, total_tokens)
        return has_room

    def _reserve_anew(self) -> None:
        """Make room for all rows once more, where the tree keeps those that the lane had. Raises DoesNotFit."""
        room, slot, incoming = self._context.residency.room, self.sequence.slot, Incoming(0)
        if not slot.lane.shares_rows:
            return
        if not room.reserve(slot, self.sequence.total_tokens, incoming=incoming):
            raise room.refuse(slot.lane.bytes_after_clear(self.sequence.total_tokens, incoming))

    def note_prefill(self, seconds: float) -> None:
        """Learn the rate of computing: the rest of the prompt, up to the first token, took so many seconds."""
        self._context.residency.loader.rates.note_prefill(self.cached, self.prompt_tokens, seconds)

    def close(self) -> None:
        """Record what was computed, whatever happened, and make the lane idle. A second call does nothing."""
        if self.is_closed:
            return
        if self._adoption.is_loading:
            self._cancel_loading()
            return
        try:
            if self.is_whole:
                self._record_last()
            else:
                self._repair()
        except (EngineError, MemoryError) as error:
            log.warning("a finished request could not be recorded: %s", error)
            self.sequence.slot.clear()
        finally:
            self.is_closed = True
            self._context.finisher.finish(self.sequence, self.prompt, self.salt, stores=self.stores, is_whole=self.is_whole)
            self._context.residency.evictor.forget_if_empty(self.sequence.trie)

    def _cancel_loading(self) -> None:
        """Give up what is being read. There is nothing to record, and the lane is as it was before."""
        self.is_closed = True
        self._adoption.cancel()
        self._context.finisher.clear_device()
        self._context.residency.evictor.forget_if_empty(self.sequence.trie)

    def _record_last(self) -> None:
        """The last record, with a restore point at the end; then the idle lane's tokens are known."""
        end = self.sequence.total_tokens = self.sequence.offset
        if self._context.costs.needs_points and end:
            self.captures[end] = self.captures.get(end, Capture(end, Reason.END)).united(Reason.END)
        self.publish()
        if self.stores:
            self.sequence.slot.tokens = self.sequence.packed()

    def _repair(self) -> None:
        """After a failed forward pass: full attention alone goes back to the last good offset, other lanes are cleared."""
        slot, at = self.sequence.slot, self.sequence.offset
        if self._context.costs.needs_points or not self.stores:
            slot.clear()
            return
        slot.lane.adopt(at, {group: Source(live=at) for group in self._context.groups})
        slot.tokens = self.sequence.packed()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
