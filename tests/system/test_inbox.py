"""The inbox of an event loop: the order of messages, and how often the loop is woken."""

from __future__ import annotations

import asyncio
import threading

from bough.system.inbox import Inbox, Mailbox


def test_messages_of_other_threads_come_in_their_order_and_by_few_wake_ups() -> None:
    asyncio.run(asyncio.wait_for(_put_from_a_thread(), 10))


async def _put_from_a_thread() -> None:
    loop = asyncio.get_running_loop()
    inbox: Inbox[int] = Inbox(loop)
    mailboxes: list[Mailbox[int]] = [Mailbox() for _ in range(3)]
    num_wakes, wake = 0, loop.call_soon_threadsafe

    def counted(callback, *args):  # type: ignore[no-untyped-def]
        nonlocal num_wakes
        num_wakes += 1
        return wake(callback, *args)

    loop.call_soon_threadsafe = counted  # type: ignore[method-assign]

    def put_all() -> None:
        for number in range(300):
            inbox.put(mailboxes[number % 3], number)

    thread = threading.Thread(target=put_all)
    thread.start()
    thread.join()  # the loop does not run meanwhile

    received = [await mailbox.take() for mailbox in mailboxes]
    assert received == [list(range(start, 300, 3)) for start in range(3)]
    assert num_wakes == 1
    inbox.put(mailboxes[0], 7)
    assert await mailboxes[0].take() == [7] and num_wakes == 2


def test_what_is_put_after_the_end_of_the_loop_is_dropped() -> None:
    loop = asyncio.new_event_loop()
    inbox: Inbox[int] = Inbox(loop)
    loop.close()
    inbox.put(Mailbox(), 1)


def test_a_reader_that_was_cancelled_leaves_the_messages_to_the_next() -> None:
    async def read_twice() -> list[int]:
        mailbox: Mailbox[int] = Mailbox()
        reader = asyncio.ensure_future(mailbox.take())
        await asyncio.sleep(0)
        reader.cancel()
        mailbox.put(1)
        mailbox.put(2)
        await asyncio.gather(reader, return_exceptions=True)
        return await mailbox.take()

    assert asyncio.run(asyncio.wait_for(read_twice(), 10)) == [1, 2]
