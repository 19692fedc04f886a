"""Models with mixtures of experts by our own decoder, against transformers; and whatever is computed beside them."""

import json
import random

import pytest
import torch

from engine.build import build_engine
from engine.model.experts import GroupedProduct, MixtureOfExperts, StackedProduct
from engine.model.layers import Linear
from engine.native.library import ENVIRONMENT, OFF
from engine.native.linear import best_variant
from engine.native.linear_library import best_variant as best_quantized_variant
from engine.parallel import Residual, alone
from serving_core.errors import ModelError
from serving_core.settings import EngineSettings
from serving_core.sharding import whole
from tests.effort import few
from tests.lora_adapters import ATTENTION, write_adapter, write_merged
from tests.tiny_models import VOCAB_SIZE
from tests.toy_scheduler import greedy, random_prompts, run_all, token_ids
from tests.transformers_models import NUM_TOKENS, PROMPTS, generated, transformers_model, write_transformers_model
from tests.unit.engine.company import Neighbour
from tests.unit.engine.histories_kit import num_blocks_for, play, prompt_of, random_cuts
from tests.unit.engine.rank_process import run_ranks

MODELS = {  # beside those of tests.transformers_models, which other tests try too
    "mixtral-one-of-five-tied": (
        "mixtral",
        {"num_local_experts": 5, "num_experts_per_tok": 1, "sliding_window": None, "tie_word_embeddings": True},
    ),
    "olmoe-normalized-biases": ("olmoe", {"norm_topk_prob": True, "attention_bias": True}),
    "qwen2-windows": (
        "qwen2_moe",
        {"use_sliding_window": True, "sliding_window": 13, "max_window_layers": 3, "norm_topk_prob": True},
    ),
    "qwen3-four-of-forty": ("qwen3_moe", {"num_experts": 40, "num_experts_per_tok": 4}),
    "qwen3-normalized-some-dense": (
        "qwen3_moe",
        {
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 13,
        },
    ),
}
BLOCK_SIZE = 8
SPANS = (slice(3), slice(3, 3), slice(3, 8), slice(8, 9))  # rows of four experts
KINDS = [
    {"dtype": "float32"},
    {"dtype": "bfloat16", "quantization": "int8"},
    {"dtype": "bfloat16", "quantization": "w8a8"},
]


@pytest.fixture(scope="module")
def folder_of(written):
    """The models, each written once."""
    return lambda name: written(write_transformers_model, MODELS[name][0], **MODELS[name][1])


def load(folder, **fields):
    return build_engine(
        EngineSettings(**{"model": str(folder), "num_kv_blocks": 64, "block_size": BLOCK_SIZE, **fields})
    )


def mixtures(engine):
    return [module for module in engine.model.modules() if isinstance(module, MixtureOfExperts)]


@pytest.mark.parametrize(
    "name", few(MODELS, "mixtral-one-of-five-tied", "qwen2-windows", "qwen3-normalized-some-dense")
)
def test_greedy_tokens_equal_transformers(name, folder_of, monkeypatch):
    found = {}
    for environment in ("", OFF):
        monkeypatch.setenv(ENVIRONMENT, environment)
        engine = load(folder_of(name))
        assert (engine.description["model_impl"], len(mixtures(engine)) > 0) == ("native", True)
        answers = run_all(engine, PROMPTS, greedy(NUM_TOKENS), chunk_tokens=19, joins_at=[3, 0, 1])
        found[environment] = token_ids(answers)
    expected = generated(folder_of(name), PROMPTS, NUM_TOKENS, found[""])
    assert found == {"": expected, OFF: expected}
    assert len({token for answer in expected for token in answer}) > 4  # no model that says the same all the time


@pytest.mark.parametrize("family", few(["qwen2_moe", "mixtral"]))
def test_bfloat16_is_as_close_to_the_truth_as_transformers(family, written, monkeypatch):
    """With all experts taken, as rounding could choose others. Over several prompts: what rounding does to one of them
    is chance."""
    folder = written(write_transformers_model, family, spread=0.15, num_experts_per_tok=6)
    prompts = random_prompts([21, 47, 60, 66, 73, 80])
    with torch.inference_mode():
        truth, rounded = (
            torch.stack([model(torch.tensor([prompt])).logits[0, -1].float() for prompt in prompts]).log_softmax(-1)
            for model in (transformers_model(folder, dtype) for dtype in (torch.float32, torch.bfloat16))
        )
    for environment in ("", OFF):
        monkeypatch.setenv(ENVIRONMENT, environment)
        answers = run_all(load(folder, dtype="bfloat16"), prompts, greedy(1, logprobs=VOCAB_SIZE), chunk_tokens=40)
        ours = torch.tensor([[logprob for _, logprob in sorted(token.top_logprobs)] for (token,) in answers])
        our_error, their_error = ((logprobs - truth).square().mean().sqrt() for logprobs in (ours, rounded))
        assert our_error < 1.5 * their_error, environment


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[] if (place == 1) == (name == "qwen2-windows") else pytest.mark.nightly)
        for name in ("qwen2-windows", "qwen3-normalized-some-dense")
        for place, kind in enumerate(KINDS)
    ],
    ids=str,
)
def test_the_cut_of_a_prompt_and_company_change_no_bit(name, kind, folder_of):
    if best_variant(getattr(torch, kind["dtype"])) is None:
        pytest.skip(f"{kind['dtype']} products are not native here")
    engine = load(folder_of(name), num_kv_blocks=num_blocks_for(90, BLOCK_SIZE), **kind)
    assert (engine.is_batch_invariant, engine.program) == (True, None)
    prompt = prompt_of(90)
    torch.set_num_threads(1)
    kv, logits = play(engine, prompt, [90])
    for seed in (1, 2):
        torch.set_num_threads(1 + 2 * (seed % 2))
        neighbours = [Neighbour(index, random.Random(seed)) for index in range(3 * seed)]
        again, others = play(engine, prompt, random_cuts(90, seed), neighbours, seed)
        assert again == kv, seed
        assert others[90] == logits[90], seed


def test_experts_in_8_bits_take_half_and_are_computed_at_once(tmp_path, monkeypatch):
    if best_variant(torch.bfloat16) is None or best_quantized_variant() is None:
        pytest.skip("products are not native here")
    folder = write_transformers_model(tmp_path, "qwen3_moe", hidden_size=128, moe_intermediate_size=128)
    plain, quantized = (load(folder, dtype="bfloat16", quantization=kind) for kind in ("none", "int8"))
    num_products, multiply = [], GroupedProduct.__call__
    monkeypatch.setattr(GroupedProduct, "__call__", lambda *given: num_products.append(1) or multiply(*given))
    for ours, theirs in zip(mixtures(quantized), mixtures(plain), strict=True):
        assert ours.expert_bytes < 0.56 * theirs.expert_bytes
        x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
        ops = plain.model.ops  # the gate is not quantized, so both take the same experts
        residual = Residual(alone(), len(x), is_divided=False)
        num_products.clear()
        exact, rounded = (mixture(x, ops, residual).float() for mixture in (theirs, ours))
        assert len(num_products) == 2 * 2, "not all experts at once"
        assert (exact - rounded).norm() < 0.03 * exact.norm()


@pytest.fixture(scope="module")
def ranks(folder_of, tmp_path_factory):
    """All models, run once on two ranks."""
    cases = {
        name: {
            "settings": {"model": str(folder_of(name)), "num_kv_blocks": 64, "block_size": BLOCK_SIZE},
            "prompts": PROMPTS,
            "sampling": {"max_tokens": NUM_TOKENS},
            "chunk_tokens": 19,
        }
        for name in MODELS
    }
    return run_ranks(tmp_path_factory.mktemp("ranks"), 2, cases)


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_answer_as_transformers_and_divide_the_experts(name, folder_of, ranks):
    answers, facts = ranks
    found = [[token["token_id"] for token in answer] for answer in answers[name]]
    assert found == generated(folder_of(name), PROMPTS, NUM_TOKENS, found)
    whole = load(folder_of(name)).weight_bytes
    assert all(0.4 * whole < rank[name]["weight_bytes"] < 0.65 * whole for rank in facts)


@torch.inference_mode()
def test_stacked_weights_are_multiplied_as_each_by_itself():
    random = torch.Generator().manual_seed(2)
    layers = [Linear(whole(24), {"down_proj": whole(40)}, bias=False) for _ in range(4)]
    weights = [torch.randn((40, 24), generator=random).bfloat16() for _ in layers]
    for layer, weight in zip(layers, weights, strict=True):
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    product, rows = StackedProduct(layers), torch.randn((9, 24), generator=random).bfloat16()
    assert (product.takes(torch.bfloat16), product.takes(torch.float32)) == (True, False)
    outputs = product(rows, torch.tensor([0, 3, 3, 8, 9], dtype=torch.int32))  # the second has none
    expected = [rows[span].double() @ weight.double().T for span, weight in zip(SPANS, weights, strict=True)]
    torch.testing.assert_close(outputs.double(), torch.cat(expected), atol=0.03, rtol=0.01)
    assert all(torch.equal(layer.weight, weight) for layer, weight in zip(layers, weights, strict=True))
    layers[2].pack(8)
    assert not product.takes(torch.bfloat16), "one of them computes otherwise"


def test_weights_of_another_size_are_refused(tmp_path):
    folder = write_transformers_model(tmp_path, "qwen3_moe")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "moe_intermediate_size": 25}))
    with pytest.raises(ModelError, match=r"experts\.0\.gate_proj\.weight has shape \[24, 48\], and the model wants"):
        load(folder)


def test_adapters_change_attention_and_dense_layers_alone(folder_of, tmp_path):
    model = folder_of("qwen3-normalized-some-dense")
    adapter = write_adapter(tmp_path / "adapter", model, seed=1, targets=ATTENTION)
    merged = write_merged(tmp_path / "merged", model, adapter)
    adapters = ["", "one", "one"]
    engine = load(model, lora=(f"one={adapter}",))
    plain, found = (token_ids(run_all(engine, PROMPTS, greedy(NUM_TOKENS), adapters=names)) for names in ([], adapters))
    assert plain == generated(model, PROMPTS, NUM_TOKENS, plain) != found
    assert found[0] == plain[0]
    assert found[1:] == generated(merged, PROMPTS[1:], NUM_TOKENS, found[1:])
    of_experts = write_adapter(tmp_path / "experts", model, seed=1, targets=["down_proj"])
    with pytest.raises(
        ModelError, match=r"layers\.3\.mlp\.experts\.0\.down_proj\S*, which is not LoRA of a projection"
    ):
        load(model, lora=(f"one={of_experts}",))


def test_what_our_decoder_does_not_know_is_left_to_transformers(tmp_path):
    folder = write_transformers_model(tmp_path, "olmoe", clip_qkv=0.7)
    engine = load(folder)
    assert engine.config.is_transformers
    found = token_ids(run_all(engine, PROMPTS, greedy(NUM_TOKENS)))
    assert found == generated(folder, PROMPTS, NUM_TOKENS, found)
