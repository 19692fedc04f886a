"""Tell what accelerators and links do at best and cost, and work out from that what steps take on them.

The figures are of data sheets: FLOP/s are dense 16-bit products, bandwidths are of one direction, watts are the board's
limit. Dollars are what renting a device for an hour costs: H100 and A100 as Splitwise reckons (table V of arXiv
2311.18677: 38 and 17.6 dollars for a machine of eight), the others are assumptions. A device `cpu` is one core of a
server with AVX-512. Layers that have no room come from host memory over PCIe 5 or 4, or from a disk beside a CPU.

Steps follow the roofline of Williams et al., with efficiencies that are written here:

    products     max(2 · weights · tokens / FLOP/s, bytes of the weights / bandwidth); the head: sampled tokens only;
                 of experts, a token is multiplied with those that it takes, and a step reads those that its tokens
                 take, as if each chose at random: 1 - (1 - chosen / experts)^tokens of them
    attention    max(4 · heads · head size · layers · pairs of query and key / FLOP/s,
                     bytes of the keys and values / bandwidth)
    collectives  2 a layer, of tokens · hidden size values: a ring's 2 (n-1) latencies and 2 (n-1)/n of the bytes
    kernels      so many seconds for each layer, whatever is in the step
    elsewhere    no step is over before it has read the layers that are not in memory, meanwhile
    quantized    on CPUs, whose kernels compute with such weights, a step reads them as they are, at the rate of 16-bit
                 products; on others they are made whole first: read, written and read again
    stages       decoding requests pass one stage after the other. Chunks pass in m micro-batches as the engine cuts
                 them, of which stages compute several at once: with p stages (m + p - 1) / p times what one of them
                 takes on all layers. A hop is a message from each stage to the next, of two vectors a token (what goes
                 on, and what is still to be added), and of the logits back to the first rank; nothing hides it

With n ranks, each has an nth of the weights and of the query heads, and the KV heads that belong to them. No figure
here was fitted to a published table:

- PRODUCTS: what a good engine reaches on prompts of 1,000 tokens and more is 50 to 65 % (of H100 and H200); large
  products alone reach 80 %.
- ATTENTION: 35 to 75 % are published for kernels of this kind, by head size and length.
- MEMORY: gpt-fast and torchao reach 69 to 70 % of an A100's bandwidth with one request to an 8B model.
- LAYER_S: with that, 20 µs a layer make the 7.2 to 7.4 ms a token that SGLang and vLLM take for Qwen3-8B on one H100.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from engine.micro_batches import num_micro_batches
from serving_core.errors import SettingsError
from serving_core.units import GIB

if TYPE_CHECKING:
    from splitserve_bench.plan.model_sizes import ModelSizes

NVLINK, INFINIBAND, ETHERNET_100G, ETHERNET_10G, PCIE = "nvlink", "ib", "100g", "10g", "pcie"
CPU: Final = "cpu"
PRODUCTS: Final = 0.6  # of the FLOP/s
ATTENTION: Final = 0.4  # of the FLOP/s
MEMORY: Final = 0.7  # of the bandwidth
LINK: Final = 0.7  # of a link's; Mooncake reaches 71 % of eight ports
LAYER_S: Final = 20e-6
VECTORS: Final = 2  # of a token, from stage to stage
NVLINK_LATENCY_S: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator: its rates, memory, price and power. `link` is what usually joins the devices of a host."""

    name: str
    flops: float
    bytes_per_s: float
    memory_bytes: int
    elsewhere_bytes_per_s: float  # of weights that are not in its memory
    nvlink_bytes_per_s: float  # 0: it has none
    link: str
    dollars_per_h: float
    watts: float
    multiplies_quantized: bool = False  # our kernels there do, with weights as they are


@dataclass(frozen=True, slots=True)
class Link:
    """What one device sends by to another: bytes a second while no other device of its host uses it."""

    name: str
    bytes_per_s: float
    latency_s: float  # of a message between two ranks
    is_shared: bool = False  # by the devices of a host, between hosts


_DEVICES: Final = (
    Device("h100", 989e12, 3.35e12, 80 * GIB, 64e9, 450e9, NVLINK, 4.75, 700),
    Device("h200", 989e12, 4.8e12, 140 * GIB, 64e9, 450e9, NVLINK, 5.50, 700),
    Device("a100", 312e12, 2.039e12, 80 * GIB, 32e9, 300e9, NVLINK, 2.20, 400),
    Device("l4", 121e12, 300e9, 24_000_000_000, 32e9, 0, PCIE, 0.70, 72),
    Device(CPU, 320e9, 12e9, 4 * GIB, 3e9, 0, ETHERNET_10G, 0.05, 10, multiplies_quantized=True),
)
DEVICES: Final = {device.name: device for device in _DEVICES}
_LINKS: Final = (
    Link(INFINIBAND, 50e9, 5e-6),  # a port of 400 Gbit/s for each device
    Link(ETHERNET_100G, 12.5e9, 20e-6, is_shared=True),
    Link(ETHERNET_10G, 1.25e9, 30e-6, is_shared=True),
    Link(PCIE, 32e9, 5e-6),
)
LINKS: Final = {link.name: link for link in _LINKS}
LINK_NAMES: Final = (NVLINK, *LINKS)


def device_of(name: str) -> Device | None:
    """Return the device that a profile or a flag names (h100, h100-80gb or H100); None for an unknown device."""
    return DEVICES.get(name.lower().split("-")[0])


def link_of(name: str, device: Device) -> Link:
    """Return the link of this name between devices of this kind.

    Raises SettingsError for NVLink on a device without it.
    """
    if name != NVLINK:
        return LINKS[name]
    if not device.nvlink_bytes_per_s:
        others = ", ".join(LINKS)
        raise SettingsError(f"{device.name} has no NVLink: --link and --host-link can be {others}")
    return Link(NVLINK, device.nvlink_bytes_per_s, NVLINK_LATENCY_S)


@dataclass(frozen=True, slots=True)
class Roofline:
    """The times of a model's steps on `pp` stages of `tp` devices of one kind each, joined by a link.

    Each time is that of the slowest rank.
    """

    model: "ModelSizes"
    device: Device
    link: Link
    tp: int
    pp: int = 1
    elsewhere_bytes: int = 0  # of the weights of one rank of each stage together

    def answers_s(self, num_sequences: float, context_tokens: float) -> float:
        """Return the seconds of a decode step of `num_sequences` requests with `context_tokens` tokens before each."""
        num_cached = num_sequences * context_tokens
        attention_s = self._attention_s(num_cached, num_cached)
        computed_s = max(self._elsewhere_s, self._products_s(num_sequences, num_sequences) + attention_s)
        return computed_s + self._hops_s(num_sequences, num_sequences)

    def chunk_s(self, num_tokens: float, before_tokens: float) -> float:
        """Return the seconds of a step with `num_tokens` tokens of a prompt, which has `before_tokens` before them."""
        num_parts = num_micro_batches(int(num_tokens), self.pp) if self.pp > 1 else 1
        part_tokens = num_tokens / num_parts
        before_part = before_tokens + (num_tokens - part_tokens) / 2  # on average
        num_pairs = part_tokens * (before_part + (part_tokens + 1) / 2)
        attention_s = self._attention_s(num_pairs, max(0.0, before_part) + part_tokens)
        part_s = max(self._elsewhere_s, self._products_s(part_tokens, 1) + attention_s)
        return (num_parts + self.pp - 1) / self.pp * part_s + self._hops_s(part_tokens, 1)

    @property
    def _elsewhere_s(self) -> float:
        return self.elsewhere_bytes / (self.device.elsewhere_bytes_per_s * LINK)

    def _products_s(self, num_tokens: float, num_sampled: float) -> float:
        model = self.model
        read_bytes = model.read_weights(num_tokens) * self._moved_bytes(model.body_weight_bytes)
        body_s = self._bound_s(2 * model.active_weights * num_tokens, read_bytes)
        head_bytes = model.head_weights * self._moved_bytes(model.head_weight_bytes)
        head_s = self._bound_s(2 * model.head_weights * num_sampled, head_bytes)
        return body_s + head_s + self._collectives_s(num_tokens) + LAYER_S * model.num_layers

    def _moved_bytes(self, weight_bytes: float) -> float:
        """Return the bytes that a step reads and writes for each weight that takes `weight_bytes` bytes."""
        if not self.model.is_quantized or self.device.multiplies_quantized:
            return weight_bytes
        return weight_bytes + 2 * self.model.dtype_bytes

    def _bound_s(self, flops: float, num_bytes: float) -> float:
        """Return the seconds of operations and memory reads that are divided over all ranks: the longer of the two."""
        flops_per_s, bytes_per_s = self.device.flops * PRODUCTS, self.device.bytes_per_s * MEMORY
        return max(flops / flops_per_s, num_bytes / bytes_per_s) / self.tp

    def _attention_s(self, num_pairs: float, num_read: float) -> float:
        """Return the seconds of attention over so many pairs of query and key, which reads KV of `num_read` tokens."""
        model = self.model
        heads = -(-model.num_heads // self.tp)
        flops = 4 * heads * model.head_dim * model.num_layers * num_pairs
        num_bytes = model.rank_token_bytes(self.tp) * num_read
        return max(flops / (self.device.flops * ATTENTION), num_bytes / (self.device.bytes_per_s * MEMORY))

    def _collectives_s(self, num_tokens: float) -> float:
        """Return the seconds of a step's ring all-reduces, two a layer."""
        if self.tp == 1:
            return 0.0
        num_bytes, hops = num_tokens * self.model.hidden_size * self.model.dtype_bytes, 2 * (self.tp - 1)
        ring_s = hops * self.link.latency_s + hops / self.tp * num_bytes / (self.link.bytes_per_s * LINK)
        return 2 * self.model.num_layers * ring_s

    def _hops_s(self, num_tokens: float, num_sampled: float) -> float:
        if self.pp == 1:
            return 0.0
        model, link = self.model, self.link
        num_bytes = VECTORS * num_tokens * model.hidden_size * model.dtype_bytes
        sent_bytes = (self.pp - 1) * num_bytes + num_sampled * model.vocab_size * model.dtype_bytes
        return self.pp * link.latency_s + sent_bytes / (link.bytes_per_s * LINK)
