"""What the KV cache looks like in memory. Torch-free: the corridor plans with it."""

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
    values: int  # 0 where a layer has no V, as with latent KV


class Pchannel(NamedTuple):
    """One block in one layer, K or V alone: [block_size, num_heads, width] in consecutive bytes, none for width 0.

    With a quantized dtype num_heads float32 scales follow these data: value = data * scale of the head.
    """

    block_size: int
    num_heads: int
    width: int
    dtype: str

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one token, without scales."""
        return self.width * DTYPE_BYTES[self.dtype]

    @property
    def data_bytes(self) -> int:
        """Bytes without scales."""
        return self.block_size * self.num_heads * self.head_bytes

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales; 0 unless quantized."""
        return self.num_heads * SCALE_BYTES if self.width and self.dtype in QUANTIZED_DTYPES else 0

    @property
    def num_bytes(self) -> int:
        return self.data_bytes + self.scale_bytes


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of a KV pool: in each of its layers num_blocks planes of K and as many of V.

    Layers are counted over the whole model everywhere, also where only some of them are held.
    """

    first_layer: int
    widths: tuple[Widths, ...]  # of the first layer and those after it
    num_kv_heads: int
    block_size: int
    dtype: str

    @classmethod
    def uniform(
        cls, num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: str, *, is_latent: bool = False
    ) -> "KVLayout":
        """That of a whole model whose K and V have head_dim elements a head in all layers; latents have no V."""
        widths = Widths(head_dim, 0 if is_latent else head_dim)
        return cls(0, (widths,) * num_layers, num_kv_heads, block_size, dtype)

    @property
    def layers(self) -> range:
        """Those of the model that the pool holds."""
        return range(self.first_layer, self.first_layer + len(self.widths))

    @property
    def num_layers(self) -> int:
        return len(self.widths)

    @property
    def plane(self) -> Pchannel:
        """The one shape of all planes. Raises SettingsError as check_uniform."""
        self.check_uniform()
        keys, _ = self.planes(self.first_layer)
        return keys

    @property
    def head_dim(self) -> int:
        """The one width of K and V in all layers. Raises SettingsError as check_uniform."""
        return self.plane.width

    @property
    def is_latent(self) -> bool:
        """Whether all layers are alike, and have no V."""
        return len(set(self.widths)) == 1 and not self.widths[0].values

    @property
    def is_quantized(self) -> bool:
        """Whether planes hold 8-bit data and scales."""
        return self.dtype in QUANTIZED_DTYPES

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, K and V."""
        return sum(count * self._layer_bytes(widths) for widths, count in Counter(self.widths).items())

    @property
    def largest_layer_bytes(self) -> int:
        """Bytes of one block in one layer, K and V, where these are the most."""
        return max(map(self._layer_bytes, set(self.widths)))

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes in the cache, with its part of the scales, rounded up."""
        return -(-self.block_bytes // self.block_size)

    @property
    def runs(self) -> list[tuple[int, Widths]]:
        """How many neighbouring layers have which widths, from the first layer on."""
        return [(len(list(run)), widths) for widths, run in groupby(self.widths)]

    @property
    def layers_text(self) -> str:
        """`64 + 64 in layers 0-29`: the widths of K and V, in words."""
        parts, first = [], self.first_layer
        for count, widths in self.runs:
            layers = f"layer {first}" if count == 1 else f"layers {first}-{first + count - 1}"
            parts.append(f"{widths.keys} + {widths.values} in {layers}")
            first += count
        return ", ".join(parts)

    @property
    def heads_text(self) -> str:
        """`4 KV heads of 64 float32 values`: what a layer keeps of a token. Raises SettingsError as check_uniform."""
        if self.is_latent:
            return f"a latent of {self.widths[0].keys} {self.dtype} values"
        return f"{self.num_kv_heads} KV heads of {self.head_dim} {self.dtype} values"

    def __str__(self) -> str:
        return f"{self.block_size} tokens and {self.num_kv_heads} heads of {self.dtype}, K + V {self.layers_text}"

    def planes(self, layer: int) -> tuple[Pchannel, Pchannel]:
        """K and V of one block in one layer. Raises ValueError for a layer that is not held."""
        return _planes(self.widths[self.layers.index(layer)], self.block_size, self.num_kv_heads, self.dtype)

    def plane_bytes(self, layer: int) -> tuple[int, int]:
        """Bytes of the planes of a layer: of K, of V. Raises ValueError for a layer that is not held."""
        return _plane_bytes(self.widths[self.layers.index(layer)], self.block_size, self.num_kv_heads, self.dtype)

    def check_uniform(self) -> None:
        """Raises SettingsError unless K and V are of one width in all layers."""
        if len({width for widths in self.widths for width in widths}) != 1:
            raise SettingsError(f"K and V must be of one width in all layers to be computed with: {self.layers_text}")

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold num_tokens tokens."""
        return -(-num_tokens // self.block_size)

    def with_heads(self, num_kv_heads: int) -> "KVLayout":
        """The layout of that many heads of the same model: one rank's or one channel's."""
        return replace(self, num_kv_heads=num_kv_heads)

    def with_layers(self, layers: range) -> "KVLayout":
        """The layout of some neighbouring layers of these."""
        first = self.layers.index(layers.start)
        return replace(self, first_layer=layers.start, widths=self.widths[first : first + len(layers)])

    def uniform_fields(self) -> dict[str, Any]:
        """What `uniform` takes to make that of a whole model. Raises SettingsError as check_uniform, but not of
        latents."""
        return {
            "num_layers": self.num_layers,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.widths[0].keys if self.is_latent else self.head_dim,
            "block_size": self.block_size,
            "dtype": self.dtype,
            **({"is_latent": True} if self.is_latent else {}),
        }

    def _layer_bytes(self, widths: Widths) -> int:
        return sum(_plane_bytes(widths, self.block_size, self.num_kv_heads, self.dtype))


def _planes(widths: Widths, block_size: int, num_heads: int, dtype: str) -> tuple[Pchannel, Pchannel]:
    keys, values = (Pchannel(block_size, num_heads, width, dtype) for width in widths)
    return keys, values


@lru_cache(maxsize=1024)  # asked for every plane that travels
def _plane_bytes(widths: Widths, block_size: int, num_heads: int, dtype: str) -> tuple[int, int]:
    keys, values = _planes(widths, block_size, num_heads, dtype)
    return keys.num_bytes, values.num_bytes
