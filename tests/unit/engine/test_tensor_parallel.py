"""One model on several ranks, real processes over gloo, against transformers and against one rank."""

import pytest
import torch

from engine.build import build_engine
from engine.native.library import ENVIRONMENT, OFF, native_library
from serving_core.settings import EngineSettings
from tests.tiny_models import VOCAB_SIZE, write_fake_model, write_tiny_model
from tests.toy_scheduler import greedy, random_prompts, run_all
from tests.transformers_models import DESCRIBED, MIXTURES, transformers_model, write_any_model
from tests.unit.engine.rank_process import rank_case, run_ranks
from tests.unit.engine.test_fake import answer_on_paper

pytestmark = pytest.mark.nightly

# Sizes are chosen so that 2, 3 and 4 ranks divide few of them: heads, neurons and vocabulary come out uneven.
MODELS = {
    "gqa-3-of-9": (
        "llama",
        {
            "hidden_size": 54,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": VOCAB_SIZE + 3,
            "intermediate_size": 77,
        },
    ),
    "mqa-tied": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True, "vocab_size": VOCAB_SIZE + 1}),
    "mha-8-window": (
        "mistral",
        {"num_attention_heads": 8, "num_key_value_heads": 8, "sliding_window": 11, "intermediate_size": 79},
    ),
    "biases-everywhere": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2-biases": ("qwen2", {"vocab_size": VOCAB_SIZE + 2}),
    "qwen3-norms-bias-tied": ("qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    # (Transformers' own products of experts want multiples of 4.)
    **{family: (family, {"intermediate_size": 76 if family in MIXTURES else 77}) for family in DESCRIBED},
}
PROMPTS = random_prompts([1, 33, 150])
FAKE_PROMPTS = [[97, 98], list(range(30)), [255] * 9]
SIZES = [2, 3, 4]
NUM_NEW_TOKENS = 10


def token_ids(answers):
    return [[token["token_id"] for token in answer] for answer in answers]


def logprobs(token):
    """Of the whole vocabulary, in order."""
    return torch.tensor([logprob for _, logprob in sorted(token["top_logprobs"])])


def case(folder, prompts=PROMPTS, num_tokens=NUM_NEW_TOKENS, **settings):
    return rank_case(folder, prompts, num_tokens, 23, **settings)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    folders = {name: write_any_model(root / name, family, **config) for name, (family, config) in MODELS.items()}
    folders["bfloat16"] = write_tiny_model(root / "bfloat16", "qwen2", dtype="bfloat16")
    folders["fake"] = write_fake_model(root / "fake", num_kv_heads=3)
    return folders


@pytest.fixture(scope="module", params=SIZES)
def tp_size(request):
    return request.param


@pytest.fixture(scope="module")
def ranks(tp_size, models, tmp_path_factory):
    """What rank 0 sampled in each case, and what each rank says of itself: all cases run once on so many ranks."""
    cases = {name: case(models[name]) for name in MODELS}
    cases["bfloat16"] = case(models["bfloat16"], num_tokens=1)
    cases["unpacked"] = case(models["mha-8-window"], num_tokens=1, dtype="float16")  # kernels would round outputs up
    cases["int8"] = case(models["gqa-3-of-9"], kv_cache_dtype="int8")
    cases["fake"] = case(models["fake"], FAKE_PROMPTS, block_size=4)
    cases["memory"] = case(models["gqa-3-of-9"], num_kv_blocks=0, kv_cache_memory_bytes=200_000)
    return run_ranks(tmp_path_factory.mktemp("ranks"), tp_size, cases)


@pytest.mark.parametrize("name", MODELS)
def test_answers_and_probabilities_are_those_of_transformers(name, models, ranks):
    answers = ranks[0][name]
    model = transformers_model(models[name])
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens = [token["token_id"] for token in answer]
        with torch.inference_mode():
            expected = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert tokens == expected.argmax(-1).tolist()
        torch.testing.assert_close(torch.stack([logprobs(token) for token in answer]), expected, rtol=1e-5, atol=1e-4)


def test_bfloat16_is_as_close_to_the_truth_as_on_one_rank(models, ranks):
    folder = models["bfloat16"]
    alone = run_all(build_engine(EngineSettings(**case(folder)["settings"])), PROMPTS, greedy(1, logprobs=300))
    divided = ranks[0]["bfloat16"]
    model = transformers_model(folder)
    with torch.inference_mode():
        truth = torch.stack([model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1) for prompt in PROMPTS])
    errors = [
        (torch.stack([logprobs(token) for (token,) in answers]) - truth).square().mean().sqrt()
        for answers in (divided, [[{"top_logprobs": token.top_logprobs}] for (token,) in alone])
    ]
    assert errors[1] > 0.01
    assert errors[0] < 1.5 * errors[1]


def test_a_quantized_cache_has_the_scales_of_one_rank(models, ranks):
    settings = EngineSettings(**case(models["gqa-3-of-9"], kv_cache_dtype="int8")["settings"])
    alone = run_all(build_engine(settings), PROMPTS, greedy(NUM_NEW_TOKENS, ignore_eos=True), chunk_tokens=23)
    assert token_ids(ranks[0]["int8"]) == [[token.token_id for token in answer] for answer in alone]


def test_the_fake_model_answers_as_on_paper(ranks):
    expected = [answer_on_paper(prompt, NUM_NEW_TOKENS) for prompt in FAKE_PROMPTS]
    assert token_ids(ranks[0]["fake"]) == expected


def test_ranks_agree_on_the_model_and_the_number_of_blocks(tp_size, models, ranks):
    facts = ranks[1]
    for name in ("gqa-3-of-9", "fake", "memory"):
        alone = build_engine(EngineSettings(**case(models["fake" if name == "fake" else "gqa-3-of-9"])["settings"]))
        of_ranks = [rank[name] for rank in facts]
        assert len({rank["num_blocks"] for rank in of_ranks}) == 1
        assert all(rank["description"]["tp_size"] == str(tp_size) for rank in of_ranks)
        if name != "fake":
            assert all(rank["fingerprint"] == alone.fingerprint for rank in of_ranks)


def test_the_memory_for_kv_is_that_of_each_rank(tp_size, ranks):
    heads, num_blocks = {2: ([1, 2], 43), 3: ([1, 1, 1], 86), 4: ([1, 1, 1, 1], 86)}[tp_size]
    facts = [rank["memory"] for rank in ranks[1]]
    assert [rank["num_kv_heads"] for rank in facts] == heads
    head_bytes = 2 * 3 * 16 * 6 * 4  # K and V, layers, tokens, elements, bytes
    assert [rank["num_blocks"] for rank in facts] == [num_blocks] * tp_size
    assert [rank["kv_pool_bytes"] for rank in facts] == [num_blocks * head_bytes * num_heads for num_heads in heads]


def test_ranks_hold_their_part_of_the_weights(tp_size, models, ranks):
    settings = EngineSettings(**case(models["mha-8-window"], dtype="float16")["settings"])
    whole_bytes = build_engine(settings).weight_bytes
    norm_bytes = (2 * 3 + 1) * 48 * 2  # whole on every rank
    held = [rank["unpacked"]["weight_bytes"] for rank in ranks[1]]
    assert sum(held) == whole_bytes + (tp_size - 1) * norm_bytes  # 8 heads over 3 ranks: no KV head is on two
    assert max(held) < whole_bytes / tp_size * 1.3  # 3 of 8 heads are on one of three ranks


def test_with_the_flag_two_ranks_of_torch_change_no_bit_by_the_cut(models, tmp_path, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, OFF)
    model = case(models["gqa-3-of-9"], dtype="float32", batch_invariant=True)
    sampled, _ = run_ranks(tmp_path, 2, {str(size): {**model, "chunk_tokens": size} for size in (7, 1000)})
    assert sampled["7"] == sampled["1000"]


@pytest.mark.skipif(native_library() is None, reason="the native kernels were not built")
@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_nor_do_ranks_of_one_machine_by_kernels(models, tmp_path, num_ranks):
    model = case(models["bfloat16"])
    sampled, facts = run_ranks(tmp_path, num_ranks, {str(size): {**model, "chunk_tokens": size} for size in (7, 1000)})
    assert sampled["7"] == sampled["1000"]
    assert [rank["7"]["numerics"]["is_batch_invariant"] for rank in facts] == ["yes"] * num_ranks
