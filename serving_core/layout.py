"""What the KV cache looks like in memory. Torch-free: the corridor plans with it."""

from dataclasses import dataclass, replace
from typing import Final

DTYPE_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "fp8_e4m3": 1}
QUANTIZED_DTYPES: Final = ("int8", "fp8_e4m3")
SCALE_BYTES: Final = 4  # a float32


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of a KV pool: for each layer K and V of [num_blocks, block_size, num_kv_heads, head_dim].

    A plane is one block in one layer, K or V alone, in consecutive bytes. With a quantized dtype its data
    [block_size, num_kv_heads, head_dim] is followed by num_kv_heads float32 scales: value = data * scale of the head.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one token, K or V alone, without scales."""
        return self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def is_quantized(self) -> bool:
        """Whether planes hold 8-bit data and scales."""
        return self.dtype in QUANTIZED_DTYPES

    @property
    def data_bytes(self) -> int:
        """Bytes of one plane without its scales."""
        return self.block_size * self.num_kv_heads * self.head_bytes

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of one plane; 0 unless quantized."""
        return self.num_kv_heads * SCALE_BYTES if self.is_quantized else 0

    @property
    def plane_bytes(self) -> int:
        """Bytes of one block in one layer, K or V alone; contiguous in the pool."""
        return self.data_bytes + self.scale_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, K and V."""
        return 2 * self.num_layers * self.plane_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes in the cache, with its part of the scales, rounded up."""
        return -(-self.block_bytes // self.block_size)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold num_tokens tokens."""
        return -(-num_tokens // self.block_size)

    def with_heads(self, num_kv_heads: int) -> "KVLayout":
        """The layout of that many heads of the same model: one rank's or one lane's."""
        return replace(self, num_kv_heads=num_kv_heads)
