"""Mistakes that a type checker must find. Each line that has one names the code of the error that is expected for it."""

from __future__ import annotations

import asyncio

import bough


def make_mistakes() -> None:
    runner = bough.load("model", lane=2)  # expect: call-arg
    bough.load("model", engine="jax")  # expect: arg-type
    runner.generate("Hello", temprature=1.0)  # expect: call-overload
    runner.generate("Hello", temperature="hot")  # expect: call-overload
    runner.generate(7)  # expect: call-overload
    print(runner.generate("Hello", n=2).text)  # expect: attr-defined
    runner.stream("Hello", max_token=4)  # expect: call-arg
    runner.stream("Hello", stop=7)  # expect: arg-type
    runner.batch(["Hello"], on_progress=print)  # expect: call-arg
    runner.batch(["Hello"], on_done=lambda answer: None)  # expect: arg-type misc
    runner.warm("Hello", temperature=1.0)  # expect: call-arg
    chat = runner.chat(sytem="Be brief.")  # expect: call-arg
    runner.chat(is_cancelled=lambda: True)  # expect: call-arg
    chat.send("Hello", raw=True)  # expect: call-arg
    chat.send(7)  # expect: arg-type
    chat.fork(2).send("Hello")  # expect: attr-defined
    runner.send_all([chat], "Hello", choice=1)  # expect: call-arg
    print(runner.lanes)  # expect: attr-defined
    asyncio.run(runner.astream("Hello"))  # expect: arg-type
