"""`bough run`: answer one prompt, or chat."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from bough.cli import options
from bough.cli.chat.chat import TerminalChat
from bough.cli.chat.line_input import history, read_message
from bough.cli.chat.loop import run_chat
from bough.cli.chat.parameters import read_format
from bough.cli.prompt_args import PromptArgs, read_prompt_args
from bough.cli.terminal.answer import as_dict, stream_answer, summarise
from bough.cli.terminal.progress import show_progress
from bough.cli.terminal.screen import Screen
from bough.errors import ModelNotFound, RequestError
from bough.models.sources import is_path
from bough.runner import Runner, load
from bough.types import Prompt, SamplingParams

_INTERRUPTED = 130


@dataclass(frozen=True)
class RunOptions:
    """The options of one run of the command, apart from the settings."""

    params: SamplingParams
    system: str
    is_raw: bool
    is_json: bool
    is_verbose: bool


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
            help="The prompt, with - for standard input; not given: piped input, or a chat.",
            show_default=False,
        ),
    ] = None,
    model: options.Model = None,
    system: Annotated[str, typer.Option(help="The system prompt.", show_default=False)] = "",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show counts and times after each answer.")] = False,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repeat_penalty: options.RepeatPenalty = 1.1,
    seed: options.Seed = None,
    stop: options.Stop = None,
    format: options.Format = None,
    context: options.Context = None,
    threads: options.Threads = None,
    engine: options.Engine = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    attention: options.Attention = None,
    device_memory: options.DeviceMemory = None,
    host_memory: options.HostMemory = None,
    disk: options.Disk = None,
    disk_free: options.DiskFree = None,
    disk_ttl: options.DiskTTL = None,
    salt_share: options.SaltShare = None,
    cache: options.Cache = None,
    trust_remote_code: options.TrustRemoteCode = None,
) -> None:
    """Answer a prompt, or chat."""
    params = _read_params(
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
    run_options = RunOptions(params, system, raw, as_json, verbose)
    args = read_prompt_args([word for word in (first, *(rest or ())) if word], model, sys.stdin)
    _check_usage(args, run_options)
    screen, started_s = Screen(), time.perf_counter()
    settings = options.settings_of(ctx)
    del settings["model"]  # the arguments may name it, too: PromptArgs has it
    with _load(args, settings, screen) as runner:
        load_s = time.perf_counter() - started_s
        _require_template(runner, run_options)
        if args.prompt is None:
            _chat(runner, run_options, screen, load_s)
        else:
            _answer(runner, args.prompt, run_options, screen, load_s)


def _read_params(**given: Any) -> SamplingParams:
    """The parameters that were given. They are checked here, before a model is loaded."""
    values = {name: value for name, value in given.items() if value is not None}
    try:
        if "format" in values:
            values["format"] = read_format(values["format"])
        return SamplingParams(**values)
    except RequestError as error:
        raise typer.BadParameter(str(error)) from error


def _check_usage(args: PromptArgs, run_options: RunOptions) -> None:
    if run_options.is_raw and run_options.system:
        raise typer.BadParameter("--system needs the chat template, and --raw does not use it")
    if args.prompt == "":
        raise typer.BadParameter(f"the prompt for {args.model or 'the default model'} is empty")
    if args.prompt is None and (run_options.is_json or run_options.is_raw):
        raise typer.BadParameter(f"{'--json' if run_options.is_json else '--raw'} needs a prompt")


def _load(args: PromptArgs, settings: dict[str, Any], screen: Screen) -> Runner:
    try:
        with show_progress(screen.notes, stays=False) as progress:
            progress.start(f"loading {args.model or 'the default model'}", None)
            return load(
                args.model, progress=progress, announce=lambda plan: screen.note(f"fetching {plan.describe()}"), **settings
            )
    except ModelNotFound as error:
        if not args.is_guess or is_path(args.model or ""):
            raise
        raise ModelNotFound(f"{error}; if {args.model!r} is part of the prompt, give the model with --model") from error


def _require_template(runner: Runner, run_options: RunOptions) -> None:
    if not runner.tokenizer.has_text and runner.files is not None and runner.files.tokenizer_problem:
        raise RequestError(runner.files.tokenizer_problem)
    if not run_options.is_raw and not (runner.tokenizer.has_text and runner.tokenizer.template.is_present):
        raise RequestError("the model has no chat template: use --raw with a prompt to continue a text")


def _answer(runner: Runner, text: str, run_options: RunOptions, screen: Screen, load_s: float) -> None:
    completion = stream_answer(
        runner, _prompt(text, run_options), run_options.params, screen, is_silent=run_options.is_json
    )
    if run_options.is_json:
        name = runner.files.name if runner.files else ""
        screen.write_line(json.dumps(as_dict(completion, name, load_s), ensure_ascii=False))
    screen.end_line()
    if run_options.is_verbose:
        for line in summarise(completion, load_s):
            screen.note(line)
    if completion.finish_reason == "cancelled":
        raise typer.Exit(_INTERRUPTED)


def _prompt(text: str, run_options: RunOptions) -> Prompt:
    if run_options.is_raw:
        return text
    system = [{"role": "system", "content": run_options.system}] if run_options.system else []
    return [*system, {"role": "user", "content": text}]


def _chat(runner: Runner, run_options: RunOptions, screen: Screen, load_s: float) -> None:
    info = runner.engine.info
    name = runner.files.name if runner.files else info.model
    screen.note(f"{name} on {info.name} ({info.device}) · /help lists the commands, /bye leaves")
    chat = TerminalChat(
        runner,
        screen,
        params=run_options.params,
        system=run_options.system,
        is_verbose=run_options.is_verbose,
        load_s=load_s,
    )
    with history(runner.settings.cache_folder / "history"):
        run_chat(chat, lambda: read_message(input))
