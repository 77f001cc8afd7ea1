"""What a tree of many nodes costs those who watch it: the first look, which tells all of it, and a later one.

The tree is a real one without content. A look runs in steps on the engine's thread, and other work may go on between two of
them, so the longest step matters more than their sum. The JSON is written in another thread, with pauses.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.null_engine import NUM_BYTES, VOCAB_SIZE
from benchmarks.streams.model import write_word_model
from bough.cache.admin.watch import TreeWatch
from bough.cache.prefix_cache import PrefixCache
from bough.models.tokenizer import load_tokenizer
from bough.replay.engine import CountingEngine
from bough.server.serving.events.frames import write_nodes
from bough.server.serving.events.messages import MessageFinder
from bough.server.serving.events.reader import EventReader
from bough.server.serving.model.contract import Look
from bough.server.serving.model.in_process import look
from bough.tokens import unpack

NUM_NODES = 10_000
_EDGE_TOKENS = 48
_CHILDREN = 9
_LATER_LOOKS = 51


@dataclass(frozen=True)
class LargeTreeFigures:
    """Processor time of the engine's thread for looks, the time of another thread for writing, and bytes for one reader.

    A later look finds one change.
    """

    nodes: int
    first_look_ms: float
    longest_step_ms: float
    first_write_ms: float
    first_bytes: int
    later_look_us: float
    later_bytes: int


def measure_large_tree(num_nodes: int = NUM_NODES) -> LargeTreeFigures:
    """Look at a tree that was never looked at, then again and again after one node has changed."""
    store: Any = CountingEngine()
    cache = PrefixCache(store, [])
    _grow(cache, num_nodes)
    with TemporaryDirectory(prefix="bough-events-") as folder:
        tokenizer = load_tokenizer(write_word_model(Path(folder), VOCAB_SIZE))
    find_messages = MessageFinder(tokenizer).find
    watch = TreeWatch(cache)
    first = _timed_look(cache, watch)
    started_s = time.perf_counter()
    pieces = write_nodes(first.found.changes, lambda packed: tokenizer.decode(unpack(packed)), find_messages)
    written_s = time.perf_counter() - started_s
    later = [_look_after_change(cache, watch) for _ in range(_LATER_LOOKS)]
    changed = write_nodes(later[-1].found.changes, lambda packed: tokenizer.decode(unpack(packed)), find_messages)
    return LargeTreeFigures(
        num_nodes,
        round(1e3 * first.seconds, 2),
        round(1e3 * first.longest_s, 2),
        round(1e3 * written_s, 1),
        _count_bytes(pieces),
        round(1e6 * statistics.median(each.seconds for each in later), 1),
        _count_bytes(changed),
    )


def _grow(cache: PrefixCache, num_nodes: int) -> None:
    """Nodes of the empty salt, a tenth of them below the root."""
    trie, chance = cache.forest.open(""), random.Random(3)

    def edge(number: int) -> list[int]:
        """Words that begin with one of their own: siblings differ in their first token."""
        return [NUM_BYTES + number, *(chance.randrange(NUM_BYTES, VOCAB_SIZE) for _ in range(_EDGE_TOKENS - 1))]

    for number in range(num_nodes // (1 + _CHILDREN)):
        head = trie.append(trie.root, edge(number))
        for child in range(_CHILDREN):
            trie.append(head, edge(child))


@dataclass(frozen=True)
class _TimedLook:
    found: Look
    seconds: float
    longest_s: float


def _timed_look(cache: PrefixCache, watch: TreeWatch) -> _TimedLook:
    steps, total_s, longest_s = look(cache, watch, [], set()), 0.0, 0.0
    while True:
        started_s = time.thread_time()
        try:
            next(steps)
            found: Look | None = None
        except StopIteration as end:
            found = end.value
        took_s = time.thread_time() - started_s
        total_s, longest_s = total_s + took_s, max(longest_s, took_s)
        if found is not None:
            return _TimedLook(found, total_s, longest_s)


def _look_after_change(cache: PrefixCache, watch: TreeWatch) -> _TimedLook:
    trie = cache.forest.open("")
    trie.memory.note(next(iter(trie.root.children.values())))
    return _timed_look(cache, watch)


def _count_bytes(pieces: Any) -> int:
    """The bytes of the events that tell these nodes."""
    reader = EventReader(None, None, 1.0)
    reader.send_tree("model", pieces, is_reset=False)
    return sum(len(text.encode()) for _, text in reader.take())
