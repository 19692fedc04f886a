"""What `splitserve plan` is asked for, as plain values that JSON can carry to the processes that simulate."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Final

DEVICE, COST, POWER = "device", "cost", "power"
MOST_COUNTED: Final = 10_000  # requests of a probe
# What goodput is shown by: words, and times what requests a second are.
OBJECTIVES: Final = {DEVICE: ("req/s a device", 1), COST: ("requests a dollar", 3600), POWER: ("req/s a kilowatt", 1)}


@dataclass(frozen=True, slots=True)
class AskedNodes:
    """The flags of nodes. Paths are "" where there is none, numbers 0 where they are to be found out."""

    model: str
    profile: str
    table_model: str
    prefill_hardware: tuple[str, ...]
    decode_hardware: tuple[str, ...]
    both_hardware: tuple[str, ...]
    link: str
    host_link: str
    gpus_per_host: int
    tp_sizes: tuple[int, ...]
    device_memory_bytes: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    dollars_per_h: tuple[tuple[str, float], ...] = ()
    watts: tuple[tuple[str, float], ...] = ()
    pp_sizes: tuple[int, ...] = (1,)
    weights_memory_bytes: int = 0
    quantization: str = "none"
    kv_cache_dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class AskedLoad:
    """The flags of a load."""

    dataset_name: str
    dataset_path: str
    length_scale: float
    random_input_len: int
    random_output_len: int
    random_range_ratio: float
    burstiness: float
    seed: int


@dataclass(frozen=True, slots=True)
class Asked:
    """The flags of a search."""

    nodes: AskedNodes
    load: AskedLoad
    gpus: int
    cells: int
    objective: str
    candidates: int
    goodput: tuple[str, ...]
    attainment: float
    tolerance: float
    max_probes: int
    num_prompts: int
    seconds: float
    all_plans: bool  # are searched to the end, not only the best two

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def asked_from_json(text: str) -> Asked:
    """What to_json has written."""
    fields = {name: _tuples(value) for name, value in json.loads(text).items()}
    nodes, load = (({name: _tuples(value) for name, value in fields.pop(part).items()}) for part in ("nodes", "load"))
    return Asked(nodes=AskedNodes(**nodes), load=AskedLoad(**load), **fields)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
