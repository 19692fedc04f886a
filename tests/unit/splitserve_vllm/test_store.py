"""Blocks of vLLM's KV cache as bytes, and back."""

import pytest
import torch

from kv_transfer.results import TransferError
from serving_core.errors import SettingsError
from serving_core.layout import KVLayout
from splitserve_vllm.store import OrderedStore, VllmStore, places_in_block


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


HEADS, TOKENS, WIDTH = 2, 4, 3
BLOCK_SHAPE = (HEADS, TOKENS, 2 * WIDTH)


def shuffled(seed=1):
    """Kernels with an order of their own: the value with number n in the plain order is at order[n]."""
    order = torch.randperm(HEADS * TOKENS * 2 * WIDTH, generator=torch.Generator().manual_seed(seed))

    def pack(block):
        plain = block.flatten().clone()
        block.view(-1)[order] = plain

    return order, pack


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_order_of_the_kernels_is_found(dtype):
    order, pack = shuffled()
    places = places_in_block(BLOCK_SHAPE, dtype, pack)
    for which in range(2):
        for token in range(TOKENS):
            for head in range(HEADS):
                number = (head * TOKENS + token) * 2 * WIDTH + which * WIDTH
                assert places[which, token, head].tolist() == order[number : number + WIDTH].tolist()


@pytest.mark.parametrize("pack", [lambda block: block.zero_(), lambda block: block.view(-1)[1:].fill_(1)])
def test_what_changes_more_than_the_order_is_refused(pack):
    with pytest.raises(SettingsError, match="--kv-order vllm"):
        places_in_block(BLOCK_SHAPE, torch.bfloat16, pack)


def ordered(dtype=torch.bfloat16):
    """A store, and its layers in the plain order."""
    _, pack = shuffled()
    plain = caches(dtype=dtype, shape=(8, *BLOCK_SHAPE))
    packed = {}
    for name, cache in plain.items():
        blocks = cache.clone().split(1)
        for block in blocks:
            pack(block)
        packed[name] = torch.cat(blocks)
    return OrderedStore(packed, TOKENS, places_in_block(BLOCK_SHAPE, dtype, pack)), list(plain.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_given_in_the_order_of_our_engine(dtype):
    store, plain = ordered(dtype)
    assert store.layout == KVLayout.uniform(3, HEADS, WIDTH, TOKENS, str(dtype).removeprefix("torch."))
    keys, values = store.read(1, [5, 2])
    for given, part in ((keys, slice(0, WIDTH)), (values, slice(WIDTH, None))):
        expected = plain[1][[5, 2]][..., part].transpose(1, 2).contiguous()  # [blocks, tokens, heads, values]
        assert bytes(given) == expected.view(torch.uint8).numpy().tobytes()


def test_blocks_of_our_engine_are_taken():
    source, _ = ordered()
    target, _ = ordered()
    before = [bytes(part) for part in target.read(0, [0])]
    target.write(0, [6, 3], *source.read(2, [1, 4]))
    assert list(map(bytes, target.read(0, [6, 3]))) == list(map(bytes, source.read(2, [1, 4])))
    assert [bytes(part) for part in target.read(0, [0])] == before


def test_heads_travel_apart_in_the_order_of_our_engine():
    store, plain = ordered()
    part = store.heads(range(1, 2))
    assert part.layout == store.layout.with_heads(1)
    keys, values = part.read(0, [7])
    assert bytes(keys) == plain[0][7, 1, :, :WIDTH].contiguous().view(torch.uint8).numpy().tobytes()
    other, _ = ordered()
    other.heads(range(1)).write(0, [2], keys, values)
    read, _ = other.heads(range(1)).read(0, [2])
    assert bytes(read) == bytes(keys)
    assert store.heads(range(HEADS)) is store
