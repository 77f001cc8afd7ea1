"""The options of requests and of `load`, typed: editors complete them, and type checkers find misspelt ones."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypedDict

from bough.errors import RequestError
from bough.models.chat.tools import find_problem
from bough.prompting.ask import Ask, ToolChoice
from bough.prompting.user_prompt import read_prompt
from bough.python_types import describe_tool, make_schema
from bough.sampling_params import PARAMETERS, SamplingOptions, SamplingParams
from bough.types import Prompt, Tool

_PROMPT = ("raw", "tools")
_REQUEST = {"salt": "salt", "keep_state": "keep_state", "choice": "first_choice", "prompt_logprobs": "scores_prompt"}
"""Options by the fields of an `Ask`."""

_EARLIER = {"store": "keep_state"}  # names that are still taken
_OTHERS = {*_PROMPT, *_REQUEST, *_EARLIER, "template_kwargs", "tool_choice", "is_cancelled", "on_progress"}
_FLAGS = ("raw", "keep_state", "store", "prompt_logprobs", "truncate", "normalize")
_CALLBACKS = ("is_cancelled", "on_progress")
_NOT_FOR_TEMPLATES = {"chat_template", "continue_final_message", "limit", "messages", "prompt", "self", *_PROMPT}


class PrefixOptions(TypedDict, total=False):
    """How messages become token ids, and in which tree: equal prompts under two salts share nothing."""

    salt: str
    tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None
    template_kwargs: Mapping[str, Any] | None


class PromptOptions(PrefixOptions, total=False):
    """How a prompt of any kind becomes token ids. `raw` takes a text without the chat template."""

    raw: bool


class SharedOptions(SamplingOptions, PrefixOptions, total=False):
    """Options of chats and all requests.

    `tool_choice` is "auto", "none", "required" or the name of a tool that must be called. `keep_state=False` keeps nothing,
    as does its earlier name `store`; `prompt_logprobs` scores the prompt's tokens, too.
    """

    tool_choice: str | None
    keep_state: bool
    store: bool
    prompt_logprobs: bool


class ChatOptions(SharedOptions, total=False):
    """Options of a chat for all its requests. `choice` numbers several answers to one prompt with one seed."""

    choice: int


class SendAllOptions(SharedOptions, total=False):
    """Options of a message to several chats.

    The thread or task that waits for the answers calls `is_cancelled`. If it returns True, they end where they are; if it
    raises, the requests end, and the error is raised there.
    """

    is_cancelled: Callable[[], bool] | None


class SendOptions(ChatOptions, SendAllOptions, total=False):
    """Options of a message to one chat. The waiting thread or task calls `on_progress(done, total)`, in prompt tokens."""

    on_progress: Callable[[int, int], None] | None


class BatchOptions(SendAllOptions, PromptOptions, total=False):
    """All options of several requests together."""


class RequestOptions(SendOptions, BatchOptions, total=False):
    """All options of one request."""


class EmbedOptions(TypedDict, total=False):
    """How texts become vectors.

    `dimensions` keeps the first numbers of each vector; by default all. A text that is too long is cut, or with
    `truncate=False` raises PromptTooLong. `normalize=False` leaves out scaling to length 1.
    """

    dimensions: int | None
    truncate: bool
    normalize: bool
    salt: str


class LoadOptions(TypedDict, total=False):
    """The settings as keywords of `load`. Sizes may be texts such as "2GB", times such as "12h"."""

    engine: Literal["auto", "torch", "mlx"]
    device: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    weights: Literal["auto", "packed", "float32", "q8_0", "q4_0"]
    activations: Literal["exact", "int8"]
    kv: Literal["auto", "float32", "float16", "bfloat16", "int8"]
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
    store_secret_file: str | Path | None
    store_budget: int | str | None
    store_ttl: float | str | None
    salt_share: float
    trust_remote_code: bool
    verify_cache: float
    data_folder: str | Path
    cache_folder: str | Path


def check_chat_options(given: Mapping[str, Any], allowed: type[ChatOptions] = ChatOptions) -> None:
    """Raise RequestError if these are not options of a chat, or of a message in one."""
    check_options(given, allowed.__annotations__)
    make_params(None, {name: value for name, value in given.items() if name in PARAMETERS})


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
    if not isinstance(value, int) or value < 1:
        raise RequestError(f"{name} is {value!r}, and must be a whole number of at least 1")


def make_params(params: SamplingParams | None, given: Mapping[str, Any]) -> SamplingParams:
    """The parameters of a request from one object or from single options. Raises RequestError if they are wrong."""
    _check_names(given, PARAMETERS)
    if params is not None and not isinstance(params, SamplingParams):
        raise RequestError(f"params is a {type(params).__name__}, and must be SamplingParams")
    if params is not None and given:
        raise RequestError("give either SamplingParams or single options, not both")
    return params or SamplingParams(**given)


def ask_of(prompt: Prompt, params: SamplingParams | None, options: Mapping[str, Any]) -> Ask:
    """What a request asks. Raises RequestError for a wrong prompt, and for an unknown or wrong option."""
    ask, sampling = ask_of_prompt(prompt, options), sampling_of(params, options)
    choice = ToolChoice.of(options.get("tool_choice"), ask.tools)
    if choice.mode == "required" and sampling.format is not None:
        raise RequestError(
            f"tool_choice {options['tool_choice']!r} and format both say what the answer is: give one of them"
        )
    return replace(ask, params=sampling, tool_choice=choice, **request_of(options))


def ask_of_prompt(prompt: Prompt, options: Mapping[str, Any]) -> Ask:
    """The ask of a prompt alone. Raises RequestError."""
    if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], str):
        raise RequestError("a prompt is a text, messages, or token ids, and this is a list of texts: `batch` takes those")
    return read_prompt(prompt, **template_of(options))


def sampling_of(params: SamplingParams | None, options: Mapping[str, Any]) -> SamplingParams:
    """The parameters of a request from one object or from its options. Raises RequestError for an unknown or wrong one."""
    check_options(options, RequestOptions.__annotations__)
    return make_params(params, {name: value for name, value in options.items() if name not in _OTHERS})


def request_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an ask besides its prompt and its sampling. Raises RequestError."""
    if type(options.get("choice", 0)) is not int:
        raise RequestError(f"choice is {options['choice']!r:.80}, and must be a whole number")
    options = with_present_names(options)
    return {field: options[name] for name, field in _REQUEST.items() if name in options}


def with_present_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with their present names instead of earlier ones. Raises RequestError if one is given by both names."""
    if both := [name for name, present in _EARLIER.items() if name in options and present in options]:
        raise RequestError(f"give {_EARLIER[both[0]]} alone: {both[0]} is its earlier name")
    return {_EARLIER.get(name, name): value for name, value in options.items()}


def template_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options for encoding a prompt. Raises RequestError for wrong tools or values."""
    tools = read_tools(options.get("tools"))
    given: Any = options.get("template_kwargs") or {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise RequestError(f"template_kwargs is {given!r:.80}, and must be a mapping from names to values")
    if taken := sorted(_NOT_FOR_TEMPLATES & set(given)):
        raise RequestError(f"template_kwargs has {', '.join(taken)}, which is no value for a chat template")
    return {name: options[name] for name in _PROMPT if name in options} | ({"tools": tools} if tools else {}) | dict(given)


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options under their present names, with tools and a format that can be written as JSON. Raises RequestError."""
    plain = with_present_names(options)
    if tools := read_tools(plain.get("tools")):
        plain["tools"] = tools
    if callable(plain.get("format")):
        plain["format"] = make_schema(plain["format"])
    return plain


def read_tools(tools: Any) -> list[Tool]:
    """The tools as OpenAI's API has them; functions and classes are described. Raises RequestError, with its number."""
    if isinstance(tools, str | Mapping) or not isinstance(tools or (), Sequence):
        raise RequestError(f"tools is a {type(tools).__name__}, and must be a list of functions or of descriptions")
    return [_read_tool(f"tools[{number}]", tool) for number, tool in enumerate(tools or ())]


def _read_tool(place: str, tool: Any) -> Tool:
    if callable(tool):
        return describe_tool(tool)
    if not isinstance(tool, Mapping):
        raise RequestError(f"{place} is {tool!r:.80}, and must be a function, or a description as OpenAI's API has it")
    function = tool.get("function", tool)
    if problem := find_problem(function, needs_parameters=True):
        raise RequestError(f"{place}{'.function' if 'function' in tool else ''}{problem}")
    try:
        json.dumps(tool)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{place} cannot be written as JSON: {error}") from error
    return tool if "function" in tool else {"type": "function", "function": tool}


def number_choices(n: int, options: RequestOptions) -> list[RequestOptions]:
    """The options of each of n answers to one prompt, which differ in the number of the choice."""
    check_count("n", n)
    first = options.get("choice", 0)
    return [{**options, "choice": first + number} for number in range(n)]
