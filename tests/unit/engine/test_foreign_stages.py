"""Models that transformers computes in stages, real processes over gloo: answers are those of its own `generate`."""

import json

import pytest

from engine.engine import Engine
from serving_core.settings import EngineSettings
from tests.foreign_models import FAMILIES, INITIALIZES, UNTRIED, generated, write_foreign_model
from tests.unit.engine.test_foreign import NUM_TOKENS, PROMPTS, rounded
from tests.unit.serving_node.rank_process import TIMEOUT_S, rank_processes, run_ranks

pytestmark = pytest.mark.nightly

MODELS = {
    "tied": ("gemma2", {"tie_word_embeddings": True, "num_hidden_layers": 3, "layer_types": None}),
    **{family: (family, {}) for family in FAMILIES},
}
FOUR_RANKS = ("deepseek_v2", "gemma3", "gpt_oss", "mixtral")


def case(folder, num_stages=2, **settings):
    fields = {"model_impl": "transformers", "num_kv_blocks": 64, "block_size": 8, "pipeline_parallel_size": num_stages}
    return {
        "settings": {"model": str(folder), **fields, **settings},
        "prompts": PROMPTS,
        "sampling": {"max_tokens": NUM_TOKENS},
        "chunk_tokens": 200,  # two micro-batches
    }


class Staged:
    """Models, what stages of ranks answered, and what each rank says of itself."""

    def __init__(self, root, models, num_ranks=2, **settings):
        self.folders = {name: write_foreign_model(root / name, family, **f) for name, (family, f) in models.items()}
        cases = {name: case(folder, **settings) for name, folder in self.folders.items()}
        self.answers, self.facts = run_ranks(root, num_ranks, cases)

    def check(self, name):
        found = [[token["token_id"] for token in answer] for answer in self.answers[name]]
        assert found == generated(self.folders[name], PROMPTS, NUM_TOKENS)


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    return Staged(tmp_path_factory.mktemp("models"), MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_two_stages_answer_as_transformers(name, staged):
    staged.check(name)


def test_a_rank_holds_its_stage_alone(staged):
    """Of three tied layers one and two, and each stage the one matrix of 260 x 48 that is looked up and is the head."""
    fields = {"model": str(staged.folders["tied"]), "num_kv_blocks": 64, "block_size": 8}
    whole = Engine(EngineSettings(**fields, model_impl="transformers"))
    first, last = (rank["tied"] for rank in staged.facts)
    table, norm = 4 * 260 * 48, 4 * 48
    layer = (whole.weight_bytes - table - norm) // 3
    small = 2048  # norms, scales and frequencies, which all stages have
    assert abs(first["weight_bytes"] - table - layer) < small
    assert abs(last["weight_bytes"] - table - 2 * layer) < small
    assert [3 * rank["kv_pool_bytes"] for rank in (first, last)] == [whole.kv_pool_bytes, 2 * whole.kv_pool_bytes]
    assert first["fingerprint"] == last["fingerprint"] == whole.fingerprint


def test_two_stages_of_two_ranks_answer_as_transformers(tmp_path):
    staged = Staged(tmp_path, {family: (family, {}) for family in FOUR_RANKS}, num_ranks=4)
    for family in FOUR_RANKS:
        staged.check(family)


def test_two_stages_of_two_ranks_with_quantized_weights(tmp_path):
    staged = Staged(tmp_path, {"starcoder2": ("starcoder2", {})}, num_ranks=4, quantization="int8")
    rounded(staged.folders["starcoder2"], num_ranks=2)
    staged.check("starcoder2")


def test_stages_of_a_model_whose_modules_initialize_what_is_in_them(tmp_path):
    Staged(tmp_path, {"model": (INITIALIZES, {})}, verify_model=False).check("model")


def test_stages_of_what_no_test_tries_are_refused_before_anything_is_loaded(tmp_path):
    folder = write_foreign_model(tmp_path / "model", UNTRIED)
    (folder / "model.safetensors").write_bytes(b"no weights")
    (tmp_path / "cases.json").write_text(json.dumps({"case": case(folder)}))
    with rank_processes(2, "tests.unit.serving_node.rank_process", tmp_path, "cpu") as processes:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    for output in outputs:
        assert "ArceeForCausalLM was not tried in stages; --no-verify-model serves it nevertheless" in output
