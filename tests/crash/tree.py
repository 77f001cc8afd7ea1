"""The tree that is crashed: what a seed stands for, its requests, and what its disk has promised to keep."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bough.cache.disk import Disk, NotOwner
from bough.cache.tree.plan import LiveRows, plan
from bough.cache.tree.state import Group
from bough.types import Boundary, Mark
from tests.fakes import MODELS, FakeEngine
from tests.scenarios.world import World

SALTS = ("", "", "other")
SYSTEM_TOKENS, CHAT_TOKENS = 9, 40
LONGEST = SYSTEM_TOKENS + CHAT_TOKENS + 8  # of all requests, with their answers


@dataclass(frozen=True)
class Request:
    """A prompt and its answer; `num_chunks` of its prompt are computed before it is cancelled, None: it is not."""

    salt: str
    prompt: list[int]
    reply: list[int]
    num_chunks: int | None = None

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.reply


@dataclass(frozen=True)
class Setup:
    """A model and its budgets, chosen by a seed. Where disk is ample, nothing that was flushed is ever dropped: there each
    request begins when all before it is written.
    """

    seed: int

    @property
    def model(self) -> str:
        return list(MODELS)[self.seed % len(MODELS)]

    @property
    def groups(self) -> tuple[Group, ...]:
        return MODELS[self.model]

    @property
    def is_ample(self) -> bool:
        return self.seed % 4 != 3

    @property
    def disk_bytes(self) -> int:
        return 2**30 if self.is_ample else 10_000

    def device_bytes(self, spare_tokens: int) -> int:
        """What two lanes take, and so many tokens of the tree."""
        rows = sum(group.bytes_per_token for group in self.groups)
        states = sum(group.state_bytes for group in self.groups)
        return (2 * LONGEST + spare_tokens) * rows + (2 + spare_tokens // 10) * states

    def open_disk(self, folder: Path, not_owner: NotOwner | None = None) -> Disk:
        options: dict[str, Any] = {"budget_bytes": self.disk_bytes, "floor_bytes": 0, "not_owner": not_owner}
        return Disk(folder, fingerprint="crash", page_tokens=4, groups=self.groups, **options)

    def open(
        self, folder: Path, kind: type[World] = World, *, is_roomy: bool = False, not_owner: NotOwner | None = None
    ) -> World:
        """The cache over this folder, restored; its device holds little more than its lanes, unless it is to be roomy.

        With `not_owner` the folder is only read.
        """
        disk = self.open_disk(folder, not_owner)
        host_bytes = (2**20 if is_roomy else 600) if self.seed % 3 == 1 else 0
        engine = FakeEngine(self.groups, has_host=host_bytes > 0)
        budgets: dict[str, Any] = {"budget_bytes": self.device_bytes(4000 if is_roomy else 60), "host_bytes": host_bytes}
        return kind(page_tokens=4, num_lanes=2, chunk=7, engine=engine, disk=disk, **budgets)

    def make_request(self, chance: random.Random) -> Request:
        """One turn of one of a few chats: they share system prompts, grow, branch at a few places, and are retried."""
        chat, branch = chance.randrange(5), chance.randrange(4)
        tokens = _tokens(self.seed, "system", chat % 2, num=SYSTEM_TOKENS)
        tokens += _tokens(self.seed, "chat", chat, num=CHAT_TOKENS)
        if branch:
            at = SYSTEM_TOKENS + 8 * branch + chat
            tokens[at:] = _tokens(self.seed, "branch", chat, branch, num=len(tokens) - at)
        num_reply = chance.randrange(6)
        end = chance.randrange(SYSTEM_TOKENS + 1, len(tokens) - num_reply)
        num_chunks = chance.randrange(4) if chance.random() < 0.1 else None
        return Request(chance.choice(SALTS), tokens[:end], tokens[end : end + num_reply], num_chunks)


def _tokens(*key: object, num: int) -> list[int]:
    chance = random.Random(repr(key))
    return [chance.randrange(60) for _ in range(num)]


def serve(world: World, request: Request) -> None:
    """Serve a request as far as it goes."""
    boundaries = [Boundary(SYSTEM_TOKENS, Mark.SYSTEM_END)]
    session = world.begin(request.prompt, boundaries, request.salt, max_new=len(request.reply))
    num_done = 0
    while num_done != request.num_chunks and world.prefill_chunk(session):
        num_done += 1
    if request.num_chunks is None:
        world.decode(session, request.reply[:-1])
    world.close(session)


def depth_in_tree(world: World, salt: str, tokens: list[int]) -> int:
    """How deep the tree alone, without any lane, can restore these tokens."""
    cache = world.cache
    found = cache.forest.find(salt).match(tokens)
    nothing = LiveRows(0, -1, dict.fromkeys(cache.memory.groups, 0))
    return plan(cache.memory.groups, found.path, found.length, nothing, found.length)


def _promised_depth(world: World, salt: str, tokens: list[int]) -> int:
    """The deepest restore point, where the model needs one: window rows of others may let it stand deeper today."""
    depth = depth_in_tree(world, salt, tokens)
    if not world.cache.memory.needs_points:
        return depth
    path = world.cache.forest.find(salt).match(tokens).path
    return max((at for node in path for at in node.points if at <= depth), default=0)


@dataclass(frozen=True)
class Promise:
    """Tokens that were flushed, and how deep the tree can restore them."""

    salt: str
    tokens: list[int]
    depth: int


@dataclass
class Promises:
    """What must still be there, told line by line by whoever serves requests.

    A request may make restore points on its own path redundant, which may then go. So what lies on the path of a request is
    no longer promised from its beginning on, until it is flushed again.
    """

    promised: list[Promise] = field(default_factory=list)
    num_flushes: int = 0

    def hear(self, line: bytes) -> None:
        told = json.loads(line)
        if "begins" in told:
            salt, tokens = told["begins"]
            self.promised = [each for each in self.promised if not _lies_on(each, salt, tokens)]
        else:
            self.promised += [Promise(*each) for each in told["flushed"]]
            self.num_flushes += 1


def _lies_on(promise: Promise, salt: str, tokens: list[int]) -> bool:
    return promise.salt == salt and tokens[: promise.depth] == promise.tokens[: promise.depth]


def tell_begin(request: Request) -> bytes:
    return _line(begins=[request.salt, request.tokens])


def tell_flushed(world: World, requests: Iterable[Request]) -> bytes:
    kept = [(each.salt, each.tokens, _promised_depth(world, each.salt, each.tokens)) for each in requests]
    return _line(flushed=kept)


def _line(**told: Any) -> bytes:
    return json.dumps(told, separators=(",", ":")).encode() + b"\n"
