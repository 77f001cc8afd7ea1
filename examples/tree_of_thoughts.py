"""A tree of thoughts: 32 branches of one conversation, level by level, and only the best go on.

At each of four levels the best conversations so far are forked into eight. All eight think of a next step together, and a
fork of each is asked whether the step is a good one. The probability of "Yes" is the score. A fork costs nothing, and what
two branches have in common is computed once, however often it is asked about.

    python examples/tree_of_thoughts.py [--model NAME] [--tokens N]
"""

from __future__ import annotations

import argparse
import math

import bough

LEVELS, BRANCHES, KEPT = 4, 8, 2
SYSTEM = """You plan things for a small town, step by step. A step is one short sentence that begins with a verb. It says
what to do, not why. A good step is concrete, cheap, and can be done within a month by people who live there. It goes on
from the steps before, and repeats none of them.

About the town: It has 9,000 people, two schools, a railway station, a brewery and a hospital. Most people work in the city,
which is twelve minutes away by train. The main street is narrow, and full of cars from seven to nine in the morning. A path
along the river leads from the northern houses to the station; it is not lit, and floods in March. The town owns a workshop
that stands empty, a sports ground, and eighty bicycle stands in a cellar. There is a market on Saturdays, where the fire
brigade, the library and the choir have a table. The mayor has 20,000 euros a year for such plans. The hospital and the
brewery would help, if they are asked. The older pupils look for work in summer.

Examples of good steps: Ask the hospital to let its staff use the showers in the morning. Paint a white line along the river
path. Put ten of the stands from the cellar in front of the station. Examples of bad steps: Improve the traffic. Build a
tunnel. Think about what the people want."""
GOAL = "The goal: more people ride a bicycle to work. What is the first step?"
NEXT = "What is the next step?"
JUDGE = "Is this a good step? Answer Yes or No."


def think(runner: bough.Runner, chats: list[bough.Chat], question: str, tokens: int) -> list[bough.Completion]:
    """One more step in each chat. With one seed, every chat of the list draws differently."""
    return runner.send_all(chats, question, max_tokens=tokens, temperature=0.8, top_p=0.95, seed=7, stop=["\n"])


def judge(runner: bough.Runner, chats: list[bough.Chat]) -> list[bough.Completion]:
    """The first word of a verdict on each chat. The chats are forked for it, and so do not remember the question."""
    return runner.send_all([chat.fork() for chat in chats], JUDGE, max_tokens=1, logprobs=20)


def score(runner: bough.Runner, verdict: bough.Completion) -> float:
    """The probability that the verdict begins with Yes."""
    likely = {runner.detokenize([each.token_id]): math.exp(each.logprob) for each in verdict.logprobs[0].top}
    return sum(probability for text, probability in likely.items() if text.strip().lower() == "yes")


def main() -> None:
    parser = argparse.ArgumentParser(description="A tree of thoughts: 32 branches of one conversation.")
    parser.add_argument("--model", help="a name, a folder or a GGUF file; not given: the default model")
    parser.add_argument("--tokens", type=int, default=24, help="the most tokens of a step")
    options = parser.parse_args()
    with bough.load(options.model, disk=0) as runner:
        root = runner.chat(system=SYSTEM)
        best, rows = [root], {"shared": [runner.warm(root.messages).usage]}
        for level in range(LEVELS):
            branches = [fork for chat in best for fork in chat.fork(BRANCHES // len(best))]
            steps = think(runner, branches, NEXT if level else GOAL, options.tokens)
            verdicts = judge(runner, branches)
            scores = [score(runner, verdict) for verdict in verdicts]
            ranked = sorted(range(BRANCHES), key=scores.__getitem__, reverse=True)
            best = [branches[number] for number in ranked[:KEPT]]
            rows[str(level + 1)] = [each.usage for each in [*steps, *verdicts]]
            print(f"level {level + 1}: {steps[ranked[0]].text}  ({scores[ranked[0]]:.0%} yes)")
    print_counts(rows)
    print(f"\nThe best of {LEVELS * BRANCHES} branches:")
    for number, message in enumerate(best[0].messages[2::2], 1):
        print(f"  {number}. {message['content']}")


def print_counts(rows: dict[str, list[bough.Usage]]) -> None:
    """What was reused and computed: for what all branches share, by level, and in all."""
    print(f"\n{'level':>6} {'prompts':>8} {'reused':>8} {'computed':>8}")
    everything = [usage for usages in rows.values() for usage in usages]
    for name, usages in [*rows.items(), ("all", everything)]:
        sums = (sum(getattr(usage, f"{kind}_tokens") for usage in usages) for kind in ("prompt", "cached", "computed"))
        print(f"{name:>6}", *(f"{number:8,}" for number in sums))


if __name__ == "__main__":
    main()
