"""One frame of `bough tree --live`: the server, its requests, its figures and its trees, in lines of a width and a height.

`draw_frame` is a pure function of what the server has told. No line has more columns than the width; there are never more
lines than the height.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from bough.cli.live.branches import TIER_STYLES, choose, draw_branches
from bough.cli.live.line import Note, cut_line, write_line
from bough.cli.live.mirror import LiveRequest, Mirror
from bough.cli.terminal.columns import memory
from bough.cli.terminal.screen import neutralise

STATE_STYLES = {
    "waiting": "yellow",
    "loading": "blue",
    "computing": "cyan",
    "answering": "green",
    "failed": "red",
}

_BAR = 12  # columns of a progress bar
_SHOWN_ENDED = 3
_ID_COLUMNS = 8


def draw_frame(mirror: Mirror, server: str, width: int, height: int, problem: str = "") -> list[Text]:
    """All lines. `problem` says why there is no news, if the server has gone."""
    lines = [
        cut_line(Text.assemble(("bough", "bold"), f" at {server}", ("" if problem else " · Ctrl-C ends", "dim")), width)
    ]
    if problem:
        lines.append(cut_line(Text(neutralise(problem), "bold red"), width))
    lines += _draw_requests(mirror, width, max(1, height // 3))
    headers = {model: _draw_model(mirror, model, width) for model in sorted(mirror.models)}
    if not headers:
        lines.append(cut_line(Text("no model is loaded: a request loads one", "dim"), width))
    fixed = len(lines) + sum(map(len, headers.values()))
    chosen = choose(mirror, max(0, height - fixed))
    if len(chosen) < sum(len(nodes) for tree in mirror.trees.values() for nodes in tree.values()):
        chosen = choose(mirror, max(0, height - fixed - len(headers)))  # with a line for those that are left out
    for model, header in headers.items():
        lines += [*header, *draw_branches(mirror, model, chosen, width)]
    return lines[:height]


def _draw_requests(mirror: Mirror, width: int, room: int) -> list[Text]:
    """The running requests, then a few that have ended."""
    running = mirror.running
    shown = running if len(running) <= room else running[: room - 1]
    ended = mirror.ended[: max(0, min(_SHOWN_ENDED, room - len(running)))]
    has_models = len(mirror.models) > 1
    lines = [draw_request(each, width, has_model=has_models) for each in (*shown, *ended)]
    if len(shown) < len(running):
        lines.append(cut_line(Text(f"… and {len(running) - len(shown):,} more requests", "dim"), width))
    return lines


def draw_request(request: LiveRequest, width: int, *, has_model: bool = False) -> Text:
    """One line for a request. Notes that have no room are left out, the last ones first."""
    style = STATE_STYLES.get(request.state, "dim")
    line = Text.assemble(
        (f"{request.state:<10}", style),
        f" {neutralise(request.request_id.removeprefix('req_')[:_ID_COLUMNS]):<{_ID_COLUMNS}}",
    )
    line = write_line(line, _request_notes(request, has_model), width)
    if request.has_ended and request.state != "failed":
        line.stylize("dim")
    return line


def _request_notes(request: LiveRequest, has_model: bool) -> list[Note]:
    prompt = f"{request.prompt_tokens:,} prompt tokens"
    if request.state in ("loading", "computing"):
        prompt = f"{_draw_bar(request.done_tokens, request.prompt_tokens)} {request.done_tokens:,} of {prompt}"
    notes = [(prompt, "")]
    if request.state != "waiting":
        notes += [(f"{request.cached_tokens:,} cached", "green"), (f"{request.computed_tokens:,} computed", "cyan")]
    if request.error:
        notes.append((neutralise(" ".join(request.error.split())), "red"))
    if request.completion_tokens:
        notes.append((f"{request.completion_tokens:,} answered", ""))
    if request.first_token_s is not None:
        without = (
            f", without the tree about {seconds(request.without_s)}" if request.without_s and request.cached_tokens else ""
        )
        notes.append((f"first token {seconds(request.first_token_s)}{without}", ""))
    if has_model:
        notes.append((neutralise(request.model), "dim"))
    if request.queue_s >= 0.01:
        notes.append((f"waited {seconds(request.queue_s)}", ""))
    return [*notes, (f"{seconds(request.total_s)} in all", "")] if request.has_ended else notes


def seconds(number: float) -> str:
    """A time in a form of few digits: 12 ms, 1.25 s, 3.1 min."""
    if number < 1:
        return f"{number * 1000:.0f} ms"
    return f"{number:.2f} s" if number < 60 else f"{number / 60:.1f} min"


def _draw_bar(done: int, total: int) -> str:
    filled = min(_BAR, _BAR * done // total) if total else 0
    return "█" * filled + "░" * (_BAR - filled)


def _draw_model(mirror: Mirror, model: str, width: int) -> list[Text]:
    """The name of a model and what it runs on; its figures below."""
    about, figures = mirror.models[model], mirror.figures.get(model)
    line = Text(neutralise(model), "bold underline")
    notes: list[Note] = [(f"{about['engine']} on {about['device']}", ""), (f"context {about['context_tokens']:,}", "")]
    if figures is None:
        return [Text(), write_line(line, notes, width)]
    if "lanes" in figures:  # one who sees only his own tree is not told of the others
        notes += [(f"{figures['busy_lanes']} of {figures['lanes']} lanes busy", ""), (f"{figures['queue']} waiting", "")]
    notes.append((_describe_reuse(figures), "green"))
    return [Text(), write_line(line, notes, width), write_line(Text(), _tree_notes(figures), width)]


def _describe_reuse(figures: Mapping[str, Any]) -> str:
    prompt, cached = figures["prompt_tokens"], figures["cached_tokens"]
    if not prompt:
        return "no prompts yet"
    return f"{100 * cached / prompt:.0f} % of {prompt:,} prompt tokens reused"


def _tree_notes(figures: Mapping[str, Any]) -> list[Note]:
    notes: list[Note] = [
        (f"{figures['nodes']:,} node{'' if figures['nodes'] == 1 else 's'}", ""),
        (f"{figures['tokens']:,} tokens", ""),
    ]
    for tier, each in figures["tiers"].items():
        budget = each.get("budget_bytes")
        of = f" of {memory(budget)}" if budget else ""
        notes.append((f"{tier} {memory(each['bytes'])}{of}", TIER_STYLES.get(tier, "")))
    if figures.get("lane_bytes"):
        notes.append((f"lanes {memory(figures['lane_bytes'])}", ""))
    return notes
