"""Describe the memory layout of the KV cache. Torch-free, so that the KV transfer can plan with it."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Any, Final, NamedTuple

from serving_core.errors import SettingsError

DTYPE_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "fp8_e4m3": 1}
QUANTIZED_DTYPES: Final = ("int8", "fp8_e4m3")
SCALE_BYTES: Final = 4  # a float32


class Widths(NamedTuple):
    """Elements of one head of one token in one layer."""

    keys: int
    values: int  # 0 if the layer has no V, as with latent KV


class CacheShape(NamedTuple):
    """One block in one layer, K or V alone: [block_size, num_heads, width] in consecutive bytes; no bytes for width 0.

    With a quantized dtype num_heads float32 scales follow the data: value = data * scale of the head.
    """

    block_size: int
    num_heads: int
    width: int
    dtype: str

    @property
    def head_bytes(self) -> int:
        """Return the bytes of one head of one token, without scales."""
        return self.width * DTYPE_BYTES[self.dtype]

    @property
    def data_bytes(self) -> int:
        """Return the bytes of one block in one layer, K or V alone, without scales."""
        return self.block_size * self.num_heads * self.head_bytes

    @property
    def scale_bytes(self) -> int:
        """Return the bytes of the block's scales; 0 unless the dtype is quantized."""
        return self.num_heads * SCALE_BYTES if self.width and self.dtype in QUANTIZED_DTYPES else 0

    @property
    def num_bytes(self) -> int:
        return self.data_bytes + self.scale_bytes


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of a KV pool: in each of its layers num_blocks blocks of K and as many of V.

    Layers are always numbered over the whole model, also where a pool holds only some of them.
    """

    first_layer: int
    widths: tuple[Widths, ...]  # of each run of layers, from the first layer on
    num_kv_heads: int
    block_size: int
    dtype: str
    state_bytes: int = 0  # of one request, over all layers and heads: its fixed state, as of recurrent layers

    @classmethod
    def uniform(
        cls, num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: str, *, is_latent: bool = False
    ) -> "KVLayout":
        """Return the layout of a whole model whose K and V have `head_dim` elements per head in all layers.

        Latent KV (`is_latent`) has no V.
        """
        widths = Widths(head_dim, 0 if is_latent else head_dim)
        return cls(0, (widths,) * num_layers, num_kv_heads, block_size, dtype)

    @property
    def layers(self) -> range:
        """Return the layers of the model that the pool holds."""
        return range(self.first_layer, self.first_layer + len(self.widths))

    @property
    def num_layers(self) -> int:
        return len(self.widths)

    @property
    def cache_shape(self) -> CacheShape:
        """Return the common shape of all K and V blocks. Raises SettingsError if their widths differ."""
        self.check_uniform()
        keys, _ = self.cache_shapes(self.first_layer)
        return keys

    @property
    def head_dim(self) -> int:
        """Return the common width of K and V in all layers. Raises SettingsError if the widths differ."""
        return self.cache_shape.width

    @property
    def is_latent(self) -> bool:
        """Return whether all layers are alike and have no V."""
        return len(set(self.widths)) == 1 and not self.widths[0].values

    @property
    def is_quantized(self) -> bool:
        """Return whether blocks hold 8-bit data and scales."""
        return self.dtype in QUANTIZED_DTYPES

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block over all layers, K and V."""
        return sum(count * self._layer_bytes(widths) for widths, count in Counter(self.widths).items())

    @property
    def num_state_blocks(self) -> int:
        """Return the number of blocks that hold a request's fixed state. They lead its block table."""
        return -(-self.state_bytes // self.block_bytes) if self.state_bytes else 0

    @property
    def largest_layer_bytes(self) -> int:
        """Return the bytes of one block, K and V, in the largest layer."""
        return max(map(self._layer_bytes, set(self.widths)))

    @property
    def token_bytes(self) -> int:
        """Return the bytes of one token in the cache, with its part of the scales, rounded up."""
        return -(-self.block_bytes // self.block_size)

    @property
    def runs(self) -> list[tuple[int, Widths]]:
        """Return the runs of layers with equal widths, as (number of layers, widths), from the first layer on."""
        return [(len(list(run)), widths) for widths, run in groupby(self.widths)]

    @property
    def layers_text(self) -> str:
        """Return the widths of K and V in words, such as `64 + 64 in layers 0-29`."""
        parts, first = [], self.first_layer
        for count, widths in self.runs:
            layers = f"layer {first}" if count == 1 else f"layers {first}-{first + count - 1}"
            parts.append(f"{widths.keys} + {widths.values} in {layers}")
            first += count
        return ", ".join(parts)

    @property
    def heads_text(self) -> str:
        """Return what a layer stores for a token in words, such as `4 KV heads of 64 float32 values`.

        Raises SettingsError if the widths of K and V differ, except for latent KV.
        """
        if self.is_latent:
            return f"a latent of {self.widths[0].keys} {self.dtype} values"
        return f"{self.num_kv_heads} KV heads of {self.head_dim} {self.dtype} values"

    def __str__(self) -> str:
        return f"{self.block_size} tokens and {self.num_kv_heads} heads of {self.dtype}, K + V {self.layers_text}"

    def cache_shapes(self, layer: int) -> tuple[CacheShape, CacheShape]:
        """Return the shapes of K and of V of one block in one layer.

        Raises ValueError if the pool does not hold the layer.
        """
        return _cache_shapes(self.widths[self.layers.index(layer)], self.block_size, self.num_kv_heads, self.dtype)

    def cache_bytes(self, layer: int) -> tuple[int, int]:
        """Return the bytes of K and of V of one block in one layer.

        Raises ValueError if the pool does not hold the layer.
        """
        return _cache_bytes(self.widths[self.layers.index(layer)], self.block_size, self.num_kv_heads, self.dtype)

    def check_uniform(self) -> None:
        """Raise SettingsError unless K and V have one width in all layers."""
        if len({width for widths in self.widths for width in widths}) != 1:
            raise SettingsError(f"K and V must be of one width in all layers to be computed with: {self.layers_text}")

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks for `num_tokens` tokens of a request and its fixed state; 0 for no tokens."""
        num_blocks = -(-num_tokens // self.block_size)
        return num_blocks + self.num_state_blocks if self.state_bytes and num_blocks else num_blocks

    def with_heads(self, num_kv_heads: int) -> "KVLayout":
        """Return this layout with another number of KV heads: those of one rank or one channel.

        An equal part of the fixed state goes with each head.
        """
        state_bytes = self.state_bytes * num_kv_heads // self.num_kv_heads
        return replace(self, num_kv_heads=num_kv_heads, state_bytes=state_bytes)

    def with_layers(self, layers: range) -> "KVLayout":
        """Return this layout restricted to these layers, numbered over the whole model.

        Raises ValueError for others.
        """
        first = self.layers.index(layers.start)
        return replace(self, first_layer=layers.start, widths=self.widths[first : first + len(layers)])

    def uniform_fields(self) -> dict[str, Any]:
        """Return the arguments of `uniform` that make this layout of a whole model.

        Raises SettingsError if the widths of K and V differ, except for latent KV.
        """
        return {
            "num_layers": self.num_layers,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.widths[0].keys if self.is_latent else self.head_dim,
            "block_size": self.block_size,
            "dtype": self.dtype,
            **({"is_latent": True} if self.is_latent else {}),
        }

    def _layer_bytes(self, widths: Widths) -> int:
        return sum(_cache_bytes(widths, self.block_size, self.num_kv_heads, self.dtype))


def _cache_shapes(widths: Widths, block_size: int, num_heads: int, dtype: str) -> tuple[CacheShape, CacheShape]:
    keys, values = (CacheShape(block_size, num_heads, width, dtype) for width in widths)
    return keys, values


@lru_cache(maxsize=1024)  # called for every block that is transferred
def _cache_bytes(widths: Widths, block_size: int, num_heads: int, dtype: str) -> tuple[int, int]:
    keys, values = _cache_shapes(widths, block_size, num_heads, dtype)
    return keys.num_bytes, values.num_bytes
