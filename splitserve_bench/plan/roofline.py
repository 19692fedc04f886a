"""What steps take on a device by its data sheet: the roofline of Williams et al., with efficiencies that are written
here.

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

With n ranks, each has an nth of the weights and of the query heads, and the KV heads that belong to them. A step of
prompts and answers has the products of all its tokens together, and both attentions. No figure here was fitted to a
published table:
- PRODUCTS: what a good engine reaches on prompts of 1,000 tokens and more is 50 to 65 % (of H100 and H200); large
  products alone reach 80 %.
- ATTENTION: 35 to 75 % are published for kernels of this kind, by head size and length.
- MEMORY: gpt-fast and torchao reach 69 to 70 % of an A100's bandwidth with one answer of an 8B model.
- LAYER_S: with that, 20 µs a layer make the 7.2 to 7.4 ms a token that SGLang and vLLM take for Qwen3-8B on one H100.
"""

from dataclasses import dataclass
from typing import Final

from splitserve_bench.plan.devices import Device, Link
from splitserve_bench.plan.model_sizes import ModelSizes
from splitserve_bench.simulate.costs import StepLoad

PRODUCTS: Final = 0.6  # of the FLOP/s
ATTENTION: Final = 0.4  # of the FLOP/s
MEMORY: Final = 0.7  # of the bandwidth
LINK: Final = 0.7  # of a link's; Mooncake reaches 71 % of eight ports
LAYER_S: Final = 20e-6


@dataclass(frozen=True, slots=True)
class Roofline:
    """Steps of a model on so many devices of a kind, joined by a link. Each figure is of one rank; the slowest
    counts."""

    model: ModelSizes
    device: Device
    link: Link
    tp: int
    elsewhere_bytes: int = 0  # of a rank's weights

    def answers_s(self, num_answers: float, context_tokens: float) -> float:
        products_s = self._products_s(num_answers, num_answers)
        return max(self._elsewhere_s, products_s + self._answers_attention_s(num_answers, context_tokens))

    def chunk_s(self, num_tokens: float, before_tokens: float) -> float:
        products_s = self._products_s(num_tokens, 1)
        return max(self._elsewhere_s, products_s + self._chunk_attention_s(num_tokens, before_tokens))

    def both_s(self, load: StepLoad) -> float:
        num_answers, num_tokens = load.num_answers, load.num_prompt_tokens
        return self.mixed_s(num_answers, load.num_cached / num_answers, num_tokens, load.num_before / num_tokens)

    def mixed_s(self, num_answers: float, context_tokens: float, num_tokens: float, before_tokens: float) -> float:
        """Both in one step."""
        products_s = self._products_s(num_answers + num_tokens, num_answers + 1)
        answers_s = self._answers_attention_s(num_answers, context_tokens)
        return max(self._elsewhere_s, products_s + answers_s + self._chunk_attention_s(num_tokens, before_tokens))

    @property
    def _elsewhere_s(self) -> float:
        return self.elsewhere_bytes / (self.device.elsewhere_bytes_per_s * LINK)

    def _products_s(self, num_tokens: float, num_sampled: float) -> float:
        model = self.model
        read_bytes = model.read_weights(num_tokens) * self._moved_bytes(model.body_weight_bytes)
        body_s = self._bound_s(2 * model.active_weights * num_tokens, read_bytes)
        head_bytes = model.head_weights * self._moved_bytes(model.head_weight_bytes)
        head_s = self._bound_s(2 * model.head_weights * num_sampled, head_bytes)
        ring_s = collectives_s(model, self.link, self.tp, num_tokens)
        return body_s + head_s + ring_s + LAYER_S * model.num_layers

    def _moved_bytes(self, weight_bytes: float) -> float:
        """For each weight that takes so many."""
        if not self.model.is_quantized or self.device.multiplies_quantized:
            return weight_bytes
        return weight_bytes + 2 * self.model.dtype_bytes

    def _bound_s(self, flops: float, num_bytes: float) -> float:
        """What is divided over all ranks."""
        flops_per_s, bytes_per_s = self.device.flops * PRODUCTS, self.device.bytes_per_s * MEMORY
        return max(flops / flops_per_s, num_bytes / bytes_per_s) / self.tp

    def _answers_attention_s(self, num_answers: float, context_tokens: float) -> float:
        return self._attention_s(num_answers * context_tokens, num_answers * context_tokens)

    def _chunk_attention_s(self, num_tokens: float, before_tokens: float) -> float:
        num_pairs = num_tokens * (before_tokens + (num_tokens + 1) / 2)
        return self._attention_s(num_pairs, max(0.0, before_tokens) + num_tokens)

    def _attention_s(self, num_pairs: float, num_read: float) -> float:
        """Over so many pairs of query and key, with the KV of so many tokens read."""
        model = self.model
        heads = -(-model.num_heads // self.tp)
        flops = 4 * heads * model.head_dim * model.num_layers * num_pairs
        num_bytes = model.rank_token_bytes(self.tp) * num_read
        return max(flops / (self.device.flops * ATTENTION), num_bytes / (self.device.bytes_per_s * MEMORY))


def collectives_s(model: ModelSizes, link: Link, tp: int, num_tokens: float) -> float:
    """Of a step of so many tokens on tp ranks: two rings a layer."""
    if tp == 1:
        return 0.0
    num_bytes = num_tokens * model.hidden_size * model.dtype_bytes
    hops = 2 * (tp - 1)
    return 2 * model.num_layers * (hops * link.latency_s + hops / tp * num_bytes / (link.bytes_per_s * LINK))
