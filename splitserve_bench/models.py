"""Open the model that a benchmark measures: one that is named, or random weights in the sizes of a known model.

Speed does not depend on the values of weights.
"""

import dataclasses
import json
import math
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from serving_core.errors import SettingsError
from serving_core.model_files.config import read_model_config
from serving_core.process.memory import available_bytes
from serving_core.units import size_of
from splitserve.launch.models import LocalModel, Report, resolve
from splitserve_bench.errors import BenchError

WEIGHT_BYTES: Final = 2  # of bfloat16
DEVIATION: Final = 0.02  # of the weights, as models are initialized: logits stay finite
SEED: Final = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Llama, Qwen3, Qwen3-MoE or Gemma 3 model with tied embeddings and bfloat16 weights."""

    architecture: str
    model_type: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    num_experts: int = 0  # in place of each feed-forward; 0: there are none
    num_chosen: int = 0  # of them by each token
    expert_size: int = 0

    @property
    def is_gemma(self) -> bool:
        """Return whether the model is of the Gemma 3 family."""
        return self.model_type.startswith("gemma3")

    @property
    def num_parameters(self) -> int:
        """Return the number of weights of all matrices, without the norms."""
        return sum(math.prod(sizes) for _, sizes in self.tensors() if len(sizes) > 1)

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield each tensor's name (without ".weight") and sizes: outputs and inputs of a matrix, or a norm's width."""
        hidden, heads, kv_heads = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        yield "model.embed_tokens", (self.vocab_size, hidden)
        yield "model.norm", (hidden,)
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if self.is_gemma else []
        experts = {f"mlp.experts.{expert}": self.expert_size for expert in range(self.num_experts)}
        for path in (f"model.layers.{layer}" for layer in range(self.num_layers)):
            yield from ((f"{path}.{norm}", (hidden,)) for norm in norms)
            if self.is_gemma or self.model_type.startswith("qwen3"):
                yield from ((f"{path}.self_attn.{norm}", (self.head_dim,)) for norm in ("q_norm", "k_norm"))
            yield f"{path}.self_attn.q_proj", (heads, hidden)
            yield f"{path}.self_attn.k_proj", (kv_heads, hidden)
            yield f"{path}.self_attn.v_proj", (kv_heads, hidden)
            yield f"{path}.self_attn.o_proj", (hidden, heads)
            if experts:
                yield f"{path}.mlp.gate", (self.num_experts, hidden)
            for name, inner in (experts or {"mlp": self.intermediate_size}).items():
                yield f"{path}.{name}.gate_proj", (inner, hidden)
                yield f"{path}.{name}.up_proj", (inner, hidden)
                yield f"{path}.{name}.down_proj", (hidden, inner)


SHAPES: Final = {
    "gemma-3-1b": Shape("Gemma3ForCausalLM", "gemma3_text", 1152, 26, 4, 1, 256, 6912, 262144, 32768),
    "qwen3-0.6b": Shape("Qwen3ForCausalLM", "qwen3", 1024, 28, 16, 8, 128, 3072, 151936, 40960),
    "qwen3-30b-a3b": Shape("Qwen3MoeForCausalLM", "qwen3_moe", 2048, 48, 32, 4, 128, 6144, 151936, 40960, 128, 8, 768),
    "llama-3.1-8b": Shape("LlamaForCausalLM", "llama", 4096, 32, 32, 8, 128, 14336, 128256, 131072),
    "llama-3.2-1b": Shape("LlamaForCausalLM", "llama", 2048, 16, 32, 8, 64, 8192, 128256, 131072),
    "smollm2-135m": Shape("LlamaForCausalLM", "llama", 576, 30, 9, 3, 64, 1536, 49152, 8192),
}


def writing_model(model: str, report: Report) -> LocalModel:
    """Return folder and name of a model that generates text, downloading it when needed; `report` gets progress.

    `model` is a folder, a file, or a hub id, as `resolve` takes it. Raises BenchError for a model that makes
    embeddings, and what `resolve` raises.
    """
    local = resolve(model, report)
    if read_model_config(local.folder).embedder is not None:
        raise BenchError(f"{local.name} makes embeddings, and what is measured here is a model that generates text")
    return local


@contextmanager
def model_folder(model: str, shape: str | None, num_layers: int, report: Report) -> Iterator[Path]:
    """Return a context manager that yields the folder of `model`, or without one a folder with random weights.

    `shape`, a name of SHAPES or None, has the sizes of those weights, with `num_layers` of its layers (0: all). They
    are removed at the end, also at SIGTERM. Raises SettingsError when they do not fit into memory.
    """
    if shape is None:
        yield writing_model(model, report).folder
        return
    sizes = shape_of(shape, num_layers)

    def end(signal_number: int, _: object) -> NoReturn:
        raise SystemExit(128 + signal_number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        with tempfile.TemporaryDirectory(prefix="splitserve-bench-") as scratch:
            report(f"writing random weights of the sizes of {shape} ...")
            folder = Path(scratch) / (f"{shape}-{num_layers}-layers" if num_layers else shape)
            write_random_model(folder, sizes)
            yield folder
    finally:
        signal.signal(signal.SIGTERM, before)


def shape_of(name: str, num_layers: int) -> Shape:
    """Return the sizes of a model of SHAPES with its first `num_layers` layers, 0 for all.

    Raises SettingsError when it has fewer layers, or its weights do not fit into the free memory.
    """
    whole = SHAPES[name]
    if num_layers > whole.num_layers:
        raise SettingsError(f"--layers {num_layers}: {name} has {whole.num_layers}")
    shape = dataclasses.replace(whole, num_layers=num_layers or whole.num_layers)
    needed, free = WEIGHT_BYTES * shape.num_parameters, available_bytes()
    if needed > free:
        raise SettingsError(
            f"{shape.num_layers} layers of {name} take {size_of(needed)}, and {size_of(free)} of memory are free; "
            "--layers gives it fewer"
        )
    return shape


def write_random_model(folder: Path, shape: Shape) -> None:
    """Write config.json, model.safetensors with random weights, and a tokenizer of one word a token to a folder.

    The folder is made. The weights are the same each time on one kind of device (CPU or CUDA).
    """
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    device = "cuda" if torch.cuda.is_available() else "cpu"  # which draws billions of numbers at once
    generator = torch.Generator(device).manual_seed(SEED)

    def tensor(sizes: tuple[int, ...]) -> torch.Tensor:
        if len(sizes) == 1:  # Gemma's norms have 1 added
            return torch.full(sizes, 0.0 if shape.is_gemma else 1.0, dtype=torch.bfloat16)
        weight = torch.empty(sizes, dtype=torch.bfloat16, device=device)
        return weight.normal_(0, DEVIATION, generator=generator).cpu()

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config(shape), indent=2))
    tensors = {f"{name}.weight": tensor(sizes) for name, sizes in shape.tensors()}
    save_file(tensors, folder / "model.safetensors")
    tokenizer = Tokenizer(WordLevel({f"w{number}": number for number in range(shape.vocab_size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


def _config(shape: Shape) -> dict[str, Any]:
    mixture = {
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.num_chosen,
        "moe_intermediate_size": shape.expert_size,
        "norm_topk_prob": True,
    }
    gemma = {"query_pre_attn_scalar": shape.head_dim, "sliding_window": 512}
    return {
        "architectures": [shape.architecture],
        "model_type": shape.model_type,
        **(gemma if shape.is_gemma else {"hidden_act": "silu"}),
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        **(mixture if shape.num_experts else {}),
    }
