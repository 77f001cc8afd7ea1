"""Limits for chat templates: on their time and on the size of their output.

A template is a program that comes with a model's files, and any client may use that model by name. transformers runs it in
jinja2's sandbox, which forbids dangerous calls but does not limit size or time: three nested loops may never end, and `**`
or `*` may take all memory in one step that no other thread can interrupt.

- A rendering that takes longer than `RENDER_S` is interrupted, by an exception that a watching thread raises inside it.
- The environment that templates are compiled in refuses operators, calls and filters whose result would be larger than
  `MAX_CHARS` before it is made, and counts the output while it is made.
"""

from __future__ import annotations

import ctypes
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache, wraps
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment

log = logging.getLogger(__name__)

RENDER_S = 10.0
MAX_CHARS = 2**27
"""Many times the largest default request, since templates add to the messages."""

_MAX_BITS = 256  # of an integer; templates only count messages and seconds
_CHECK_S = 0.25
_IDLE_S = 30.0  # the watching thread ends when nothing was rendered for so long
_SIZED = (str, bytes, list, tuple)
_PADDING = frozenset(
    ("batch", "center", "expandtabs", "generate_lorem_ipsum", "indent", "ljust", "rjust", "wordwrap", "zfill")
)
_WIDE = re.compile(r"\d{8,}")  # a width in a format


class RenderTimeout(Exception):
    """A template took longer than the limit."""


def render_within_limits(render: Callable[[], str], limit_s: float = RENDER_S) -> str:
    """Call `render`, which applies a chat template. Raises RenderTimeout, or the error of the template."""
    _bind_environment()
    return _watchdog().run(render, limit_s)


# Time


class _Overdue(BaseException):
    """Raised inside a rendering that takes too long. It is no Exception, so that no handler on the way catches it."""


class Watchdog:
    """Interrupts work that takes too long, in any number of threads.

    Always true: when `run` has ended, its thread is not interrupted any more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._due_s: dict[int, float] = {}  # by thread
        self._is_needed = threading.Event()
        self._thread: threading.Thread | None = None

    def run(self, work: Callable[[], str], limit_s: float) -> str:
        """Run some work and return its result. Raises RenderTimeout if it takes longer than `limit_s`."""
        thread_id = threading.get_ident()
        try:
            self._begin(thread_id, limit_s)
            try:
                return work()
            finally:
                self._end(thread_id)
        except _Overdue:
            self._end(thread_id)  # it may have been interrupted just before its end
            raise RenderTimeout(f"it takes longer than {limit_s:g} s") from None

    def _begin(self, thread_id: int, limit_s: float) -> None:
        with self._lock:
            self._due_s[thread_id] = time.monotonic() + limit_s
            self._is_needed.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="bough-render-watchdog", daemon=True)
                self._thread.start()

    def _end(self, thread_id: int) -> None:
        with self._lock:
            self._due_s.pop(thread_id, None)
            _interrupt(thread_id, None)  # revoke an interruption that was not raised yet

    def _watch(self) -> None:
        while self._is_needed.wait(_IDLE_S) or not self._ends_if_idle():
            time.sleep(_CHECK_S)
            with self._lock:
                now = time.monotonic()
                for thread_id, due_s in self._due_s.items():
                    if now > due_s:
                        self._due_s[thread_id] = now + 1.0  # raise it again if something caught it
                        _interrupt(thread_id, _Overdue)
                if not self._due_s:
                    self._is_needed.clear()

    def _ends_if_idle(self) -> bool:
        with self._lock:
            if self._is_needed.is_set():
                return False
            self._thread = None
            return True


def _interrupt(thread_id: int, error: type[BaseException] | None) -> None:
    """Raise an error in another thread at its next bytecode; None revokes one that was not raised yet."""
    raised = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), raised)


@cache
def _watchdog() -> Watchdog:
    return Watchdog()  # one per process, because it keys by thread id


# Size


class _BoundedCode(CodeGenerator):
    """Compiles `~` to a call of the environment, which checks the size."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join_texts(context, (")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write("))")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox in which no value grows beyond `MAX_CHARS`."""

    code_generator_class = _BoundedCode
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.filters = _Filters({name: _checked(name, each) for name, each in self.filters.items()})
        self.finalize = _check_output

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """The output of a template or a macro."""
        return "".join(_counted(pieces))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":  # by far the most frequent, and at most doubles a size
            made = left + right
            _require(_size(made))
            return made
        _require(_size_of_result(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps `format`
        owner = getattr(method, "__self__", None)
        _check_arguments(
            getattr(method, "__name__", ""), [*([owner] if isinstance(owner, str) else []), *args, *kwargs.values()]
        )
        return super().call(__context, __obj, *args, **kwargs)

    def join_texts(self, context: Context, texts: tuple[Any, ...]) -> str:
        """The result of `~`."""
        _require(sum(map(_deep_size, texts)))
        return (markup_join if context.eval_ctx.autoescape else str_join)(texts)


class _Filters(dict[str, Any]):
    """Filters by name. Filters that are added later are checked, too."""

    def __setitem__(self, name: str, apply: Callable[..., Any]) -> None:
        super().__setitem__(name, _checked(name, apply))


def _checked(name: str, apply: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(apply)
    def check_and_apply(*args: Any, **kwargs: Any) -> Any:
        _check_arguments(name, [*args, *kwargs.values()])
        return apply(*(_counted(each) if isinstance(each, Iterator) else each for each in args), **kwargs)

    return check_and_apply


def _check_output(value: Any) -> Any:
    """Check a value that a template outputs; a list or an object becomes one text."""
    if not isinstance(value, str):
        _require(_deep_size(value))
    return value


def _check_arguments(name: str, arguments: list[Any]) -> None:
    """Refuse calls with a result far larger than their arguments: padding, formats, and replacing at many places."""
    texts = [each for each in arguments if isinstance(each, str)]
    estimate = _ESTIMATES.get(name)
    if estimate is not None:
        _require(estimate(texts, arguments))


def _estimate_padding(texts: list[str], arguments: list[Any]) -> float:
    """Each line or tab may become as wide as the largest number, and each line break may be a text."""
    widest = max((each for each in arguments if isinstance(each, int)), default=0)
    longest = sorted(map(len, texts))[-2:]
    breaks = 1 + max((text.count("\n") + text.count("\t") for text in texts), default=0)
    wrapped = math.prod(longest) if len(longest) == 2 else 0
    return sum(longest) + widest * breaks + wrapped


def _estimate_format(texts: list[str], arguments: list[Any]) -> float:
    return _size_of_format(texts[0], arguments[1:]) if texts else 0


def _estimate_replace(texts: list[str], arguments: list[Any]) -> float:
    return len(texts[0]) + (texts[0].count(texts[1]) + 1) * len(texts[2]) if len(texts) > 2 else 0


def _estimate_join(texts: list[str], arguments: list[Any]) -> float:
    lists = [each for each in arguments if isinstance(each, str | list | tuple | dict)]
    return max(map(len, texts), default=0) * max(map(len, lists), default=0) + sum(map(_deep_size, lists))


def _estimate_written(texts: list[str], arguments: list[Any]) -> float:
    """One character may become six, and each entry of the value, which comes first, may be indented."""
    plain = [each for each in arguments if isinstance(each, str | int | list | tuple | dict)]
    widest = max((each for each in plain[1:] if isinstance(each, int)), default=0)
    return _deep_size(plain[0]) * (6 + widest) if plain else 0


_ESTIMATES: dict[str, Callable[[list[str], list[Any]], float]] = {
    **dict.fromkeys(_PADDING, _estimate_padding),
    **dict.fromkeys(("format", "format_map"), _estimate_format),
    **dict.fromkeys(("escape", "e", "forceescape", "urlize", "string", "pprint", "tojson"), _estimate_written),
    "replace": _estimate_replace,
    "join": _estimate_join,
    "translate": lambda texts, arguments: math.inf,
}


def _size_of_result(operator: str, left: Any, right: Any) -> float:
    """How large the result of an operator is at most; integers count as 0 unless they are absurd."""
    if operator == "%":
        return _size_of_format(left, [right]) if isinstance(left, str) else 0
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        return math.inf if bits > _MAX_BITS else 0
    count, repeated = (left, right) if isinstance(left, int) else (right, left)
    return _size(repeated) * count if isinstance(count, int) else 0


def _size_of_format(format: str, values: list[Any]) -> float:
    """How large a format with these values may become: each field may hold the largest of them, or be as wide as one."""
    if _WIDE.search(format):
        return math.inf
    num_fields = format.count("{") + format.count("%")
    largest = max(map(_deep_size, values), default=0)
    takes_widths = ":{" in format or "*" in format
    widest = max((abs(each) for each in _numbers(values)), default=0) if takes_widths else 0
    return len(format) + num_fields * (largest + widest)


def _numbers(values: Iterable[Any]) -> Iterator[int]:
    for each in values:
        if isinstance(each, tuple | list):
            yield from _numbers(each)
        elif isinstance(each, int):
            yield each


def _size(value: Any) -> int:
    return len(value) if isinstance(value, _SIZED) else 0


def _deep_size(value: Any) -> int:
    """At least how many characters a value has as text. Stops counting above the limit."""
    size, left = 0, [value]
    while left and size <= MAX_CHARS:
        each = left.pop()
        if isinstance(each, dict):
            left += [*each, *each.values()]
        elif isinstance(each, list | tuple):
            left += each
        size += len(each) if isinstance(each, str | bytes) else 1
    return size


def _counted(pieces: Iterable[Any]) -> Iterator[Any]:
    size = 0
    for piece in pieces:
        size += _size(piece)
        if size > MAX_CHARS:
            _require(size)
        yield piece


def _require(size: float) -> None:
    if size > MAX_CHARS:
        raise SecurityError(f"the template makes more than {MAX_CHARS:,} characters, or numbers as large as that")


@cache
def _bind_environment() -> None:
    """Make transformers compile templates in our environment, by replacing the class that it looks up by this name."""
    from transformers.utils import chat_template_utils

    module: Any = chat_template_utils
    if getattr(module, "ImmutableSandboxedEnvironment", None) is not ImmutableSandboxedEnvironment:
        log.warning("this version of transformers compiles chat templates in another way: only their time is limited")
        return
    module.ImmutableSandboxedEnvironment = BoundedEnvironment
