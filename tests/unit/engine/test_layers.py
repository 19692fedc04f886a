import torch

from engine.model.layers import Embedding, Linear, RowParallel
from engine.native.linear import best_variant
from engine.parallel import alone
from serving_core.sharding import Extent, Shard, whole
from tests.unit.engine.in_one_test import for_each

DTYPES = [torch.float32, torch.bfloat16]
BITS = [None, 8, 4]
# Of the sizes of the terms: what so many bits cost with normal weights in groups of 32.
COSTS = {None: 0.0, 8: 0.01, 4: 0.12}
SHARD = Shard(0, *[whole(1)] * 5)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fill(layer, dtype):
    """Random parameters; gives copies of them."""
    copies = {}
    for number, (name, parameter) in enumerate(layer.named_parameters()):
        copies[name] = random(*parameter.shape, seed=number).to(dtype)
        setattr(layer, name, torch.nn.Parameter(copies[name].clone(), requires_grad=False))
    return copies


def assert_near(outputs, expected, cost, dtype):
    limit = (cost + (8e-3 if dtype == torch.bfloat16 else 1e-5)) * expected.square().mean().sqrt()
    assert (outputs.float() - expected).square().mean().sqrt() <= limit


@for_each(bits=BITS, dtype=DTYPES, bias=[False, True])
def test_a_packed_projection_computes_what_it_did(bits, dtype, bias):
    layer = Linear(whole(70), {"a": whole(33), "b": Extent(60, range(5, 50))}, bias)
    filled = fill(layer, dtype)
    layer.pack(bits)
    x = random(9, 70, seed=7).to(dtype)
    expected = x.float() @ filled["weight"].float().t() + (filled["bias"].float() if bias else 0)
    assert_near(layer(x), expected, COSTS[bits], dtype)
    is_plain = bits is None and dtype == torch.float32 and best_variant(dtype) is None
    assert ("weight" in dict(layer.named_parameters())) == is_plain


@for_each(bits=BITS)
def test_only_one_rank_adds_the_bias(bits):
    for rank, added in ((0, True), (1, False)):
        layer = RowParallel(whole(32), "o", 16, True, SHARD.__class__(rank, *[whole(1)] * 5))
        filled = fill(layer, torch.float32)
        layer.pack(bits)
        x = random(3, 32, seed=7)
        expected = x @ filled["weight"].t() + (filled["bias"] if added else 0)
        assert_near(layer(x), expected, COSTS[bits], torch.float32)


def embedding(dtype, bits, is_head, vocabulary=None, gives_logits=True):
    layer = Embedding(vocabulary or whole(100), 48, alone(), is_head, gives_logits)
    filled = fill(layer, dtype)
    layer.pack(bits)
    return layer, filled["weight"].float()


@for_each(bits=BITS, dtype=DTYPES)
def test_an_embedding_that_is_the_head(bits, dtype):
    layer, weight = embedding(dtype, bits, is_head=True)
    ids = torch.tensor([0, 99, 3, 3])
    vectors = layer(ids)
    assert vectors.dtype == dtype
    assert_near(vectors, weight[ids], 0.01 if bits else 0.0, dtype)  # 8 bits at least
    x = random(5, 48, seed=3).to(dtype)
    assert_near(layer.logits(x), x.float() @ weight.t(), 0.01 if bits else 0.0, dtype)


@for_each(bits=BITS)
def test_where_another_stage_has_the_head_the_vectors_are_the_same(bits):
    (whole_model, _), (first_stage, _) = (
        embedding(torch.bfloat16, bits, is_head=True, gives_logits=gives_logits) for gives_logits in (True, False)
    )
    ids = torch.arange(100)
    assert torch.equal(first_stage(ids), whole_model(ids))
    assert first_stage.is_batch_invariant
    assert first_stage.num_bytes <= 100 * 48 * 2, "nothing is packed for logits"


@for_each(bits=BITS)
def test_an_embedding_that_is_not_the_head_stays_as_it_is(bits):
    layer, weight = embedding(torch.bfloat16, bits, is_head=False)
    ids = torch.arange(100)
    assert torch.equal(layer(ids).float(), weight)
    assert layer.num_bytes == 100 * 48 * 2


@for_each(bits=BITS)
def test_a_share_of_the_ids_gives_nothing_for_others(bits):
    layer, weight = embedding(torch.float32, bits, True, Extent(300, range(100, 200)))
    vectors = layer(torch.tensor([99, 100, 199, 200, 0]))
    assert not vectors[[0, 3, 4]].any()
    assert_near(vectors[1:3], weight[[0, 99]], 0.01 if bits else 0.0, torch.float32)


def test_bytes_that_layers_say_they_take():
    def num_bytes(bits, dtype=torch.bfloat16):
        layer = Linear(whole(256), {"a": whole(256)}, False)
        fill(layer, dtype)
        layer.pack(bits)
        return layer.num_bytes

    assert num_bytes(None) == 2 * 256 * 256
    assert num_bytes(None, torch.float32) == 4 * 256 * 256
    assert num_bytes(8) == 256 * 256 + 5 * 256  # a scale and a zero for each output
    assert num_bytes(4) == 256 * 256 // 2 + 5 * 256 * 8  # and for each group of 32 inputs


def test_a_head_of_its_own_keeps_8_bits():
    head = Linear(whole(64), {"lm_head": whole(64)}, False)
    weight = fill(head, torch.float32)["weight"]
    head.pack(4)
    x = random(4, 64, seed=2)
    assert_near(head(x), x @ weight.t(), 0.01, torch.float32)
