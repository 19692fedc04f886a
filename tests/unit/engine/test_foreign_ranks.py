"""Models that transformers computes on two ranks, real processes over gloo: answers are those of its own `generate`."""

import pytest

from engine.engine import Engine
from serving_core.errors import SettingsError
from serving_core.settings import EngineSettings
from tests.foreign_models import FAMILIES, UNTRIED, WITHOUT_PLAN, generated, write_foreign_model
from tests.unit.engine.test_foreign import NUM_TOKENS, PROMPTS
from tests.unit.serving_node.rank_process import run_ranks

ONE_KV_HEAD = ("gpt_bigcode", "deepseek_v2", "deepseek_v3", "glm4_moe_lite")  # or latent, which both ranks hold


def run(root, folders):
    """What two ranks sample of each model, and what each rank says of itself."""
    cases = {
        name: {
            "settings": {
                "model": str(folder),
                "model_impl": "transformers",
                "num_kv_blocks": 64,
                "block_size": 8,
                "tensor_parallel_size": 2,
            },
            "prompts": PROMPTS,
            "sampling": {"max_tokens": NUM_TOKENS},
            "chunk_tokens": 19,
        }
        for name, folder in folders.items()
    }
    return run_ranks(root, 2, cases)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """All families, run once."""
    root = tmp_path_factory.mktemp("models")
    folders = {family: write_foreign_model(root / family, family) for family in (*FAMILIES, UNTRIED)}
    return folders, *run(root, folders)


@pytest.mark.nightly
@pytest.mark.parametrize("family", [*FAMILIES, UNTRIED])
def test_two_ranks_answer_as_transformers(family, sampled):
    folders, answers, _ = sampled
    found = [[token["token_id"] for token in answer] for answer in answers[family]]
    assert found == generated(folders[family], PROMPTS, NUM_TOKENS)


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_hold_their_part(family, sampled):
    """Of the KV cache half, and of weights less than all where there is a plan."""
    folders, _, facts = sampled
    whole = Engine(
        EngineSettings(model=str(folders[family]), model_impl="transformers", num_kv_blocks=64, block_size=8)
    )
    for rank in facts:
        assert (rank[family]["kv_pool_bytes"] == whole.kv_pool_bytes) == (family in ONE_KV_HEAD)
        assert (rank[family]["weight_bytes"] == whole.weight_bytes) == (family in WITHOUT_PLAN)


@pytest.mark.nightly
def test_what_plans_of_transformers_leave_out_is_divided_too(tmp_path):
    """Norms of each head of Command R+, and queries that are made without a lower rank."""
    given = {"cohere": {"use_qk_norm": True}, "glm4_moe_lite": {"q_lora_rank": None}}
    folders = {family: write_foreign_model(tmp_path / family, family, **fields) for family, fields in given.items()}
    answers, _ = run(tmp_path, folders)
    for family, folder in folders.items():
        found = [[token["token_id"] for token in answer] for answer in answers[family]]
        assert found == generated(folder, PROMPTS, NUM_TOKENS)


def test_kv_heads_that_are_not_divided_equally_are_refused(tmp_path):
    class Three:
        rank, size = 0, 3

        def exchange(self, data):
            return [data] * 3

    folder = write_foreign_model(tmp_path, "starcoder2")
    with pytest.raises(SettingsError, match=r"--tensor-parallel-size 3: transformers computes .* its 2 KV heads are"):
        Engine(EngineSettings(model=str(folder), num_kv_blocks=64), Three())
