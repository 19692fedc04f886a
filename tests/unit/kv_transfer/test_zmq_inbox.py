"""The turns in which ZeroMQ's messages are taken."""

import asyncio

import zmq

from kv_transfer.transports.zmq_inbox import Inbox


def test_a_socket_that_is_closed_has_no_turn_left():
    """Two messages are there at once, so a turn is due and the descriptor announces them too; the second one closes."""
    taken, errors = [], []

    async def scenario():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        with zmq.Context() as context, context.socket(zmq.PAIR) as theirs:
            ours = context.socket(zmq.PAIR)
            ours.bind("inproc://messages")
            theirs.connect("inproc://messages")

            def take(parts):
                taken.append(parts[0].bytes)
                if len(taken) == 2:
                    inbox.close()

            for message in (b"one", b"two"):
                theirs.send(message)
            inbox = Inbox(ours, take)
            for _ in range(10):
                await asyncio.sleep(0)

    asyncio.run(scenario())
    assert (taken, errors) == ([b"one", b"two"], [])
