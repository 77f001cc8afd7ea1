"""The tiers below the device, opened for one model: host memory, the tree's folder on disk, and a store that is shared.

A tree that another process uses, or whose folder cannot be written, is only read, until this process ends. If it cannot
even be read, the model runs without a disk. Either is logged once, with the reason, and shown in the statistics. Nothing is
read from the shared store here: a store that does not answer is found later, and not used then.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from functools import partial
from pathlib import Path

from bough.cache.admin.trees import list_trees, make_room
from bough.cache.disk import Disk, DiskError, NotOwner
from bough.cache.residency.memory import Tiers
from bough.cache.store import SharedStore
from bough.cache.store.format import limit_object_bytes
from bough.cache.store.sweeping import clear_model
from bough.cache.tree.state import PAGE_TOKENS
from bough.config import Settings, read_cluster_secret
from bough.engines.contract import Engine, EngineCode
from bough.errors import ModelError
from bough.models.files import ModelFiles
from bough.models.fingerprint import fingerprint, tree_folder
from bough.runtime.object_store import UrlStore
from bough.system.resources import default_disk_bytes, default_host_bytes, free_disk_bytes
from bough.types import Progress

log = logging.getLogger(__name__)


def open_tiers(
    engine: Engine, files: ModelFiles | None, settings: Settings, progress: Progress | None = None
) -> Tiers | None:
    """The tiers below the device for this model; None if there are none."""
    if not settings.cache or not engine.capabilities.can_reuse or not engine.groups:
        return None
    host_bytes = 0
    if engine.has_host:
        host_bytes = default_host_bytes() if settings.host_memory is None else settings.host_memory
        engine.limit_host(host_bytes)
    disk, shared, problems = None, None, {}
    if files is not None:
        try:
            disk = _open_disk(engine, files, settings, progress)
        except (DiskError, ModelError) as error:
            log.warning("running without the disk tier: %s", error)
            problems["problem"] = str(error)
        try:
            shared = open_shared(engine, files, settings, progress)
        except ModelError as error:
            log.warning("running without the shared store: %s", error)
            problems["shared_problem"] = str(error)
    is_needed = bool(host_bytes or problems) or disk is not None or shared is not None
    return Tiers(engine, host_bytes, disk, shared=shared, **problems) if is_needed else None


def open_shared(
    engine: Engine, files: ModelFiles, settings: Settings, progress: Progress | None = None
) -> SharedStore | None:
    """The model's part of the store that machines share; None without one. Raises SettingsError or ModelError."""
    if not settings.store:
        return None
    objects, secret = UrlStore(settings.store), read_cluster_secret(settings)
    log.info("what is in the store is used if it was computed by %s", engine.info.code)
    return SharedStore(
        objects,
        secret=secret,
        fingerprint=_add_code(fingerprint(files, settings, progress, **_facts(engine)), engine.info.code),
        page_tokens=PAGE_TOKENS,
        owner=secrets.token_hex(8),
        budget_bytes=settings.store_budget,
        ttl_s=settings.store_ttl,
        max_object_bytes=limit_object_bytes(engine.groups, PAGE_TOKENS),
    )


def clear_shared(settings: Settings, mark: str) -> None:
    """Delete the objects of the model with this fingerprint from the shared store, if there is one. Raises StoreError."""
    if settings.store:
        clear_model(UrlStore(settings.store), mark, secrets.token_hex(8), time.time)


def _open_disk(engine: Engine, files: ModelFiles, settings: Settings, progress: Progress | None) -> Disk | None:
    """The model's tree on disk; None if the settings turn it off. Raises DiskError or ModelError if it cannot be opened."""
    budget_bytes = disk_budget_bytes(settings)
    if not budget_bytes and settings.disk is None:
        raise DiskError(describe_full(settings))
    if not budget_bytes:
        return None
    inputs = fingerprint(files, settings, progress, **_facts(engine))
    mark = _add_code(inputs, engine.info.code)
    folder = _find_folder(settings, files.name, mark)
    if not folder.exists():
        _note_outdated(settings, files.name, inputs, engine.info.code)
    open_tree = partial(
        Disk,
        folder,
        fingerprint=mark,
        model=files.name,
        page_tokens=PAGE_TOKENS,
        groups=engine.groups,
        inputs=inputs,
        computed_by=str(engine.info.code),
        floor_bytes=settings.disk_free,
        ttl_s=settings.disk_ttl,
    )
    try:
        others_bytes = make_room(settings.trees_folder, folder, budget_bytes)
        return open_tree(budget_bytes=max(0, budget_bytes - others_bytes))
    except NotOwner as reason:
        disk = open_tree(budget_bytes=0, not_owner=reason)
    log.warning("the tree of %s is %s: reading it, writing nothing", files.name, disk.read_only)
    return disk


def _find_folder(settings: Settings, name: str, mark: str) -> Path:
    """The folder of a model's tree; without one of its name, a free one that the model has under another name."""
    own = tree_folder(settings, name, mark)
    if own.exists():
        return own
    others = [tree for tree in list_trees(settings.trees_folder) if tree.fingerprint == mark and not tree.problem]
    free = [tree for tree in others if tree.owner_pid is None]
    return max(free, key=lambda tree: tree.last_used).folder if free else own


def _note_outdated(settings: Settings, name: str, inputs: str, code: EngineCode) -> None:
    """Log the trees of the same model and settings by other code, which stay until their room is needed."""
    held = [tree for tree in list_trees(settings.trees_folder) if tree.nbytes and not tree.problem]
    for tree in held:
        if tree.inputs == inputs or (tree.model == name and not tree.computed_by):
            log.warning(
                "the tree %s of %s bytes is set aside: it was computed by %s, and this is %s; it goes when room is needed",
                tree.name,
                f"{tree.nbytes:,}",
                tree.computed_by or "an earlier version of Bough",
                code,
            )


def describe_full(settings: Settings) -> str:
    """A message that the disk is too full for trees."""
    free_bytes = free_disk_bytes(settings.trees_folder)
    numbers = f"{free_bytes:,} bytes are free, and {settings.disk_free:,} must stay free (disk_free)"
    return f"the disk of {settings.trees_folder} is full: {numbers}"


def disk_budget_bytes(settings: Settings) -> int:
    """The most bytes of all trees on disk together. The default counts the bytes that they already take as free."""
    if settings.disk is not None:
        return settings.disk
    held_bytes = sum(tree.nbytes + tree.index_bytes for tree in list_trees(settings.trees_folder))
    return default_disk_bytes(settings.trees_folder, settings.disk_free, held_bytes)


def _add_code(inputs: str, code: EngineCode) -> str:
    """The fingerprint of state: of its inputs, and of the code that computes it."""
    return hashlib.sha256(f"{inputs} {code.versions} {code.source_hash}".encode()).hexdigest()


def _facts(engine: Engine) -> dict[str, str]:
    """The properties of the engine that the content of pages depends on, except its code."""
    groups = [f"{g.kind.value} {g.bytes_per_token} {g.state_bytes} {g.window}" for g in engine.groups]
    info = engine.info
    facts = {"engine": info.name, "dtype": info.weights, "page_tokens": str(PAGE_TOKENS), "groups": "; ".join(groups)}
    return facts | ({"kv": info.kv} if info.kv else {})
