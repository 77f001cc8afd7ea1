"""Agents with Python functions as tools, all at once: python examples/agents.py [MODEL or http://SERVER]"""

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import bough


def compute(left: int, sign: Literal["plus", "minus", "times"], right: int) -> str:
    """Compute with two whole numbers."""
    return str({"plus": left + right, "minus": left - right, "times": left * right}[sign])


def look_up(word: Literal["bark", "fork"]) -> str:
    """Look up the meaning of a word."""
    return {"bark": "the skin of a tree", "fork": "a place where a branch divides in two"}[word]


def reply(text: str) -> str:
    """Answer the question, when the results of other tools are there."""
    return text


def run_agent(chat: bough.Chat, messages: str | list[bough.Message]) -> None:
    for choice in ("required", "required", "reply"):  # each answer is one call, which keeps to its function's signature
        answer = chat.send(messages, tool_choice=choice)
        (call,) = answer.tool_calls
        result = {"compute": compute, "look_up": look_up, "reply": reply}[call.name](**call.arguments)
        reused = f"{answer.usage.cached_tokens} of {answer.usage.prompt_tokens} tokens reused"
        print(f"{call.name}{tuple(call.arguments.values())} = {result} ({reused})")
        if call.name == "reply":
            return
        messages = [{"role": "tool", "tool_call_id": call.id, "content": result}]


source = sys.argv[1] if len(sys.argv) > 1 else None
with bough.connect(source) if "://" in str(source) else bough.load(source, disk=0) as model:
    chat = model.chat("You answer questions with tools.", tools=[compute, look_up, reply], max_tokens=100)
    list(ThreadPoolExecutor().map(run_agent, chat.fork(3), ["What is 12 times 12?", "What is a fork?", "What is bark?"]))
