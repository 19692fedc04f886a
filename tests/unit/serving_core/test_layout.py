import pytest

from serving_core.layout import KVLayout


@pytest.mark.parametrize(
    ("dtype", "head_bytes", "plane_bytes", "block_bytes", "token_bytes"),
    [
        ("float32", 256, 12288, 737280, 46080),  # plane: 16 tokens * 3 heads * 64 * 4 bytes; block: 2 * 30 planes
        ("bfloat16", 128, 6144, 368640, 23040),
        ("float16", 128, 6144, 368640, 23040),
        ("int8", 64, 3084, 185040, 11565),  # 3072 bytes of data and 3 scales of 4 bytes
        ("fp8_e4m3", 64, 3084, 185040, 11565),
    ],
)
def test_sizes(dtype, head_bytes, plane_bytes, block_bytes, token_bytes):
    layout = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype=dtype)
    assert layout.is_quantized == (dtype in ("int8", "fp8_e4m3"))
    assert layout.head_bytes == head_bytes
    assert layout.plane_bytes == layout.data_bytes + layout.scale_bytes == plane_bytes
    assert layout.block_bytes == block_bytes
    assert layout.token_bytes == token_bytes


def test_bytes_of_a_token_are_rounded_up():
    assert KVLayout(1, 1, 4, 16, "int8").token_bytes == 9  # 2 * (64 + 4) bytes for 16 tokens


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_the_heads_of_all_ranks_add_up_to_the_whole(dtype):
    whole = KVLayout(5, 8, 32, 16, dtype)
    assert whole.with_heads(8) == whole
    shares = [whole.with_heads(num_heads) for num_heads in (1, 2, 5)]
    assert sum(share.plane_bytes for share in shares) == whole.plane_bytes
    assert {(share.num_layers, share.head_dim, share.block_size, share.dtype) for share in shares} == {
        (5, 32, 16, dtype)
    }


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_blocks_for_tokens(num_tokens, num_blocks):
    assert KVLayout(1, 1, 4, 16, "int8").num_blocks_for(num_tokens) == num_blocks
