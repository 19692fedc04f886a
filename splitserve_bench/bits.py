"""Check whether a model's outputs have the same bits whatever happens to them: `splitserve doctor --check-bits`.

Three clusters, one after the other, play histories: ways to send the same requests that must not change a bit of an
output. Each history is compared with `alone`: one request at a time, on one node that prefills its prompt in one step
and has none of it cached. Each must show that it took place: whether, say, a request was preempted depends on the
moment, and where nothing happened equal outputs prove nothing.
"""

import asyncio
import dataclasses
import itertools
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from serving_core.layout import QUANTIZED_DTYPES
from serving_core.node.needs import MOST_INVARIANT_RANKS
from serving_core.shapes import DECODE, MIXED, PREFILL, Shape
from splitserve.client.answers import Completion, NodeInfo, NodeLoad, TokenLogprob
from splitserve.client.clients import AsyncClient
from splitserve.client.questions import Sampling
from splitserve.commands.terminal import plain_table
from splitserve.launch.launcher import Cluster
from splitserve.launch.models import LocalModel, Report
from splitserve_bench.compare.arena import cluster_on
from splitserve_bench.errors import BenchError
from splitserve_bench.prompts import SEED
from splitserve_bench.report import engine_line

NUM_TOP: Final = 4  # likeliest tokens whose log-probabilities are compared, beside the output's own
TURN_TOKENS: Final = 23  # new text of a second turn
CHUNKS: Final = (16, 100, 512)
MAX_MIGRATION_TRIES: Final = 8
BEGUN_OUTPUTS, BEGUN_TOKENS = 3, 3  # when their node is disturbed
REQUEST_S: Final = 900.0  # for one output, beside all others
SETTLE_S: Final = 10.0  # until the report of a node has what it did
POLL_S: Final = 0.05
BLOCK_SIZE: Final = 8  # small, so that outputs grow by several
WHOLE_PROMPT_TOKENS: Final = 1024  # of one step, so that `alone` prefills each prompt in one
HEARTBEAT_S: Final = 0.1
# Whatever the model's folder recommends: every token can be drawn, so that the least bit may show.
OPEN: Final = Sampling(top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, ignore_eos=True, logprobs=NUM_TOP)


@dataclass(frozen=True, slots=True)
class BitsBench:
    """How many requests of how many tokens are sent, and the size of the nodes.

    Prompts that are too long for the model's context are left out.
    """

    num_requests: int = 8
    prompt_tokens: tuple[int, ...] = (5, 130, 40, 600, 17, 290)  # of the prompts in turn
    output_tokens: tuple[int, int] = (16, 32)  # minimum and maximum of an output
    cores: int = 1  # of each rank, as far as there are enough
    tp_size: int = 1


@dataclass(frozen=True, slots=True)
class Request:
    """One request; greedy without a seed."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None

    @property
    def sampling(self) -> Sampling:
        """Return the sampling parameters to send: temperature 0, or 0.9 with the seed; with log-probabilities."""
        how = Sampling(temperature=0.0) if self.seed is None else Sampling(temperature=0.9, seed=self.seed)
        return Sampling(**OPEN, **how, max_tokens=self.max_tokens)


@dataclass(frozen=True, slots=True)
class Output:
    """An output as a client gets it, and the server's account of how it ended."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    completion: Completion


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two histories differ: token `token` of the output of request `request`, from 0."""

    request: int
    token: int
    is_token: bool  # or its log-probabilities alone


def draw_requests(sizes: BitsBench, vocab_size: int, max_model_len: int) -> list[Request]:
    """Return requests of random tokens, half of them greedy and half sampled, the same each time.

    Prompts that leave no room for the output in `max_model_len` tokens are left out. Raises BenchError when all are.
    """
    random, (least, most) = Random(SEED), sizes.output_tokens
    lengths = [each for each in sizes.prompt_tokens if each + 2 * most + TURN_TOKENS <= max_model_len]
    if not lengths:
        raise BenchError(f"a context of {max_model_len} tokens is too short for the prompts and outputs of this check")
    return [
        Request(
            tuple(random.choices(range(vocab_size), k=length)),
            random.randint(least, most),
            None if index % 4 < 2 else SEED + index,
        )
        for index, length in zip(range(sizes.num_requests), itertools.cycle(lengths), strict=False)
    ]


def second_turns(requests: Sequence[Request], outputs: Sequence[Output], vocab_size: int) -> list[Request]:
    """Return requests whose prompts are these requests' prompts, their outputs, and some random tokens as new text."""
    random = Random(SEED + 1)
    return [
        Request(
            (*request.prompt, *output.token_ids, *random.choices(range(vocab_size), k=TURN_TOKENS)),
            request.max_tokens,
            request.seed,
        )
        for request, output in zip(requests, outputs, strict=True)
    ]


def first_difference(expected: Sequence[Output], found: Sequence[Output]) -> Difference | None:
    """Return the first place where outputs of the same request differ, or None.

    Floats are equal when their bits are.
    """
    for request, (one, other) in enumerate(zip(expected, found, strict=True)):
        for token, (ours, theirs) in enumerate(zip(one.logprobs, other.logprobs, strict=False)):
            if ours != theirs:
                return Difference(request, token, ours.token_id != theirs.token_id)
        if one.token_ids != other.token_ids:  # of other lengths
            return Difference(request, min(len(one.token_ids), len(other.token_ids)), is_token=True)
    return None


@dataclass(frozen=True, slots=True)
class Played:
    """One history that was played: evidence that it took place, and where it differs from `alone` (None: nowhere)."""

    history: str
    shown_by: str
    took_place: bool
    difference: Difference | None

    @property
    def is_good(self) -> bool:
        """Return whether the history took place and changed no bit."""
        return self.took_place and self.difference is None


@dataclass(frozen=True, slots=True)
class SmallPool:
    """The size of a KV pool, and the order in which to send requests, such that some are preempted.

    The pool holds the longest request alone. Sent at once are the shorter requests, repeated until the pool has no
    blocks for their outputs; it has one more block for each output that runs, and all grow by more.
    """

    num_blocks: int
    order: tuple[int, ...]  # indices of requests

    @classmethod
    def of(cls, requests: Sequence[Request], block_size: int) -> "SmallPool":
        """Return the pool and the order for these requests and a block size in tokens."""
        by_length = sorted(range(len(requests)), key=lambda index: len(requests[index].prompt))
        short = by_length[: (len(requests) + 1) // 2]
        longest = max(-(-(len(request.prompt) + request.max_tokens) // block_size) for request in requests)
        begun = sum(1 + -(-len(requests[index].prompt) // block_size) for index in short)
        num_blocks = max(longest + 1, begun)
        return cls(num_blocks, tuple(short) * -(-num_blocks // begun))


class Histories:
    """Play histories on clusters, and collect the results in `played`. `on_one_node` must be called first."""

    def __init__(self, requests: Sequence[Request], vocab_size: int, report: Report) -> None:
        self.played: list[Played] = []
        self.alone: list[Output] = []
        self._requests = requests
        self._vocab_size = vocab_size
        self._report = report
        self._threads = ""  # of the node that answered alone

    # ---- a mixed node ----

    async def on_one_node(self, client: AsyncClient) -> None:
        """Play the histories of a cluster of one mixed node, whose steps hold any prompt and whose pool all requests.

        Sets `alone`, with which all others are compared.
        """
        [node] = (await client.server_info()).nodes
        self._threads = node.engine["threads"]
        self.alone = await self._one_by_one(client, "alone")
        size = f"{_num_prompt_tokens(self._requests)} + {sum(len(each.token_ids) for each in self.alone)} tokens"
        self._note("alone", self.alone, f"{len(self.alone)} requests, {size}, {self._threads} threads", True)

        crowd = _Crowd()
        outputs = await self._at_once(client, "crowd", crowd)
        self._note("crowd", outputs, f"{crowd.most} outputs at the same time", crowd.most > 1)

        outputs = await self._at_once(client, "crowd")
        cached = sum(each.completion.cached_tokens for each in outputs)
        self._note("prefix reuse", outputs, f"{cached} prompt tokens cached", cached > 0)

        for num_tokens in CHUNKS:
            await self._in_chunks(client, node.name, num_tokens)
        await self._chat(client)

    async def _in_chunks(self, client: AsyncClient, name: str, num_tokens: int) -> None:
        [before] = (await client.loads()).nodes
        now = await client.set_role(name, Shape(num_tokens, before.shape.slots, accepts_transfers=True))
        outputs = await self._at_once(client, f"chunks of {num_tokens}")
        least = _num_prompt_tokens(self._requests) // num_tokens
        after = await _until(client, lambda load: load.num_steps - before.num_steps >= least)
        num_cut = sum(len(request.prompt) > now.shape.prompt_tokens for request in self._requests)
        took_place = num_cut > 0 and after.num_steps - before.num_steps >= least
        self._note(f"chunks of {num_tokens}", outputs, f"{num_cut} prompts cut", took_place)
        await client.set_role(name, before.shape)

    async def _chat(self, client: AsyncClient) -> None:
        """Send second turns, for which the node has the first turns' prompts and outputs cached."""
        turns = second_turns(self._requests, self.alone, self._vocab_size)
        fresh = [await self._ask(client, turn, f"turn {index}") for index, turn in enumerate(turns)]
        await self._at_once(client, "chat")
        outputs = await asyncio.gather(*(self._ask(client, turn, "chat") for turn in turns))
        num_generated = sum(
            max(0, output.completion.cached_tokens - len(request.prompt))
            for request, output in zip(self._requests, outputs, strict=True)
        )
        shown_by = f"{num_generated} generated tokens cached"
        self._note("second turn of a chat", outputs, shown_by, num_generated > 0, fresh)

    # ---- a prefill node and two decode nodes ----

    async def on_split_nodes(self, client: AsyncClient, kill: Callable[[str], None]) -> None:
        """Play the histories of a cluster of one prefill node and two decode nodes.

        `kill` must end the process of the node of this name at once; the decode node that is killed does not come back.
        """
        server = await client.server_info()
        prefill_node, victim, survivor = (
            node.name for role in (PREFILL, DECODE) for node in server.nodes if node.role == role
        )
        outputs = await self._at_once(client, "split")
        sent = sum(each.completion.kv_bytes > 0 for each in outputs)
        self._note("split", outputs, f"{sent} outputs decoded on another node than prefilled", sent == len(outputs))
        await self._moved(client, victim)

        async def end_victim() -> None:
            kill(victim)

        outputs = await self._disturbed(client, "killed", end_victim)
        num_restarts = _total(outputs, lambda completion: completion.timeline.num_restarts)
        self._note("node killed", outputs, f"{num_restarts} requests restarted elsewhere", num_restarts > 0)

        for name in (prefill_node, survivor):
            await client.set_role(name, MIXED)
        outputs = await self._at_once(client, "colocated")
        there = sum(each.completion.timeline.prefill_node == each.completion.timeline.decode_node for each in outputs)
        self._note("colocated", outputs, f"{there} outputs decoded where they were prefilled", there > 0)

    async def _moved(self, client: AsyncClient, victim: str) -> None:
        """Make a decode node a prefill node, so that its running requests migrate, and give it its role back."""
        outputs: list[Output] = []
        num_migrations = 0
        for number in range(MAX_MIGRATION_TRIES):
            outputs = await self._disturbed(client, f"moved {number}", lambda: client.set_role(victim, PREFILL))
            await client.set_role(victim, DECODE)
            num_migrations = _total(outputs, lambda completion: completion.timeline.num_migrations)
            if num_migrations or first_difference(self.alone, outputs):
                break
        self._note("migrated", outputs, f"{num_migrations} migrations of running requests", num_migrations > 0)

    # ---- a small node ----

    async def on_a_small_node(self, client: AsyncClient, pool: "SmallPool") -> None:
        """Play the histories of a cluster of one node with this small pool and more threads than the first node."""
        [node] = (await client.server_info()).nodes
        threads = node.engine["threads"]
        outputs = await self._one_by_one(client, "threads")
        shown_by = f"{threads} threads, {self._threads} before"
        self._note("other threads", outputs, shown_by, threads != self._threads)

        order = pool.order
        outputs = await asyncio.gather(
            *(self._ask(client, self._requests[index], f"preempted {place}") for place, index in enumerate(order))
        )
        load = await _until(client, lambda load: load.num_preemptions > 0)
        shown_by = f"{load.num_preemptions} preemptions"
        difference = first_difference([self.alone[index] for index in order], outputs)
        if difference is not None:
            difference = dataclasses.replace(difference, request=order[difference.request])
        self._add("preempted", shown_by, load.num_preemptions > 0, difference)

    # ---- all ----

    async def _one_by_one(self, client: AsyncClient, salt: str) -> list[Output]:
        return [await self._ask(client, request, f"{salt} {index}") for index, request in enumerate(self._requests)]

    async def _at_once(self, client: AsyncClient, salt: str, crowd: "_Crowd | None" = None) -> list[Output]:
        return await asyncio.gather(*(self._ask(client, request, salt, crowd) for request in self._requests))

    async def _disturbed(
        self, client: AsyncClient, salt: str, disturb: Callable[[], Awaitable[object]]
    ) -> list[Output]:
        """Send all requests at once, call `disturb` when some outputs have begun, and return the outputs."""
        crowd = _Crowd()

        async def once_begun() -> None:
            async with asyncio.timeout(REQUEST_S):
                await crowd.has_begun.wait()
            await disturb()

        outputs, _ = await asyncio.gather(self._at_once(client, salt, crowd), once_begun())
        return outputs

    async def _ask(self, client: AsyncClient, request: Request, salt: str, crowd: "_Crowd | None" = None) -> Output:
        """Send a request and return its output.

        Only requests with the same `salt` share cached blocks; `crowd` counts them.
        """
        token_ids, logprobs = list[int](), list[TokenLogprob]()
        stream = client.generate(request.prompt, cache_salt=salt, deadline_s=REQUEST_S, **request.sampling)
        async for chunk in stream:
            if crowd is not None:
                has_ended = chunk.completion is not None
                crowd.take(len(token_ids), len(token_ids) + len(chunk.token_ids), has_ended=has_ended)
            token_ids += chunk.token_ids
            logprobs += chunk.logprobs
            if chunk.completion is not None:
                return Output(tuple(token_ids), tuple(logprobs), chunk.completion)
        raise AssertionError("an output without an end")

    def _note(
        self,
        history: str,
        outputs: Sequence[Output],
        shown_by: str,
        took_place: bool,
        expected: Sequence[Output] | None = None,
    ) -> None:
        self._add(history, shown_by, took_place, first_difference(expected or self.alone, outputs))

    def _add(self, history: str, shown_by: str, took_place: bool, difference: Difference | None) -> None:
        self.played.append(Played(history, shown_by, took_place, difference))
        self._report(f"{history}: {shown_by}")


class _Crowd:
    """Count the outputs that run at the same time. `has_begun` is set when BEGUN_OUTPUTS have BEGUN_TOKENS tokens."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()
        self.most = 0
        self._num_live = 0
        self._num_begun = 0

    def take(self, num_before: int, num_tokens: int, *, has_ended: bool) -> None:
        """Record that an output that had `num_before` tokens has `num_tokens` now."""
        self._num_live += num_before == 0 < num_tokens
        self.most = max(self.most, self._num_live)
        self._num_live -= has_ended
        self._num_begun += num_before < BEGUN_TOKENS <= num_tokens
        if self._num_begun == BEGUN_OUTPUTS:
            self.has_begun.set()


async def _until(client: AsyncClient, condition: Callable[[NodeLoad], bool]) -> NodeLoad:
    """Return the load report of the only node, once it meets the condition or SETTLE_S seconds are over."""
    end_s = time.monotonic() + SETTLE_S
    while True:
        [load] = (await client.loads()).nodes
        if condition(load) or time.monotonic() > end_s:
            return load
        await asyncio.sleep(POLL_S)


def _num_prompt_tokens(requests: Collection[Request]) -> int:
    return sum(len(request.prompt) for request in requests)


def _total(outputs: Collection[Output], count: Callable[[Completion], int]) -> int:
    return sum(count(output.completion) for output in outputs)


@dataclass(frozen=True, slots=True)
class BitsFigures:
    """What was found: what the node promises of these settings, and how each history went."""

    model: str
    engine: Mapping[str, str]
    promise: str
    histories: tuple[Played, ...]

    @property
    def differs(self) -> bool:
        """Return whether a history changed a bit."""
        return any(played.difference for played in self.histories)


async def check_bits(
    model: LocalModel, flags: Mapping[str, Any], sizes: BitsBench, cpus: Sequence[int], report: Report
) -> BitsFigures:
    """Start three clusters of the model with these flags, one after the other, and play the histories on them.

    `cpus` are shared out among a cluster's nodes. Raises BenchError when the model's context is too short, LaunchError
    when a cluster does not start, and SettingsError for flags that a node cannot use.
    """
    tp_size = sizes.tp_size
    cores = tp_size * min(sizes.cores, max(1, len(cpus) // (3 * tp_size)))  # of each of three nodes
    flags = {**flags, **dict.fromkeys(("prefill_tp", "decode_tp", "mixed_tp"), tp_size)}
    serving = partial(_serving, model, flags, report)
    async with serving(cpus[:cores], mixed=1) as (_, client):
        info = await client.model_info()
        [node] = (await client.server_info()).nodes
        requests = draw_requests(sizes, info.vocab_size, info.max_model_len)
        histories = Histories(requests, info.vocab_size, report)
        await histories.on_one_node(client)
    async with serving(cpus[: 3 * cores], prefill=1, decode=2) as (cluster, client):
        await histories.on_split_nodes(client, lambda name: os.kill(cluster.pid(name), signal.SIGKILL))
    pool = SmallPool.of(requests, BLOCK_SIZE)
    async with serving(cpus[: cores + tp_size], mixed=1, num_kv_blocks=pool.num_blocks) as (_, client):
        await histories.on_a_small_node(client, pool)  # which has one more core for each rank
    return BitsFigures(model.name, node.engine, promise_of(node), tuple(histories.played))


def promise_of(node: NodeInfo) -> str:
    """Return in words whether a node promises equal bits for equal requests, and why not, by its own description."""
    if node.numerics["is_batch_invariant"] == "yes":
        threads = " (with equal numbers of threads)" if "threads" in node.numerics else ""
        return f"promised: the same bits whatever happened to an output{threads}"
    if node.fingerprint["kv_cache_dtype"] in QUANTIZED_DTYPES:
        return "not promised: keys and values in 8 bits are rounded by what else is in their block"
    if int(node.engine["tp_size"]) > MOST_INVARIANT_RANKS:
        return f"not promised: the order in which {node.engine['tp_size']} ranks are added up depends on the batch"
    if node.engine["batch_invariant"] == "yes":
        return "not promised: histories that the node tried out at its start differ in bits; its log names them"
    return "not promised without --batch-invariant: PyTorch computes some of it, and its bits depend on the batch"


@asynccontextmanager
async def _serving(
    model: LocalModel, flags: Mapping[str, Any], report: Report, cpus: Sequence[int], **own: int
) -> AsyncIterator[tuple[Cluster, AsyncClient]]:
    """Return an async context manager that starts a cluster on these CPUs and yields it with a client.

    `own` are more flags of `splitserve up`.
    """
    timeouts = ("request_timeout_s", "credit_timeout_s", "descriptor_timeout_s", "keep_after_s")
    with tempfile.TemporaryDirectory(prefix="splitserve-bits-") as log_dir:
        values = {
            "block_size": BLOCK_SIZE,
            "max_num_batched_tokens": WHOLE_PROMPT_TOKENS,
            "heartbeat_s": HEARTBEAT_S,
            "log_dir": log_dir,
            **dict.fromkeys(timeouts, REQUEST_S),
            **flags,
            **own,
        }
        cluster = cluster_on(cpus, model, values, report)
        async with cluster, cluster.client() as client:
            await cluster.start(lambda missing: None)
            yield cluster, client


def bits_view(figures: BitsFigures) -> Group:
    """Return the report for people: the promise, a table of the histories, and the conclusion."""
    return Group(
        Text(engine_line(figures.model, dict(sorted(figures.engine.items())))),
        Text(figures.promise),
        "",
        histories_table(figures.histories),
        "",
        Text(conclusion(figures), style="bold"),
    )


def histories_table(histories: tuple[Played, ...]) -> Table:
    """Return a table with a row for each history: whether bits differ, and what shows that it took place."""
    table = plain_table("history", "bits", "shown by")
    for played in histories:
        style = "green" if played.is_good else "yellow" if played.difference is None else "red"
        table.add_row(played.history, Text(outcome(played), style=style), played.shown_by)
    return table


def outcome(played: Played) -> str:
    """Return a history's result in words: "ok", "not played", or where it differs."""
    if (difference := played.difference) is not None:
        what = "token" if difference.is_token else "log-probabilities"
        return f"differ: request {difference.request}, {what} {difference.token}"
    return "ok" if played.took_place else "not played"


def conclusion(figures: BitsFigures) -> str:
    """Return in one sentence how many histories changed bits, or could not be played."""
    num_histories = len(figures.histories)
    if differing := [played.history for played in figures.histories if played.difference is not None]:
        return f"{len(differing)} of {num_histories} histories changed bits of outputs: {', '.join(differing)}"
    if missing := [played.history for played in figures.histories if not played.took_place]:
        return f"no history changed a bit, but of {num_histories} some could not be played: {', '.join(missing)}"
    return f"none of {num_histories} histories changed a bit of a token or a log-probability"
