"""A tree of thoughts, four levels of eight plans: python examples/tree_of_thoughts.py [MODEL or http://SERVER]"""

import sys
from dataclasses import dataclass
from typing import Literal

import bough

SYSTEM = """You plan things for a small town, step by step. A step is one short sentence that begins with a verb, and can be
done within a month by people who live there. It goes on from the steps before, and repeats none of them. The town has 9,000
people, two schools, a railway station, a brewery and a hospital. Most people work in the city, twelve minutes away.
The main street is full of cars from seven to nine in the morning. A path along the river leads from the northern houses to
the station; it is not lit, and floods in March. The town owns an empty workshop, a sports ground, and eighty bicycle stands
in a cellar. There is a market on Saturdays. The mayor has 20,000 euros a year for such plans. The hospital and the brewery
would help, if they are asked. The older pupils look for work in summer. The goal: more people ride a bicycle to work."""


@dataclass
class Verdict:
    grade: Literal[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


source = sys.argv[1] if len(sys.argv) > 1 else None
with bough.connect(source) if "://" in str(source) else bough.load(source, disk=0) as model:
    best = [model.chat(SYSTEM)]
    answers = [model.warm(best[0].messages)]
    for level in range(1, 5):
        plans = [plan for chat in best for plan in chat.fork(8 // len(best))]
        steps = model.send_all(plans, "What is the next step?", max_tokens=24, temperature=0.8, seed=level, stop="\n")
        verdicts = model.send_all([plan.fork() for plan in plans], "Grade this step from 1 to 10.", format=Verdict)
        grades = [verdict.parse(Verdict).grade for verdict in verdicts]
        ranked = sorted(range(8), key=grades.__getitem__, reverse=True)
        best = [plans[number] for number in ranked[:2]]
        answers += [*steps, *verdicts]
        print(f"{level}. {steps[ranked[0]].text.strip()} ({grades[ranked[0]]} of 10)")
sums = [sum(getattr(each.usage, f"{kind}_tokens") for each in answers) for kind in ("prompt", "cached", "computed")]
print(f"{len(answers)} requests: {sums[0]:,} tokens of prompts, {sums[1]:,} reused, {sums[2]:,} computed")
