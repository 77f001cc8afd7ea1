"""What an answer cost: for people after `--verbose`, for programs with `--json`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bough.cli.columns import describe
from bough.types import Completion


def summarise(completion: Completion, load_s: float) -> list[str]:
    """Lines with the counts, times and rates of one answer."""
    usage, timings = completion.usage, completion.timings
    share = usage.cached_tokens / usage.prompt_tokens if usage.prompt_tokens else 0.0
    facts = {
        "total": f"{timings.total_s:.2f} s",
        "load": f"{load_s:.2f} s",
        "prompt": f"{usage.prompt_tokens:,} tokens",
        "cached": f"{usage.cached_tokens:,} tokens ({share:.0%})",
        "computed": _rate(usage.computed_tokens, usage.computed_tokens, timings.prefill_s),
        "first token": f"{timings.first_token_s:.3f} s",
        "generated": _rate(usage.completion_tokens, usage.completion_tokens - 1, timings.decode_s),
        "finished": completion.finish_reason,
    }
    return describe(facts, indent="")


def _rate(num_tokens: int, num_timed: int, seconds: float) -> str:
    """`num_timed` of the tokens took so many seconds: the first generated token comes from the prefill."""
    rate = f" ({num_timed / seconds:,.1f} tokens/s)" if num_timed > 0 and seconds > 0 else ""
    return f"{num_tokens:,} tokens in {seconds:.2f} s{rate}"


def as_dict(completion: Completion, model: str, load_s: float) -> dict[str, Any]:
    """One answer as plain data."""
    return {
        "model": model,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "usage": asdict(completion.usage),
        "timings": {"load_s": load_s} | asdict(completion.timings),
    }
