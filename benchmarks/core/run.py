"""The cost of matching, evicting and starting from disk; and on the host, of a decode step and a chunk.

There is no engine that computes: a page has a size and no content.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.core.chunk_cost import DEPTHS, measure_chunk_us
from benchmarks.core.step_cost import SAMPLING, measure_step_s
from bough.cache.admin.stats import stats
from bough.cache.disk import Disk
from bough.cache.disk.index import INDEX, Index, IndexChanges
from bough.cache.prefix_cache import PrefixCache
from bough.cache.residency.evictor import Evictor
from bough.cache.residency.memory import Memory, SaltForest, Tiers
from bough.cache.tree.address import Address, DiskFile
from bough.cache.tree.forest import Forest
from bough.cache.tree.state import PAGE_TOKENS, Page
from bough.cache.tree.trie import NoMemory, Trie
from bough.replay.engine import GROUP, CountingEngine
from bough.tokens import TOKEN_BYTES, pack

PROMPT_TOKENS = 100_000
TREE_NODES = 10_000


@dataclass(frozen=True)
class CoreFigures:
    """Medians: `match_ms` for each number of edges on the matched path, `evict_us` for each number of nodes.

    `start_ms`, for each number of pages in the index on disk, is the time to open the index and to build the tree.
    `step_ms`, for each way to sample and each number of lanes, is the processor time of the host for one decode step.
    `chunk_us` is the host cost of a chunk: of publishing it, with a disk or without, at each depth of a conversation.
    """

    match_ms: dict[int, float]
    evict_us: dict[int, float]
    start_ms: dict[int, float]
    step_ms: dict[str, dict[int, float]]
    chunk_us: dict[str, dict[int, float]]


@dataclass(frozen=True)
class CoreSizes:
    """What is measured: edges of a path, nodes of a tree, pages on disk, lanes of a step, and tokens before a chunk."""

    edges: Sequence[int] = (1, 10, 100, 1000, 10_000)
    nodes: Sequence[int] = (1000, 10_000, 100_000)
    pages: Sequence[int] = (10_000, 100_000)
    lanes: Sequence[int] = (1, 16, 64)
    depths: Sequence[int] = DEPTHS


def measure_core(sizes: CoreSizes) -> CoreFigures:
    """Match 100,000 tokens on paths of so many edges, evict from trees of so many nodes, start and step."""
    return CoreFigures(
        match_ms={edges: 1e3 * _median_s(_match(edges)) for edges in sizes.edges},
        evict_us={nodes: 1e6 * _evict_s(nodes) for nodes in sizes.nodes},
        start_ms={pages: 1e3 * _start_s(pages) for pages in sizes.pages},
        step_ms={name: {lanes: 1e3 * measure_step_s(lanes, name) for lanes in sizes.lanes} for name in SAMPLING},
        chunk_us=measure_chunk_us(sizes.depths),
    )


def _match(num_edges: int) -> Callable[[], object]:
    """Build a trie of at least 10,000 nodes in which the prompt's path has `num_edges`. Returns a call that matches it."""
    chance = random.Random(1)
    prompt = [chance.randrange(50_000) for _ in range(PROMPT_TOKENS)]
    trie, node = Trie(NoMemory()), None
    step = PROMPT_TOKENS // num_edges
    for edge in range(num_edges):
        node = trie.append(node or trie.root, prompt[edge * step : (edge + 1) * step])
    path = [trie.root, *trie.match(prompt).path]
    for number in range(max(0, TREE_NODES - num_edges)):
        parent = path[number % len(path)]
        trie.append(parent, [100_000 + number, 1, 2, 3])
    packed = pack(prompt)
    return lambda: trie.match(packed)


def _median_s(call: Callable[[], object], times: int = 51) -> float:
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def _evict_s(num_nodes: int, evictions: int = 900) -> float:
    """Seconds for one eviction from a tree of `num_nodes`: the median over batches of 100."""
    memory, chance = Memory(CountingEngine(), page_tokens=16), random.Random(2)
    forest: SaltForest = Forest(memory, page_tokens=16)
    evictor, trie = Evictor(memory, forest), forest.open("")
    heads = [trie.append(trie.root, [number]) for number in range(num_nodes // 10)]
    for number in range(num_nodes - len(heads)):
        node = trie.append(heads[number % len(heads)], [number] * 16, now=chance.random())
        trie.add_page(node, trie.memory.add(Page(GROUP, 1, 16, None, 15)))
        trie.add_page(node, trie.memory.add(Page(GROUP, 16, 17, None, 1)))
        evictor.offer(trie, node)
    batches = []
    for _ in range(evictions // 100):
        started = time.perf_counter()
        for _ in range(100):
            assert evictor.evict_one()
        batches.append((time.perf_counter() - started) / 100)
    return statistics.median(batches)


def _start_s(num_pages: int, pages_each: int = 100) -> float:
    """Seconds from opening an index of `num_pages` to the finished tree: the median of 3."""
    with TemporaryDirectory(prefix="bough-core-") as folder:
        tree = Path(folder) / "tree"
        _open(tree).close()
        _fill(tree, num_pages, pages_each)
        taken = []
        for _ in range(3):
            started = time.perf_counter()
            disk = _open(tree)
            store: Any = CountingEngine()
            cache = PrefixCache(store, [], tiers=Tiers(store, disk=disk))
            cache.restore()
            taken.append(time.perf_counter() - started)
            assert stats(cache.forest, cache.residency)["pages"] == num_pages
            disk.close()
    return statistics.median(taken)


def _open(folder: Path) -> Disk:
    return Disk(folder, fingerprint="core", page_tokens=PAGE_TOKENS, budget_bytes=1 << 60, floor_bytes=0)


def _fill(folder: Path, num_pages: int, pages_each: int) -> None:
    """Write an index of `num_pages` pages. Their files do not exist: starting does not read them."""
    chance, rows = random.Random(3), []
    with _open(folder) as disk:
        root, keys, identity = disk.root(""), disk.keys, disk.identity
    for conversation in range(num_pages // pages_each):
        words = memoryview(chance.randbytes(2 * pages_each * PAGE_TOKENS)).cast("H").tolist()
        tokens = pack([conversation, *words[1:]])  # no two conversations begin alike, so that no page is cut
        for number, before in enumerate(keys.digests(root, tokens)[:-1]):
            page = tokens[number * PAGE_TOKENS * TOKEN_BYTES : (number + 1) * PAGE_TOKENS * TOKEN_BYTES]
            address = Address(root, before, page, 0, number * PAGE_TOKENS, (number + 1) * PAGE_TOKENS)
            rows.append(DiskFile(keys.name(address), address, 1 << 20, time.time()))
    index = Index(folder / INDEX, identity, keys)
    index.apply(IndexChanges(saved=rows))
    index.close()
