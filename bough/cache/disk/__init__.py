"""The disk place: pages and states in files, an index in SQLite, surviving restart."""

from bough.cache.disk.address import POINT, Address, Copy
from bough.cache.disk.faults import DiskBusy, DiskError, DiskMiss
from bough.cache.disk.ledger import Counts
from bough.cache.disk.manifest import Manifest
from bough.cache.disk.rows import PointRecord
from bough.cache.disk.store import Disk
from bough.cache.disk.trees import (
    Exported,
    Imported,
    TreeInfo,
    Verified,
    export_tree,
    import_tree,
    list_trees,
    make_room,
    open_tree,
    read_manifest,
    remove_tree,
    verify_tree,
)

__all__ = [
    "POINT",
    "Address",
    "Copy",
    "Counts",
    "Disk",
    "DiskBusy",
    "DiskError",
    "DiskMiss",
    "Exported",
    "Imported",
    "Manifest",
    "PointRecord",
    "TreeInfo",
    "Verified",
    "export_tree",
    "import_tree",
    "list_trees",
    "make_room",
    "open_tree",
    "read_manifest",
    "remove_tree",
    "verify_tree",
]
