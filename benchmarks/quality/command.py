"""The command `quality`."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from benchmarks.quality.compare import REFERENCE, Quality, add_up, measure_quality
from benchmarks.quality.prompts import PROMPTS
from bough.bench.variants import describe_variants, load_variants, variant_lines
from bough.cli import options
from bough.cli.bench import BenchReport, Json, Model, Weights, load_model, read_weights


@options.with_flags(options.setting_flags("threads"))
def quality(
    model: Model = None,
    weights: Weights = "auto",
    kv: Annotated[str, typer.Option(metavar="LIST", help="Types of rows to compare instead, such as float16,int8.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="Positions to compare, all prompts together.")] = 1000,
    prompts: Annotated[int, typer.Option(min=1, max=len(PROMPTS), help="How many of the built-in prompts.")] = 5,
    as_json: Json = False,
    **settings: Any,
) -> None:
    """What other weights, or other types of rows, do to the answers: tokens, logits and KL divergence against float32."""
    setting, names = ("kv", kv.split(",")) if kv else ("weights", read_weights(weights))
    others = [each for each in names if each != REFERENCE]
    if not others:
        raise typer.BadParameter(f"{kv or weights!r} names no {setting} to compare with {REFERENCE}")
    report, found, chosen = BenchReport("quality", as_json), list[Quality](), PROMPTS[:prompts]
    load = partial(load_model, model, None, **settings)
    with (
        load_variants([REFERENCE, *others], lambda each: load(**{setting: each})) as variants,
        report.counting("quality", prompts) as count,
    ):
        for part in measure_quality(variants, chosen, -(-tokens // prompts)):
            found += part
            count()
        found += [add_up([each for each in found if each.weights == name]) for name in others]
        about, lines = describe_variants(variants), variant_lines(variants)
    columns = ("prompt", setting, "equal tokens", "same best", "KL mean", "KL max", "logits", "lead")
    report.table(f"against {REFERENCE}", columns, map(_quality_row, found))
    for line in [report.machine_line(), *lines]:
        report.line(line)
    report.finish({**about, "figures": [each.as_dict() for each in found]})


def _quality_row(each: Quality) -> tuple[str, ...]:
    counts = (f"{each.equal_tokens:,} of {each.positions:,}", f"{each.same_best:,} of {each.positions:,}")
    sizes = (each.kl_mean, each.kl_max, each.largest_difference)
    lead = "–" if each.is_all_equal else f"{each.largest_gap:.1e}"
    return (each.prompt, each.weights, *counts, *(f"{size:.1e}" if size else "0" for size in sizes), lead)
