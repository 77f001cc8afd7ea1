"""The drawings of docs/cache.md and the home page, made of real trees: `python docs/drawings/draw.py` (the default model).

Each bar is an edge of the tree: its place tells the range of tokens, counted from the root, its height what hangs below it.
The texts, ranges and counts are those that the run gave. The SVG files are committed, and look the same on light and dark.
"""

from __future__ import annotations

import html
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import bough

FOLDER = Path(__file__).parent
SYSTEM = "You are a librarian in a small town. You recommend one book at a time, and say in one sentence why."
QUESTIONS = ("What shall I read about rivers?", "What shall I read about bees?", "When do you open?")
WIDTH, ROW, GAP, LABEL = 960, 40, 3, 42
MEMORY_MB = 20
COLORS = {"new": "#2a9d8f", "known": "#a8d5cf", "device": "#2a9d8f", "disk": "#d9c9a3", "computed": "#e07a5f"}
INK, FAINT, PAPER = "#1f2d2b", "#5d6f6c", "#fbfcfb"


@dataclass(frozen=True)
class Bar:
    """A rectangle with its text, in tokens from the root and in rows from the top."""

    start: int
    end: int
    row: float
    num_rows: float
    text: str
    color: str


def main() -> None:
    with bough.load(disk=0) as runner:
        _write("growing.svg", *_draw_growing(runner))
        runner.cache.clear()
        _write("one-request.svg", *_draw_request(runner))
    with tempfile.TemporaryDirectory() as folder:
        _write("tiers.svg", *_draw_tiers(Path(folder)))


def _draw_growing(runner: bough.Runner) -> tuple[int, list[str]]:
    """The tree after each of three questions to one librarian: what was there before, and what each one added."""
    parts, top = list[str](), 0
    before: list[dict[str, Any]] = []
    for number, question in enumerate(QUESTIONS, 1):
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        usage = runner.generate(messages, max_tokens=12).usage
        roots = runner.cache.tree().as_dict()[""]
        parts += _heading(top, f"{number}. “{question}”", f"{usage.cached_tokens} of {usage.prompt_tokens} tokens reused")
        bars = list(_lay_out(roots, 0, partial(_color_by_age, before)))
        parts += _draw_bars(bars, top + LABEL, 58)
        top += LABEL + ROW * round(max(bar.row + bar.num_rows for bar in bars)) + 26
        before = roots
    return top, [*parts, *_legend(top, new="computed by this request", known="known before")]


def _color_by_age(before: list[dict[str, Any]], node: dict[str, Any]) -> str:
    return "known" if _was_known(before, node) else "new"


def _was_known(before: list[dict[str, Any]], node: dict[str, Any]) -> bool:
    """Whether the earlier tree had these tokens in this place: an edge may have been split or grown since."""
    return any(
        (
            each["start"] <= node["start"]
            and node["end"] <= each["end"]
            and each["token_ids"][node["start"] - each["start"] : node["end"] - each["start"]] == node["token_ids"]
        )
        or _was_known(each["children"], node)
        for each in before
    )


def _draw_request(runner: bough.Runner) -> tuple[int, list[str]]:
    """One prompt over the tree: how far it is known, and what is computed."""
    chat = runner.chat(system=SYSTEM, max_tokens=12)
    chat.send(QUESTIONS[0])
    roots = runner.cache.tree().as_dict()[""]
    answer = chat.send("And a shorter one?")
    usage = answer.usage
    parts = _heading(0, "The tree before the second turn", f"{roots[0]['end']} tokens")
    parts += _draw_bars(list(_lay_out(roots, 0, lambda node: "known")), LABEL, usage.prompt_tokens + 4)
    top = LABEL + ROW + 26
    parts += _heading(top, "The prompt of the second turn", f"{usage.prompt_tokens} tokens")
    bars = [
        Bar(0, usage.cached_tokens, 0, 1, f"{usage.cached_tokens} tokens reused", "known"),
        Bar(usage.cached_tokens, usage.prompt_tokens, 0, 1, f"{usage.computed_tokens} computed", "computed"),
    ]
    top += LABEL
    parts += _draw_bars(bars, top, usage.prompt_tokens + 4)
    top += ROW + 26
    return top, [*parts, *_legend(top, known="in the tree, and reused", computed="computed")]


def _draw_tiers(folder: Path) -> tuple[int, list[str]]:
    """A tree that is larger than its memory: what was used last is on the device, the rest on disk."""
    with bough.load(cache_folder=folder, disk="1GB", lanes=1, device_memory=f"{MEMORY_MB}MB") as runner:
        for number, topic in enumerate(("rivers", "bees", "snow", "bread", "stars"), 1):
            facts = [f"Fact {fact} about {topic}: there is more to tell." for fact in range(12 * number, 12 * number + 16)]
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": " ".join(facts)}]
            runner.generate(messages, max_tokens=2)
            runner.cache.flush()
        roots = runner.cache.tree().as_dict()[""]
    bars = list(_lay_out(roots, 0, lambda node: "device" if "device" in node["tiers"] else "disk"))
    parts = _heading(0, "Five long questions, one after the other", f"1 lane, memory for lane and tree: {MEMORY_MB} MB")
    top = LABEL
    parts += _draw_bars(bars, top, max(bar.end for bar in bars))
    top += ROW * round(max(bar.row + bar.num_rows for bar in bars)) + 26
    return top, [*parts, *_legend(top, device="in memory", disk="on disk alone")]


def _lay_out(nodes: Sequence[dict[str, Any]], row: float, color: Callable[[dict[str, Any]], str]) -> Iterator[Bar]:
    """A bar for each node; children stand to the right of their parent, each below the other."""
    for node in nodes:
        below = list(_lay_out(node["children"], row, color))
        num_rows = max([bar.row + bar.num_rows - row for bar in below], default=1)
        yield Bar(node["start"], node["end"], row, num_rows, _plain(node["text"]), color(node))
        yield from below
        row += num_rows


def _plain(text: str) -> str:
    return " ".join(text.replace("<|im_start|>", "").replace("<|im_end|>", "").split())


def _draw_bars(bars: Sequence[Bar], top: float, num_tokens: int) -> list[str]:
    parts = []
    unit = (WIDTH - 40) / num_tokens
    for bar in bars:
        x, y = 20 + bar.start * unit, top + bar.row * ROW
        width, height = (bar.end - bar.start) * unit - GAP, bar.num_rows * ROW - GAP
        fill = COLORS[bar.color]
        parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="4" fill="{fill}"/>')
        ink = "#ffffff" if bar.color in ("new", "device", "computed") else INK
        middle = y + height / 2
        parts.append(_text(x + 7, middle - 2, _fit(bar.text, width - 12, 6.9), 12, ink))
        parts.append(_text(x + 7, middle + 12, _fit(f"[{bar.start}, {bar.end})", width - 12, 5.6), 10, ink))
    return parts


def _heading(top: float, title: str, note: str) -> list[str]:
    return [_text(20, top + 26, title, 15, INK, "600"), _text(WIDTH - 20, top + 26, note, 13, FAINT, anchor="end")]


def _legend(top: float, **names: str) -> list[str]:
    parts, x = [], 20.0
    for color, name in names.items():
        parts.append(f'<rect x="{x:.1f}" y="{top - 2:.1f}" width="14" height="14" rx="3" fill="{COLORS[color]}"/>')
        parts.append(_text(x + 20, top + 10, name, 12, FAINT))
        x += 44 + 6.6 * len(name)
    return parts


def _fit(text: str, width: float, letter: float) -> str:
    most = int(width / letter)
    return text if len(text) <= most else text[: most - 1].rstrip() + "…" if most > 3 else ""


def _text(x: float, y: float, text: str, size: int, ink: str, weight: str = "400", anchor: str = "start") -> str:
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{ink}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{html.escape(text, quote=False)}</text>' if text else ""


def _write(name: str, height: int, parts: list[str]) -> None:
    size = f'width="{WIDTH}" height="{height + 28}" viewBox="0 0 {WIDTH} {height + 28}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, sans-serif">',
        f'<rect width="{WIDTH}" height="{height + 28}" rx="10" fill="{PAPER}"/>',
        *filter(None, parts),
        "</svg>",
    ]
    (FOLDER / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
