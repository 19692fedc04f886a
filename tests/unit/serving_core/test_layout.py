import pytest

from serving_core.errors import SettingsError
from serving_core.layout import CacheShape, KVLayout, Widths


@pytest.mark.parametrize(
    ("dtype", "head_bytes", "cache_bytes", "block_bytes", "token_bytes"),
    [
        ("float32", 256, 12288, 737280, 46080),  # cache: 16 tokens * 3 heads * 64 * 4 bytes; block: 2 * 30 caches
        ("bfloat16", 128, 6144, 368640, 23040),
        ("float16", 128, 6144, 368640, 23040),
        ("int8", 64, 3084, 185040, 11565),  # 3072 bytes of data and 3 scales of 4 bytes
        ("fp8_e4m3", 64, 3084, 185040, 11565),
    ],
)
def test_sizes(dtype, head_bytes, cache_bytes, block_bytes, token_bytes):
    layout = KVLayout.uniform(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype=dtype)
    assert layout.is_quantized == (dtype in ("int8", "fp8_e4m3"))
    assert layout.cache_shape.head_bytes == head_bytes
    assert layout.cache_shape.num_bytes == layout.cache_shape.data_bytes + layout.cache_shape.scale_bytes == cache_bytes
    assert layout.largest_layer_bytes == 2 * cache_bytes
    assert layout.block_bytes == block_bytes
    assert layout.token_bytes == token_bytes


def test_bytes_of_a_token_are_rounded_up():
    assert KVLayout.uniform(1, 1, 4, 16, "int8").token_bytes == 9  # 2 * (64 + 4) bytes for 16 tokens


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_the_heads_of_all_ranks_add_up_to_the_whole(dtype):
    whole = KVLayout.uniform(5, 8, 32, 16, dtype)
    assert whole.with_heads(8) == whole
    shares = [whole.with_heads(num_heads) for num_heads in (1, 2, 5)]
    assert sum(share.cache_shape.num_bytes for share in shares) == whole.cache_shape.num_bytes
    assert {(share.num_layers, share.head_dim, share.block_size, share.dtype) for share in shares} == {
        (5, 32, 16, dtype)
    }


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_blocks_for_tokens(num_tokens, num_blocks):
    assert KVLayout.uniform(1, 1, 4, 16, "int8").num_blocks_for(num_tokens) == num_blocks


# ---- layers of unlike widths ----

WIDTHS = (Widths(8, 8), Widths(8, 8), Widths(24, 16), Widths(36, 0))


def uneven(dtype):
    return KVLayout(5, WIDTHS, num_kv_heads=2, block_size=4, dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "caches"),
    [
        # 4 tokens * 2 heads * 2 bytes an element
        ("bfloat16", [(128, 128), (128, 128), (384, 256), (576, 0)]),
        # 4 tokens * 2 heads * 1 byte, and 2 scales of 4 bytes where there is anything to scale
        ("int8", [(72, 72), (72, 72), (200, 136), (296, 0)]),
    ],
)
def test_sizes_of_caches_layer_by_layer(dtype, caches):
    layout = uneven(dtype)
    assert list(layout.layers) == [5, 6, 7, 8]
    assert [tuple(cache.num_bytes for cache in layout.cache_shapes(layer)) for layer in layout.layers] == caches
    assert [layout.cache_bytes(layer) for layer in layout.layers] == caches
    assert layout.block_bytes == sum(map(sum, caches))
    assert layout.largest_layer_bytes == max(map(sum, caches))


def test_the_caches_of_a_layer():
    assert uneven("int8").cache_shapes(7) == (CacheShape(4, 2, 24, "int8"), CacheShape(4, 2, 16, "int8"))


@pytest.mark.parametrize("layer", [-1, 0, 4, 9])
def test_layers_that_are_not_held_have_no_caches(layer):
    with pytest.raises(ValueError, match=str(layer)):
        uneven("int8").cache_shapes(layer)
    with pytest.raises(ValueError, match=str(layer)):
        uneven("int8").cache_bytes(layer)


def test_some_layers_of_a_layout():
    layout = uneven("bfloat16")
    assert layout.with_layers(range(5, 9)) == layout
    assert layout.with_layers(range(6, 8)) == KVLayout(6, WIDTHS[1:3], 2, 4, "bfloat16")
    parts = [layout.with_layers(layers) for layers in (range(5, 6), range(6, 9))]
    assert sum(part.block_bytes for part in parts) == layout.block_bytes
    assert [part.cache_shapes(6) for part in parts[1:]] == [layout.cache_shapes(6)]


def test_a_layout_in_words():
    assert str(uneven("int8")) == (
        "4 tokens and 2 heads of int8, K + V 8 + 8 in layers 5-6, 24 + 16 in layer 7, 36 + 0 in layer 8"
    )
    assert str(KVLayout.uniform(30, 3, 64, 16, "bfloat16")) == (
        "16 tokens and 3 heads of bfloat16, K + V 64 + 64 in layers 0-29"
    )


@pytest.mark.parametrize("is_latent", [False, True])
def test_what_makes_a_uniform_layout_makes_it_again(is_latent):
    layout = KVLayout.uniform(30, 3, 64, 16, "bfloat16", is_latent=is_latent)
    assert KVLayout.uniform(**layout.uniform_fields()) == layout
    assert layout.is_latent == is_latent
    assert layout.heads_text == ("a latent of" if is_latent else "3 KV heads of") + " 64 bfloat16 values"


@pytest.mark.parametrize("widths", [WIDTHS, (Widths(8, 0), Widths(6, 0)), (Widths(8, 8), Widths(16, 16))])
def test_what_wants_one_width_refuses_several_with_the_widths(widths):
    layout = KVLayout(5, widths, 2, 4, "float32")
    for ask in (layout.uniform_fields, lambda: layout.heads_text):
        with pytest.raises(SettingsError, match=r"of one width in all layers .*: 8 \+ \d+ in layer"):
            ask()
    assert not layout.is_latent


@pytest.mark.parametrize("widths", [WIDTHS, (Widths(8, 0),), (Widths(8, 8), Widths(16, 16))])
def test_what_computes_with_one_width_refuses_several_with_the_widths(widths):
    layout = KVLayout(5, widths, 2, 4, "float32")
    for ask in (layout.check_uniform, lambda: layout.head_dim, lambda: layout.cache_shape):
        with pytest.raises(SettingsError, match=r"of one width in all layers .*: 8 \+ \d+ in layer"):
            ask()
