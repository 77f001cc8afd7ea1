"""The options of requests and of `load`, typed: editors complete them, and type checkers find misspelt ones."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, TypedDict

from bough.errors import RequestError
from bough.types import SamplingParams

_PROMPT = ("raw", "tools")
_REQUEST = ("salt", "store", "choice", "prompt_logprobs")
_OTHERS = {*_PROMPT, *_REQUEST, "template_kwargs", "is_cancelled", "on_progress"}
_FLAGS = ("raw", "store", "prompt_logprobs", "truncate", "normalize")
_CALLBACKS = ("is_cancelled", "on_progress")
_NOT_FOR_TEMPLATES = {"chat_template", "continue_final_message", "limit", "messages", "prompt", "self", *_PROMPT}
_SAMPLING = {each.name for each in fields(SamplingParams)}


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams`, as keywords."""

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    repeat_last_n: int
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    stop: str | Sequence[str]
    ignore_eos: bool
    loop_guard: bool
    logprobs: int | None
    format: Literal["json"] | dict[str, Any] | None
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]


class PrefixOptions(TypedDict, total=False):
    """How messages become token ids, and whose tree they belong to.

    `salt` names a tenant: equal prompts under two salts share nothing. `tools` and `template_kwargs` are for the chat
    template.
    """

    salt: str
    tools: Sequence[Mapping[str, Any]] | None
    template_kwargs: Mapping[str, Any] | None


class PromptOptions(PrefixOptions, total=False):
    """How a prompt of any kind becomes token ids. `raw` takes a text as it stands, without the chat template."""

    raw: bool


class SharedOptions(SamplingOptions, PrefixOptions, total=False):
    """What chats and requests of every kind may say.

    With `store=False` nothing of a request is kept. With `prompt_logprobs` the tokens of the prompt are scored, too.
    """

    store: bool
    prompt_logprobs: bool


class ChatOptions(SharedOptions, total=False):
    """What a chat may say of all its requests. `choice` numbers several answers to one prompt with one seed."""

    choice: int


class SendAllOptions(SharedOptions, total=False):
    """What may be said with a message to several chats.

    `is_cancelled` is asked by the thread or task that waits for the answers. If it returns True, they end where they are;
    what it raises ends the requests and is raised there.
    """

    is_cancelled: Callable[[], bool] | None


class SendOptions(ChatOptions, SendAllOptions, total=False):
    """What may be said with a message to one chat.

    `on_progress(done, total)` is told how many tokens of the prompt are done, by the thread or task that waits.
    """

    on_progress: Callable[[int, int], None] | None


class BatchOptions(SendAllOptions, PromptOptions, total=False):
    """Everything that several requests may say together besides their prompts."""


class RequestOptions(SendOptions, BatchOptions, total=False):
    """Everything that one request may say besides its prompt."""


class EmbedOptions(TypedDict, total=False):
    """How texts become vectors.

    `dimensions` keeps the first so many numbers of each vector; by default all. A text that is too long is cut, or with
    `truncate=False` raises PromptTooLong. `normalize=False` leaves out scaling to length 1. `salt` is as in a prompt.
    """

    dimensions: int | None
    truncate: bool
    normalize: bool
    salt: str


class LoadOptions(TypedDict, total=False):
    """The settings, as keywords of `load`. Sizes may be texts such as "2GB", times such as "12h"."""

    engine: Literal["auto", "torch", "mlx"]
    device: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    graphs: Literal["auto", "wait", "off"]
    weights: Literal["auto", "packed", "float32", "q8_0", "q4_0", "int4"]
    attention: str
    threads: int
    context: int
    lanes: int
    chunk: int
    max_tokens: int
    loop_guard: bool
    cache: bool
    device_memory: int | str | None
    host_memory: int | str | None
    disk: int | str | None
    disk_free: int | str
    disk_ttl: float | str | None
    store: str
    store_secret: str
    store_secret_file: str | Path | None
    store_budget: int | str | None
    store_ttl: float | str | None
    salt_share: float
    trust_remote_code: bool
    watchdog: float | str
    verify_cache: float
    index_url: str
    data_folder: str | Path
    cache_folder: str | Path


def check_chat_options(given: Mapping[str, Any], allowed: type[ChatOptions] = ChatOptions) -> None:
    """Raise RequestError if these are not options of a chat, or of what is sent in one."""
    check_options(given, allowed.__annotations__)
    make_params(None, {name: value for name, value in given.items() if name in _SAMPLING})


def check_options(given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise RequestError for a name that is not known, a flag that is no boolean, or a callback that is no function."""
    _check_names(given, known)
    for name in _FLAGS:
        if not isinstance(given.get(name, False), bool):
            raise RequestError(f"{name} is {given[name]!r}, and must be True or False")
    for name in _CALLBACKS:
        if given.get(name) is not None and not callable(given[name]):
            raise RequestError(f"{name} is {given[name]!r}, and must be a function")


def _check_names(given: Mapping[str, Any], known: Collection[str]) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known))}"
        raise RequestError(f"unknown option {', '.join(unknown)}; {hint}")


def check_count(name: str, value: Any) -> None:
    """Raise RequestError if this is not a whole number from 1 on."""
    if not isinstance(value, int) or value < 1:
        raise RequestError(f"{name} is {value!r}, and must be a whole number of at least 1")


def make_params(params: SamplingParams | None, given: Mapping[str, Any]) -> SamplingParams:
    """The parameters of a request from one object or from single options. Raises RequestError if they are wrong."""
    _check_names(given, _SAMPLING)
    if params is not None and not isinstance(params, SamplingParams):
        raise RequestError(f"params is a {type(params).__name__}, and must be SamplingParams")
    if params is not None and given:
        raise RequestError("give either SamplingParams or single options, not both")
    return params or SamplingParams(**given)


def sampling_of(params: SamplingParams | None, options: Mapping[str, Any]) -> SamplingParams:
    """The parameters of a request from one object, or from those of its options that are no others.

    Raises RequestError if one of the options is unknown or wrong.
    """
    check_options(options, RequestOptions.__annotations__)
    return make_params(params, {name: value for name, value in options.items() if name not in _OTHERS})


def request_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a request has besides its prompt, its sampling and its callbacks. Raises RequestError."""
    if type(options.get("choice", 0)) is not int:
        raise RequestError(f"choice is {options['choice']!r:.80}, and must be a whole number")
    return {name: options[name] for name in _REQUEST if name in options}


def template_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that say how a prompt is encoded. Raises RequestError for tools or values that cannot be ones."""
    _check_tools(options.get("tools") or ())
    _check_template_kwargs(options.get("template_kwargs") or {})
    named = {name: options[name] for name in _PROMPT if name in options}
    return named | dict(options.get("template_kwargs") or {})


def _check_template_kwargs(given: Any) -> None:
    """Raise RequestError if these are no values for a chat template, or have the name of something else."""
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise RequestError(f"template_kwargs is {given!r:.80}, and must be a mapping from names to values")
    if taken := sorted(_NOT_FOR_TEMPLATES & set(given)):
        raise RequestError(f"template_kwargs has {', '.join(taken)}, which is no value for a chat template")


def _check_tools(tools: Any) -> None:
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise RequestError(f"tools is a {type(tools).__name__}, and must be a list of descriptions")
    for number, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"tools[{number}] is {tool!r:.80}, and must be a description as OpenAI's API has it")
        try:
            json.dumps(tool)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"tools[{number}] cannot be written as JSON: {error}") from error


def number_choices(n: int, options: RequestOptions) -> list[RequestOptions]:
    """The options of each of n answers to one prompt: they differ in the number of the choice."""
    check_count("n", n)
    first = options.get("choice", 0)
    return [{**options, "choice": first + number} for number in range(n)]
