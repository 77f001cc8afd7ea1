"""What a created model adds to an ask: a system prompt, messages before those of the request, parameters and a template.

Whatever the request itself gives comes first; what comes after is the model's own, and then the API's defaults. A created
model shares the loaded model and the tree: only the prompt and the parameters of its requests differ.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from bough.errors import RequestError
from bough.models.aliases import Overlay
from bough.models.chat.go_template import to_jinja
from bough.models.chat.messages import SYSTEM_ROLES, check_messages
from bough.models.prompts import Prompts
from bough.models.tokenizer import Tokenizer
from bough.server.serving.ask import Ask
from bough.server.serving.prompting.prompt import ModelFacts
from bough.types import TO_THE_END, Message, SamplingParams

_NAMES = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repeat_penalty",
    "repeat_last_n",
    "presence_penalty",
    "frequency_penalty",
)
_LEAST_TOP_P = 1e-9
_KEPT_TEMPLATES = 16
_PROBE = (
    {"role": "system", "content": "Probe-1"},
    {"role": "user", "content": "Probe-2"},
    {"role": "assistant", "content": "Probe-3"},
    {"role": "user", "content": "Probe-4"},
)


async def with_overlay(ask: Ask, find: Callable[[str], Overlay]) -> Ask:
    """The ask with what its model's name adds. Looks for the overlay in a thread."""
    overlay = await asyncio.to_thread(find, ask.model) if ask.model else Overlay()
    return ask if overlay.is_empty else apply_overlay(ask, overlay)


def apply_overlay(ask: Ask, overlay: Overlay) -> Ask:
    """The ask with an overlay. Raises RequestError if a parameter is out of range."""
    values = {name: value for name, value in sampling_of(overlay).items() if _is_unset(ask, name)}
    context_tokens = overlay.parameters.get("num_ctx")
    return replace(
        ask,
        messages=None if ask.messages is None else _add_messages(ask, overlay),
        params=replace(ask.params, **values),
        unset=ask.unset - values.keys(),
        context_tokens=context_tokens if ask.context_tokens is None else ask.context_tokens,
        template=to_jinja(overlay.template) if overlay.template else ask.template,
    )


def sampling_of(overlay: Overlay) -> dict[str, Any]:
    """The parameters by the names of `SamplingParams`, with Ollama's handling of numbers out of range."""
    given = overlay.parameters
    values = {name: given[name] for name in _NAMES if name in given}
    if "top_k" in values:
        values["top_k"] = max(0, values["top_k"])
    if "top_p" in values:
        values["top_p"] = min(1.0, max(_LEAST_TOP_P, values["top_p"]))
    if given.get("seed", -1) != -1:
        values["seed"] = given["seed"]
    if "num_predict" in given:
        values["max_tokens"] = max(TO_THE_END, given["num_predict"])
    if given.get("stop"):
        values["stop"] = tuple(given["stop"])
    return values


def _is_unset(ask: Ask, name: str) -> bool:
    """Whether the request did not give a parameter. A length, a seed and stop strings have no default of an API."""
    is_absent = name in ("max_tokens", "seed", "stop") and getattr(ask.params, name) in (None, ())
    return is_absent or name in ask.unset


def _add_messages(ask: Ask, overlay: Overlay) -> Sequence[Message]:
    """The system prompt unless there is one, then the overlay's messages, then the others.

    What continues an earlier context has all of that in it already.
    """
    assert ask.messages is not None
    if ask.context:
        return ask.messages
    has_system = bool(ask.messages) and ask.messages[0].get("role") in SYSTEM_ROLES
    own: list[Message] = [{"role": "system", "content": overlay.system}] if overlay.system else []
    system, rest = ([ask.messages[0]], ask.messages[1:]) if has_system else (own, ask.messages)
    return [*system, *overlay.messages, *rest]


class OtherTemplates:
    """The prompts of one loaded model with other chat templates than its own, of those that were used last.

    Any thread may call it: at worst two prepare the same template.
    """

    def __init__(self) -> None:
        self._known: dict[str, Prompts] = {}

    def apply(self, own: ModelFacts, template: str | None) -> ModelFacts:
        """The facts with another template, if one is given. A new one is rendered to find out what it supports."""
        if not template:
            return own
        prompts = self._known.pop(template, None) or own.prompts.with_template(template)
        self._known[template] = prompts
        for oldest in list(self._known)[:-_KEPT_TEMPLATES]:
            self._known.pop(oldest, None)
        found = prompts.tokenizer.template
        return replace(
            own,
            prompts=prompts,
            knows_tools=found.supports_tools,
            knows_thinking=found.supports_thinking,
            has_template=True,
        )


def merge_overlays(base: Overlay, over: Overlay) -> Overlay:
    """One overlay over another: what the second has replaces the first's, parameters one by one."""
    return Overlay(
        system=over.system or base.system,
        template=over.template or base.template,
        parameters={**base.parameters, **over.parameters},
        messages=over.messages or base.messages,
        license=over.license or base.license,
    )


def check_overlay(overlay: Overlay, load: Callable[[], Tokenizer]) -> Overlay:
    """The overlay with the capabilities of its template. The tokenizer is loaded if there is a template.

    Raises RequestError if parameters, messages or template cannot be used.
    """
    if overlay.messages:
        check_messages(overlay.messages)
    SamplingParams(**sampling_of(overlay))
    if overlay.parameters.get("num_ctx", 1) < 1:
        raise RequestError(f"num_ctx is {overlay.parameters['num_ctx']}, and must be at least 1")
    if not overlay.template:
        return overlay
    template = load().with_template(to_jinja(overlay.template)).template
    text = template.render(_PROBE, True, None, {}).text
    if "Probe-2" not in text or "Probe-4" not in text:
        raise RequestError("the template leaves out messages of the user")
    tools = ("tools",) if template.supports_tools else ()
    thinking = ("thinking",) if template.supports_thinking else ()
    return replace(overlay, capabilities=("completion", *tools, *thinking))
