"""How long the engine's thread waits for the interpreter after a step, beside its node's event loop:
`python -m tests.interpreter_waits [--streams 64] [--step-ms 4] [--interval-ms 5]`.

A prefill node and a decode node of the fake model, whose steps sleep as long as a device would compute, without the
interpreter. Each stream asks for short outputs behind prompts of 700 tokens one after the other, so that KV comes in
between. Told is by how much the decode node's steps of many requests overslept. A busy machine adds to that: run it
with `chrt -r 20` there, and the nodes are run before all else.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import httpx2

from tests.system.cluster import Cluster
from tests.tiny_models import write_fake_model

FILE, INTERVAL = "STEP_WAITS", "SWITCH_INTERVAL_MS"
WRITTEN_EVERY, NUM_TURNS, MAX_TOKENS = 100, 12, 40
DEADLINE_S = 600.0
HOOK = "from tests.interpreter_waits import note_waits\nnote_waits()\n"


def note_waits() -> None:
    """In a node's process: steps of the fake model do nothing but sleep, and what they oversleep is written down."""
    import torch

    from engine.fake import FakeModel

    waits: list[tuple[float, int]] = []
    sys.setswitchinterval(float(os.environ[INTERVAL]) / 1e3)

    def step(model, batch, attention, on_layer=None):
        due_s = time.perf_counter() + model._step_s
        time.sleep(model._step_s)
        waits.append((time.perf_counter() - due_s, len(batch.token_ids)))
        if len(waits) % WRITTEN_EVERY == 0:
            Path(f"{os.environ[FILE]}-{os.getpid()}").write_text("".join(f"{wait} {num}\n" for wait, num in waits))
        if on_layer is not None:
            on_layer(attention.pool.layout.num_layers)
        return torch.ones(len(batch.logit_rows), model._vocab_size)

    FakeModel.__call__ = step


async def stream_all(cluster: Cluster, num_streams: int) -> None:
    limits = httpx2.Limits(max_connections=num_streams)
    async with httpx2.AsyncClient(base_url=cluster.url, timeout=DEADLINE_S, limits=limits) as client:

        async def one(index: int) -> None:
            for turn in range(NUM_TURNS):
                prompt = [97 + index % 100, *([50] * 700), 97 + turn]
                body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True}
                async with client.stream("POST", "/v1/completions", json=body) as response:
                    assert response.status_code == 200, await response.aread()
                    async for _ in response.aiter_raw():
                        pass

        await asyncio.gather(*map(one, range(num_streams)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("streams", 64), ("step-ms", 4.0), ("interval-ms", 5.0)):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(HOOK)
        os.environ["PYTHONPATH"] = os.pathsep.join([name, str(Path.cwd())])
        os.environ |= {FILE: f"{folder}/waits", INTERVAL: str(given.interval_ms)}
        model = write_fake_model(folder / "m", step_s=given.step_ms / 1e3, max_position_embeddings=2048)
        (folder / "logs").mkdir()
        flags = {"node": {"max_num_seqs": 64, "num_kv_blocks": 8192}, "coordinator": {"max_queue_wait_s": DEADLINE_S}}
        cluster = Cluster(model, folder / "logs", http=True, **flags)
        cluster.start()
        try:
            pid = cluster.children["decode-0"].process.pid
            if os.sched_getscheduler(0) != os.SCHED_OTHER:
                subprocess.run(["chrt", "-a", "-f", "-p", "40", str(pid)], check=True)
            asyncio.run(stream_all(cluster, given.streams))
        finally:
            cluster.stop()
        rows = [line.split() for line in Path(f"{folder}/waits-{pid}").read_text().splitlines()]
    waits = sorted(float(wait) * 1e3 for wait, num in rows if int(num) >= given.streams * 0.3)
    told = ", ".join(f"{share:.0%} {waits[int(share * (len(waits) - 1))]:.2f}" for share in (0.5, 0.9, 0.99, 1.0))
    click.echo(f"{len(waits)} steps of {given.step_ms:g} ms, switch interval {given.interval_ms:g} ms, ms late: {told}")


if __name__ == "__main__":
    main()
