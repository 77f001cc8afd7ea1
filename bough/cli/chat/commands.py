"""The commands of the chat: messages that begin with a slash."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass

from bough.cli.chat.chat import TerminalChat
from bough.cli.chat.parameters import NAMES, changed, set_parameter
from bough.cli.terminal.columns import align, describe, memory
from bough.errors import RequestError

_ENGINE_FACTS = ("engine", "device", "dtype", "attention")


@dataclass(frozen=True)
class Command:
    """One command: what to type, what the help says, and the function that runs it."""

    usage: str
    purpose: str
    run: Callable[[TerminalChat, str], None]


def run_command(chat: TerminalChat, message: str) -> None:
    """Run the command in the message. Raises RequestError, which lists all commands, if the command is unknown."""
    name, _, rest = message.partition(" ")
    command = COMMANDS.get({"/?": "/help", "/exit": "/bye", "/quit": "/bye"}.get(name, name))
    if command is None:
        raise RequestError(f"unknown command {name}; the commands are {', '.join(COMMANDS)}")
    command.run(chat, rest.strip())


def _set(chat: TerminalChat, rest: str) -> None:
    name, _, value = rest.partition(" ")
    value = value.strip()
    if name in ("verbose", "quiet"):
        chat.is_verbose = name == "verbose"
    elif name == "system":
        chat.conversation.system = value
    elif name and value:
        chat.params = set_parameter(chat.params, name, value)
    else:
        raise RequestError(f"usage: /set NAME VALUE; the names are system, verbose, quiet, {', '.join(NAMES)}")
    chat.screen.note(_say_setting(chat, name))


def _say_setting(chat: TerminalChat, name: str) -> str:
    if name in ("verbose", "quiet"):
        return "showing counts and times after each answer" if chat.is_verbose else "showing answers only"
    if name == "system":
        return f"the system prompt is {chat.conversation.system!r}" if chat.conversation.system else "no system prompt"
    return f"{name} is {getattr(chat.params, name)!r}"


def _show(chat: TerminalChat, rest: str) -> None:
    runner, stats = chat.runner, chat.runner.cache.stats()
    facts = {
        "model": runner.files.name if runner.files else "",
        **{name: value for name, value in runner.engine.describe().items() if name in _ENGINE_FACTS},
        "context": f"{runner.engine.context_tokens:,} tokens",
        "tree": f"{stats['nodes']:,} nodes, {stats['tokens']:,} tokens, {memory(stats['tree_bytes'])}",
        "memory": f"{memory(stats['used_bytes'])} of {memory(stats['budget_bytes'])}",
        "messages": str(2 * len(chat.conversation.exchanges)),
        "system": chat.conversation.system,
        **changed(chat.params),
    }
    _write(chat, describe(facts))


def _tree(chat: TerminalChat, rest: str) -> None:
    _write(chat, str(chat.runner.cache.tree()).splitlines())


def _explain(chat: TerminalChat, rest: str) -> None:
    if not rest:
        raise RequestError("usage: /explain TEXT; shows what would be cached if TEXT were the next message")
    found = chat.runner.cache.explain(chat.conversation.messages(rest))
    facts = {
        "prompt": f"{found.prompt_tokens:,} tokens",
        "matched": f"{found.matched_tokens:,} tokens",
        "cached": f"{found.cached_tokens:,} tokens",
        "because": found.reason,
        "the prompt continues": repr(found.prompt_goes_on) if found.prompt_goes_on else "",
        "the tree continues": ", ".join(map(repr, found.tree_goes_on)),
    }
    _write(chat, describe(facts))


def _retry(chat: TerminalChat, rest: str) -> None:
    chat.retry()


def _undo(chat: TerminalChat, rest: str) -> None:
    if not chat.conversation.exchanges:
        return chat.screen.note("there is nothing to undo")
    gone = chat.conversation.exchanges.pop()
    return chat.screen.note(f"removed {_shorten(gone.question)!r} and its answer")


def _clear(chat: TerminalChat, rest: str) -> None:
    chat.conversation.exchanges.clear()
    chat.screen.note("started a new conversation; the tree is kept")


def _help(chat: TerminalChat, rest: str) -> None:
    rows = [(each.usage, each.purpose) for each in COMMANDS.values()]
    keys = [
        ('"""', "begins and ends a message of many lines"),
        ("Ctrl-C", "stops an answer; at the prompt, drops the message, and leaves when pressed twice"),
        ("Ctrl-D", "leaves"),
    ]
    names = textwrap.wrap(f"The parameters are {', '.join(NAMES)}.", width=80)
    _write(chat, [*align([*rows, *keys]), "", *names])


def _bye(chat: TerminalChat, rest: str) -> None:
    chat.is_over = True


def _write(chat: TerminalChat, lines: list[str]) -> None:
    for line in [*lines, ""]:
        chat.screen.write_line(line)


def _shorten(text: str, length: int = 40) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


COMMANDS = {
    "/set": Command("/set NAME VALUE", "set a parameter, the system prompt, verbose or quiet", _set),
    "/show": Command("/show", "show the model, the settings and the memory in use", _show),
    "/tree": Command("/tree", "draw the tree of all cached prefixes", _tree),
    "/explain": Command(
        "/explain TEXT", "show what would be cached if TEXT were the next message, and why not more", _explain
    ),
    "/retry": Command("/retry", "answer the last message again", _retry),
    "/undo": Command("/undo", "remove the last message and its answer", _undo),
    "/clear": Command("/clear", "start a new conversation; the tree is kept", _clear),
    "/help": Command("/help", "show this list", _help),
    "/bye": Command("/bye", "leave", _bye),
}
