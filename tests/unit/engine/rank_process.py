"""One rank of several engines, one after the other, in a process of its own.

`python -m tests.unit.engine.rank_process FOLDER DEVICE` runs what FOLDER/cases.json lists. Rank 0 schedules,
tells the others the shares of each step, and writes what it sampled; every rank writes what it says of itself.
"""

import dataclasses
import json
import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import torch

from engine.build import build_engine
from engine.parallel import choose_device, join
from serving_core.requests import Share
from serving_core.settings import EngineSettings
from tests import forked
from tests.toy_scheduler import greedy, run_all

TIMEOUT_S = 600


def rank_case(folder, prompts, num_tokens, chunk_tokens, **settings):
    """What ranks are to answer, with the logprobs of the whole vocabulary."""
    return {
        "settings": {"model": str(folder), "num_kv_blocks": 64, **settings},
        "prompts": prompts,
        "sampling": {"max_tokens": num_tokens, "ignore_eos": True, "logprobs": 300},
        "chunk_tokens": chunk_tokens,
    }


@contextmanager
def rank_processes(tp_size, program, *arguments):
    """Starts the ranks of a node; ends those that are left afterwards."""
    with socket.socket() as held:  # and not listened on: rank 0 can still do that, and nobody else is given the port
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        meeting = {
            "WORLD_SIZE": str(tp_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(held.getsockname()[1]),
            "OMP_NUM_THREADS": "1",
        }
        processes = [
            forked.popen(
                program,
                *map(str, arguments),
                env={**os.environ, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(tp_size)
        ]
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.communicate()


def run_ranks(folder, tp_size, cases, device="cpu"):
    """Runs the cases on tp_size ranks; gives what rank 0 sampled in each, and what each rank says of itself."""
    (folder / "cases.json").write_text(json.dumps(cases))
    with rank_processes(tp_size, __name__, folder, device) as processes:
        for process in processes:
            output, _ = process.communicate(timeout=TIMEOUT_S)
            sys.stdout.write(output)  # which is shown where a test fails
            assert process.returncode == 0, output
    facts = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(tp_size)]
    return json.loads((folder / "sampled.json").read_text()), facts


class Leader:
    """An engine whose steps the other ranks are told of."""

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def step(self, works):
        self.tell([{**dataclasses.asdict(work.share), "block_ids": list(work.block_ids)} for work in works])
        return self._engine.step(works)

    def tell(self, shares):
        self._engine.group.exchange(json.dumps(shares).encode())


def follow(engine):
    """Follows until there is nothing more."""
    while (shares := json.loads(engine.group.exchange(b"")[0])) is not None:
        engine.follow([Share(**share) for share in shares])


def serve(case, device, group):
    """What rank 0 sampled, and what this rank says of itself."""
    engine = build_engine(EngineSettings(device=device, **case["settings"]), group)
    engine.warm_up()
    sampled = None
    if group.rank == 0:
        leader = Leader(engine)
        options = {"chunk_tokens": case["chunk_tokens"], "adapters": case.get("adapters", ())}
        answers = run_all(leader, case["prompts"], greedy(**case["sampling"]), **options)
        if case.get("foretells"):
            options["propose"] = foretelling(answers)
            answers = run_all(leader, case["prompts"], greedy(**case["sampling"]), **options)
        leader.tell(None)
        sampled = [[_as_json(token) for token in answer] for answer in answers]
    else:
        follow(engine)
    facts = {
        "fingerprint": engine.fingerprint,
        "description": engine.description,
        "numerics": engine.numerics_facts,
        "program": type(engine.program).__name__,
        "num_divided_passes": engine.num_divided_passes,
        "num_blocks": engine.num_blocks,
        "num_kv_heads": engine.layout.num_kv_heads,
        "weight_bytes": engine.weight_bytes,
        "kv_pool_bytes": engine.kv_pool_bytes,
    }
    engine.close()
    return sampled, facts


def foretelling(answers):
    """Proposes of these answers what comes next, three tokens and a wrong one, until they are almost over."""

    def propose(request):
        answer = [token.token_id for token in answers[int(request.request_id)]]
        draft_tokens = [*answer[request.num_output_tokens :][:3], 0]
        return draft_tokens[: request.sampling.max_tokens - request.num_output_tokens - 1]

    return propose


def _as_json(token):
    return {name: value for name, value in token._asdict().items() if name != "embedding"}


def main(folder, device):
    torch.set_num_threads(1)
    cases = json.loads((folder / "cases.json").read_text())
    group = join(choose_device(device), int(os.environ["WORLD_SIZE"]), TIMEOUT_S)
    results = {name: serve(case, device, group) for name, case in cases.items()}
    group.close()
    left = [thread.read_text().strip() for thread in Path("/proc/self/task").glob("*/comm")]
    assert "pt_gloo_runloop" not in left, "a thread of the group's may need Python after its end, and abort"
    facts = {name: result[1] for name, result in results.items()}
    (folder / f"rank{group.rank}.json").write_text(json.dumps(facts))
    if group.rank == 0:
        (folder / "sampled.json").write_text(json.dumps({name: result[0] for name, result in results.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
