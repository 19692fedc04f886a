"""The histories: the same questions, asked in ways that are to change no bit of an answer.

Each one is compared with `alone`: one question at a time, on one node that reads its prompt in one step and holds
nothing of it before. Each must show that it took place: what is to happen depends on the moment, and where it did not,
equal answers prove nothing.
"""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from serving_core.shapes import BOTH, DECODE, PREFILL, Shape
from splitserve.client.answers import Completion, NodeLoad, TokenLogprob
from splitserve.client.clients import AsyncClient
from splitserve.launch.models import Report
from splitserve_bench.bits.questions import Answer, Difference, Question, first_difference, second_turns, short_ones

CHUNKS: Final = (16, 100, 512)
TRIES: Final = 8  # to have a running answer move
BEGUN_ANSWERS, BEGUN_TOKENS = 3, 3  # so many answers have so many tokens when their node is disturbed
ANSWER_S: Final = 900.0  # for one answer, beside all others
SETTLE_S: Final = 10.0  # until nodes have told what they did
LOOK_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Played:
    """One history: what shows that it took place, whether it did, and where it first differs from `alone`."""

    history: str
    shown_by: str
    took_place: bool
    difference: Difference | None

    @property
    def is_good(self) -> bool:
        return self.took_place and self.difference is None


@dataclass(frozen=True, slots=True)
class SmallPool:
    """A pool that holds the longest question alone, and what is asked at once so that answers are put back: the shorter
    questions, again and again until the pool has no room for what these grow by. Each leaves every answer that is
    written one block to grow into; all grow by more."""

    num_blocks: int
    order: tuple[int, ...]  # questions by their numbers

    @classmethod
    def of(cls, questions: Sequence[Question], block_size: int) -> "SmallPool":
        short = short_ones(questions)
        longest = max(-(-(len(question.prompt) + question.max_tokens) // block_size) for question in questions)
        begun = sum(1 + -(-len(questions[index].prompt) // block_size) for index in short)
        num_blocks = max(longest + 1, begun)
        return cls(num_blocks, tuple(short) * -(-num_blocks // begun))


class Histories:
    """Plays them on clusters, and keeps what came of each. `on_one_node` is to be called first."""

    def __init__(self, questions: Sequence[Question], vocab_size: int, report: Report) -> None:
        self.played: list[Played] = []
        self.alone: list[Answer] = []
        self._questions = questions
        self._vocab_size = vocab_size
        self._report = report
        self._threads = ""  # of the node that answered alone

    # ---- a node that does both ----

    async def on_one_node(self, client: AsyncClient) -> None:
        """Of a cluster of one node, whose steps hold every prompt and whose pool every question."""
        [node] = (await client.server_info()).nodes
        self._threads = node.engine["threads"]
        self.alone = await self._one_by_one(client, "alone")
        size = f"{_num_prompt_tokens(self._questions)} + {sum(len(each.token_ids) for each in self.alone)} tokens"
        self._note("alone", self.alone, f"{len(self.alone)} requests, {size}, {self._threads} threads", True)

        crowd = _Crowd()
        answers = await self._at_once(client, "crowd", crowd)
        self._note("crowd", answers, f"{crowd.most} answers at the same time", crowd.most > 1)

        answers = await self._at_once(client, "crowd")
        cached = sum(each.completion.cached_tokens for each in answers)
        self._note("prefix reuse", answers, f"{cached} prompt tokens cached", cached > 0)

        for num_tokens in CHUNKS:
            await self._in_chunks(client, node.name, num_tokens)
        await self._chat(client)

    async def _in_chunks(self, client: AsyncClient, name: str, num_tokens: int) -> None:
        [before] = (await client.loads()).nodes
        now = await client.set_role(name, Shape(num_tokens, before.shape.seats, takes_handovers=True))
        answers = await self._at_once(client, f"chunks of {num_tokens}")
        least = _num_prompt_tokens(self._questions) // num_tokens
        after = await _until(client, lambda load: load.num_steps - before.num_steps >= least)
        num_cut = sum(len(question.prompt) > now.shape.prompt_tokens for question in self._questions)
        took_place = num_cut > 0 and after.num_steps - before.num_steps >= least
        self._note(f"chunks of {num_tokens}", answers, f"{num_cut} prompts cut", took_place)
        await client.set_role(name, before.shape)

    async def _chat(self, client: AsyncClient) -> None:
        """The second turns of a chat, of which the node holds what it wrote in the first."""
        turns = second_turns(self._questions, self.alone, self._vocab_size)
        fresh = [await self._ask(client, turn, f"turn {index}") for index, turn in enumerate(turns)]
        await self._at_once(client, "chat")
        answers = await asyncio.gather(*(self._ask(client, turn, "chat") for turn in turns))
        num_written = sum(
            max(0, answer.completion.cached_tokens - len(question.prompt))
            for question, answer in zip(self._questions, answers, strict=True)
        )
        shown_by = f"{num_written} tokens reused that the node had written"
        self._note("second turn of a chat", answers, shown_by, num_written > 0, fresh)

    # ---- a prefill node and two decode nodes ----

    async def on_split_nodes(self, client: AsyncClient, kill: Callable[[str], None]) -> None:
        """Of a cluster of one prefill node and two decode nodes; `kill` ends a node's process at once. The decode node
        that is killed does not come back."""
        server = await client.server_info()
        reader, victim, heir = (node.name for role in (PREFILL, DECODE) for node in server.nodes if node.role == role)
        answers = await self._at_once(client, "split")
        sent = sum(each.completion.kv_bytes > 0 for each in answers)
        self._note("split", answers, f"{sent} answers written on another node than read", sent == len(answers))
        await self._moved(client, victim)

        async def end_victim() -> None:
            kill(victim)

        answers = await self._disturbed(client, "killed", end_victim)
        num_restarts = _total(answers, lambda completion: completion.timeline.num_restarts)
        self._note("node killed", answers, f"{num_restarts} answers began again elsewhere", num_restarts > 0)

        for name in (reader, heir):
            await client.set_role(name, BOTH)
        answers = await self._at_once(client, "colocated")
        there = sum(each.completion.timeline.prefill_node == each.completion.timeline.decode_node for each in answers)
        self._note("colocated", answers, f"{there} answers written where they were read", there > 0)

    async def _moved(self, client: AsyncClient, victim: str) -> None:
        """A node that is told to write no more has its running answers move, those that are under way just then."""
        answers: list[Answer] = []
        num_moves = 0
        for number in range(TRIES):
            answers = await self._disturbed(client, f"moved {number}", lambda: client.set_role(victim, PREFILL))
            await client.set_role(victim, DECODE)
            num_moves = _total(answers, lambda completion: completion.timeline.num_moves)
            if num_moves or first_difference(self.alone, answers):
                break
        self._note("moved", answers, f"{num_moves} moves of running answers", num_moves > 0)

    # ---- a small node ----

    async def on_a_small_node(self, client: AsyncClient, pool: "SmallPool") -> None:
        """Of a cluster of one node, with more threads than before, with this pool."""
        [node] = (await client.server_info()).nodes
        threads = node.engine["threads"]
        answers = await self._one_by_one(client, "threads")
        shown_by = f"{threads} threads, {self._threads} before"
        self._note("other threads", answers, shown_by, threads != self._threads)

        order = pool.order
        answers = await asyncio.gather(
            *(self._ask(client, self._questions[index], f"preempted {place}") for place, index in enumerate(order))
        )
        load = await _until(client, lambda load: load.num_preemptions > 0)
        shown_by = f"{load.num_preemptions} answers put back"
        difference = first_difference([self.alone[index] for index in order], answers)
        if difference is not None:
            difference = dataclasses.replace(difference, question=order[difference.question])
        self._add("preempted", shown_by, load.num_preemptions > 0, difference)

    # ---- all ----

    async def _one_by_one(self, client: AsyncClient, salt: str) -> list[Answer]:
        return [await self._ask(client, question, f"{salt} {index}") for index, question in enumerate(self._questions)]

    async def _at_once(self, client: AsyncClient, salt: str, crowd: "_Crowd | None" = None) -> list[Answer]:
        return await asyncio.gather(*(self._ask(client, question, salt, crowd) for question in self._questions))

    async def _disturbed(
        self, client: AsyncClient, salt: str, disturb: Callable[[], Awaitable[object]]
    ) -> list[Answer]:
        """All at once, disturbed when some answers have begun."""
        crowd = _Crowd()

        async def once_begun() -> None:
            async with asyncio.timeout(ANSWER_S):
                await crowd.has_begun.wait()
            await disturb()

        answers, _ = await asyncio.gather(self._at_once(client, salt, crowd), once_begun())
        return answers

    async def _ask(self, client: AsyncClient, question: Question, salt: str, crowd: "_Crowd | None" = None) -> Answer:
        """Requests of one salt share what nodes hold, others do not."""
        token_ids, logprobs = list[int](), list[TokenLogprob]()
        stream = client.generate(question.prompt, cache_salt=salt, deadline_s=ANSWER_S, **question.sampling)
        async for chunk in stream:
            if crowd is not None:
                has_ended = chunk.completion is not None
                crowd.sees(len(token_ids), len(token_ids) + len(chunk.token_ids), has_ended=has_ended)
            token_ids += chunk.token_ids
            logprobs += chunk.logprobs
            if chunk.completion is not None:
                return Answer(tuple(token_ids), tuple(logprobs), chunk.completion)
        raise AssertionError("an answer without an end")

    def _note(
        self,
        history: str,
        answers: Sequence[Answer],
        shown_by: str,
        took_place: bool,
        expected: Sequence[Answer] | None = None,
    ) -> None:
        self._add(history, shown_by, took_place, first_difference(expected or self.alone, answers))

    def _add(self, history: str, shown_by: str, took_place: bool, difference: Difference | None) -> None:
        self.played.append(Played(history, shown_by, took_place, difference))
        self._report(f"{history}: {shown_by}")


class _Crowd:
    """What is under way at the same time."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()
        self.most = 0
        self._num_live = 0
        self._num_begun = 0

    def sees(self, num_before: int, num_tokens: int, *, has_ended: bool) -> None:
        """An answer that had so many tokens has so many now."""
        self._num_live += num_before == 0 < num_tokens
        self.most = max(self.most, self._num_live)
        self._num_live -= has_ended
        self._num_begun += num_before < BEGUN_TOKENS <= num_tokens
        if self._num_begun == BEGUN_ANSWERS:
            self.has_begun.set()


async def _until(client: AsyncClient, condition: Callable[[NodeLoad], bool]) -> NodeLoad:
    """What the only node tells of itself, once this is so, or is not so after SETTLE_S."""
    end_s = time.monotonic() + SETTLE_S
    while True:
        [load] = (await client.loads()).nodes
        if condition(load) or time.monotonic() > end_s:
            return load
        await asyncio.sleep(LOOK_S)


def _num_prompt_tokens(questions: Collection[Question]) -> int:
    return sum(len(question.prompt) for question in questions)


def _total(answers: Collection[Answer], count: Callable[[Completion], int]) -> int:
    return sum(count(answer.completion) for answer in answers)
