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
    """Settings of one node's engine."""

    model: str = flag("", "Load config.json and safetensors files from this folder.", positional=True)
    model_impl: str = flag(
        "auto",
        "Compute with this model code; auto takes SplitServe's own where it supports the architecture, "
        "else the transformers backend.",
        choices=MODEL_IMPLS,
    )
    verify_model: bool = flag(
        True,
        "Compare an untested model of the transformers backend with transformers' own attention at the start.",
    )
    runner: str = flag(
        "auto",
        "Generate tokens (generate) or compute embeddings (pooling); auto decides by the model's folder.",
        choices=RUNNERS,
    )
    dtype: str = flag("auto", "Compute in this dtype; auto takes the model's own.", choices=DTYPES)
    quantization: str = flag(
        "none",
        "Quantize the weights when they are loaded, with w8a8 also activations; none keeps them as stored.",
        choices=QUANTIZATIONS,
    )
    kv_cache_dtype: str = flag(
        "auto",
        "Store KV in this dtype; auto takes the compute dtype, int8 and fp8_e4m3 take half of 16 bits.",
        choices=KV_CACHE_DTYPES,
    )
    lora: tuple[str, ...] = flag(
        (),
        "Load this LoRA adapter, which requests select as a model: NAME=FOLDER, in PEFT's format, the "
        "same on all nodes. May be repeated.",
    )
    lora_root: str = flag(
        "",
        "Let operators load LoRA adapters of this folder while the node serves (/v1/load_lora_adapter); empty: none.",
    )
    weights_memory_bytes: int = flag(
        0,
        "Keep at most this much of each rank's weights in memory, such as 8GiB; further layers are read "
        "from disk, or on CUDA from host memory, while other layers compute. 0: all in memory.",
        minimum=0,
    )
    weights_disk_path: str = flag(
        "", "Put weights that are offloaded to disk into this folder; default: /tmp or /var/tmp."
    )
    device: str = flag("auto", "Compute on this device; auto takes CUDA if available.", choices=DEVICES)
    block_size: int = flag(16, "Store this many tokens in a KV block.", minimum=1, maximum=1024)
    num_kv_blocks: int = flag(
        0, "Hold this many KV blocks in the pool; 0 derives it from --kv-cache-memory-bytes.", minimum=0
    )
    kv_cache_memory_bytes: int = flag(
        0,
        "Give each rank a KV pool of this size, such as 2GiB; 0: 512MiB on CPUs, and on CUDA the memory "
        "that --gpu-memory-utilization leaves.",
        minimum=0,
    )
    gpu_memory_utilization: float = flag(
        0.9,
        "Use this fraction of a CUDA device's memory for a rank's weights and KV pool, if the pool's "
        "size is not given; the rest is for activations.",
        minimum=0.01,
        maximum=1.0,
    )
    max_model_len: int = flag(
        0, "Allow at most this many tokens of prompt and output together; 0 takes the model's own limit.", minimum=0
    )
    batch_invariant: bool = flag(
        False, "Make the bits of an output independent of its batch and of chunks, also in products of torch."
    )
    enforce_eager: bool = flag(False, "Run decode steps on CUDA without CUDA graphs.")
    enable_prefix_caching: bool = flag(True, "Keep the KV of finished requests for prompts with the same prefix.")
    tensor_parallel_size: int = flag(1, "Divide each layer over this many ranks.", minimum=1, maximum=64)
    pipeline_parallel_size: int = flag(
        1,
        "Divide the layers over this many pipeline stages, of --tensor-parallel-size ranks each.",
        minimum=1,
        maximum=64,
    )
    sequence_parallel_min_tokens: int = flag(
        0,
        "Divide activations over the ranks by tokens, between products, in steps with prefill of this "
        "many tokens or more (sequence parallelism); 0: never.",
        minimum=0,
    )
    rank_timeout_s: float = flag(
        60.0, "End the node when a rank has waited this many seconds for the others.", minimum=1.0
    )
    cpus: str = flag(
        "",
        "Pin this node to CPUs: 0-3,8 by number, or 2/4, the second of four equal parts; default: no pinning.",
    )

    @property
    def num_ranks(self) -> int:
        """Return the number of processes that compute this node together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
