"""What the KV cache looks like in memory. Torch-free: the corridor plans with it."""

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of one node's KV pool: for each layer K and V of [num_blocks, block_size, num_kv_heads, head_dim]."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one token, K or V alone."""
        return self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def plane_bytes(self) -> int:
        """Bytes of one block in one layer, K or V alone; contiguous in the pool."""
        return self.block_size * self.num_kv_heads * self.head_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, K and V."""
        return 2 * self.num_layers * self.plane_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes in the cache."""
        return self.block_bytes // self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold num_tokens tokens."""
        return -(-num_tokens // self.block_size)
