"""A map-reduce over a document: summarise its parts together, then summarise the summaries.

The instruction stands before the part of the document, so that all prompts begin alike. It is computed once, before the
first. When one part changes and everything is run again, only that part is computed: the others are still in the tree.

    python examples/map_reduce.py [--model NAME] [--tokens N] [--file FILE]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import bough

DOCUMENT = Path(__file__).parent / "orchard.md"
INSTRUCTION = """You write summaries. You get a text, and answer with one sentence of at most twenty words. You keep names
and numbers as they are in the text, and add nothing that is not in the text. You do not say that it is a summary."""
EXAMPLES = [
    (
        "## The mill\n\nThe mill by the river was built in 1790. It burnt down twice, in 1811 and in 1862. Each time the "
        "miller built it again. Since 1990 it has been a museum, and 4,000 people see it every year.",
        "The mill was built in 1790, burnt down twice, and has been a museum since 1990.",
    ),
    (
        "## The ferry\n\nBefore there was a bridge, a ferry crossed the river forty times a day. It took two carts or "
        "thirty people. The fare was one penny, and nothing for the doctor.",
        "Before the bridge, a ferry crossed the river forty times a day for a penny.",
    ),
    (
        "## The school\n\nThe school has 86 pupils and five teachers. In winter the older pupils read to the younger "
        "ones. The roof was mended in 2019 by the parents, because the town had no money.",
        "The school has 86 pupils and five teachers, and its roof was mended by parents in 2019.",
    ),
]


def split(document: str) -> list[str]:
    """The parts of a document: each begins with a heading."""
    return ["## " + part.strip() for part in document.split("## ") if part.strip()]


def make_prefix() -> list[bough.Message]:
    """What all prompts have in common: the instruction, and the examples as a conversation."""
    told = [("system", INSTRUCTION)]
    for example, summary in EXAMPLES:
        told += [("user", example), ("assistant", summary)]
    return [{"role": role, "content": content} for role, content in told]


def summarise(runner: bough.Runner, texts: list[str], tokens: int) -> list[bough.Completion]:
    """A sentence about each text. All are computed together, as many at a time as there are lanes."""
    prompts = [[*make_prefix(), {"role": "user", "content": text}] for text in texts]
    return runner.batch(prompts, max_tokens=tokens, stop=["\n", ". "])


def main() -> None:
    parser = argparse.ArgumentParser(description="A map-reduce over a document.")
    parser.add_argument("--model", help="a name, a folder or a GGUF file; not given: the default model")
    parser.add_argument("--tokens", type=int, default=32, help="the most tokens of a summary")
    parser.add_argument("--file", type=Path, default=DOCUMENT, help="a text with headings that begin with ##")
    options = parser.parse_args()
    parts = split(options.file.read_text(encoding="utf-8"))
    with bough.load(options.model, disk=0) as runner:
        prefix = runner.warm(make_prefix())
        mapped = summarise(runner, parts, options.tokens)
        reduced = summarise(runner, ["\n".join(each.text for each in mapped)], 2 * options.tokens)
        changed = [*parts[:-1], parts[-1] + " In 2024 nothing was lost."]
        again = summarise(runner, changed, options.tokens)
    for part, summary in zip(parts, mapped, strict=True):
        print(f"{part.splitlines()[0].removeprefix('## ')}: {summary.text}")
    print(f"\nIn all: {reduced[0].text}\n")
    print(f"{'':<17} {'requests':>8} {'prompts':>8} {'reused':>8} {'computed':>8}")
    print_row("instruction", [prefix])
    print_row("map", mapped)
    print_row("reduce", reduced)
    print_row("map, one changed", again)


def print_row(name: str, completions: list[bough.Completion]) -> None:
    kinds = ("prompt", "cached", "computed")
    sums = (sum(getattr(each.usage, f"{kind}_tokens") for each in completions) for kind in kinds)
    print(f"{name:<17} {len(completions):8}", *(f"{number:8,}" for number in sums))


if __name__ == "__main__":
    main()
