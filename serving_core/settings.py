"""Define the settings of one node's engine. The flags derive from these fields; names follow vLLM's."""

from dataclasses import dataclass
from typing import Final

from serving_core.flags import flag

WEIGHT_BITS: Final = {"int8": 8, "int4": 4, "w8a8": 8}
HEAD_BITS: Final = 8  # also with 4-bit weights: rounding of the head affects outputs directly
INPUT_BITS: Final = {"w8a8": 8}  # bits to which kernels round inputs; 16 for others
GROUP_SIZE_4_BIT: Final = 32  # inputs that share a scale (float32) and a zero (a byte); with 8 bits all inputs do


DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("none", *WEIGHT_BITS)
MODEL_IMPLS = ("auto", "native", "transformers")
RUNNERS = ("auto", "generate", "pooling")
KV_CACHE_DTYPES = ("auto", "int8", "fp8_e4m3")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of one engine."""

    model: str = flag("", "Folder with config.json and safetensors files.", positional=True)
    model_impl: str = flag(
        "auto",
        "Whose modelling code computes; auto takes ours where there is some, else that of transformers.",
        choices=MODEL_IMPLS,
    )
    verify_model: bool = flag(
        True, "Compare what transformers computes here with its own attention first, where no test of ours has."
    )
    runner: str = flag(
        "auto",
        "Whether the model writes answers (generate) or makes embeddings (pooling); auto does what its folder says.",
        choices=RUNNERS,
    )
    dtype: str = flag("auto", "Compute dtype; auto takes the model's own.", choices=DTYPES)
    quantization: str = flag(
        "none",
        "Bits of the weights, made when they are loaded, and with w8a8 of activations; none takes them as they are.",
        choices=QUANTIZATIONS,
    )
    kv_cache_dtype: str = flag(
        "auto", "KV cache dtype; auto takes the compute dtype, int8 and fp8_e4m3 halve it.", choices=KV_CACHE_DTYPES
    )
    lora: tuple[str, ...] = flag(
        (),
        "LoRA adapter that requests may ask for as a model: NAME=FOLDER, as PEFT writes it. The same on all nodes. May "
        "be repeated.",
    )
    weights_memory_bytes: int = flag(
        0,
        "Memory that the weights of each rank may take, such as 8GiB: layers beyond are on disk, or with CUDA in host "
        "memory, and read while others compute. 0: all are in memory.",
        minimum=0,
    )
    weights_disk_path: str = flag("", "Folder on that disk, with CPUs; empty takes /tmp or /var/tmp.")
    device: str = flag("auto", "Where to compute; auto takes CUDA when there is one.", choices=DEVICES)
    block_size: int = flag(16, "Tokens in one KV block.", minimum=1, maximum=1024)
    num_kv_blocks: int = flag(0, "KV blocks in the pool; 0 derives it from --kv-cache-memory-bytes.", minimum=0)
    kv_cache_memory_bytes: int = flag(
        0,
        "Size of each rank's KV pool, such as 2GiB. 0: 512MiB with CPUs, and with CUDA what --gpu-memory-utilization "
        "leaves.",
        minimum=0,
    )
    gpu_memory_utilization: float = flag(
        0.9,
        "Part of a CUDA device's memory that a rank may take for weights and KV, where the size of its pool is not "
        "given; the rest is for what a step computes.",
        minimum=0.01,
        maximum=1.0,
    )
    max_model_len: int = flag(0, "Most tokens of prompt and answer; 0 takes the model's own.", minimum=0)
    batch_invariant: bool = flag(
        False, "Bits of an answer depend on the tokens before it alone, where torch computes too."
    )
    enforce_eager: bool = flag(False, "On CUDA, compute decode steps without CUDA graphs.")
    enable_prefix_caching: bool = flag(True, "Keep the KV of ended requests for prompts that begin alike.")
    tensor_parallel_size: int = flag(1, "Ranks that compute each layer together.", minimum=1, maximum=64)
    pipeline_parallel_size: int = flag(
        1,
        "Stages of neighbouring layers, which pass a step's tokens on from one to the next. Each has "
        "--tensor-parallel-size ranks.",
        minimum=1,
        maximum=64,
    )
    sequence_parallel_min_tokens: int = flag(
        0,
        "Tokens from which on the ranks of a layer divide a step with prompts by tokens, between the layer's products. "
        "0: each rank has them all.",
        minimum=0,
    )
    rank_timeout_s: float = flag(60.0, "Seconds a rank waits for the others before the node ends.", minimum=1.0)
    cpus: str = flag(
        "",
        "CPUs this node pins itself to: numbers such as 0-3,8, or a share such as 1/4; empty leaves it unpinned.",
    )

    @property
    def num_ranks(self) -> int:
        """Return the number of processes that compute this node together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
