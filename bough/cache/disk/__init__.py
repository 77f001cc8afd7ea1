"""The disk tier: pages and states in files, an index in SQLite, surviving restart."""

from bough.cache.disk.disk import Disk
from bough.cache.disk.errors import DiskBusy, DiskError, DiskMiss, DiskSlow, DiskUnwritable, NotOwner, ReadOnlyTree

__all__ = ["Disk", "DiskBusy", "DiskError", "DiskMiss", "DiskSlow", "DiskUnwritable", "NotOwner", "ReadOnlyTree"]
