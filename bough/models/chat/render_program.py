"""The program that renders chat templates, with a limit on its memory and on the time of each rendering.

`renderer` starts it, with the limits as arguments. It imports only Jinja and the standard library, nothing else of Bough.
It reads requests from its input until that ends, and writes one answer to each; both are a header and a body.

The limits hold whatever a template does, also inside one long call in C, because the system ends the process:
- by a signal after `limit_s` of computing, or after `_WAIT_FACTOR` times as long if other programs keep the machine busy;
- when it allocates memory beyond the limit, except on macOS, which has none.

A template is rendered as by transformers' `apply_chat_template`: the same sandbox, extensions, filters and names.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, BinaryIO, NamedTuple, NoReturn

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

REQUEST = struct.Struct(">Q")  # the bytes of the JSON that follows
ANSWER = struct.Struct(">cQ")  # one of the three below, and the bytes of the text that follows
READY, TEXT, REFUSAL = b"r", b"t", b"e"
OUT_OF_MEMORY = 77
TOOK_TOO_LONG = (-signal.SIGPROF, -signal.SIGALRM)

MAX_CHARS = 2**25
"""The most characters of a rendering: four times the largest default body."""

_WAIT_FACTOR = 5
_MAX_REASON_CHARS = 2000
_KEPT_TEMPLATES = 8
_THINKING = ("reasoning_content", "thinking", "reasoning")  # names of the same, the usual one first


class RenderRequest(NamedTuple):
    """A template and its values. `values` are special tokens and options, by name."""

    source: str
    messages: list[dict[str, Any]]
    tools: list[Any] | None
    add_generation_prompt: bool
    values: dict[str, Any]


def render(request: RenderRequest) -> str:
    """Render the template. Raises any error of its own."""
    text = _compile(request.source).render(
        {
            "documents": None,
            **request.values,
            "messages": [_complete(message) for message in request.messages],
            "tools": request.tools,
            "add_generation_prompt": request.add_generation_prompt,
        }
    )
    if len(text) > MAX_CHARS:
        raise SecurityError(f"it makes {len(text):,} characters, and {MAX_CHARS:,} are allowed")
    return text


def _complete(message: Mapping[str, Any]) -> dict[str, Any]:
    """Drop a message's empty fields, which templates would print, and put its thinking under both usual names."""
    given = {name: value for name, value in message.items() if value is not None}
    thinking = next((given[name] for name in _THINKING if name in given), None)
    return given if thinking is None else {"thinking": thinking, **given, "reasoning_content": thinking}


# The environment


@lru_cache(_KEPT_TEMPLATES)
def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _format_now,
        "dict": _MakeDict(),
        "namespace": _OpenNamespace,
    }
    return environment.from_string(source)


class _GenerationTag(Extension):
    """`{% generation %}`, with which some templates mark the model's text. The text is unchanged."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_call"), [], [], body).set_lineno(line)

    def _call(self, caller: Macro) -> str:
        return caller()


class _MakeDict:
    """`dict`, as templates may use it, without the type itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _OpenNamespace(Namespace):
    """A namespace without private names, so that no template replaces an attribute that Python itself uses."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        given = dict(*args[1:], **kwargs)
        for name in given:
            _require_open(name)
        Namespace.__init__(args[0], given)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_open(name)
        super().__setitem__(name, value)


def _require_open(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template cannot set {name!r:.80} in a namespace: the name begins with an underscore")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _format_now(format: str) -> str:
    return datetime.now().strftime(format)


# The process


def main(limit_s: float, memory_bytes: int) -> None:
    _limit_memory(memory_bytes)
    for number in (signal.SIGPROF, signal.SIGALRM):  # which the parent may ignore or block
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGPROF, signal.SIGALRM))
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    _send(answers, READY, b"")
    while header := requests.read(REQUEST.size):
        body = requests.read(*REQUEST.unpack(header))
        _set_timer(limit_s)
        kind, text = _answer(body)
        _set_timer(0)
        _send(answers, kind, text)


def _set_timer(limit_s: float) -> None:
    """Let a signal end this process after some time, counted from this call; 0 stops the timer."""
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    signal.setitimer(signal.ITIMER_REAL, _WAIT_FACTOR * limit_s)


def _limit_memory(num_bytes: int) -> None:
    """Limit the memory of this process, and write no core file when it crashes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    with contextlib.suppress(OSError, ValueError) if sys.platform == "darwin" else contextlib.nullcontext():
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _answer(body: bytes) -> tuple[bytes, bytes]:
    try:
        return TEXT, _to_bytes(render(RenderRequest(*json.loads(body.decode("utf-8", "surrogatepass")))))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except Exception as error:  # templates are programs and may raise anything
        return REFUSAL, _to_bytes(str(error)[:_MAX_REASON_CHARS])


def _to_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _send(answers: BinaryIO, kind: bytes, text: bytes) -> None:
    answers.write(ANSWER.pack(kind, len(text)) + text)
    answers.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
