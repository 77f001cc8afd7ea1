"""Fetching: a prompt whose whole pages go on beyond what the tree holds is looked for in the store that machines share.

The store's threads read and check, a few objects ahead; the engine's thread puts what has arrived into the tree between two
steps, page by page from the root on. A model that needs restore points reads the lists of these first, chooses one, and
then reads the rows up to it and what it needs. Then the request is planned as always, with what is in the tree.

Whatever is missing, damaged or too slow ends the fetch with what has come so far. It waits no longer than a load from disk
would: at most a tenth of what computing takes, unless what has come makes up for it.

Always true between calls (the loader's `check` asserts it): what a fetch has reserved is counted in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bough.cache.residency.evictor import Evictor
from bough.cache.residency.loading import LEAST_WAIT_S, STALLED_S, TAKE_S, WASTE, Loader
from bough.cache.residency.memory import Memory, SaltTrie
from bough.cache.residency.rates import Clock
from bough.cache.residency.room import Room
from bough.cache.residency.saving import Saver
from bough.cache.store import Section, SharedStore, StorePath
from bough.cache.store.format import ListedPoint, Object, read_points
from bough.cache.tree.address import Address
from bough.cache.tree.node import Node, Pin, Reason
from bough.cache.tree.plan import Live, deepest, plan, tree_reach
from bough.cache.tree.state import Group, Kind, Page, Range, State, Tier
from bough.cache.tree.tokens import cut, num_tokens
from bough.cache.tree.trie import Match
from bough.errors import EngineError

log = logging.getLogger(__name__)

AHEAD = 8
"""So many objects are read ahead, once the first has been found."""

TELLING_S = 1.0
"""A store from which nothing came for so long is slow; before, it may just have nothing."""

Shortage = Callable[[int], int]
"""How many bytes are missing on the device for so many more, beside what the request needs for itself."""


@dataclass(frozen=True)
class _Rows:
    """Rows that are missing in the tree, and the section that has them."""

    group: Group
    section: Section
    start: int
    end: int


class Fetcher:
    """Decides what is worth looking for; a `Fetch` does it for one request. Without a shared store nothing is."""

    def __init__(
        self, memory: Memory, evictor: Evictor, room: Room, saver: Saver, loader: Loader, page_tokens: int, clock: Clock
    ) -> None:
        self.memory, self.evictor, self.room, self.saver, self.loader = memory, evictor, room, saver, loader
        self.page_tokens = page_tokens
        self.clock = clock
        self.full = [group for group in memory.groups if group.kind is Kind.FULL]
        self.needs_points = len(self.full) < len(memory.groups)
        self.row_bytes = sum(group.bytes_per_token for group in self.full)

    def open(self, trie: SaltTrie, salt: str, prompt: bytes, found: Match, without: int) -> Fetch | None:
        """A fetch for a prompt of which `found` is in the tree, and which can stand at `without` as it is.

        None if nothing is worth looking for: there is no whole page more, it was looked for a moment ago, the store does
        not answer, or computing is quicker by what was measured.
        """
        shared, size = self.memory.shared, self.page_tokens
        end = num_tokens(prompt) // size * size
        if shared is None or not shared.is_available or end - without < max(1, size // 2):
            return None
        path = shared.path(salt)
        path.add(cut(prompt, 0, end))
        reaches = [tree_reach(group, found.path, found.length) for group in self.full]
        first = deepest(reaches, min(end, found.length)) // size if self.full else path.num_pages
        fetch = Fetch(self, shared, trie, prompt, path, first, without)
        return None if fetch.is_done or shared.is_missing(fetch.first_address) else fetch

    def load_s(self, nbytes: int) -> float:
        """What fetching so many bytes takes; 0 if that is not known."""
        return nbytes * self.loader.rates.byte_s(Tier.STORE)

    def point_bytes(self, offset: int) -> int:
        """What a restore point needs beside rows of full attention."""
        return sum(group.needed_bytes(offset) for group in self.memory.groups if group.kind is not Kind.FULL)


class Fetch:
    """Brings what the store has of one prompt into the tree. The owner closes it, however it ends.

    From `start` on it moves a pin along with what has come.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        shared: SharedStore,
        trie: SaltTrie,
        prompt: bytes,
        path: StorePath,
        first: int,
        without: int,
    ) -> None:
        self.reserved_bytes = 0
        self.nbytes = 0  # what has come into the tree
        self.is_done = False
        self._fetcher, self._shared, self._trie = fetcher, shared, trie
        self._prompt, self._path, self._without = prompt, path, without
        self._total = num_tokens(prompt)
        self._reads = shared.reader.open_list()
        self._pin: Pin | None = None
        self._shortage: Shortage = lambda nbytes: 0
        self._next, self._end = first, path.num_pages  # pages whose rows are wanted
        self._next_list = without // fetcher.page_tokens  # the next page whose list of points is wanted
        self._listed: list[ListedPoint] | None = [] if fetcher.needs_points else None  # None when one was chosen
        self._point: ListedPoint | None = None
        self._rest: list[ListedPoint] = []  # those that are chosen from if that one cannot be had
        self._own: set[Node] = set()
        self._version = trie.version
        self._has_found = False
        self._started_s = self._arrived_s = self._alive_s = fetcher.loader.clock()
        self._seen_bytes = shared.reader.progress().num_bytes
        if not fetcher.needs_points:
            self._choose_end()

    @property
    def first_address(self) -> Address:
        """What is looked for first: if the store lacks it, it lacks all."""
        return self._path.rows(self._next) if self._listed is None else self._path.points(self._next_list)

    @property
    def load_s(self) -> float:
        """From the beginning until the last object came."""
        return self._arrived_s - self._started_s if self.nbytes else 0.0

    def start(self, pin: Pin, shortage: Shortage) -> None:
        """Begin to look. `pin` holds what the tree has of the prompt."""
        self._pin, self._shortage = pin, shortage
        self._fetcher.loader.loads.add(self)

    def advance(self) -> bool:
        """Put what has arrived into the tree, for a limited time; returns whether the fetch has ended. Never waits."""
        clock = self._fetcher.loader.clock
        until_s = clock() + TAKE_S
        if not self.is_done:
            self._skip_held()
        while not self.is_done and self._take_next() and clock() <= until_s:
            pass
        if not self.is_done:
            self._want()
        if not self.is_done and not self._is_worth_waiting():
            self._give_up()
        return self.is_done

    def close(self) -> None:
        """Want nothing any more. What has come stays in the tree. A second call does nothing."""
        self.is_done = True
        self._reads.close()
        self._reserve(0)
        self._fetcher.loader.loads.discard(self)

    def _finish(self) -> None:
        """All is there that can be had: learn the store's rate."""
        if self.nbytes:
            self._fetcher.loader.rates.note_load(Tier.STORE, self.nbytes, self.load_s)
        self.close()

    def _give_up(self) -> None:
        """Wait no longer; learn that the store is slow, if this was long enough to tell."""
        loader = self._fetcher.loader
        loader.counts.slow_loads += 1
        elapsed_s = loader.clock() - self._started_s
        if self.nbytes or elapsed_s >= TELLING_S:
            loader.rates.note_load(Tier.STORE, max(1, self.nbytes), elapsed_s)
        if not self._has_found:
            self._shared.note_silence()
        self.close()

    # What is wanted

    def _choose_end(self) -> None:
        """Without restore points: the page up to which fetching is quicker than computing."""
        size, rates = self._fetcher.page_tokens, self._fetcher.loader.rates
        if self._next >= self._end:
            self.is_done = True
        elif rates.prefill_s(0, self._total) is not None and rates.byte_s(Tier.STORE):
            best = min(range(self._next, self._end + 1), key=lambda end: (self._seconds(end * size, 0), -end))
            self._end, self.is_done = best, best == self._next

    def _seconds(self, offset: int, point_bytes: int) -> float:
        """What it takes to fetch up to an offset, and to compute the rest."""
        fetcher, size = self._fetcher, self._fetcher.page_tokens
        num_pages = max(0, -(-offset // size) - self._next)
        left_s = fetcher.loader.rates.prefill_s(max(self._without, min(offset, self._total)), self._total)
        return fetcher.load_s(num_pages * size * fetcher.row_bytes + point_bytes) + (left_s or 0.0)

    def _choose_point(self, listed: Sequence[ListedPoint]) -> None:
        """The restore point from which the prompt's end is reached soonest; the fetch ends if there is none."""
        fetcher, self._listed = self._fetcher, None
        points = [each for each in listed if self._without < each.offset < self._total and each.reason in set(Reason)]
        seconds = {each: self._seconds(each.offset, fetcher.point_bytes(each.offset)) for each in points}
        best = min(points, key=lambda each: (seconds[each], -each.offset), default=None)
        if best is None or seconds[best] > self._seconds(self._without, 0):
            self._finish()
            return
        self._point = best
        self._rest = [each for each in points if each.offset < best.offset]
        self._end = max(self._next, -(-best.offset // fetcher.page_tokens)) if fetcher.full else self._next

    def _shorten(self) -> None:
        """Rows are missing from page `_next` on: end, or choose a restore point before it."""
        self._end = self._next
        if self._point is None:
            self._finish()
        else:
            border = self._next * self._fetcher.page_tokens
            self._choose_point([each for each in self._rest if each.offset <= border])

    def _want(self) -> None:
        """Read ahead, as far as there is room for it; only one object as long as none was found."""
        ahead, path = AHEAD if self._has_found else 1, self._path
        if self._listed is not None:
            last = min(self._next_list + ahead, self._end)
            self._reads.want([path.points(page) for page in range(self._next_list, last)])
            return
        wanted = [] if self._point is None else [path.point(self._point.offset)]
        last = min(self._next + ahead, self._end)
        if self._has_found and not self._make_room(self._page_bytes() * (last - self._next) + self._point_bytes()):
            last = min(last, self._next + 1)
            if not self._make_room(self._page_bytes() * (last - self._next) + self._point_bytes()):
                self._finish()
                return
        self._reads.want(wanted + [path.rows(page) for page in range(self._next, last)])

    def _page_bytes(self) -> int:
        """What the rows of one page will take where they go."""
        size = self._fetcher.page_tokens
        return sum(self._item_bytes(group, 0, size) for group in self._fetcher.full)

    def _point_bytes(self) -> int:
        """The most that what the chosen restore point needs will take."""
        if self._point is None:
            return 0
        offset, nbytes = self._point.offset, 0
        for group in self._fetcher.memory.groups:
            if group.kind is Kind.RECURRENT:
                nbytes += self._device_bytes(State(group, offset, None, 0, Tier.DISK))
            elif group.kind is Kind.WINDOW:
                for low, high in _page_ranges(group.first_needed(offset), offset, self._fetcher.page_tokens):
                    nbytes += self._item_bytes(group, low, high)
        return nbytes

    def _item_bytes(self, group: Group, start: int, end: int) -> int:
        return self._device_bytes(Page(group, start, end, None, 0, tier=Tier.DISK))

    def _device_bytes(self, item: Page | State) -> int:
        if self._fetcher.loader.tier is not Tier.DEVICE:
            return item.content_bytes
        return self._fetcher.memory.store.device_bytes(item)

    def _make_room(self, nbytes: int) -> bool:
        """Reserve so many bytes in all where fetched content goes; False if there is no room for more than now."""
        extra, fetcher = nbytes - self.reserved_bytes, self._fetcher
        if extra > 0:
            if fetcher.loader.tier is Tier.HOST:
                has_room = fetcher.evictor.make_host_room(extra, self._trie)
            else:
                has_room = not self._shortage(extra) and fetcher.room.make_room(extra, trie=self._trie)
            if not has_room:
                return False
        self._reserve(nbytes)
        return True

    def _reserve(self, nbytes: int) -> None:
        self._trie.memory.reserve(self._fetcher.loader.tier, nbytes - self.reserved_bytes)
        self.reserved_bytes = nbytes

    def _skip_held(self) -> None:
        """Want nothing that has come into the tree meanwhile, for another request."""
        if self._trie.version == self._version or self._pin is None:
            return
        self._version, size = self._trie.version, self._fetcher.page_tokens
        match, groups = self._match(self._path.num_pages * size), self._fetcher.memory.groups
        reaches = [tree_reach(group, match.path, match.length) for group in self._fetcher.full]
        held = min(deepest(reaches, match.length) // size, self._end) if reaches else 0
        if held > self._next:
            self._next = held
            self._hold(next(node for node in match.path if node.start < held * size <= node.end), held * size)
        offset = plan(groups, match.path, match.length, Live.nothing(groups), self._total - 1)
        if self._point is not None and offset >= self._point.offset:
            self._finish()

    # Waiting

    def _is_worth_waiting(self) -> bool:
        rates, now = self._fetcher.loader.rates, self._fetcher.loader.clock()
        if (seen := self._shared.reader.progress().num_bytes) != self._seen_bytes:
            self._seen_bytes, self._alive_s = seen, now
        if now - self._alive_s > STALLED_S or self._shared.health.is_backing_off:
            return False
        elapsed_s, reached = now - self._started_s, self._reached
        compute_s, won_s = rates.prefill_s(self._without, self._total), rates.prefill_s(self._without, reached)
        left_s = rates.prefill_s(reached, max(reached, self._target))
        if compute_s is None or won_s is None or left_s is None or elapsed_s <= LEAST_WAIT_S:
            return True
        if elapsed_s > WASTE * compute_s + won_s:
            return False
        left_bytes = (self._end - self._next) * self._page_bytes() + self._point_bytes()
        return not self.nbytes or left_bytes * elapsed_s / self.nbytes <= left_s

    @property
    def _reached(self) -> int:
        """How deep a lane could stand with what has come."""
        if self._fetcher.needs_points:
            return self._without
        return max(self._without, min(self._next * self._fetcher.page_tokens, self._total))

    @property
    def _target(self) -> int:
        """How deep a lane could stand with what is wanted."""
        if self._point is not None:
            return self._point.offset
        return min(self._end * self._fetcher.page_tokens, self._total)

    # What has come

    def _take_next(self) -> bool:
        """Take the next object, if it has come; False if it has not."""
        if self._listed is not None:
            return self._take_list(self._listed)
        if self._next < self._end:
            return self._take_rows()
        if self._point is not None:
            return self._take_point(self._point)
        self._finish()
        return False

    def _take_list(self, listed: list[ListedPoint]) -> bool:
        address = self._path.points(self._next_list)
        read = self._reads.find(address)
        if read is None:
            return False
        if read.content is not None:
            self._has_found = True
            listed += read_points(address, read.content)
            self._next_list += 1
        if read.content is None or self._next_list >= self._end:
            self._choose_point(listed)
        return True

    def _take_rows(self) -> bool:
        address = self._path.rows(self._next)
        read = self._reads.find(address)
        if read is None and not self._shared.is_missing(address):
            return False
        if read is None or read.content is None or not self._place_rows(self._next, read.content):
            self._shorten()
            return True
        self._has_found = True
        self._next += 1
        return True

    def _take_point(self, point: ListedPoint) -> bool:
        read = self._reads.find(self._path.point(point.offset))
        if read is None:
            return False
        if read.content is None or not self._place_point(point, read.content):
            self._choose_point(self._rest)
        else:
            self._finish()
        return True

    def _note_arrived(self, found: Object) -> None:
        self._arrived_s = self._fetcher.loader.clock()
        self.nbytes += found.nbytes
        self._shared.note_loaded(found.nbytes)

    def _place_rows(self, page: int, found: Object) -> bool:
        """Put the rows of a page into the tree, where it lacks them; False if that cannot be done."""
        size = self._fetcher.page_tokens
        start, end = page * size, (page + 1) * size
        missing = self._missing(found, start, end)
        if missing is None:
            return False
        nbytes = sum(self._item_bytes(rows.group, rows.start, rows.end) for _, rows in missing)
        if not self._make_room(max(self.reserved_bytes, nbytes)):
            return False
        missing = self._missing(found, start, end) or []  # again: making room may have merged nodes
        self._reserve(max(0, self.reserved_bytes - nbytes))
        if not self._add_rows(missing, end):
            return False
        if missing:
            self._note_arrived(found)
        return True

    def _missing(self, found: Object, start: int, end: int) -> list[tuple[Node | None, _Rows]] | None:
        """The rows [start, end) that the tree lacks, each with its node; None for what is not in the tree yet.

        None altogether if the object does not have them.
        """
        match, missing = self._match(end), list[tuple[Node | None, _Rows]]()
        for group in self._fetcher.full:
            ranges: list[tuple[Node | None, Range]] = [
                (node, held)
                for node in match.path
                if node.end > start
                for held in node.missing_between(group, start, min(end, match.length), self._fetcher.page_tokens)
            ]
            if match.length < end:
                ranges.append((None, (max(start, match.length), end)))
            for node, (low, high) in ranges:
                rows = list(_cover(found.sections, group, low, high))
                if sum(each.end - each.start for each in rows) != high - low:
                    return None
                missing += [(node, each) for each in rows]
        return missing

    def _match(self, end: int) -> Match:
        """What the tree has of the prompt up to an offset."""
        assert self._pin is not None
        return self._trie.match(cut(self._prompt, min(self._pin.offset, end), end), start=self._pin)

    def _add_rows(self, missing: Sequence[tuple[Node | None, _Rows]], end: int) -> bool:
        """Make pages of the rows, and then the edge that they lie on; all of it or nothing."""
        pages, memory = list[tuple[Node | None, Page]](), self._trie.memory
        try:
            for node, rows in missing:
                held, data = (rows.section.start, rows.section.end), rows.section.data
                is_whole = held == (rows.start, rows.end)
                wanted = memory.unpack_rows(rows.group, held, data if is_whole else bytearray(data), (rows.start, rows.end))
                pages.append((node, wanted))
            last = self._reach(end)
        except (EngineError, MemoryError, ValueError) as error:
            log.warning("rows of the store could not be put into the tree: %s", error)
            self._fetcher.loader.counts.failed_loads += 1
            for _, page in pages:
                memory.release(page)
            return False
        for node, page in pages:
            self._trie.add_page(last if node is None else node, page)
        for node in {node for node, _ in pages if node is not None}:
            node.has_holes = any(
                any(node.missing_between(group, node.start, node.end, self._fetcher.page_tokens))
                for group in self._fetcher.full
            )
            self._fetcher.evictor.offer(self._trie, node)
        self._hold(last, end)
        return True

    def _reach(self, end: int) -> Node:
        """The node in which the prompt's first `end` tokens end; made if there is none. May raise EngineError."""
        match, trie, evictor = self._match(end), self._trie, self._fetcher.evictor
        node, tokens = match.node, cut(self._prompt, match.length, end)
        if match.length >= end:
            return next((each for each in match.path if each.start < end <= each.end), node)
        if match.length < node.end:
            tail, node = node, trie.split(node, match.length)
            self._fetcher.saver.note_split(trie, tail)
            evictor.offer(trie, tail)
            evictor.offer(trie, node)
        elif node in self._own and node.is_leaf:
            trie.grow(node, tokens)
            return node
        child = trie.append(node, tokens, self._fetcher.clock.now())
        child.hits = 1
        self._own.add(child)
        return child

    def _hold(self, node: Node, offset: int) -> None:
        """Keep what has come until the request stands on it."""
        assert self._pin is not None
        if offset > self._pin.offset:
            self._fetcher.room.hold(self._trie, self._pin, node, offset)
        self._fetcher.evictor.offer(self._trie, node)

    def _place_point(self, listed: ListedPoint, found: Object) -> bool:
        """Make a restore point with all that it needs; False if that cannot be done."""
        if not self._has_all(listed.offset, found) or not self._make_room(max(self.reserved_bytes, self._point_bytes())):
            return False
        self._reserve(max(0, self.reserved_bytes - self._point_bytes()))
        memory, states = self._trie.memory, dict[Group, State]()
        node = None
        try:
            for group in self._fetcher.memory.groups:
                if group.kind is Kind.RECURRENT:
                    section = next(each for each in found.sections if each.group == group.index)
                    states[group] = memory.unpack_state(group, listed.offset, section.data)
            node = self._reach(listed.offset)
            self._attach(node, listed, states, found)
        except (EngineError, MemoryError, ValueError) as error:
            log.warning("a restore point of the store could not be put into the tree: %s", error)
            self._fetcher.loader.counts.failed_loads += 1
            for state in states.values():
                memory.release(state)
            if node is not None and node in self._own and node.is_leaf and not node.points and not any(node.items()):
                self._fetcher.evictor.remove(self._trie, node)
            return False
        self._hold(node, listed.offset)
        self._note_arrived(found)
        return True

    def _has_all(self, offset: int, found: Object) -> bool:
        """Whether an object has everything that restoring at an offset needs."""
        for group in self._fetcher.memory.groups:
            held = [each for each in found.sections if each.group == group.index]
            if group.kind is Kind.RECURRENT and [(each.start, each.end) for each in held] != [(offset, offset)]:
                return False
            if group.kind is Kind.WINDOW:
                start = group.first_needed(offset)
                if sum(rows.end - rows.start for rows in _cover(held, group, start, offset)) != offset - start:
                    return False
        return True

    def _attach(self, node: Node, listed: ListedPoint, states: dict[Group, State], found: Object) -> None:
        """Add a restore point; if its window rows cannot be made, none. Takes the states, if it succeeds."""
        trie, known = self._trie, node.points.get(listed.offset)

        def publish(group: Group, start: int, end: int) -> Iterator[Page]:
            for rows in _cover(found.sections, group, start, end):
                held, data = (rows.section.start, rows.section.end), bytearray(rows.section.data)
                yield trie.memory.unpack_rows(group, held, data, (rows.start, rows.end))

        point = trie.add_point(node, listed.offset, Reason(listed.reason))
        try:
            for group in self._fetcher.memory.groups:
                if group.kind is Kind.WINDOW:
                    trie.hold_window(node, point, group, publish)
        except BaseException:
            if known is None:
                trie.drop_point(node, point)
            raise
        for group, state in states.items():
            if group in point.states:
                trie.memory.release(state)
            else:
                point.states[group] = state


def _cover(sections: Sequence[Section], group: Group, low: int, high: int) -> Iterator[_Rows]:
    """The parts of rows [low, high) that sections of a group have, in order, each once."""
    held = (each for each in sections if each.group == group.index and each.start < each.end)
    for section in sorted(held, key=lambda each: each.start):
        end = min(high, section.end)
        if section.start <= low < end:
            yield _Rows(group, section, low, end)
            low = end


def _page_ranges(start: int, end: int, page_tokens: int) -> Iterator[Range]:
    """[start, end) cut at page borders."""
    while start < end:
        stop = min(end, (start // page_tokens + 1) * page_tokens)
        yield start, stop
        start = stop
