"""Who has the next turn, where only one can have it at a time."""

import asyncio

import pytest

from serving_core.tasks import Turns


class World:
    """Turns, and who has had them in which order; each lasts until the test ends it."""

    def __init__(self):
        self.had = []
        self._turns = Turns()
        self._may_end = asyncio.Semaphore(0)

    def ask(self, asker, name):
        return asyncio.create_task(self._have(asker, name))

    async def _have(self, asker, name):
        async with self._turns.turn(asker):
            self.had.append(name)
            await self._may_end.acquire()

    async def end(self, number):
        """End so many turns, one after the other."""
        for _ in range(number):
            await settled()
            self._may_end.release()
        await settled()


async def settled():
    for _ in range(10):
        await asyncio.sleep(0)


async def test_each_asker_has_one_turn_before_any_has_a_second():
    world = World()
    tasks = [world.ask("a", f"a{number}") for number in range(4)]
    tasks += [world.ask("b", "b0"), world.ask("b", "b1"), world.ask("", "nobody")]
    await world.end(7)
    assert world.had == ["a0", "a1", "b0", "nobody", "a2", "b1", "a3"]
    assert all(task.done() for task in tasks)


async def test_one_at_a_time():
    world = World()
    tasks = [world.ask("a", "a0"), world.ask("b", "b0")]
    await settled()
    assert world.had == ["a0"]
    await world.end(2)
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("left", [[1], [1, 2], [0], [0, 1]])
async def test_who_leaves_is_passed_over(left):
    """Whether it waits, or has its turn."""
    world = World()
    tasks = [world.ask(asker, asker) for asker in "abcd"]
    await settled()
    for index in left:
        tasks[index].cancel()
    await world.end(4)
    assert world.had == ["a", *(asker for index, asker in enumerate("abcd") if index and index not in left)]


async def test_who_leaves_as_the_turn_comes_passes_it_on():
    world = World()
    tasks = [world.ask(asker, asker) for asker in "abc"]
    await settled()
    tasks[0].cancel()
    await asyncio.sleep(0)  # a has ended: the turn is b's, which has not gone on yet
    tasks[1].cancel()
    await world.end(1)
    assert world.had == ["a", "c"]
