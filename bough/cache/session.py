"""One request's use of the cache: begin → load → publish, capture → close.

A session owns a busy lane and a hold on the path that it stands on. While it `is_loading`, parts of that path are being
read, and the lane must not be used: then only `advance_loading`, `wait_for_reads`, `schedule`, `close` and what tells how
far it is may be called. Afterwards it keeps the record of what the lane contains; the lane's state is never ahead of that
record, except in the middle of a forward pass.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from bough.cache.adoption import Adoption
from bough.cache.finish import Finisher
from bough.cache.record import Capture, Recorder
from bough.cache.residency import Residency
from bough.cache.tree.node import Reason
from bough.cache.tree.state import GroupSource, Incoming, Lane
from bough.errors import EngineError
from bough.tokens import Tokens
from bough.types import Loading

log = logging.getLogger(__name__)

READ_WAIT_S = 0.01
"""The time between two checks of `finish_loading`, whether waiting is still worth it, in seconds."""


@dataclass(frozen=True)
class SessionContext:
    """Settings and parts that all sessions of a cache share.

    Prompts beyond `reuse_limit` tokens are computed whole, and nothing beyond it is recorded. Restore points inside a
    long prompt are `point_spacing` tokens apart.
    """

    point_spacing: int
    reuse_limit: int | None
    can_chunk: bool
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
        prompt: Tokens,
        *,
        captures: Sequence[Capture],
        keeps_state: bool,
        keep: bool,
    ) -> None:
        self.sequence = adoption.sequence
        self.lane: Lane = adoption.sequence.lane  # as a plain field: every step reads it
        self.prompt = prompt
        self.keeps_state = keeps_state
        self.captures: dict[int, Capture] = {}
        self.is_whole = not adoption.is_loading  # False too in the middle of a forward pass, and after one that failed
        self.is_closed = False
        self._context = context
        self._memory = context.residency.memory
        self._adoption = adoption
        self._prompt_captures = captures
        self._keeps_prompt = keep
        if not adoption.is_loading:
            self._schedule_prompt()

    @property
    def matched(self) -> int:
        """Tokens of the prompt that were found."""
        return self._adoption.matched

    @property
    def cached(self) -> int:
        """Tokens of the prompt that are reused; while the session loads, those that are planned to be."""
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
        """The tokens that the lane could stand on with what has been read so far."""
        return self._adoption.loaded_tokens

    def advance_loading(self) -> bool:
        """Take what has been read; returns whether the session still loads. Never waits."""
        if self._adoption.is_loading and self._adoption.advance():
            self.is_whole = True
            self.captures = {at: each for at, each in self.captures.items() if at >= max(1, self.cached)}
            self._schedule_prompt()
        return self._adoption.is_loading

    def wait_for_reads(self, timeout_s: float) -> None:
        """Wait until the disk or the shared store has read something more, or the time is over. Any thread may wait."""
        self._adoption.wait_for_reads(timeout_s)

    def finish_loading(self) -> None:
        """Load to the end. For callers that have nothing else to do."""
        while self.advance_loading():
            self.wait_for_reads(READ_WAIT_S)

    @property
    def tokens(self) -> array[int]:
        """The tokens that the lane holds for certain."""
        return self.sequence.tokens

    @property
    def offset(self) -> int:
        return self.sequence.offset

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    def _schedule_prompt(self) -> None:
        """Plan the restore points of the prompt: only where a group needs them, or one was asked to be kept."""
        total = self.prompt_tokens
        if self._keeps_prompt:
            self.schedule(total, Reason.END, kept=True)
        if not self._memory.needs_points:
            return
        for capture in self._prompt_captures:
            self.schedule(capture.offset, capture.reason)
        for offset in range(self._context.point_spacing, total, self._context.point_spacing):
            self.schedule(offset, Reason.BRANCH)
        if self._memory.shared is not None:  # it takes only whole pages, and points in these
            self.schedule((total - 1) // self._memory.page_tokens * self._memory.page_tokens, Reason.BRANCH)
        if self.cached < self.matched or self._adoption.is_branch:
            self.schedule(min(self.matched, total - 1), Reason.BRANCH)
        self.schedule(total - 1, Reason.PROMPT_END)

    def schedule(self, offset: int, reason: Reason = Reason.BRANCH, *, kept: bool = False) -> None:
        """Ask for a restore point at `offset`; does nothing if the lane is beyond it.

        At the lane's present offset, windows can still be captured after the next run, recurrent states cannot.
        """
        if offset >= max(1, self.sequence.offset) and self.keeps_state:
            known = self.captures.get(offset, Capture(offset, reason))
            self.captures[offset] = known.united(reason, kept=kept)

    def next_chunk(self, max_tokens: int) -> Tokens:
        """The prompt tokens to evaluate next; empty when the prompt is done.

        A chunk ends at a scheduled capture only if a recurrent group needs that, else at a page border where it can.
        """
        context, page_tokens = self._context, self._memory.page_tokens
        start, total = self.sequence.offset, self.prompt_tokens
        if not context.can_chunk or context.is_beyond_limit(total):
            return self.prompt[start:]
        end = min(start + max_tokens, total)
        border = end // page_tokens * page_tokens
        if start < border and end < total:
            end = border
        if self._memory.recurrent:
            end = min((offset for offset in self.captures if start < offset < end), default=end)
        return self.prompt[start:end]

    @contextmanager
    def feeding(self, ids: Sequence[int]) -> Iterator[None]:
        """The lane is fed `ids` inside this context; after an error the lane's groups may disagree."""
        self.begin_feed()
        yield
        self.sequence.tokens.frombytes(Tokens.of(ids).key)
        self.is_whole = True

    def begin_feed(self) -> None:
        """The lane is about to be fed. Until `end_feed`, or the end of `feeding`, its groups may disagree."""
        self.is_whole = False

    def end_feed(self, token_id: int) -> None:
        """The lane was fed one token of an answer without an error."""
        self.sequence.tokens.append(token_id)
        self.is_whole = True

    def publish(self) -> None:
        """Hand what the lane holds to the tree: other requests can use it while this one goes on."""
        assert self.is_whole and not self.is_closed
        if not self.keeps_state:
            return
        limit, end = self._context.reuse_limit, self.sequence.offset
        end = end if limit is None else min(end, limit)
        due = [self.captures.pop(offset) for offset in list(self.captures) if offset <= end]
        self._context.recorder.record(self.sequence, end, due)

    def restart(self) -> None:
        """Publish what the lane holds, then start the lane again at 0; from now on nothing is recorded."""
        self.publish()
        self.keeps_state = False
        self._reserve_again()
        self.sequence.tokens = array("i")
        self.lane.adopt(0, {group: GroupSource() for group in self._memory.groups})

    def reserve(self, total_tokens: int) -> bool:
        """Make room for a sequence of `total_tokens`; False if the budget does not allow it now."""
        has_room = self._context.residency.room.reserve(self.sequence.slot, total_tokens)
        if has_room:
            self.sequence.total_tokens = max(self.sequence.total_tokens, total_tokens)
        return has_room

    def _reserve_again(self) -> None:
        """Make room for all rows once more, where the tree keeps those that the lane had. Raises DoesNotFit."""
        room, slot, total = self._context.residency.room, self.sequence.slot, self.sequence.total_tokens
        if slot.lane.shares_rows and not room.reserve(slot, total, incoming=Incoming(0)):
            raise room.refuse_lane(slot, total)

    def note_prefill(self, seconds: float) -> None:
        """Learn the rate of computing from the rest of the prompt, up to the first token."""
        self._context.residency.loader.rates.note_prefill(self.cached, self.prompt_tokens, seconds)

    def close(self) -> None:
        """Record what was computed, and make the lane idle; after a forward pass that failed, what was published stays.

        A second call does nothing.
        """
        if self.is_closed:
            return
        if self._adoption.is_loading:
            self._cancel_loading()
            return
        is_recorded = False
        try:
            if self.is_whole:
                self._record_last()
                is_recorded = True
            else:
                self._repair()
        except (EngineError, MemoryError) as error:
            log.warning("a finished request could not be recorded: %s", error)
            self.sequence.slot.clear()
        finally:
            self.is_closed = True
            self._context.finisher.finish(
                self.sequence, self.prompt.key, keeps_state=self.keeps_state, is_whole=is_recorded
            )
            self._context.residency.evictor.forget_if_empty(self.sequence.trie)

    def _cancel_loading(self) -> None:
        """Give up reading. There is nothing to record; the lane is free, and empty if it was cleared for the load."""
        self.is_closed = True
        self._adoption.cancel()
        self._context.finisher.clear_device()
        self._context.residency.evictor.forget_if_empty(self.sequence.trie)

    def _record_last(self) -> None:
        """Publish everything, with a restore point at the end, and note what the idle lane holds."""
        end = self.sequence.total_tokens = self.sequence.offset
        if self._memory.needs_points and end:
            self.captures[end] = self.captures.get(end, Capture(end, Reason.END)).united(Reason.END)
        self.publish()
        if self.keeps_state:
            self.sequence.slot.tokens = self.sequence.packed()

    def _repair(self) -> None:
        """After a failed forward pass: full attention alone goes back to the last good offset, other lanes are cleared."""
        slot, at = self.sequence.slot, self.sequence.offset
        if self._memory.needs_points or not self.keeps_state:
            slot.clear()
            return
        slot.lane.adopt(at, {group: GroupSource(live=at) for group in self._memory.groups})
        slot.tokens = self.sequence.packed()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
