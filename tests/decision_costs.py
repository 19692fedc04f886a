"""What decisions cost beside completions: `python -m tests.decision_costs [MODEL] [--questions 400] [--tokens 7500]`.

A prefill node and a decode node are asked questions about one input: as one call of /v1/decisions, as a completion for
each question, and as completions that share no KV of the input (--unshared of them, multiplied). Told is the CPU time
of each process and the prompt tokens that the prefill node has computed.
"""

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import click
import httpx2
import psutil

from tests.system.cluster import Cluster
from tests.tiny_models import write_tiny_model

DEADLINE_S = 3600.0
WORDS = "the customer was charged twice and nobody has answered so far "


def cpu_s(cluster: Cluster) -> Counter[str]:
    times = {name: psutil.Process(child.process.pid).cpu_times() for name, child in cluster.children.items()}
    return Counter({name: each.user + each.system for name, each in times.items()})


def num_computed(cluster: Cluster) -> int:
    return sum(load.num_prompt_tokens - load.num_cached_tokens for load in cluster.loads().values())


def question(index: int) -> dict[str, object]:
    choices = [{"value": "billing"}, {"value": "technical"}, {"value": "sales"}]
    return {"type": "choice", "instructions": f"Which team should read part {index}?", "choices": choices}


async def measured(
    cluster: Cluster, name: str, ask: Callable[[], Awaitable[None]], factor: float = 1.0
) -> tuple[float, int]:
    """Print what `ask` costs times `factor`; return the CPU time and the prompt tokens."""
    before, num_before, begun_s = cpu_s(cluster), num_computed(cluster), time.monotonic()
    await ask()
    wall_s = time.monotonic() - begun_s
    await asyncio.sleep(1.0)  # until the nodes' reports have come
    used = cpu_s(cluster) - before
    total, num_tokens = factor * used.total(), round(factor * (num_computed(cluster) - num_before))
    each = ", ".join(f"{process} {factor * seconds:.1f}" for process, seconds in sorted(used.items()))
    click.echo(f"{name}: {total:.1f} s of CPU ({each}), {num_tokens} prompt tokens computed, {factor * wall_s:.1f} s")
    return total, num_tokens


async def compare(cluster: Cluster, given: argparse.Namespace) -> None:
    async with httpx2.AsyncClient(base_url=cluster.url, timeout=DEADLINE_S) as client:

        async def post(path: str, **body: object) -> dict[str, object]:
            reply = await client.post(path, json=body)
            assert reply.status_code == 200, reply.text
            return reply.json()

        words = WORDS * given.tokens
        token_ids = (await post("/tokenize", prompt=words[: 6 * given.tokens]))["tokens"][: given.tokens]
        text = (await post("/detokenize", tokens=token_ids))["prompt"]
        questions = [question(index) for index in range(given.questions)]

        async def complete(index: int, salt: str) -> None:
            said = f"{text}\n\n{questions[index]['instructions']}\n\nA. billing\nB. technical\nC. sales\n\nWhich one?"
            messages = [{"role": "user", "content": said}]
            options = {"max_tokens": given.max_tokens, "ignore_eos": True, "temperature": 0, "cache_salt": salt}
            await post("/v1/chat/completions", messages=messages, **options)

        async def decide() -> None:
            await post("/v1/decisions", model="", input=text, questions=questions, cache_salt="d")

        async def complete_all() -> None:
            await asyncio.gather(*(complete(index, "c") for index in range(given.questions)))

        async def complete_apart() -> None:
            await asyncio.gather(*(complete(index, f"{index}") for index in range(given.unshared)))

        await post("/v1/decisions", model="", input="Hi.", questions=questions[:1])  # first calls cost more
        await complete(0, "first")
        decided = await measured(cluster, f"{given.questions} decisions", decide)
        name = f"{given.questions} completions of {given.max_tokens} tokens"
        factor = given.questions / given.unshared
        for other in (
            await measured(cluster, name, complete_all),
            await measured(cluster, f"{name} that share no KV", complete_apart, factor),
        ):
            click.echo(
                f"  {other[0] / decided[0]:.1f} times the CPU time, {other[1] / decided[1]:.1f} times the prompt tokens"
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", help="a model folder; default: a small random one")
    parser.add_argument("--questions", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=7500, help="of the input")
    parser.add_argument("--max-tokens", type=int, default=16, help="of a completion")
    parser.add_argument("--unshared", type=int, default=10, help="completions without shared KV")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = given.model or write_tiny_model(folder / "model", "llama", max_position_embeddings=16_384)
        node = {"num_kv_blocks": 2000, "max_model_len": 8192, "block_size": 16}
        cluster = Cluster(
            Path(model), folder, http=True, coordinator={"max_model_len": 8192, "max_queue_wait_s": 0}, node=node
        ).start()
        try:
            asyncio.run(compare(cluster, given))
            cluster.stop()
        finally:
            cluster.kill_everything()


if __name__ == "__main__":
    main()
