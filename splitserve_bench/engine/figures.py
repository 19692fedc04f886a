"""What `splitserve bench engine` measures, as plain data. Times are seconds, rates are per second."""

from dataclasses import dataclass
from typing import Final

STEP_TOKENS: Final = 512  # of prompts in one step, unless another number is given


@dataclass(frozen=True, slots=True)
class PromptSize:
    """So many prompts of one length."""

    count: int
    num_tokens: int

    def __str__(self) -> str:
        return f"{self.count}x{self.num_tokens}"


@dataclass(frozen=True, slots=True)
class EngineBench:
    """How much is measured: each figure so many times, contexts in ascending order."""

    prompts: tuple[PromptSize, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    repeats: int
    structured: bool = False  # what a grammar for each answer costs a step, too
    step_tokens: int = STEP_TOKENS  # of prompts in one step
    shares_steps: bool = False  # of several prompts, as in a node; else each has steps of its own


@dataclass(frozen=True, slots=True)
class StartFigures:
    """From the start of the process to the imported engine, from there to the loaded one, and its first steps.
    Finding or making the model's folder in between does not count."""

    imports_s: float
    load_s: float
    warm_up_s: float
    ready_s: float  # all three


@dataclass(frozen=True, slots=True)
class MachineFigures:
    """The best that torch reaches here with this number of threads, and with what."""

    num_threads: int
    gemm_dtype: str
    gemm_flops_per_s: float
    gemm_with: str
    read_bytes_per_s: float
    read_with: str


@dataclass(frozen=True, slots=True)
class PrefillFigures:
    """Prompts of one length, computed one after the other: the median of the repeats, and the best. Operations are
    known of our own decoders alone, else None."""

    prompts: PromptSize
    tokens_per_s: float
    best_tokens_per_s: float
    flops: int | None  # of all prompts
    gemm_share: float | None  # of the median, of the measured GEMM rate


@dataclass(frozen=True, slots=True)
class DecodeFigures:
    """One step of a batch: the mean of steps in a row, of which the median of the repeats and the least. Bytes and
    operations are those of the mean step, shares of the median; but those of KV, known of our own decoders alone, else
    None."""

    batch: int
    context_tokens: int  # in the cache before the first of the steps
    step_s: float
    best_step_s: float
    weight_bytes: int | None
    kv_bytes: float
    flops: float | None
    bandwidth_share: float | None
    gemm_share: float | None


@dataclass(frozen=True, slots=True)
class LoopFigures:
    """What a node does between two decode steps of a batch, by the parts of engine/stepper.py, beside the time that
    a step computes: CPU time, and time by the clock, each of the repeat in which it is least."""

    batch: int
    context_tokens: int
    step_s: float
    cpu_s: dict[str, float]
    clock_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class PartFigures:
    """One part of a step, without the parts within it."""

    name: str
    num_calls: float
    own_s: float
    share: float


@dataclass(frozen=True, slots=True)
class ProfileFigures:
    """Where the time of a step goes, in the fastest repeat: the parts sum up to step_s. plain_s is the same step
    without the stop-watches."""

    name: str
    step_s: float
    plain_s: float
    parts: tuple[PartFigures, ...]


@dataclass(frozen=True, slots=True)
class StructuredFigures:
    """A step of a batch whose answers are each kept to a grammar, and the same step without: medians of the repeats."""

    batch: int
    vocab_size: int
    step_s: float
    plain_step_s: float


@dataclass(frozen=True, slots=True)
class ChoosingFigures:
    """Choosing the tokens of one step, after its logits: the median of the repeats."""

    way: str  # what is asked for
    batch: int
    vocab_size: int
    step_s: float


@dataclass(frozen=True, slots=True)
class OffloadFigures:
    """Layers whose weights are elsewhere, on disk or in host memory: what decode steps of one request read of them, and
    what is read from there while nothing computes."""

    where: str
    num_layers: int
    num_bytes: int
    step_bytes: float
    step_s: float  # the median of the repeats
    bytes_per_s: float
    alone_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """One engine on this machine: the name of the model's folder, and the engine's description of itself."""

    model: str
    engine: dict[str, str]
    weight_bytes: int
    start: StartFigures
    machine: MachineFigures
    prefill: tuple[PrefillFigures, ...]
    decode: tuple[DecodeFigures, ...]
    profiles: tuple[ProfileFigures, ...]
    loop: tuple[LoopFigures, ...]
    choosing: tuple[ChoosingFigures, ...]
    step_tokens: int = STEP_TOKENS
    shares_steps: bool = False
    structured: StructuredFigures | None = None
    offload: OffloadFigures | None = None
