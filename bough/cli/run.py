"""`bough run`: answer one prompt, or chat, with a model in a running server or in this process.

Nothing here imports the runner: with a server, the command is ready in less than a second.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer

from bough.cli import options
from bough.cli.backends.choice import Backends, Where
from bough.cli.backends.contract import Backend
from bough.cli.chat.chat import TerminalChat
from bough.cli.chat.commands import describe_session
from bough.cli.chat.conversation import FIRST, ChatSession, Conversation
from bough.cli.chat.line_input import history, read_message
from bough.cli.chat.loop import run_chat
from bough.cli.chat.parameters import check, read_format
from bough.cli.chat.sessions import Sessions
from bough.cli.prompt_args import PromptArgs, read_prompt_args
from bough.cli.terminal.answer import as_dict, describe_end, stream_answer, summarise
from bough.cli.terminal.screen import Screen, is_interactive
from bough.config import Settings, load_settings
from bough.errors import BoughError, ModelNotFound, RequestError
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
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repeat_penalty: options.RepeatPenalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    format: options.Format = None,
    context: options.Context = None,
    threads: options.Threads = None,
    engine: options.Engine = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    weights: options.Weights = None,
    attention: options.Attention = None,
    device_memory: options.DeviceMemory = None,
    host_memory: options.HostMemory = None,
    disk: options.Disk = None,
    disk_free: options.DiskFree = None,
    disk_ttl: options.DiskTTL = None,
    store: options.StoreUrl = None,
    store_secret_file: options.StoreSecretFile = None,
    store_budget: options.StoreBudget = None,
    store_ttl: options.StoreTTL = None,
    salt_share: options.SaltShare = None,
    cache: options.Cache = None,
    trust_remote_code: options.TrustRemoteCode = None,
) -> None:
    """Answer a prompt, or chat."""
    given = _read_given(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
        seed=seed,
        stop=stop or None,
        format=format,
    )
    if raw and system:
        raise typer.BadParameter("--system needs the chat template, and --raw does not use it")
    run_options = RunOptions(given, system, raw, as_json, verbose, not nowordwrap, not no_history)
    words, screen = [word for word in (first, *(rest or ())) if word], Screen()
    flags = options.settings_of(ctx)
    del flags["model"]  # the arguments may name it, too: PromptArgs has it
    settings = load_settings(flags, are_flags=True)
    sessions = Sessions(settings.data_folder / "chats")
    session = _resume(words, sessions) if resume else None
    args = PromptArgs(model or session.model or None, None) if session else read_prompt_args(words, model, sys.stdin)
    with Backends(Where(settings, url, is_local, flags), screen) as backends:
        args = _settle(args, backends, screen)
        _check_prompt(args, run_options)
        is_told = args.prompt is not None and (verbose or screen.notes.is_terminal)  # a chat's first line says it
        with backends.open(args.model, tells_server=is_told, tells_advice=not as_json) as backend:
            _require_template(backend, run_options)
            if args.prompt is None:
                _chat(backend, run_options, screen, settings, sessions, session)
            else:
                _answer(backend, args.prompt, run_options, screen)


def _read_given(**given: Any) -> dict[str, Any]:
    """The parameters that were given. They are checked here, before a model is loaded."""
    try:
        if given["format"] is not None:
            given["format"] = read_format(given["format"])
        return check(given)
    except RequestError as error:
        raise typer.BadParameter(str(error)) from error


def _resume(words: list[str], sessions: Sessions) -> ChatSession:
    if len(words) > 1:
        raise typer.BadParameter(f"--resume takes one name, and there are {len(words)} words: {' '.join(words)}")
    return sessions.load(words[0] if words else None)


def _check_prompt(args: PromptArgs, run_options: RunOptions) -> None:
    if args.prompt == "":
        raise typer.BadParameter(f"the prompt for {args.model or 'the default model'} is empty")
    if args.prompt is None and (run_options.is_json or run_options.is_raw):
        raise typer.BadParameter(f"{'--json' if run_options.is_json else '--raw'} needs a prompt")


def _settle(args: PromptArgs, backends: Backends, screen: Screen) -> PromptArgs:
    """The arguments, with a word that was taken for a model made the prompt if there is no such model.

    Raises ModelNotFound if more words follow it, or if it is a model's name misspelt.
    """
    if not args.is_guess or not args.model or backends.knows(args.model):
        return args
    missing, near = f"there is no model {args.model!r}", backends.find_near(args.model)
    if near:
        raise ModelNotFound(f"{missing}; did you mean {near}?")
    if not args.is_alone:
        raise ModelNotFound(f"{missing}; if {args.model!r} is part of the prompt, give the model with --model")
    if not is_interactive():
        screen.note(f"{missing}: sending it as a prompt to {backends.default_model}")
    elif not typer.confirm(f"{missing}; send it as a prompt to {backends.default_model}?", default=True, err=True):
        raise typer.Exit(1)
    return args.as_prompt()


def _require_template(backend: Backend, run_options: RunOptions) -> None:
    if not run_options.is_raw and backend.chat_problem:
        raise RequestError(backend.chat_problem)


def _answer(backend: Backend, text: str, run_options: RunOptions, screen: Screen) -> None:
    open_stream = partial(backend.stream, _prompt(text, run_options), run_options.given)
    try:
        completion = stream_answer(open_stream, screen, is_silent=run_options.is_json, wraps=run_options.wraps)
    except BoughError:
        screen.end_line()  # the error is told on a line of its own
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


def _prompt(text: str, run_options: RunOptions) -> Prompt:
    if run_options.is_raw:
        return text
    system = [{"role": "system", "content": run_options.system}] if run_options.system else []
    return [*system, {"role": "user", "content": text}]


def _chat(
    backend: Backend,
    run_options: RunOptions,
    screen: Screen,
    settings: Settings,
    sessions: Sessions,
    session: ChatSession | None,
) -> None:
    """Chat, and save the chat when it ends."""
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
        screen.note(describe_session(chat))
    try:
        with history(settings.cache_folder / "history" if run_options.keeps_history else None):
            run_chat(chat, lambda: read_message(input))
    finally:
        _keep(chat, screen)


def _keep(chat: TerminalChat, screen: Screen) -> None:
    """Save the chat at its end. That this failed is told, and changes nothing else."""
    try:
        chat.keep()
    except BoughError as error:
        screen.error(str(error))


def _start(session: ChatSession | None, run_options: RunOptions) -> ChatSession:
    """The session to begin with: a new one, or one that is resumed, with what the flags say instead."""
    if session is None:
        return ChatSession(given=run_options.given, branches={FIRST: Conversation(run_options.system)})
    session.given |= run_options.given
    session.conversation.system = run_options.system or session.conversation.system
    return session
