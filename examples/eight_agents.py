"""Eight agents with one long tool prompt, at the same time.

All agents share a description of the tools and a few worked examples; each has a question of its own. An agent calls a tool
by a JSON schema, which even a small model cannot violate. The tool runs here, and the agent answers with its result. The
eight run together, as tasks of one event loop. The tool prompt is computed once, before they start.

    python examples/eight_agents.py [--model NAME] [--tokens N]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import operator
from dataclasses import dataclass, field

import bough

WORDS = {
    "bark": "the skin of a tree",
    "climb": "to go up something high",
    "fork": "a place where a branch divides in two",
    "meadow": "a field of grass",
    "prune": "to cut off branches, so that the others grow better",
    "stream": "a small river",
    "twig": "a small thin branch",
}
TOOLS = [
    {"name": "calculator", "description": "Computes a term of two numbers.", "argument": "the term"},
    {"name": "dictionary", "description": "Tells what a word means.", "argument": "the word"},
]
ARGUMENTS = [{"type": "string", "pattern": "^[0-9]{1,4} [-+*/] [0-9]{1,4}$"}, {"enum": sorted(WORDS)}]
CALL = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"tool": {"const": tool["name"]}, "argument": argument},
            "required": ["tool", "argument"],
            "additionalProperties": False,
        }
        for tool, argument in zip(TOOLS, ARGUMENTS, strict=True)
    ]
}
SYSTEM = f"You answer questions with tools. Call one tool as JSON, then answer with its result. Tools: {json.dumps(TOOLS)}"
EXAMPLES = [  # question, tool, argument, answer
    ("What is 6 times 7?", "calculator", "6 * 7", "6 times 7 is 42."),
    ("What does meadow mean?", "dictionary", "meadow", "A meadow is a field of grass."),
    ("What is 90 minus 12?", "calculator", "90 - 12", "90 minus 12 is 78."),
    ("What does climb mean?", "dictionary", "climb", "To climb is to go up something high."),
    ("What is 300 divided by 12?", "calculator", "300 / 12", "300 divided by 12 is 25."),
    ("What does stream mean?", "dictionary", "stream", "A stream is a small river."),
]
QUESTIONS = [
    "What is 12 times 12?",
    "What does fork mean?",
    "What is 100 minus 58?",
    "What does prune mean?",
    "What is 17 plus 25?",
    "What does bark mean?",
    "What is 450 divided by 9?",
    "What does twig mean?",
]
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def use(tool: str, argument: str) -> str:
    """What a tool says. The schema leaves one thing that can go wrong: a division by zero."""
    if tool == "dictionary":
        return WORDS[argument]
    left, sign, right = argument.split()
    try:
        return f"{OPERATORS[sign](int(left), int(right)):g}"
    except ZeroDivisionError:
        return "nothing: one cannot divide by zero"


def example_messages() -> list[bough.Message]:
    """The worked examples, as a conversation."""
    told = []
    for question, tool, argument, answer in EXAMPLES:
        call = json.dumps({"tool": tool, "argument": argument})
        told += [("user", question), ("assistant", call), ("user", f"Result: {use(tool, argument)}"), ("assistant", answer)]
    return [{"role": role, "content": content} for role, content in told]


@dataclass
class Agent:
    """A conversation that uses tools, and what came of it."""

    chat: bough.Chat
    question: str
    call: str = ""
    answer: str = ""
    usages: list[bough.Usage] = field(default_factory=list)

    async def run(self, tokens: int) -> None:
        called = await self.chat.asend(self.question, format=CALL, max_tokens=48)
        wanted = json.loads(called.text)
        answered = await self.chat.asend(f"Result: {use(**wanted)}", max_tokens=tokens)
        self.call, self.answer = f"{wanted['tool']}({wanted['argument']})", answered.text
        self.usages = [called.usage, answered.usage]


async def run_together(agents: list[Agent], tokens: int) -> None:
    await asyncio.gather(*(agent.run(tokens) for agent in agents))


def main() -> None:
    parser = argparse.ArgumentParser(description="Eight agents with one long tool prompt, at the same time.")
    parser.add_argument("--model", help="a name, a folder or a GGUF file; not given: the default model")
    parser.add_argument("--tokens", type=int, default=24, help="the most tokens of an answer")
    options = parser.parse_args()
    with bough.load(options.model, disk=0) as runner:
        start = runner.chat(system=SYSTEM, messages=example_messages())
        prefix = runner.warm(start.messages)
        agents = [Agent(chat, question) for chat, question in zip(start.fork(8), QUESTIONS, strict=True)]
        asyncio.run(run_together(agents, options.tokens))
    for agent in agents:
        print(f"{agent.question}\n    {agent.call}\n    {agent.answer}")
    print(f"\n{'agent':>6} {'prompts':>8} {'reused':>8} {'computed':>8}")
    print_row("shared", [prefix.usage])
    for number, agent in enumerate(agents, 1):
        print_row(str(number), agent.usages)
    print_row("all", [prefix.usage, *(usage for agent in agents for usage in agent.usages)])


def print_row(name: str, usages: list[bough.Usage]) -> None:
    sums = (sum(getattr(usage, f"{kind}_tokens") for usage in usages) for kind in ("prompt", "cached", "computed"))
    print(f"{name:>6}", *(f"{number:8,}" for number in sums))


if __name__ == "__main__":
    main()
