"""Which experts tokens take and the sum of what these give, against numpy in float64."""

import numpy as np
import pytest
import torch

from engine.native.ops_library import VARIANTS, ops_library
from engine.ops.base import Ops, Shared
from engine.ops.native import NativeOps
from tests.unit.engine.in_one_test import for_each
from tests.unit.engine.native_kit import thread_counts

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=["native", "torch"])
def ops(request):
    if request.param == "torch":
        return Ops()
    if ops_library() is None:
        pytest.skip("the native kernels were not built")
    return NativeOps(VARIANTS[-1])  # experts have no variants


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def softmax(logits):
    logits = logits.double().numpy()
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def check_order(routing, chosen, num_experts):
    """Rows are sorted by expert, then by token; every choice has its place."""
    rows = sorted((expert, token) for token, experts in enumerate(chosen) for expert in experts)
    places = {row: place for place, row in enumerate(rows)}
    assert routing.tokens.tolist() == [token for _, token in rows]
    starts = [sum(expert < each for expert, _ in rows) for each in range(num_experts + 1)]
    assert (routing.starts.dtype, routing.starts.tolist()) == (torch.int32, starts)
    wanted = [[places[expert, token] for expert in experts] for token, experts in enumerate(chosen)]
    assert routing.places.tolist() == wanted


@for_each(sizes=[(1, 1, 1), (1, 5, 2), (3, 128, 8), (40, 6, 6), (700, 61, 3)], is_normalized=[False, True])
def test_tokens_take_the_likeliest_experts(ops, sizes, is_normalized):
    num_tokens, num_experts, num_chosen = sizes
    logits = 5 * random(num_tokens, num_experts)
    routing = ops.route(logits, num_chosen, is_normalized)
    probabilities = softmax(logits)
    chosen = np.argsort(-logits.numpy(), axis=1, kind="stable")[:, :num_chosen]
    check_order(routing, chosen.tolist(), num_experts)
    weights = np.take_along_axis(probabilities, chosen, axis=1)
    if is_normalized:
        weights /= weights.sum(axis=1, keepdims=True)
    assert routing.weights.dtype == torch.float32
    np.testing.assert_allclose(routing.weights.numpy(), weights, rtol=2e-5, atol=1e-30)


def test_logits_of_bfloat16(ops):
    logits = (torch.arange(60).view(6, 10) * 7 % 60 / 4).bfloat16()  # exact, and all unlike
    routing = ops.route(logits, 4, False)
    chosen = np.argsort(-logits.float().numpy(), axis=1)[:, :4]
    check_order(routing, chosen.tolist(), 10)
    np.testing.assert_allclose(routing.weights, np.take_along_axis(softmax(logits), chosen, axis=1), rtol=1e-5)


def test_of_equals_experts_are_taken_once(ops):
    routing = ops.route(torch.zeros(3, 7), 4, True)
    experts = [[int((routing.starts <= place).sum()) - 1 for place in places] for places in routing.places.tolist()]
    assert all(len(set(each)) == 4 for each in experts)
    torch.testing.assert_close(routing.weights, torch.full((3, 4), 0.25))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_row(ops, wrong):
    logits = random(3, 9)
    expected = ops.route(logits, 2, True).weights.clone()
    logits[1, 4] = wrong
    routing = ops.route(logits, 2, True)
    assert routing.weights[1].isnan().any()
    assert torch.equal(routing.weights[[0, 2]], expected[[0, 2]])
    assert sorted(routing.places.flatten().tolist()) == list(range(6))


@for_each(dtype=DTYPES, has_shared=[False, True], num_columns=[1, 33, 256, 700])
def test_outputs_are_added_up_by_their_weights(ops, dtype, has_shared, num_columns):
    routing = ops.route(random(9, 5), 3, False)
    rows, outputs = random(27, num_columns, seed=1).to(dtype), random(9, num_columns, seed=2).to(dtype)
    gates = torch.tensor([-200.0, -3.0, -1e-3, 0.0, 0.5, 1.0, 4.0, 90.0, 200.0]).view(9, 1).to(dtype)
    mixed = ops.mix(rows, routing, Shared(outputs, gates) if has_shared else None)
    expected = (rows.double()[routing.places] * routing.weights.double().unsqueeze(2)).sum(1)
    if has_shared:
        expected += outputs.double() / (1 + torch.exp(-gates.double()))
    assert (mixed.dtype, mixed.shape) == (dtype, expected.shape)
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-23
    torch.testing.assert_close(mixed.double(), expected, rtol=rounding, atol=3e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_alone_and_by_any_number_of_threads(ops, dtype):
    logits, rows = random(300, 20).to(dtype), random(600, 70, seed=1).to(dtype)
    shared = Shared(random(300, 70, seed=2).to(dtype), random(300, 1, seed=3).to(dtype))
    whole = ops.route(logits, 2, True)
    mixed = ops.mix(rows, whole, shared)
    for _ in thread_counts():
        assert torch.equal(ops.mix(rows, whole, shared), mixed)
        for token in range(0, 300, 7):
            routing = ops.route(logits[token : token + 1], 2, True)
            assert torch.equal(routing.weights[0], whole.weights[token])
            own = Shared(*(tensor[token : token + 1] for tensor in shared))
            placed = torch.empty(2, 70, dtype=dtype)
            placed[routing.places[0]] = rows[whole.places[token]]
            assert torch.equal(ops.mix(placed, routing, own)[0], mixed[token])


def test_no_tokens(ops):
    routing = ops.route(torch.empty(0, 5), 2, True)
    assert (len(routing.tokens), routing.starts.tolist()) == (0, [0] * 6)
    assert ops.mix(torch.empty(0, 7), routing, None).shape == (0, 7)
