"""Blocks of vLLM's KV cache as bytes, and back."""

import pytest
import torch

from kv_transfer.results import TransferError
from serving_core.errors import SettingsError
from splitserve_vllm.store import VllmStore


def caches(num_layers=3, dtype=torch.bfloat16, shape=(8, 2, 4, 6)):
    torch.manual_seed(0)
    names = [f"model.layers.{layer}.self_attn.attn" for layer in range(num_layers)]
    return {name: torch.randn(shape).to(dtype) for name in names}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_blocks_are_the_same_in_another_store(dtype):
    from_caches = caches(dtype=dtype)
    source = VllmStore(from_caches, 4)
    target = VllmStore({name: torch.zeros_like(each) for name, each in from_caches.items()}, 4)
    for layer, cache in enumerate(from_caches.values()):
        keys, values = source.read(layer, [5, 2])
        assert len(keys) == 2 * source.layout.cache_bytes(layer)[0]
        assert len(values) == 0
        target.write(layer, [1, 7], keys, values)
        read, _ = target.read(layer, [7, 1])
        assert bytes(read) == cache[[2, 5]].contiguous().view(torch.uint8).numpy().tobytes()


def test_layers_are_in_the_order_of_their_numbers():
    ten = caches(num_layers=11)
    store = VllmStore(dict(reversed(ten.items())), 4)
    assert store.indices["model.layers.10.self_attn.attn"] == 10
    assert (
        bytes(store.read(10, [0])[0]) == ten["model.layers.10.self_attn.attn"][:1].view(torch.uint8).numpy().tobytes()
    )


def test_a_cache_of_any_order_in_memory():
    cache = {
        "layers.0.attn": torch.randn(4, 8, 2, 6).permute(1, 2, 0, 3)
    }  # vLLM's view [blocks, heads, tokens, values]
    store = VllmStore(cache, 4)
    assert bytes(store.read(0, [3])[0]) == cache["layers.0.attn"][3].contiguous().view(torch.uint8).numpy().tobytes()


def test_a_latent_cache_has_no_heads():
    layout = VllmStore(caches(shape=(8, 4, 6)), 4).layout
    assert (layout.num_kv_heads, layout.widths[0].keys) == (1, 6)


def test_heads_do_not_travel_apart():
    store = VllmStore(caches(), 4)
    assert store.heads(range(2)) is store
    with pytest.raises(TransferError, match="parallelism"):
        store.heads(range(1))


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ({"layers.0.a": torch.zeros(2, 2, 4, 6), "layers.1.a": torch.zeros(2, 2, 4, 8)}, "differ in shape"),
        ({"layers.0.a": torch.zeros(2, 2, 4, 6, dtype=torch.uint8)}, "uint8"),
        ({"attention": torch.zeros(2, 2, 4, 6)}, "no numbered layer"),
        ({"layers.0.a": torch.zeros(2, 2, 5, 3)}, "does not divide"),
    ],
)
def test_caches_that_cannot_be_sent_are_refused(made, why):
    with pytest.raises(SettingsError, match=why):
        VllmStore(made, 4)
