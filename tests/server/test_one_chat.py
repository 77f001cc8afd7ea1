"""What one streamed chat costs in code: the files that it enters, and how often the request is made anew on its way.

A server of this process answers a chat over HTTP with a real engine and a disk. A profile function sees every call of every
thread while the chat runs. The limits keep the way of a request short: whoever adds a stop on it sees it here, and lowers
the limits after removing one.
"""

from __future__ import annotations

import linecache
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import httpx
import pytest
from anyio.to_thread import run_sync

import bough
from bough.cache.session import Session
from bough.cache.tree.trie import Trie
from bough.generate.generation import Generation
from bough.generate.request import Request
from bough.models import ModelFiles
from bough.models.prompts import EncodedPrompt
from bough.prompting.ask import Ask
from bough.scheduling.job import Job
from bough.scheduling.worker import Worker
from bough.server.serving.loaded import start_model
from bough.tokens import Tokens, pack
from tests.server.in_process import serving
from tests.waiting import BOUND_S

MOST_FILES, MOST_LINES = 84, 16_650  # with what the server does now and then (http/listening.py); the aim is 60 and 11,000
MOST_SHAPES = 4
MOST_PACKINGS = 1
MOST_TRIPS = 1
MOST_MATCHES = 2

SHAPES = (Ask, EncodedPrompt, Request, Generation, Job)
"""The classes that are a request at one of its stages, after the body that FastAPI makes."""

BACKGROUND = "bough disk writer"
"""A thread that works for many requests at once, and whenever it likes."""

PACKAGE = str(Path(bough.__file__).parent) + "/"
MESSAGES = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is the capital of France?"},
]
BODY = {"model": "tiny", "messages": MESSAGES, "stream": True, "max_tokens": 8}
EARLIER = BODY | {"messages": [{"role": "user", "content": "Hello there, how are you?"}]}


class Trace:
    """What happened while it was open. Threads that were started since `watching` began are seen."""

    def __init__(self) -> None:
        self.is_open = False
        self.has_closed = threading.Event()
        self.files: set[str] = set()
        self._made: list[object] = []
        self.shapes: list[str] = []  # up to the first token
        self._packed: list[int] = []  # the lengths of lists that were packed
        self._trips: list[FrameType] = []  # kept: a coroutine's frame is called whenever it goes on
        self._is_submitted = False
        self._has_token = False
        self._num_prompt_tokens = 0
        self._watched: dict[CodeType, Callable[[FrameType], None]] = {
            Worker.submit.__code__: self._note_submit,
            Generation.accept.__code__: self._note_token,
            Session.__init__.__code__: self._note_session,
            Trie.match.__code__: self._note_match,
            pack.__code__: self._note_packing,
            ThreadPoolExecutor.submit.__code__: self._note_trip,
            run_sync.__code__: self._note_trip,
            **{each.__init__.__code__: self._note_shape for each in SHAPES},
        }
        self._matched: list[int] = []  # the lengths that were matched from the root

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "return" and code is Session.close.__code__:
            self.has_closed.set()
        if not self.is_open or event != "call" or threading.current_thread().name == BACKGROUND:
            return
        if code.co_filename.startswith(PACKAGE) and code.co_name != "<module>":
            self.files.add(code.co_filename)
        note = self._watched.get(code)
        if note is not None:
            note(frame)

    def _note_submit(self, frame: FrameType) -> None:
        self._is_submitted = True

    def _note_token(self, frame: FrameType) -> None:
        self._has_token = True

    def _note_session(self, frame: FrameType) -> None:
        self._num_prompt_tokens = len(frame.f_locals["prompt"]) // 4

    def _note_match(self, frame: FrameType) -> None:
        if frame.f_locals["start"] is None:
            self._matched.append(len(pack(frame.f_locals["tokens"])) // 4)

    def _note_packing(self, frame: FrameType) -> None:
        given = frame.f_locals.get("ids", frame.f_locals.get("tokens"))
        self._packed += [] if isinstance(given, bytes | Tokens) else [len(given)]

    def _note_trip(self, frame: FrameType) -> None:
        if not self._is_submitted and frame not in self._trips:
            self._trips.append(frame)

    def _note_shape(self, frame: FrameType) -> None:
        made = frame.f_locals["self"]
        if not self._has_token and not any(made is each for each in self._made):  # a class calls that of its base, too
            self._made.append(made)
            self.shapes.append(type(made).__name__)

    @property
    def num_trips(self) -> int:
        """How often work went to another thread before the request was in the engine's queue."""
        return len(self._trips)

    @property
    def num_packings(self) -> int:
        """How often the prompt, or more, was packed."""
        return sum(length >= self._num_prompt_tokens for length in self._packed)

    @property
    def num_full_matches(self) -> int:
        return sum(length >= self._num_prompt_tokens for length in self._matched)

    @property
    def num_lines(self) -> int:
        return sum(len(linecache.getlines(file)) for file in self.files)

    def describe(self) -> str:
        files = "\n".join(sorted(f"{len(linecache.getlines(file)):6} {file.removeprefix(PACKAGE)}" for file in self.files))
        return (
            f"{len(self.files)} files with {self.num_lines} lines (limits {MOST_FILES}, {MOST_LINES}):\n{files}\n"
            f"shapes: {len(self.shapes)} ({dict(Counter(self.shapes))}), limit {MOST_SHAPES}\n"
            f"packings: {self.num_packings}, limit {MOST_PACKINGS}\n"
            f"thread trips before the engine: {self.num_trips}, limit {MOST_TRIPS}\n"
            f"full matches: {self.num_full_matches}, limit {MOST_MATCHES}"
        )


@contextmanager
def watching(trace: Trace) -> Iterator[None]:
    """Let the trace see the calls of this thread and of all threads that start from now on."""
    before = sys.getprofile()
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        yield
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


def ask(client: httpx.Client, body: dict[str, Any]) -> str:
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        return "".join(response.iter_text())


@pytest.fixture(scope="module")
def trace(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """The trace of one chat on a server that has answered another one before. It is over when its lane is idle."""
    trace, folder = Trace(), tmp_path_factory.mktemp("one_chat")
    with (
        watching(trace),
        serving(ModelFiles("tiny", tiny_model), folder, start_model, lanes=2, threads=1) as address,
        httpx.Client(base_url=address.url, timeout=60) as client,
    ):
        ask(client, EARLIER)
        assert trace.has_closed.wait(BOUND_S)
        trace.has_closed.clear()
        trace.is_open = True
        answer = ask(client, BODY)
        assert trace.has_closed.wait(BOUND_S)
        trace.is_open = False
    assert '"finish_reason":"length"' in answer and answer.endswith("data: [DONE]\n\n")
    print(trace.describe())
    return trace


def test_one_chat_enters_few_files(trace: Trace) -> None:
    assert len(trace.files) <= MOST_FILES and trace.num_lines <= MOST_LINES, trace.describe()


def test_a_request_takes_few_shapes_before_its_first_token(trace: Trace) -> None:
    assert len(trace.shapes) <= MOST_SHAPES, trace.describe()


def test_ids_are_packed_once(trace: Trace) -> None:
    assert trace.num_packings <= MOST_PACKINGS, trace.describe()


def test_one_thread_prepares_a_chat(trace: Trace) -> None:
    assert trace.num_trips <= MOST_TRIPS, trace.describe()


def test_a_prompt_is_matched_from_the_root_twice_at_most(trace: Trace) -> None:
    assert trace.num_full_matches <= MOST_MATCHES, trace.describe()
