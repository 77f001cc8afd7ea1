"""`bough run`: answer one prompt, or chat, with a model in a running server or in this process.

Nothing here imports the runner: with a server, the command is ready in less than a second.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer

from bough.cli import options
from bough.cli.backends.choice import Backends
from bough.cli.backends.contract import Backend
from bough.cli.chat.chat import TerminalChat
from bough.cli.chat.commands import COMMANDS, describe_session
from bough.cli.chat.line_editor import LineEditor
from bough.cli.chat.loop import run_chat
from bough.cli.chat.parameters import NAMES, check, read_format
from bough.cli.chat.sessions import FIRST, ChatSession, Conversation, Sessions
from bough.cli.prompt_args import PromptArgs, read_prompt_args
from bough.cli.terminal.answer import as_dict, describe_end, stream_answer, summarise
from bough.cli.terminal.screen import Screen, is_interactive
from bough.config import Settings, load_settings
from bough.errors import BoughError, RequestError
from bough.types import Prompt

_INTERRUPTED = 130


@dataclass(frozen=True)
class RunOptions:
    """The options of one run of the command, apart from the settings."""

    given: dict[str, Any]  # the sampling parameters that were set
    system: str
    is_raw: bool
    is_json: bool
    is_verbose: bool
    wraps: bool
    keeps_history: bool


@options.with_flags([*options.sampling_flags(NAMES), *options.command_flags("run")])
def run(
    ctx: typer.Context,
    first: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A name, a folder or a GGUF file; not given: the default model."),
    ] = None,
    rest: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT",
            help="The prompt, with - for standard input; piped input follows it. Not given: a chat.",
            show_default=False,
        ),
    ] = None,
    model: options.Model = None,
    system: Annotated[str, typer.Option(help="The system prompt.", show_default=False)] = "",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show counts and times after each answer.")] = False,
    nowordwrap: Annotated[bool, typer.Option("--nowordwrap", help="Do not wrap words at the terminal's width.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a saved chat: its name follows; not given: the last one.")
    ] = False,
    no_history: Annotated[
        bool, typer.Option("--no-history", help="Save neither the chat nor what is typed in it.")
    ] = False,
    url: options.Url = None,
    is_local: options.IsLocal = False,
    **flags: Any,
) -> None:
    """Answer a prompt, or chat."""
    given = _read_given({name: flags[name] for name in NAMES})
    if raw and system:
        raise typer.BadParameter("--system needs the chat template, and --raw does not use it")
    run_options = RunOptions(given, system, raw, as_json, verbose, not nowordwrap, not no_history)
    words, screen = [word for word in (first, *(rest or ())) if word], Screen()
    chosen = options.settings_of(ctx)
    del chosen["model"]  # the arguments may name it, too: PromptArgs has it
    settings = load_settings(chosen, are_flags=True)
    sessions = Sessions(settings.data_folder / "chats")
    if resume and len(words) > 1:
        raise typer.BadParameter(f"--resume takes one name, and there are {len(words)} words: {' '.join(words)}")
    session = sessions.load(words[0] if words else None) if resume else None
    args = PromptArgs(model or session.model or None, None) if session else read_prompt_args(words, model, sys.stdin)
    with Backends(settings, screen, url=url, is_local=is_local, flags=chosen) as backends:
        args = _check_model(args, backends, screen)
        if args.prompt == "":
            raise typer.BadParameter(f"the prompt for {args.model or 'the default model'} is empty")
        if args.prompt is None and (as_json or raw):
            raise typer.BadParameter(f"{'--json' if as_json else '--raw'} needs a prompt")
        tells_server = args.prompt is not None and (verbose or screen.notes.is_terminal)  # a chat's first line says it
        with backends.open(args.model, tells_server=tells_server, tells_advice=not as_json) as backend:
            if not raw and backend.chat_problem:
                raise RequestError(backend.chat_problem)
            if args.prompt is None:
                _chat(backend, run_options, screen, settings, sessions, session)
            else:
                _answer(backend, args.prompt, run_options, screen)


def _read_given(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that were given. They are checked here, before a model is loaded."""
    given = {name: value for name, value in flags.items() if value not in (None, [])}
    try:
        if "format" in given:
            given["format"] = read_format(given["format"])
        return check(given)
    except RequestError as error:
        raise typer.BadParameter(str(error)) from error


def _check_model(args: PromptArgs, backends: Backends, screen: Screen) -> PromptArgs:
    """The arguments; a word that was taken for a model becomes the prompt if there is no such model."""
    if backends.known.is_model(args):
        return args
    missing = f"there is no model {args.model!r}"
    if not is_interactive():
        screen.note(f"{missing}: sending it as a prompt to {backends.default_model}")
    elif not typer.confirm(f"{missing}; send it as a prompt to {backends.default_model}?", default=True, err=True):
        raise typer.Exit(1)
    return args.as_prompt()


def _answer(backend: Backend, text: str, run_options: RunOptions, screen: Screen) -> None:
    system = [{"role": "system", "content": run_options.system}] if run_options.system else []
    prompt: Prompt = text if run_options.is_raw else [*system, {"role": "user", "content": text}]
    open_stream = partial(backend.stream, prompt, run_options.given)
    try:
        completion = stream_answer(open_stream, screen, is_silent=run_options.is_json, wraps=run_options.wraps)
    except BoughError:
        screen.end_line()  # the error is printed on its own line
        raise
    if run_options.is_json:
        screen.write_line(json.dumps(as_dict(completion, backend.name, backend.load_s), ensure_ascii=False))
    screen.end_line()
    if completion.finish_reason == "loop":
        screen.note(describe_end(completion))
    if run_options.is_verbose:
        for line in summarise(completion, backend.load_s):
            screen.note(line)
    if completion.finish_reason == "cancelled":
        raise typer.Exit(_INTERRUPTED)


def _chat(
    backend: Backend,
    run_options: RunOptions,
    screen: Screen,
    settings: Settings,
    sessions: Sessions,
    session: ChatSession | None,
) -> None:
    screen.note(f"{backend.greeting()} · /help lists the commands, /bye leaves")
    chat = TerminalChat(
        backend,
        screen,
        session=_start(session, run_options),
        sessions=sessions if run_options.keeps_history else None,
        is_verbose=run_options.is_verbose,
        wraps=run_options.wraps,
    )
    if session is not None:
        chat.show_so_far()
        screen.note(describe_session(chat))
    try:
        with LineEditor(settings.cache_folder / "history" if run_options.keeps_history else None, COMMANDS) as editor:
            run_chat(chat, editor.read_message)
    finally:
        try:
            chat.keep()
        except BoughError as error:
            screen.error(str(error))


def _start(session: ChatSession | None, run_options: RunOptions) -> ChatSession:
    """A new session, or the one that is resumed, in which the flags replace what was saved."""
    if session is None:
        return ChatSession(given=run_options.given, branches={FIRST: Conversation(run_options.system)})
    session.given |= run_options.given
    session.conversation.system = run_options.system or session.conversation.system
    return session
