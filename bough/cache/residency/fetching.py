"""Fetching: the pages of a prompt that the tree does not hold are looked for in the store that machines share.

The store's threads read and check, a few objects ahead; the engine's thread puts what has arrived into the tree between two
steps, page by page from the root on. A model that needs restore points reads the lists of these first, chooses one, and
then reads the rows up to it and what it needs. Then the request is planned as always, with what is in the tree.

An object that is missing, damaged or too slow ends the fetch with what has come so far. It waits no longer than a load from
disk would, except that the store may not have what is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from bough.cache.residency.loading import Loader, TierLoad
from bough.cache.residency.memory import SaltTrie
from bough.cache.residency.placing import Placer
from bough.cache.store import SharedStore, StorePath
from bough.cache.store.format import ListedPoint, Object, read_points
from bough.cache.tree.address import Address
from bough.cache.tree.node import Hold, Reason
from bough.cache.tree.plan import LiveRows, deepest, plan, tree_reach
from bough.cache.tree.state import Tier
from bough.cache.tree.trie import Match
from bough.tokens import cut, num_tokens

AHEAD = 8
"""How many objects are read ahead, once the first has been found."""

TELLING_S = 1.0
"""A store from which nothing came for this time is slow; before, it may just have nothing."""


def open_fetch(
    loader: Loader, shared: SharedStore, trie: SaltTrie, salt: str, prompt: bytes, found: Match, without: int
) -> Fetch | None:
    """A fetch for a prompt of which `found` is in the tree, and which can stand at `without` as it is.

    None if it would be useless: the store does not answer; there is no further whole page, or it was looked for a moment
    ago; or computing is quicker by what was measured.
    """
    size, full = loader.memory.page_tokens, loader.memory.full
    end = num_tokens(prompt) // size * size
    if not shared.is_available or end - without < max(1, size // 2):
        return None
    path = shared.path(salt)
    path.add(cut(prompt, 0, end))
    reaches = [tree_reach(group, found.path, found.length) for group in full]
    first = deepest(reaches, min(end, found.length)) // size if full else path.num_pages
    fetch = Fetch(loader, shared, trie, prompt, path, first, without)
    return None if fetch.is_done or shared.is_missing(fetch.first_address) else fetch


class Fetch(TierLoad[Address, Object]):
    """Brings what the store has of one prompt into the tree. From `start` on it moves a hold along with what has come."""

    def __init__(
        self,
        loader: Loader,
        shared: SharedStore,
        trie: SaltTrie,
        prompt: bytes,
        path: StorePath,
        first: int,
        without: int,
    ) -> None:
        super().__init__(loader, trie, shared.reader, num_tokens(prompt))
        self.is_done = False
        self._page_tokens = loader.memory.page_tokens
        self._shared, self._prompt, self._path, self._without = shared, prompt, path, without
        self._placer: Placer | None = None  # from `start` on
        self._next, self._end = first, path.num_pages  # pages whose rows are wanted
        self._next_list = without // self._page_tokens  # the next page whose list of points is wanted
        self._listed: list[ListedPoint] | None = [] if self._memory.needs_points else None  # None when one was chosen
        self._point: ListedPoint | None = None
        self._rest: list[ListedPoint] = []  # those that are chosen from if that one cannot be had
        self._version = trie.version
        self._has_found = False
        if not self._memory.needs_points:
            self._choose_end()

    @property
    def first_address(self) -> Address:
        """The object that is looked for first: if the store lacks it, it lacks all."""
        return self._path.rows(self._next) if self._listed is None else self._path.points(self._next_list)

    def start(self, hold: Hold) -> None:
        """Begin to look. `hold` protects what the tree has of the prompt."""
        self._placer = Placer(self._loader, self, self._trie, self._prompt, hold)
        self._loader.loads.add(self)

    def advance(self) -> bool:
        """Put what has arrived into the tree, for a limited time; returns whether the fetch has ended. Never waits."""
        until_s = self._take_until()
        if not self.is_done:
            self._skip_held()
        while not self.is_done and self._take_next() and self._loader.clock() <= until_s:
            pass
        if not self.is_done:
            self._want()
        if not self.is_done and not self._should_wait():
            self._give_up()
        return self.is_done

    def close(self) -> None:
        self.is_done = True
        super().close()

    def _finish(self) -> None:
        """All is there that can be had: learn the store's rate."""
        if self.nbytes:
            self._loader.rates.note_load(Tier.STORE, self.nbytes, self.load_s)
        self.close()

    def _give_up(self) -> None:
        """Wait no longer; learn that the store is slow, if this took long enough.

        The very first request to a store may take longer, because it opens the connection: nothing is learned from it.
        """
        loader = self._loader
        loader.counts.slow_loads += 1
        elapsed_s = loader.clock() - self._started_s
        is_first = loader.rates.prefill_s(0, self._total) is None
        if self.nbytes or (elapsed_s >= TELLING_S and not is_first):
            loader.rates.note_load(Tier.STORE, max(1, self.nbytes), elapsed_s)
        if not self._has_found:
            self._shared.note_silence()
        self.close()

    # What is wanted

    def _choose_end(self) -> None:
        """Without restore points: the page up to which fetching is quicker than computing."""
        size, rates = self._page_tokens, self._loader.rates
        if self._next >= self._end:
            self.is_done = True
        elif rates.prefill_s(0, self._total) is not None and rates.byte_s(Tier.STORE):
            best = min(range(self._next, self._end + 1), key=lambda end: (self._seconds(end * size, 0), -end))
            self._end, self.is_done = best, best == self._next

    def _seconds(self, offset: int, point_bytes: int) -> float:
        """Seconds to fetch up to an offset, and to compute the rest."""
        rates, size = self._loader.rates, self._page_tokens
        num_pages = max(0, -(-offset // size) - self._next)
        nbytes = num_pages * size * self._memory.row_bytes + point_bytes
        left_s = rates.prefill_s(max(self._without, min(offset, self._total)), self._total)
        return nbytes * rates.byte_s(Tier.STORE) + (left_s or 0.0)

    def _choose_point(self, listed: Sequence[ListedPoint]) -> None:
        """The restore point from which the prompt's end is reached soonest; the fetch ends if there is none."""
        self._listed = None
        points = [each for each in listed if self._without < each.offset < self._total and each.reason in set(Reason)]
        seconds = {each: self._seconds(each.offset, self._memory.point_bytes(each.offset)) for each in points}
        best = min(points, key=lambda each: (seconds[each], -each.offset), default=None)
        if best is None or seconds[best] > self._seconds(self._without, 0):
            self._finish()
            return
        self._point = best
        self._rest = [each for each in points if each.offset < best.offset]
        self._end = max(self._next, -(-best.offset // self._page_tokens)) if self._memory.full else self._next

    def _shorten(self) -> None:
        """Rows are missing from page `_next` on: end, or choose a restore point before it."""
        self._end = self._next
        if self._point is None:
            self._finish()
        else:
            border = self._next * self._page_tokens
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
        if self._has_found and not self.make_room(self._left_bytes(last)):
            last = min(last, self._next + 1)
            if not self.make_room(self._left_bytes(last)):
                self._finish()
                return
        self._reads.want(wanted + [path.rows(page) for page in range(self._next, last)])

    @property
    def _placing(self) -> Placer:
        assert self._placer is not None
        return self._placer

    def _left_bytes(self, last: int) -> int:
        """The memory that the rows up to a page, and the restore point that was chosen, will take where they go."""
        placer = self._placing
        point_bytes = 0 if self._point is None else placer.point_bytes(self._point.offset)
        return placer.page_bytes() * (last - self._next) + point_bytes

    def _skip_held(self) -> None:
        """Skip what has come into the tree meanwhile, for another request."""
        if self._trie.version == self._version:
            return
        self._version, size = self._trie.version, self._page_tokens
        match, groups = self._placing.match(self._path.num_pages * size), self._memory.groups
        reaches = [tree_reach(group, match.path, match.length) for group in self._memory.full]
        held = min(deepest(reaches, match.length) // size, self._end) if reaches else 0
        if held > self._next:
            self._next = held
            self._placing.hold(match.node.at(held * size), held * size)
        offset = plan(groups, match.path, match.length, LiveRows.nothing(groups), self._total - 1)
        if self._point is not None and offset >= self._point.offset:
            self._finish()

    # Waiting

    def _should_wait(self) -> bool:
        if self._shared.health.is_backing_off:
            return False
        left_bytes = self._left_bytes(self._end)
        return self._is_worth_waiting(self._reached, self._target, left_bytes, self.nbytes, is_sure=self._has_found)

    @property
    def _reached(self) -> int:
        """How deep a lane could stand with what has come."""
        if self._memory.needs_points:
            return self._without
        return max(self._without, min(self._next * self._page_tokens, self._total))

    @property
    def _target(self) -> int:
        """How deep a lane could stand with what is wanted."""
        if self._point is not None:
            return self._point.offset
        return min(self._end * self._page_tokens, self._total)

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
        found = None if read is None else read.content
        is_new = None if found is None else self._placing.place_rows(self._next, found)
        if found is None or is_new is None:
            self._shorten()
            return True
        if is_new:
            self._note_taken(found)
        self._has_found = True
        self._next += 1
        return True

    def _take_point(self, point: ListedPoint) -> bool:
        read = self._reads.find(self._path.point(point.offset))
        if read is None:
            return False
        if read.content is None or not self._placing.place_point(point, read.content):
            self._choose_point(self._rest)
        else:
            self._note_taken(read.content)
            self._finish()
        return True

    def _note_taken(self, found: Object) -> None:
        self._note_arrived(found.nbytes)
        self._shared.note_loaded(found.nbytes)
