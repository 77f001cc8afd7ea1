"""Several archives of one model as one: what any of them holds, each item once.

Items are known by their tokens, so archives of different disks fit together. Where several have an item, that of the first
that has its content is taken. Only manifests are in memory, and one item at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from bough.cache.admin.archive import CRC_BYTES, MANIFEST, read_first, read_manifest
from bough.cache.admin.manifest import NO_STEP, Item, Manifest, PointItem, Step, encode_manifest
from bough.cache.admin.members import ArchiveWriter, open_archive, write_archive
from bough.cache.disk.errors import DiskError


def merge_archives(sources: Sequence[Path], file: Path, *, is_wanted: Callable[[], bool] = lambda: True) -> None:
    """Write what these archives hold into one file, which is whole or not there.

    Raises DiskError if they are not of the same model, cannot be read or written, or the file is no longer wanted.
    """
    merging = _Merging([read_manifest(source) for source in sources])
    with write_archive(file) as archive:
        manifest = merging.encode()
        archive.add(MANIFEST, len(manifest), [memoryview(manifest)])
        for source, numbers in zip(sources, merging.numbers, strict=True):
            if not is_wanted():
                raise DiskError(f"the export to {file} was given up")
            merging.copy(source, numbers, archive)


class _Merging:
    """The manifests as one. `numbers` are those that the items of each archive have in the new one."""

    def __init__(self, manifests: Sequence[Manifest]) -> None:
        self._identity = manifests[0]
        self._steps: dict[tuple[int, bytes], int] = {}  # by the parent and the tokens
        self._items: list[Item] = []
        self._known: dict[tuple[int, int, int], int] = {}  # the numbers of items by step, group and start
        self._points: dict[int, PointItem] = {}  # by step
        self._written: set[int] = set()
        self.numbers = [self._add(manifest) for manifest in manifests]

    def _add(self, manifest: Manifest) -> list[int]:
        for name in ("fingerprint", "page_tokens"):
            found, wanted = getattr(manifest, name), getattr(self._identity, name)
            if found != wanted:
                raise DiskError(f"these are archives of different models: {name} is {wanted!r} and {found!r}")
        steps = list[int]()
        for step in manifest.steps:
            parent = steps[step.parent] if step.parent != NO_STEP else NO_STEP
            steps.append(self._steps.setdefault((parent, step.tokens), len(self._steps)))
        for point in manifest.points:
            self._add_point(replace(point, step=steps[point.step]))
        return [self._add_item(replace(item, step=steps[item.step])) for item in manifest.items]

    def _add_item(self, item: Item) -> int:
        """The number of an item, which is new or known. It was last used when any of them was."""
        number = self._known.setdefault((item.step, item.group, item.start), len(self._items))
        if number == len(self._items):
            self._items.append(item)
        elif item.last_used > self._items[number].last_used:
            self._items[number] = replace(self._items[number], last_used=item.last_used)
        return number

    def _add_point(self, point: PointItem) -> None:
        """A restore point that is kept in one archive is kept."""
        known = self._points.get(point.step, point)
        self._points[point.step] = replace(
            known,
            is_kept=known.is_kept or point.is_kept,
            is_superseded=known.is_superseded and point.is_superseded,
            last_used=max(known.last_used, point.last_used),
        )

    def encode(self) -> bytes:
        steps = [Step(parent, tokens) for parent, tokens in self._steps]
        return encode_manifest(self._identity, steps, self._items, list(self._points.values()))

    def copy(self, source: Path, numbers: Sequence[int], archive: ArchiveWriter) -> None:
        """Write the items of one archive that are not there yet."""
        with open_archive(source) as reader:
            read_first(source, reader)
            while (member := reader.next()) is not None:
                number = numbers[int(member.name)]
                num_bytes = self._items[number].nbytes + CRC_BYTES
                if number not in self._written and (content := reader.read(member, num_bytes)):
                    archive.add(str(number), num_bytes, [memoryview(content)])
                    self._written.add(number)
