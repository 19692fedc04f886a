"""A draft model: what a node can be told of it, what is refused by name before anything is loaded, and how it computes
between the steps of a node."""

import json
import threading

import pytest

from decode_node.speculation import LEAST_STEPS, DraftModel
from engine.build import build_engine
from engine.stepper import Stepper
from serving_core.errors import SettingsError
from serving_core.flags import build
from serving_core.node.needs import needs_of
from serving_node.draft_model import check_draft_model
from serving_node.settings import NodeSettings
from serving_node.step_loop import propose
from tests.tiny_models import VOCAB_SIZE, write_fake_model, write_tiny_llama
from tests.toy_kv import answer_of
from tests.unit.serving_node.scheduler_kit import Node, prompt_of


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("model"), dtype="bfloat16")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("small"), dtype="bfloat16", num_hidden_layers=1)


def checked(model, **values):
    return check_draft_model(build(NodeSettings, {"model": str(model), "speculation": "draft", **values}))


def test_its_engine_is_like_the_nodes_with_a_pool_of_its_own(model, small):
    draft, config = checked(
        model,
        speculative_model=str(small),
        speculative_quantization="int8",
        speculative_kv_cache_memory_bytes=100_000,
        block_size=8,
        kv_cache_memory_bytes=10**9,
        device="cpu",
    )
    engine, needs = build_engine(draft), needs_of(draft, config)
    assert (engine.layout.block_size, engine.description["quantization"]) == (8, "int8")
    assert engine.kv_pool_bytes == needs.pool_bytes <= 100_000
    assert needs.weight_bytes <= engine.weight_bytes


@pytest.mark.parametrize("speculation", ["off", "lookup"])
def test_without_drafts_there_is_none(model, small, speculation):
    assert checked(model, speculation=speculation) is None
    with pytest.raises(SettingsError, match=f"--speculation {speculation}: there is a --speculative-model, which"):
        checked(model, speculation=speculation, speculative_model=str(small))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"speculative_model": ""}, "--speculation draft needs the folder of a smaller model: --speculative-model"),
        ({"tensor_parallel_size": 2}, "one rank, and --tensor-parallel-size is 2 and --pipeline-parallel-size 1"),
        ({"pipeline_parallel_size": 3}, "one rank, and --tensor-parallel-size is 1 and --pipeline-parallel-size 3"),
        ({"speculative_kv_cache_memory_bytes": 100}, "--speculative-kv-cache-memory-bytes 100 holds no block of "),
    ],
)
def test_what_cannot_be_is_refused_by_name(model, small, values, sentence):
    with pytest.raises(SettingsError, match=sentence):
        checked(model, **{"speculative_model": str(small), **values})


def test_both_have_the_same_tokens(model, tmp_path):
    folder = write_fake_model(tmp_path)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "vocab_size": 300}))
    with pytest.raises(SettingsError, match=f"vocabulary of 300 tokens, and the model one of {VOCAB_SIZE}"):
        checked(model, speculative_model=str(folder))


def test_one_that_makes_embeddings_writes_nothing(model, tmp_path):
    folder = write_tiny_llama(tmp_path, dtype="bfloat16", architectures=["LlamaModel"])
    with pytest.raises(SettingsError, match="--speculative-model makes embeddings"):
        checked(model, speculative_model=str(folder))


# ---- between steps ----


PROMPT = prompt_of(6)
NUM_TOKENS = 16
ENGINE_THREAD = "engine"  # begins its name


class QuickStepper(Stepper):
    """Whatever a busy machine takes for it, a draft model takes next to nothing."""

    async def between(self, compute):
        result, _ = await super().between(compute)
        return result, 0.001


class ToyDrafter:
    """Writes what comes, or fails."""

    def __init__(self, stepper, node, error=None):
        self._stepper, self._node, self._error = stepper, node, error
        self.num_calls = 0

    def propose(self, works):
        assert threading.current_thread().name.startswith(ENGINE_THREAD)
        assert self._stepper.step_age_s > 0, "nobody would see it stuck"
        self.num_calls += 1
        if self._error is not None:
            raise self._error
        (request,) = [node_request.request for node_request in self._node.scheduler.node_requests]
        return [answer_of(request.token_ids, work.num_draft_tokens) for work in works]


@pytest.fixture
def node():
    model = DraftModel(num_blocks=20, block_size=4, max_model_len=100, step_s=0.0)
    node = Node(24, draft_tokens=3, is_batch_invariant=True, draft_model=model)
    node.writes("a", PROMPT, max_tokens=NUM_TOKENS)
    for _ in range(LEAST_STEPS):
        node.step()
    return node


@pytest.fixture
def stepper():
    stepper = QuickStepper(lambda parts, on_layer: None)
    yield stepper
    stepper.close()


async def answered(node, stepper, drafter):
    """Whether the answer is what it would be without."""
    await propose(drafter, node.scheduler.speculation.drafts, stepper)
    while node.step():
        await propose(drafter, node.scheduler.speculation.drafts, stepper)
    node.scheduler.speculation.drafts.check_integrity()
    node.check_empty()
    return node.tokens("a") == answer_of(PROMPT, NUM_TOKENS)[1:]


async def test_what_it_writes_comes(node, stepper):
    drafter = ToyDrafter(stepper, node)
    assert await answered(node, stepper, drafter)
    assert drafter.num_calls > 1
    assert node.scheduler.speculation.counts.num_accepted > 0
    assert stepper.num_steps == 0, "it takes no step"


async def test_one_that_fails_is_used_no_more(node, stepper, caplog):
    drafter = ToyDrafter(stepper, node, ValueError("odd"))
    assert await answered(node, stepper, drafter)
    assert drafter.num_calls == 1
    assert node.scheduler.speculation.counts.num_proposed == 0
    assert [record.message for record in caplog.records] == [
        "the draft model failed: there are no draft tokens any more"
    ]
