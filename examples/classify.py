"""Classification of many texts in one batch, by a type: python examples/classify.py [MODEL or http://SERVER]"""

import sys
from dataclasses import dataclass
from typing import Literal

import bough

SYSTEM = """You sort letters to a railway company. `topic` is what the letter is about: late trains (delay), prices (price),
or what is broken or dirty (repair). `mood` is that of the writer. `urgent` says whether somebody may be hurt."""
LETTERS = [
    "Every Monday my train comes twenty minutes late, and nobody says why. I am tired of it.",
    "Thank you for the new day ticket: my family saved forty euros on our trip to the sea.",
    "The door of coach 12 opens while the train moves. A child nearly fell out yesterday!",
    "The heating has not worked since December, and the seats are filthy.",
    "On Friday your driver waited for my late connection. That was kind, and saved my evening.",
    "Why does a ticket for eleven kilometres cost more than one for thirty?",
]


@dataclass
class Letter:
    topic: Literal["delay", "price", "repair"]
    mood: Literal["happy", "angry"]
    urgent: bool


source = sys.argv[1] if len(sys.argv) > 1 else None
with bough.connect(source) if "://" in str(source) else bough.load(source, disk=0) as model:
    start = [{"role": "system", "content": SYSTEM}]
    model.warm(start)
    answers = model.batch([[*start, {"role": "user", "content": letter}] for letter in LETTERS], format=Letter)
for text, answer in zip(LETTERS, answers, strict=True):
    print(f"{text[:48]}… {answer.parse(Letter)}")
usages = [answer.usage for answer in answers]
print(f"{sum(each.cached_tokens for each in usages)} of {sum(each.prompt_tokens for each in usages)} tokens reused")
