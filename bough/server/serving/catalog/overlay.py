"""Created models: the system prompt, messages, parameters and template that they add to an ask.

The request's own values come first, then the created model's, then the API's defaults. A created model shares the loaded
model and the tree: only the prompt and the parameters of its requests differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bough.errors import RequestError
from bough.models.aliases import Overlay
from bough.models.chat.go_template import to_jinja
from bough.models.chat.messages import SYSTEM_ROLES, check_messages
from bough.models.tokenizer import Tokenizer
from bough.prompting.ask import Ask
from bough.sampling_params import PARAMETERS, SamplingParams
from bough.types import Message

_ANY_SEED = -1
_PROBE = (
    {"role": "system", "content": "Probe-1"},
    {"role": "user", "content": "Probe-2"},
    {"role": "assistant", "content": "Probe-3"},
    {"role": "user", "content": "Probe-4"},
)


def apply_overlay(ask: Ask, overlay: Overlay) -> Ask:
    """The ask with an overlay. Raises RequestError if a parameter is out of range."""
    values = {name: value for name, value in sampling_of(overlay.parameters).items() if _is_unset(ask, name)}
    context_tokens = overlay.parameters.get("num_ctx")
    return replace(
        ask,
        messages=None if ask.messages is None else _add_messages(ask, overlay),
        params=replace(ask.params, **values),
        unset=ask.unset - values.keys(),
        context_tokens=context_tokens if ask.context_tokens is None else ask.context_tokens,
        template=to_jinja(overlay.template) if overlay.template else ask.template,
    )


def sampling_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Ollama's options by the names of `SamplingParams`, with Ollama's handling of numbers out of range."""
    found = {name: (each, options.get(each.ollama)) for name, each in PARAMETERS.items() if each.ollama}
    values = {name: each.clamp(value) for name, (each, value) in found.items() if value is not None}
    if values.get("seed") == _ANY_SEED:
        del values["seed"]
    return values


def _is_unset(ask: Ask, name: str) -> bool:
    """Whether the request did not give a parameter. APIs have no default for a length, a seed and stop strings."""
    is_absent = name in ("max_tokens", "seed", "stop") and getattr(ask.params, name) in (None, ())
    return is_absent or name in ask.unset


def _add_messages(ask: Ask, overlay: Overlay) -> Sequence[Message]:
    """The system prompt unless there is one, the overlay's messages, the others; unless a context has them already."""
    assert ask.messages is not None
    if ask.context:
        return ask.messages
    has_system = bool(ask.messages) and ask.messages[0].get("role") in SYSTEM_ROLES
    own: list[Message] = [{"role": "system", "content": overlay.system}] if overlay.system else []
    system, rest = ([ask.messages[0]], ask.messages[1:]) if has_system else (own, ask.messages)
    return [*system, *overlay.messages, *rest]


def merge_overlays(base: Overlay, over: Overlay) -> Overlay:
    """One overlay over another, parameters one by one."""
    return Overlay(
        system=over.system or base.system,
        template=over.template or base.template,
        parameters={**base.parameters, **over.parameters},
        messages=over.messages or base.messages,
        license=over.license or base.license,
    )


def check_overlay(overlay: Overlay, load: Callable[[], Tokenizer]) -> Overlay:
    """The overlay with the capabilities of its template. Raises RequestError if a part of it is wrong."""
    if overlay.messages:
        check_messages(overlay.messages)
    SamplingParams(**sampling_of(overlay.parameters))
    if overlay.parameters.get("num_ctx", 1) < 1:
        raise RequestError(f"num_ctx is {overlay.parameters['num_ctx']}, and must be at least 1")
    if not overlay.template:
        return overlay
    template = load().with_template(to_jinja(overlay.template)).template
    text = template.render(_PROBE).text
    if "Probe-2" not in text or "Probe-4" not in text:
        raise RequestError("the template leaves out messages of the user")
    tools = ("tools",) if template.supports_tools else ()
    thinking = ("thinking",) if template.supports_thinking else ()
    return replace(overlay, capabilities=("completion", *tools, *thinking))
