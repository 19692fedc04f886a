"""The commands that run a plan."""

import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from coordinator.control.slo import DEFAULT, MAX_MS, MS
from coordinator.settings import CoordinatorSettings
from serving_core.errors import ModelError
from serving_core.model_config import read_model_config
from serving_core.shapes import BOTH, DECODE, PREFILL
from splitserve_bench.plan.asked import AskedNodes
from splitserve_bench.plan.devices import CPU
from splitserve_bench.plan.nodes import MEASURED, MEMORY, NodeKind
from splitserve_bench.plan.plans import Placed, Plan
from splitserve_bench.plan.study import Study
from splitserve_bench.serve.metrics import Limits

SECRETS: Final = "SPLITSERVE_FLEET_SECRET and SPLITSERVE_API_KEY"  # without which nobody listens off loopback
PUBLIC: Final = "--host 0.0.0.0 --http-host 0.0.0.0 --fleet-host 0.0.0.0"
JOINED: Final = "--coordinator COORDINATOR:50052 --kv-bind 'tcp://eth0:*'"  # as the user's hosts have them


def commands_of(study: Study, plan: Plan) -> list[str]:
    """For each cell: `splitserve up` where that does it, else every process on devices of its own. The coordinator is
    told the limits, which simulated requests have too. Of a model that cannot be served, why."""
    asked = study.asked
    model = asked.nodes.model or "MODEL"
    if asked.nodes.model:
        try:
            read_model_config(Path(asked.nodes.model))
        except ModelError as error:
            return [f"SplitServe does not serve it: {error}"]
    placed = sorted(plan.placed(), key=lambda each: each.host)
    num_hosts = len({each.host for each in placed})
    each_cell = f", in each of {asked.cells} cells" if asked.cells > 1 else ""
    of_coordinator = [*_limits(study.limits), *_in_flight(plan)]
    if num_hosts == 1 and (pools := _pool_sizes(plan, asked.nodes)):
        return [f"Run it{each_cell}:", f"  {_up(plan, model, asked.nodes, [*pools, *of_coordinator])}"]
    hosts = f"{num_hosts} host{'s' if num_hosts > 1 else ''}"
    words = [f"Run it on {hosts}{each_cell}, with {SECRETS} set; COORDINATOR and eth0 are to be yours:"]
    words.append(f"  splitserve coordinator {shlex.quote(model)} {' '.join([PUBLIC, *of_coordinator])}")
    num_taken = Counter[int]()  # devices of each host
    for each in placed:
        words.append(f"  {_node(each, num_taken[each.host], model, asked.nodes)}")
        num_taken[each.host] += each.kind.num_devices
    return words


def _limits(limits: Limits) -> list[str]:
    """Of every request that has none of its own."""
    named = {"ttft": limits.ttft_s, "tpot": limits.tpot_s}
    told = [f"{name}:{_plain(limit_s * MS)}" for name, limit_s in named.items() if limit_s and limit_s * MS <= MAX_MS]
    return [f"--slo-class {DEFAULT}={','.join(told)}"] if told else []


def _plain(number: float) -> str:
    """Without an exponent."""
    return f"{number:.6f}".rstrip("0").rstrip(".")


def _pool_sizes(plan: Plan, asked: AskedNodes) -> list[str]:
    """What gives each node of a cluster the pool that it was simulated with; nothing where no flag of all does."""
    kinds = [pool.kind for pool in plan.pools]
    if len(sizes := {kind.kv_cache_memory_bytes for kind in kinds}) == 1:
        return [f"--kv-cache-memory-bytes {sizes.pop()}"]
    is_cuda = not any(kind.hardware in (CPU, MEASURED) for kind in kinds)
    return [f"--gpu-memory-utilization {MEMORY:g}"] if is_cuda and not asked.device_memory_bytes else []


def _up(plan: Plan, model: str, asked: AskedNodes, others: Sequence[str]) -> str:
    flags = [f"--{role} {plan.count_of(role)}" for role in (PREFILL, DECODE) if plan.count_of(role)]
    flags += [f"--{role} {plan.count_of(role)}" for role in (BOTH,) if plan.count_of(role)]
    flags += [f"--{pool.role}-tp {pool.kind.tp}" for pool in plan.pools if pool.kind.tp > 1]
    flags += [f"--{pool.role}-pp {pool.kind.pp}" for pool in plan.pools if pool.kind.pp > 1]
    kinds = [pool.kind for pool in plan.pools]
    flags += [
        f"--max-num-batched-tokens {min(kind.sizes.max_num_batched_tokens for kind in kinds)}",
        f"--max-num-seqs {min(kind.sizes.max_num_seqs for kind in kinds)}",
        *_stored(asked, max(kind.weights_memory_bytes for kind in kinds)),
        *_measured(kinds[0]),
    ]
    return f"splitserve up {shlex.quote(model)} {' '.join([*flags, *others])}"


def _stored(asked: AskedNodes, memory_bytes: int) -> list[str]:
    """How nodes hold weights, of which only so much may be in memory, and KV; and how long requests may be."""
    flags = [f"--weights-memory-bytes {memory_bytes}"] if memory_bytes else []
    flags += [f"--max-model-len {asked.max_model_len}"] if asked.max_model_len else []
    flags += [f"--quantization {asked.quantization}"] if asked.quantization != "none" else []
    return [*flags, *([f"--kv-cache-dtype {asked.kv_cache_dtype}"] if asked.kv_cache_dtype != "auto" else [])]


def _measured(kind: NodeKind) -> list[str]:
    """What the nodes of a profile had, which all nodes of a plan have then."""
    given = kind.profile.flags.items() if kind.profile is not None else ()
    words = [(f"--{name.replace('_', '-')}", "" if value is True else shlex.quote(f"{value}")) for name, value in given]
    return [f"{flag} {value}".strip() for flag, value in words]


def _in_flight(plan: Plan) -> list[str]:
    """Where there are more seats than the coordinator takes answers."""
    seats = sum(pool.count * (pool.kind.sizes.max_answers + pool.kind.sizes.max_num_queued) for pool in plan.pools)
    return [f"--max-num-queued-reqs {seats}"] if seats > CoordinatorSettings().max_num_queued_reqs else []


def _node(placed: Placed, first: int, model: str, asked: AskedNodes) -> str:
    """With the devices of its host from that one on."""
    kind = placed.kind
    devices = ",".join(map(str, range(first, first + kind.num_devices)))
    visible = f"CUDA_VISIBLE_DEVICES={devices} "
    flags = []
    if kind.hardware in (CPU, MEASURED):  # whose device is a core, or as many cores as a node was measured on
        visible = ""
        flags += [f"--cpus {devices if kind.hardware == CPU else f'{first + 1}/{asked.gpus_per_host}'}"]
    flags += [f"--tensor-parallel-size {kind.tp}"] if kind.tp > 1 else []
    flags += [f"--pipeline-parallel-size {kind.pp}"] if kind.pp > 1 else []
    flags += [
        f"--max-num-batched-tokens {kind.sizes.max_num_batched_tokens}",
        f"--max-num-seqs {kind.sizes.max_num_seqs}",
        f"--kv-cache-memory-bytes {kind.kv_cache_memory_bytes}",
        *_stored(asked, kind.weights_memory_bytes),
        *_measured(kind),
    ]
    command = f"{visible}splitserve {placed.role} {shlex.quote(model)} {JOINED} {' '.join(flags)}"
    return f"{command}  # host {placed.host}, {kind.hardware}"
