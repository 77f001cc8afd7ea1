"""Chat templates as Modelfiles write them: Jinja as it is, and Go templates of the simple kind translated to Jinja.

The simple kind writes one turn: `.System`, `.Prompt` and `.Response`, with `if`, `else` and `end`, and markers that trim
spaces. The template is rendered for each turn, and for the last up to `.Response`, where the answer begins. A turn begins
with a system message, or with a user's message after an answer. Messages of other roles are left out, as in Ollama.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from bough.errors import RequestError

_FIELDS = {".System": "system", ".Prompt": "prompt", ".Response": "response"}
_ACTION = re.compile(r"(-(?=\s))?(.*?)((?<=\s)-)?", re.DOTALL)  # the text between braces, with its trim markers
_MAX_DEPTH = 20
_JINJA = re.compile(r"\{%|\{\{-?\s*(messages|bos_token|eos_token|raise_exception)\b")
_TURN = "{%- macro turn(system, prompt, response) -%}"
_LAST_TURN = "{%- endmacro -%}{%- macro open(system, prompt) -%}"
_ALL_TURNS = (
    "{%- endmacro -%}"
    "{%- set now = namespace(system='', prompt='', response='') -%}"
    "{%- for message in messages -%}"
    "{%- set ends = now.response if message.role == 'user' else message.role == 'system' and (now.prompt or now.response)"
    " -%}"
    "{%- if ends -%}{{- turn(now.system, now.prompt, now.response) -}}"
    "{%- set now.system = '' -%}{%- set now.prompt = '' -%}{%- set now.response = '' -%}{%- endif -%}"
    "{%- if message.role == 'system' -%}"
    "{%- set now.system = (now.system + '\\n\\n' if now.system else '') + message.content -%}"
    "{%- elif message.role == 'user' -%}"
    "{%- set now.prompt = (now.prompt + '\\n\\n' if now.prompt else '') + message.content -%}"
    "{%- elif message.role == 'assistant' -%}"
    "{%- set now.response = (now.response + '\\n\\n' if now.response else '') + message.content -%}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if now.response -%}{{- turn(now.system, now.prompt, now.response) -}}{%- set now.system = '' -%}"
    "{%- set now.prompt = '' -%}{%- endif -%}"
    "{%- if now.system or now.prompt or (now.response and add_generation_prompt) -%}"
    "{{- open(now.system, now.prompt) -}}{%- endif -%}"
)


@dataclass(frozen=True)
class _Action:
    """The text between two braces."""

    text: str


@dataclass(frozen=True)
class _Field:
    name: str


@dataclass(frozen=True)
class _If:
    field: str
    then: Sequence[_Node]
    otherwise: Sequence[_Node]


_Node = str | _Field | _If
_Token = str | _Action


@lru_cache(maxsize=64)
def to_jinja(text: str) -> str:
    """The template in Jinja. Raises RequestError, which names it, for a construct of Go that is not supported."""
    if _JINJA.search(text):
        return text
    nodes, ender = _parse_block(_tokenize(text))
    if ender:
        raise RequestError(f"TEMPLATE has `{ender}` without `if`")
    if _Field("prompt") not in _walk(nodes):
        raise RequestError("TEMPLATE has neither `.Prompt` nor Jinja's `messages`: it would leave out the conversation")
    if _Field("response") not in _walk(nodes):
        nodes.append(_Field("response"))
    return "".join((_TURN, _write(nodes), _LAST_TURN, _write(_cut(nodes)), _ALL_TURNS))


def _tokenize(text: str) -> Iterator[_Token]:
    """Texts and actions, without spaces beside a trim marker and without comments. Costs O(text)."""
    position, trims = 0, False
    while (start := text.find("{{", position)) >= 0 and (end := text.find("}}", start + 2)) >= 0:
        action = _ACTION.fullmatch(text, start + 2, end)
        assert action is not None, "every text matches"
        before = text[position:start]
        before = before.lstrip() if trims else before
        yield before.rstrip() if action[1] else before
        position, trims = end + 2, bool(action[3])
        if not action[2].strip().startswith("/*"):
            yield _Action(action[2].strip())
    rest = text[position:]
    yield rest.lstrip() if trims else rest


def _parse_block(tokens: Iterator[_Token], depth: int = 0) -> tuple[list[_Node], str]:
    """The nodes up to the action that ends a block, and that action; an empty one at the end of the template."""
    nodes: list[_Node] = []
    for token in tokens:
        if isinstance(token, str):
            nodes.extend([token] if token else [])
        elif token.text.split()[:1] in (["else"], ["end"]):
            return nodes, token.text
        else:
            nodes.append(_parse_action(token.text, tokens, depth))
    return nodes, ""


def _parse_action(text: str, tokens: Iterator[_Token], depth: int) -> _Node:
    if text in _FIELDS:
        return _Field(_FIELDS[text])
    word, _, name = text.partition(" ")
    if word != "if" or name.strip() not in _FIELDS:
        raise RequestError(
            f"TEMPLATE has `{text[:60]}`, which is not supported: write it in Jinja, or as a Go template with only "
            f"{', '.join(_FIELDS)}, if, else and end"
        )
    if depth >= _MAX_DEPTH:
        raise RequestError(f"TEMPLATE has more than {_MAX_DEPTH} `if` in one another")
    return _parse_if(_FIELDS[name.strip()], tokens, depth + 1)


def _parse_if(name: str, tokens: Iterator[_Token], depth: int) -> _If:
    then, ender = _parse_block(tokens, depth)
    if ender.startswith("else "):  # else if: both have one end
        return _If(name, then, [_parse_action(ender.removeprefix("else ").strip(), tokens, depth)])
    otherwise: list[_Node] = []
    if ender == "else":
        otherwise, ender = _parse_block(tokens, depth)
    if ender != "end":
        raise RequestError(f"TEMPLATE has `if .{name.capitalize()}` without `end`")
    return _If(name, then, otherwise)


def _walk(nodes: Sequence[_Node]) -> Iterator[_Node]:
    for node in nodes:
        yield node
        if isinstance(node, _If):
            yield from _walk([*node.then, *node.otherwise])


def _cut(nodes: Sequence[_Node]) -> list[_Node]:
    """The nodes before the first `.Response`. An `if` around it is cut, too."""
    kept: list[_Node] = []
    for node in nodes:
        if node == _Field("response"):
            return kept
        if isinstance(node, _If) and _Field("response") in _walk([node]):
            inside = _cut(node.then)
            return kept + (inside if node.field == "response" else [_If(node.field, inside, _cut(node.otherwise))])
        kept.append(node)
    return kept


def _write(nodes: Sequence[_Node]) -> str:
    """The nodes in Jinja. Texts become strings, because Jinja would drop line breaks beside its tags."""
    return "".join(map(_write_node, nodes))


def _write_node(node: _Node) -> str:
    if isinstance(node, str):
        return "{{- " + json.dumps(node, ensure_ascii=False) + " -}}"
    if isinstance(node, _Field):
        return "{{- " + node.name + " -}}"
    otherwise = "{%- else -%}" + _write(node.otherwise) if node.otherwise else ""
    return f"{{%- if {node.field} -%}}{_write(node.then)}{otherwise}{{%- endif -%}}"
