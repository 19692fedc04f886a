"""Models that transformers computes on several ranks and in stages, real processes over gloo: answers are those of its
own `generate`."""

import json

import pytest

from engine.build import build_engine
from serving_core.errors import SettingsError
from serving_core.settings import EngineSettings
from tests.model_census import write_type
from tests.transformers_models import (
    FAMILIES,
    INITIALIZES,
    NUM_TOKENS,
    PROMPTS,
    UNTRIED,
    WITHOUT_PLAN,
    generated,
    write_transformers_model,
)
from tests.unit.engine.quantized_checkpoints import rounded
from tests.unit.engine.rank_process import TIMEOUT_S, rank_processes, run_ranks

ONE_KV_HEAD = ("gpt_bigcode", "deepseek_v2", "deepseek_v3", "glm4_moe_lite")  # or latent, which both ranks hold
SIZES = {"model_impl": "transformers", "num_kv_blocks": 64, "block_size": 8}
STAGED = {
    "tied": ("gemma2", {"tie_word_embeddings": True, "num_hidden_layers": 3, "layer_types": None}),
    **{family: (family, {}) for family in FAMILIES},
}
SEQUENCE_TYPES = (  # that are computed sequence by sequence, of each plan and rule
    "bamba",
    "falcon_h1",
    "falcon_mamba",
    "gemma4_text",
    "granitemoehybrid",
    "jamba",
    "lfm2_moe",
    "lfm3",
    "llama4_text",
    "mamba2",
    "mimo_v2_flash",
    "nemotron_h",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
)
FOUR_RANKS = ("deepseek_v2", "gemma3", "gpt_oss", "mixtral")


def case(folder, chunk_tokens, **settings):
    return {
        "settings": {"model": str(folder), **SIZES, **settings},
        "prompts": PROMPTS,
        "sampling": {"max_tokens": NUM_TOKENS},
        "chunk_tokens": chunk_tokens,
    }


def write_any(folder, name, **fields):
    """Write a model of a family, or of a type of the census."""
    if name in SEQUENCE_TYPES:
        assert write_type(folder, name)
        return folder
    return write_transformers_model(folder, name, **fields)


class Ranks:
    """Models, what ranks answered, and what each rank says of itself."""

    def __init__(self, root, models, num_ranks=2, chunk_tokens=19, **settings):
        self.folders = {name: write_any(root / name, family, **f) for name, (family, f) in models.items()}
        cases = {name: case(folder, chunk_tokens, **settings) for name, folder in self.folders.items()}
        self.answers, self.facts = run_ranks(root, num_ranks, cases)

    def check(self, name):
        found = [[token["token_id"] for token in answer] for answer in self.answers[name]]
        assert found == generated(self.folders[name], PROMPTS, NUM_TOKENS, found)


def stages(root, models, **settings):
    """Run models on ranks in two stages, in two micro-batches."""
    return Ranks(root, models, chunk_tokens=200, **{"pipeline_parallel_size": 2, **settings})


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """All families, run once."""
    models = {family: (family, {}) for family in (*FAMILIES, UNTRIED)}
    return Ranks(tmp_path_factory.mktemp("models"), models, tensor_parallel_size=2)


@pytest.fixture(scope="module")
def two_stages(tmp_path_factory):
    return stages(tmp_path_factory.mktemp("models"), STAGED)


@pytest.mark.nightly
@pytest.mark.parametrize("family", [*FAMILIES, UNTRIED])
def test_two_ranks_answer_as_transformers(family, two_ranks):
    two_ranks.check(family)


@pytest.fixture(scope="module")
def sequences(tmp_path_factory):
    models = {model_type: (model_type, {}) for model_type in SEQUENCE_TYPES}
    models |= {"groups": ("mamba2", {"n_groups": 2}), "equal sections": ("olmo_hybrid", {})}
    return Ranks(tmp_path_factory.mktemp("models"), models, tensor_parallel_size=2, model_impl="auto")


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*SEQUENCE_TYPES, "groups", "equal sections"])
def test_two_ranks_compute_sequence_by_sequence(name, sequences):
    """Each rank holds half of the pool's heads."""
    sequences.check(name)
    whole = build_engine(EngineSettings(model=str(sequences.folders[name]), num_kv_blocks=64, block_size=8))
    for rank in sequences.facts:
        assert 2 * rank[name]["num_kv_heads"] == whole.layout.num_kv_heads
        assert 2 * rank[name]["kv_pool_bytes"] == whole.kv_pool_bytes
        assert rank[name]["weight_bytes"] < whole.weight_bytes
        assert rank[name]["fingerprint"] == whole.fingerprint


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_hold_their_part(family, two_ranks):
    """Of the KV cache half, and of weights less than all where there is a plan."""
    whole = build_engine(EngineSettings(model=str(two_ranks.folders[family]), **SIZES))
    for rank in two_ranks.facts:
        assert (rank[family]["kv_pool_bytes"] == whole.kv_pool_bytes) == (family in ONE_KV_HEAD)
        assert (rank[family]["weight_bytes"] == whole.weight_bytes) == (family in WITHOUT_PLAN)


@pytest.mark.nightly
def test_what_plans_of_transformers_leave_out_is_divided_too(tmp_path):
    """Norms of each head of Command R+, and queries that are made without a lower rank."""
    models = {"cohere": ("cohere", {"use_qk_norm": True}), "glm4_moe_lite": ("glm4_moe_lite", {"q_lora_rank": None})}
    ranks = Ranks(tmp_path, models, tensor_parallel_size=2)
    for family in models:
        ranks.check(family)


def test_kv_heads_that_are_not_divided_equally_are_refused(written):
    class Three:
        rank, size = 0, 3

        def exchange(self, data):
            return [data] * 3

    folder = written(write_transformers_model, "starcoder2")
    with pytest.raises(SettingsError, match=r"--tensor-parallel-size 3: transformers computes .* its 2 KV heads are"):
        build_engine(EngineSettings(model=str(folder), num_kv_blocks=64), Three())


@pytest.mark.nightly
@pytest.mark.parametrize("name", STAGED)
def test_two_stages_answer_as_transformers(name, two_stages):
    two_stages.check(name)


@pytest.mark.nightly
def test_a_rank_holds_its_stage_alone(two_stages):
    """Of three tied layers one and two, and each stage the one matrix of 260 x 48 that is looked up and is the head."""
    whole = build_engine(EngineSettings(model=str(two_stages.folders["tied"]), **SIZES))
    first, last = (rank["tied"] for rank in two_stages.facts)
    table, norm = 4 * 260 * 48, 4 * 48
    layer = (whole.weight_bytes - table - norm) // 3
    small = 2048  # norms, scales and frequencies, which all stages have
    assert abs(first["weight_bytes"] - table - layer) < small
    assert abs(last["weight_bytes"] - table - 2 * layer) < small
    assert [3 * rank["kv_pool_bytes"] for rank in (first, last)] == [whole.kv_pool_bytes, 2 * whole.kv_pool_bytes]
    assert first["fingerprint"] == last["fingerprint"] == whole.fingerprint


@pytest.mark.nightly
def test_two_stages_of_two_ranks_answer_as_transformers(tmp_path):
    ranks = stages(tmp_path, {family: (family, {}) for family in FOUR_RANKS}, num_ranks=4)
    for family in FOUR_RANKS:
        ranks.check(family)


@pytest.mark.nightly
def test_two_stages_of_two_ranks_with_quantized_weights(tmp_path):
    ranks = stages(tmp_path, {"starcoder2": ("starcoder2", {})}, num_ranks=4, quantization="int8")
    rounded(ranks.folders["starcoder2"], num_ranks=2)
    ranks.check("starcoder2")


@pytest.mark.nightly
def test_stages_of_a_model_whose_modules_initialize_what_is_in_them(tmp_path):
    stages(tmp_path, {"model": (INITIALIZES, {})}, verify_model=False).check("model")


@pytest.mark.nightly
def test_stages_of_what_no_test_tries_are_refused_before_anything_is_loaded(tmp_path):
    folder = write_transformers_model(tmp_path / "model", UNTRIED)
    (folder / "model.safetensors").write_bytes(b"no weights")
    (tmp_path / "cases.json").write_text(json.dumps({"case": case(folder, 200, pipeline_parallel_size=2)}))
    with rank_processes(2, "tests.unit.engine.rank_process", tmp_path, "cpu") as processes:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    for output in outputs:
        assert "ArceeForCausalLM was not tried in stages; --no-verify-model serves it nevertheless" in output
