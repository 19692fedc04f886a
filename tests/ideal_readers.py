"""How many prompts of a load could be read in time if there were nothing but prompts: `python -m tests.ideal_readers`.

Nodes read one prompt at a time out of one queue, each for as long as the profile says; answers take nothing, what can
be in time no more is forgotten at once, and nothing is known of what is to come. So it is no bound, since an order that
knows the future does better, but what orders of this kind reach where all else is free.
"""

import math
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple

import click

from serving_core.slo import timely
from splitserve_bench.plan.loads import LoadOptions, Loads
from splitserve_bench.simulate.profile import Profile, read_profile


class Prompt(NamedTuple):
    """When it comes, how long it is read, and when it is due."""

    at_s: float
    read_s: float
    due_s: float


Choice = Callable[[Sequence[Prompt], float, int], Prompt]
"""Of those that wait at that time, for so many readers."""


def most_timely(waiting: Sequence[Prompt], now: float, num_readers: int) -> Prompt:
    """The most urgent one of the most that can be in time, as a node has it (prefill_node/scheduler.py)."""
    shares_s = [each.read_s / num_readers for each in waiting]
    left_s = [each.due_s - now - each.read_s + share_s for each, share_s in zip(waiting, shares_s, strict=True)]
    found = timely(shares_s, left_s)
    return waiting[found[0]] if found else shortest(waiting, now, num_readers)


def most_urgent(waiting: Sequence[Prompt], now: float, num_readers: int) -> Prompt:
    return min(waiting, key=lambda each: each.due_s)


def shortest(waiting: Sequence[Prompt], now: float, num_readers: int) -> Prompt:
    return min(waiting, key=lambda each: each.read_s)


ORDERS: Final = (most_timely, most_urgent, shortest)


def share_in_time(prompts: Sequence[Prompt], num_readers: int, choose: Choice) -> float:
    num_read, waiting, num_free = 0, list[Prompt](), num_readers
    numbers = count()  # of equal moments the first one first
    agenda: list[tuple[float, int, Prompt | None]] = [(each.at_s, next(numbers), each) for each in prompts]
    heapify(agenda)
    while agenda:
        now, _, come = heappop(agenda)
        if come is None:
            num_free += 1
        else:
            waiting.append(come)
        waiting = [each for each in waiting if now + each.read_s <= each.due_s]
        while waiting and num_free:
            chosen = choose(waiting, now, num_readers)
            waiting.remove(chosen)
            num_free, num_read = num_free - 1, num_read + 1
            heappush(agenda, (now + chosen.read_s, next(numbers), None))  # a reader is free again
    return num_read / len(prompts)


def read_s(profile: Profile, num_tokens: int) -> float:
    """Of a prompt by itself, in whole chunks."""
    chunk, steps = profile.node.max_num_batched_tokens, profile.steps.prompts
    starts = range(0, num_tokens, chunk)
    return math.fsum(steps.at(min(chunk, num_tokens - start), start) for start in starts)


@click.command()
@click.option("--profile", "path", required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--dataset-path", required=True, help="A trace in the format of Azure's.")
@click.option("--length-scale", default=0.25, show_default=True)
@click.option("--request-rate", required=True, type=float)
@click.option("--num-prompts", default=300, show_default=True)
@click.option("--ttft", nargs=2, type=float, required=True, help="The limit in ms: of any prompt, and more a token.")
@click.option("--readers", default=2, show_default=True)
def ideal_readers(
    path: Path,
    dataset_path: str,
    length_scale: float,
    request_rate: float,
    num_prompts: int,
    ttft: tuple[float, float],
    readers: int,
) -> None:
    """Prints the share that is read in time, by order."""
    profile, load = read_profile(path), LoadOptions("azure", dataset_path, length_scale, 1, 1, 0.0, 1.0, 0)
    planned = Loads(load, profile.node.vocab_size, profile.node.max_model_len).load(request_rate, num_prompts, 0)
    prompts = [
        Prompt(each.send_at_s, read_s(profile, num), each.send_at_s + (ttft[0] + ttft[1] * num) / 1000)
        for each in planned
        for num in (len(each.prompt),)
    ]
    for choose in ORDERS:
        click.echo(f"{choose.__name__:12} {share_in_time(prompts, readers, choose):6.1%}")


if __name__ == "__main__":
    ideal_readers()
