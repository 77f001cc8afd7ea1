"""Templates in processes of their own: they say what transformers says, and none takes this process with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.streams.model import _TEMPLATE as STREAMS
from bough.errors import RequestError, TemplateLimit, Unavailable
from bough.models.chat import render_program
from bough.models.chat.go_template import to_jinja
from bough.models.chat.render_program import ANSWER, MAX_CHARS, READY, RenderRequest
from bough.models.chat.renderer import Renderer, shared_renderer
from tests.models import tiny_tokenizer
from tests.models.tiny_tokenizer import CHATML, byte_level

USER = {"role": "user", "content": "Hello"}
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": 'Sees "<é>".', "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"place": "Köln", "n": 1.5}}}
# All that transformers' environment has of its own, and the constructs that the templates of models use.
EVERYTHING = """{{- bos_token }}{{ eos_token }}{{ documents }}{{ additional_special_tokens }}
{%- set ns = namespace(n=0, seen=[]) %}{% set d = dict(a=1) %}{{ d }}{{ dict.fromkeys(['k'], 2) }}
{%- macro say(text) %}<{{ text | trim }}>{% endmacro %}
{%- if tools is defined and tools %}{{ tools | tojson }}{{ tools | tojson(indent=2) }}{% endif %}
    {%- for message in messages %}
    {% if message.role == 'tool' %}{% continue %}{% endif %}
    {% set ns.n = ns.n + 1 %}
    {{ say(message.content) }} {{ message.keys() | sort }} {{ message.name }}
    {% generation %}{{ message.thinking }}|{{ message.reasoning_content }}{% set ns.n = ns.n + 1 %}{% endgeneration %}
    {% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson(sort_keys=true) }}{% endfor %}
    {% if ns.n > 99 %}{% break %}{% endif %}
    {%- endfor %}
{{ ns.n }} {{ strftime_now('%Y') }} {{ '<&>' }} {{ ['é', '"'] | tojson(ensure_ascii=true, separators=(',', ':')) }}
{{ enable_thinking | default('unset') }} {{ undefined_name }} {{ messages[::-1] | map(attribute='role') | join(',') }}
{%- if add_generation_prompt %}assistant{% endif %}
"""
TEMPLATES = {name: text for name, text in vars(tiny_tokenizer).items() if isinstance(text, str) and "messages" in text} | {
    "streams": STREAMS,
    "go": to_jinja("{{ if .System }}[{{ .System }}]{{ end }}{{ .Prompt }}: {{ .Response }}\n"),
    "everything": EVERYTHING,
    "refusing": "{{ raise_exception('no: ' + messages[0].content) }}",
    "wrong": "{{ messages[0].content.nothing.more }}",
    "malformed": "{% for %}",
}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one message": [USER],
    "system": [{"role": "system", "content": " Be brief.\n"}, USER, {"role": "assistant", "content": "Hi."}, USER],
    "text of all kinds": [{"role": "user", "content": "Grüße 你好 🙂 \x00\x1b\r\n\u2028 \ud800 <|im_end|> {{ 1 }} \\"}],
    "calls": [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"seen": true}', "tool_call_id": "1", "name": "look"},
        USER,
    ],
    "thinking": [
        USER,
        {"role": "assistant", "content": "<think>\nso\n</think>\n\nYes.", "reasoning_content": "so", "thinking": "so"},
        USER,
    ],
}
OPTIONS: list[dict[str, Any]] = [
    {"add_generation_prompt": True},
    {"add_generation_prompt": False, "tools": [TOOL]},
    {"add_generation_prompt": True, "tools": [TOOL], "enable_thinking": True, "documents": [{"title": "t", "text": "x"}]},
]
ENDLESS = {
    "a comparison of nested lists": "{% set n = namespace(a=[], b=[]) %}{% for i in range(60) %}"
    "{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}{% endfor %}{{ n.a == n.b }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "its error's text": "{% set n = namespace(a=[]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}{% endfor %}"
    "{{ raise_exception(n.a) }}",
}
HUGE = {
    "one text": "{{ ('x' * 10 ** 9) | length }}",
    "many texts": "{% set n = namespace(x=[]) %}{% for i in range(60) %}{% set n.x = n.x + ['x' * (10 ** 7 + i)] %}"
    "{% endfor %}{{ n.x | length }}",
    "output": "{% set x = 'x' * 10 ** 6 %}{% for i in range(9999) %}{{ x }}{{ i }}{% endfor %}",
}
_SAY_READY = f"import os; os.write(1, {ANSWER.pack(READY, 0)!r})"


@pytest.fixture
def renderer() -> Iterator[Renderer]:
    made = Renderer(limit_s=0.2, memory_bytes=200 * 10**6)
    yield made
    made.close()


def ask(source: str, *messages: dict[str, Any], **values: Any) -> RenderRequest:
    return RenderRequest(source, list(messages) or [USER], None, True, values)


def run_script(script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_templates_say_what_they_say_in_transformers(template: str, chat: list[dict[str, Any]]) -> None:
    hf = byte_level(template, bos_token="<|endoftext|>")

    for options in OPTIONS:
        values = {key: value for key, value in options.items() if key not in ("tools", "add_generation_prompt")}
        request = RenderRequest(
            template, chat, options.get("tools"), options["add_generation_prompt"], {**hf.special_tokens_map, **values}
        )
        try:
            expected = hf.apply_chat_template(chat, tokenize=False, **options)
        except Exception as error:
            with pytest.raises(RequestError) as refused:
                shared_renderer().render(request)
            assert type(refused.value) is RequestError
            assert str(error) in str(refused.value)
        else:
            assert shared_renderer().render(request) == expected


def test_fields_are_what_newer_versions_of_transformers_make_of_them() -> None:
    shows = "{{ messages[0].keys() | sort }} {{ messages[0].thinking }} {{ messages[0].reasoning_content }}"

    said = shared_renderer().render(ask(shows, {**USER, "name": None, "reasoning": "so"}))

    assert said == "['content', 'reasoning', 'reasoning_content', 'role', 'thinking'] so so"


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_does_not_end_is_ended(renderer: Renderer, template: str) -> None:
    with pytest.raises(TemplateLimit, match=r"the chat template takes longer than 0\.2 s"):
        renderer.render(ask(template))

    assert renderer.render(ask("{{ messages[0].content }}")) == "Hello"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory of a process")
@pytest.mark.parametrize("template", HUGE.values(), ids=HUGE)
def test_a_template_that_needs_too_much_memory_is_ended(template: str) -> None:
    renderer = Renderer(limit_s=20, memory_bytes=200 * 10**6)
    try:
        with pytest.raises(TemplateLimit, match="the chat template needs more than 200 MB"):
            renderer.render(ask(template))

        assert renderer.render(ask("{{ messages[0].content }}")) == "Hello"
    finally:
        renderer.close()


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (f"{{{{ 'x' * {MAX_CHARS + 1} }}}}", f"it makes {MAX_CHARS + 1:,} characters"),
        ("{% if 1 %}" * 2000 + "{% endif %}" * 2000, "recursion"),
        ("{{ " + "(" * 3000 + ")" * 3000 + " }}", "recursion"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("\x00\ud800{{", "unexpected"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ namespace(_x=1) }}", "underscore"),
        ("{% set n = namespace() %}{% set n.__class__ = 1 %}", "underscore"),
        ("{{ raise_exception('x' * 100000) }}", "x" * 2000 + "$"),
    ],
)
def test_hostile_templates_are_refused_with_a_reason(template: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        shared_renderer().render(ask(template))


def test_messages_that_are_no_json_are_refused() -> None:
    nested: list[Any] = []
    for _ in range(10_000):
        nested = [nested]

    for value in (nested, object(), b"bytes"):
        with pytest.raises(RequestError, match="cannot be given these messages"):
            shared_renderer().render(ask(CHATML, {**USER, "extra": value}))


def test_a_template_that_does_not_end_keeps_no_other_waiting() -> None:
    renderer = Renderer(limit_s=1000, max_processes=2)
    with ThreadPoolExecutor(1) as pool:
        endless = pool.submit(renderer.render, ask(ENDLESS["loops"]))

        texts = [renderer.render(ask("{{ messages[0].content }}")) for _ in range(3)]

        assert texts == ["Hello"] * 3 and not endless.done()
        while not endless.done():  # it may not have started yet
            renderer.close()
        assert isinstance(endless.exception(), TemplateLimit | Unavailable)  # killed while it rendered, or before


def test_many_threads_get_each_its_own_text() -> None:
    with ThreadPoolExecutor(8) as pool:
        requests = [ask(CHATML, {"role": "user", "content": f"number {number}"}) for number in range(64)]
        texts = list(pool.map(shared_renderer().render, requests))

    assert all(f"number {number}<" in text for number, text in enumerate(texts))


def test_a_process_that_was_killed_is_replaced(renderer: Renderer) -> None:
    renderer.start()
    first = renderer.render(ask("{{ messages[0].content }}"))
    [process] = renderer._all
    os.kill(process._process.pid, signal.SIGTERM)
    process._process.wait()

    assert renderer.render(ask("{{ messages[0].content }}")) == first


def test_the_processes_end_with_the_one_that_started_them() -> None:
    script = (
        "import sys\nfrom bough.models.chat.renderer import *\n"
        "text = shared_renderer().render(RenderRequest('hi', [], None, True, {}))\n"
        "print(text, flush=True)\nsys.stdin.read()"
    )
    with run_script(script) as parent:
        assert parent.stdout is not None and parent.stderr is not None
        assert parent.stdout.readline() == "hi\n"
        parent.kill()

        assert parent.stderr.read() == ""  # it ends when the last process that has it does


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_a_fork_has_processes_of_its_own() -> None:
    script = (
        "import os\nfrom bough.models.chat.renderer import *\n"
        "def say(text): return shared_renderer().render(RenderRequest(text, [], None, True, {}))\n"
        "said = say('before')\npid = os.fork()\n"
        "said += say(' fork' if pid == 0 else ' parent')\n"
        "if pid: os.waitpid(pid, 0); said += say(' after')\n"
        "print(said, flush=True)"
    )
    with run_script(script) as parent:
        said, errors = parent.communicate()

    assert (said, errors) == ("before fork\nbefore parent after\n", "")


def test_the_program_imports_jinja_alone() -> None:
    script = "import runpy, sys; runpy.run_path(sys.argv[1]); print(sorted({name.split('.')[0] for name in sys.modules}))"
    with run_script(script, render_program.__file__) as process:
        names = json.loads(process.communicate()[0].replace("'", '"'))

    outside = {"jinja2", "markupsafe"}
    assert outside <= set(names)
    assert not {"bough", "torch", "transformers", "numpy", "tokenizers"} & set(names)


@pytest.mark.parametrize(
    ("program", "error", "reason"),
    [
        ("raise SystemExit(3)", Unavailable, "did not start, and ended with 3"),
        ("print('what I say at my start'); input()", Unavailable, "did not start"),
        (f"{_SAY_READY}; raise SystemExit(4)", TemplateLimit, "ended the process that rendered it, with 4"),
        (f"{_SAY_READY}; os.write(1, b't' + bytes([255] * 8)); input()", TemplateLimit, "18,446,744,073,709,551,615 bytes"),
    ],
)
def test_a_program_that_does_not_answer_as_it_should_is_ended(
    program: str, error: type[Exception], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renderer: Renderer
) -> None:
    file = tmp_path / "program.py"
    file.write_text(program)
    monkeypatch.setattr(render_program, "__file__", str(file))

    with pytest.raises(error, match=reason):
        renderer.render(ask(CHATML))

    assert not renderer._all
