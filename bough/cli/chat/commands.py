"""The commands of the chat: messages that begin with a slash."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass

from bough.cli.chat.chat import TerminalChat
from bough.cli.chat.parameters import NAMES, describe_given, set_parameter
from bough.cli.chat.sessions import Conversation, check_name
from bough.cli.terminal.columns import align, describe
from bough.errors import RequestError

RunCommand = Callable[[TerminalChat, str], None]


@dataclass(frozen=True)
class Command:
    """A command with its usage and purpose, as the help shows them."""

    usage: str
    purpose: str
    run: RunCommand


COMMANDS: dict[str, Command] = {}
"""The commands by their names, in the order of the help."""


def _command(usage: str, purpose: str) -> Callable[[RunCommand], RunCommand]:
    def add(run: RunCommand) -> RunCommand:
        COMMANDS[usage.partition(" ")[0]] = Command(usage, purpose, run)
        return run

    return add


def run_command(chat: TerminalChat, message: str) -> None:
    """Run the command in the message. Raises RequestError, which lists all commands, if the command is unknown."""
    name, _, rest = message.partition(" ")
    command = COMMANDS.get({"/?": "/help", "/exit": "/bye", "/quit": "/bye"}.get(name, name))
    if command is None:
        raise RequestError(f"unknown command {name}; the commands are {', '.join(COMMANDS)}")
    command.run(chat, rest.strip())


@_command("/set NAME VALUE", "set a parameter (none: the model's own), the system prompt, verbose or quiet")
def _set(chat: TerminalChat, rest: str) -> None:
    name, _, value = rest.removeprefix("parameter ").strip().partition(" ")
    value = value.strip()
    if name in ("verbose", "quiet"):
        chat.is_verbose = name == "verbose"
        chat.screen.note("showing counts and times after each answer" if chat.is_verbose else "showing answers only")
    elif name == "system":
        chat.conversation.system = value
        chat.screen.note(f"the system prompt is {value!r}" if value else "no system prompt")
    elif name and value:
        chat.session.given = given = set_parameter(chat.session.given, name, value)
        chat.screen.note(f"{name} is {given[name]!r}" if name in given else f"{name} is the model's own")
    else:
        raise RequestError(f"usage: /set NAME VALUE; the names are system, verbose, quiet, {', '.join(NAMES)}")


@_command("/show", "show the model, the settings and the memory in use")
def _show(chat: TerminalChat, rest: str) -> None:
    facts = {
        **chat.backend.describe(),
        "chat": chat.session.name or "",
        "branch": chat.session.current if len(chat.session.branches) > 1 else "",
        "messages": str(2 * len(chat.conversation.exchanges)),
        "system": chat.conversation.system,
        **describe_given(chat.session.given),
    }
    _write(chat, describe(facts, width=chat.screen.width))


@_command("/tree", "draw the tree of all cached prefixes")
def _tree(chat: TerminalChat, rest: str) -> None:
    _write(chat, chat.backend.draw_tree(chat.screen.width).splitlines())


@_command("/explain TEXT", "show what would be cached if TEXT were the next message, and why not more")
def _explain(chat: TerminalChat, rest: str) -> None:
    if not rest:
        raise RequestError("usage: /explain TEXT; shows what would be cached if TEXT were the next message")
    found = chat.backend.explain(chat.conversation.messages(rest))
    facts = {
        **{name: f"{found[f'{name}_tokens']:,} tokens" for name in ("prompt", "matched", "cached")},
        "because": found["reason"],
        "the prompt continues": repr(found["prompt_goes_on"]) if found["prompt_goes_on"] else "",
        "the tree continues": ", ".join(map(repr, found["tree_goes_on"])),
    }
    _write(chat, describe(facts, width=chat.screen.width))


@_command("/retry", "answer the last message again")
def _retry(chat: TerminalChat, rest: str) -> None:
    chat.retry()


@_command("/undo", "remove the last message and its answer")
def _undo(chat: TerminalChat, rest: str) -> None:
    if not chat.conversation.exchanges:
        return chat.screen.note("there is nothing to undo")
    gone = chat.conversation.exchanges.pop()
    return chat.screen.note(f"removed {_shorten(gone.question)!r} and its answer")


@_command("/clear", "start a new conversation; the tree is kept")
def _clear(chat: TerminalChat, rest: str) -> None:
    if chat.session.name:  # what was saved under this name stays
        chat.keep()
        chat.session.name = None
    chat.conversation.exchanges.clear()
    chat.screen.note("started a new conversation; the tree is kept")


@_command("/save NAME", "save the chat with its branches; `bough run --resume NAME` goes on with it")
def _save(chat: TerminalChat, rest: str) -> None:
    if not rest:
        raise RequestError("usage: /save NAME; `bough run --resume NAME` and /load NAME go on with it")
    chat.save(rest)
    chat.screen.note(f"saved as {rest}; it is saved again when the chat ends")


@_command("/load [NAME]", "go on with a saved chat, or list them")
def _load(chat: TerminalChat, rest: str) -> None:
    if not rest:
        names = chat.sessions.names() if chat.sessions else []
        return _write(chat, names or ["there are no saved chats"])
    chat.load(rest)
    chat.show_so_far()
    chat.screen.note(describe_session(chat))
    if (model := chat.session.model) not in ("", chat.backend.model):
        chat.screen.note(f"it was with {model}; /model {model} changes to it")
    return None


def describe_session(chat: TerminalChat) -> str:
    """One line on the chat that goes on."""
    exchanges = chat.conversation.exchanges
    last = f"; the last was {_shorten(exchanges[-1].question)!r}" if exchanges else ""
    return f"going on with the chat {chat.session.name}: {2 * len(exchanges)} messages{last}"


@_command("/branch [NAME]", "go on from here in a branch of its own; what was said is shared")
def _branch(chat: TerminalChat, rest: str) -> None:
    before = chat.session.current
    chat.session.branch(check_name(rest) if rest else "")
    chat.screen.note(f"going on in the branch {chat.session.current}; /switch {before} goes back")


@_command("/switch [NAME]", "go on in another branch, or list them")
def _switch(chat: TerminalChat, rest: str) -> None:
    session = chat.session
    if not rest:
        marks = {name: "*" if name == session.current else " " for name in session.branches}
        rows = [(f"{marks[name]} {name}", _describe_branch(each)) for name, each in session.branches.items()]
        return _write(chat, align(rows))
    session.switch(rest)
    return chat.screen.note(f"going on in the branch {rest}: {_describe_branch(session.conversation)}")


def _describe_branch(branch: Conversation) -> str:
    last = f", the last {_shorten(branch.exchanges[-1].question)!r}" if branch.exchanges else ""
    return f"{2 * len(branch.exchanges)} messages{last}"


@_command("/model [NAME]", "go on with another model, or show which it is")
def _model(chat: TerminalChat, rest: str) -> None:
    if rest:
        chat.change_model(rest)
    chat.screen.note(chat.backend.greeting())


@_command("/help", "show this list")
def _help(chat: TerminalChat, rest: str) -> None:
    rows = [(each.usage, each.purpose) for each in COMMANDS.values()]
    keys = [
        ('"""', "begins and ends a message of many lines"),
        ("Ctrl-C", "stops an answer; at the prompt, drops the message, and leaves if nothing was typed since the last one"),
        ("Tab", "completes a command"),
        ("Ctrl-D", "leaves"),
    ]
    names = textwrap.wrap(f"The parameters are {', '.join(NAMES)}.", width=80)
    _write(chat, [*align([*rows, *keys]), "", *names])


@_command("/bye", "leave")
def _bye(chat: TerminalChat, rest: str) -> None:
    chat.is_over = True


def _write(chat: TerminalChat, lines: list[str]) -> None:
    chat.screen.write_lines([*lines, ""])


def _shorten(text: str, length: int = 40) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
