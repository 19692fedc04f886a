"""Read the sizes of a model that decide its costs from the config.json of its folder."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from serving_core.errors import ModelError
from serving_core.layout import DTYPE_BYTES, KVLayout
from serving_core.model_files.config import read_model_config
from serving_core.model_files.differences import Experts
from serving_core.settings import GROUP_SIZE_4_BIT, HEAD_BITS, WEIGHT_BITS, EngineSettings
from serving_core.sharding import most_kv_heads

MLP_PRODUCTS: Final = 3  # of a gated feed-forward layer
GROUP_BITS: Final = (32 + 8) / GROUP_SIZE_4_BIT  # of each weight of 4 bits, for the scale and the zero


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of one decoder. Norms and biases, less than a thousandth of the weights, are left out.

    Experts replace the feed-forward in all layers but the dense ones that they name.
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    is_tied: bool  # one matrix for the embedding and the head
    dtype: str
    experts: Experts | None = None
    quantization: str = "none"  # of all but embeddings, as nodes do it when they load them
    kv_cache_dtype: str = "auto"

    def stored_as(self, quantization: str, kv_cache_dtype: str) -> "ModelSizes":
        """Return the sizes of the same model as nodes with these two flags hold it."""
        return replace(self, quantization=quantization, kv_cache_dtype=kv_cache_dtype)

    @property
    def dtype_bytes(self) -> int:
        """Return the bytes of a value of the model's own dtype."""
        return DTYPE_BYTES[self.dtype]

    @property
    def is_quantized(self) -> bool:
        """Return whether nodes quantize the weights."""
        return self.quantization != "none"

    @property
    def body_weight_bytes(self) -> float:
        """Return the bytes of one weight of a layer."""
        if not self.is_quantized:
            return self.dtype_bytes
        bits = WEIGHT_BITS[self.quantization]
        return (bits + (GROUP_BITS if bits == 4 else 0.0)) / 8

    @property
    def head_weight_bytes(self) -> float:
        """Return the bytes of one weight of the head."""
        return HEAD_BITS / 8 if self.is_quantized else self.dtype_bytes

    @property
    def embedding_weight_bytes(self) -> float:
        """Return the bytes of one weight of the embedding."""
        return self.head_weight_bytes if self.is_tied else self.dtype_bytes

    @property
    def body_weights(self) -> int:
        """Return the number of weights of all layers."""
        return self._body(1.0)

    @property
    def active_weights(self) -> int:
        """Return the number of weights of all layers that one token is multiplied with."""
        experts = self.experts
        return self._body(1.0 if experts is None else experts.num_chosen / experts.num_experts)

    def read_weights(self, num_tokens: float) -> int:
        """Return the number of weights of all layers that a step of `num_tokens` tokens reads."""
        return self._body(1.0 if self.experts is None else self.experts.share_taken(num_tokens))

    def _body(self, share_of_experts: float) -> int:
        """Return the number of weights of all layers, with this share of their experts."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        dense, num_dense, mixture = MLP_PRODUCTS * self.intermediate_size, self.num_layers, 0
        if (experts := self.experts) is not None:
            num_dense = len(experts.dense_layers)
            neurons = round(share_of_experts * experts.num_experts * experts.intermediate_size) + experts.shared_size
            mixture = MLP_PRODUCTS * neurons + experts.num_gates
        rows = self.num_layers * attention + num_dense * dense + (self.num_layers - num_dense) * mixture
        return self.hidden_size * rows

    @property
    def head_weights(self) -> int:
        """Return the number of weights of the head."""
        return self.vocab_size * self.hidden_size

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all weights."""
        of_ends = self.embedding_weight_bytes + (0 if self.is_tied else self.head_weight_bytes)
        return int(self.body_weights * self.body_weight_bytes + self.head_weights * of_ends)

    def layout(self, block_size: int) -> KVLayout:
        """Return the layout of the whole model's KV, in blocks of `block_size` tokens."""
        dtype = self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype
        return KVLayout.uniform(self.num_layers, self.num_kv_heads, self.head_dim, block_size, dtype)

    def rank_block_bytes(self, block_size: int, tp: int, pp: int = 1) -> int:
        """Return the bytes of one KV block on the rank that holds most of it, of `pp` stages of `tp` ranks."""
        of_all_layers = self.layout(block_size).with_heads(most_kv_heads(tp, self.num_kv_heads)).block_bytes
        return of_all_layers // self.num_layers * self.stage_layers(pp)

    def rank_token_bytes(self, tp: int, pp: int = 1) -> float:
        """Return the bytes of one token's KV on the rank that holds most of it, in blocks of the default size."""
        block_size = EngineSettings().block_size
        return self.rank_block_bytes(block_size, tp, pp) / block_size

    def rank_weight_bytes(self, tp: int, pp: int = 1) -> int:
        """Return the bytes of weights on a rank of the largest stage.

        That is taken as the first: it has the embedding, which is no smaller than the head of the last.
        """
        if pp == 1:
            return self.weight_bytes // tp
        body = self.body_weights * self.stage_layers(pp) // self.num_layers
        return int(body * self.body_weight_bytes + self.head_weights * self.embedding_weight_bytes) // tp

    def rank_layer_bytes(self, tp: int) -> int:
        """Return the bytes of a layer's weights on one of `tp` ranks, on average."""
        return int(self.body_weights * self.body_weight_bytes) // (self.num_layers * tp)

    def stage_layers(self, pp: int) -> int:
        """Return the number of layers of the deepest of `pp` stages."""
        return -(-self.num_layers // pp)


def read_model_sizes(folder: Path) -> ModelSizes:
    """Return the sizes of the model in a folder.

    Raises ModelError when its config.json cannot be read, or its KV is latent.
    """
    config = read_model_config(folder)
    if config.has_latent_kv:
        raise ModelError(f"{config.architecture} has latent KV, and what attention over it costs is not known here")
    return ModelSizes(
        name=folder.resolve().name,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_model_len=config.max_position_embeddings,
        is_tied=config.tie_word_embeddings,
        dtype=config.dtype,
        experts=config.experts,
    )
