"""Models that transformers computes sequence by sequence, over its own cache: greedy answers against its `generate`."""

import pytest
import torch
from transformers import PreTrainedModel

from engine.build import build_engine
from engine.transformers_backend import loading
from engine.transformers_backend.mixers import Section
from engine.transformers_backend.sequences import KeptState, SequenceDecoder
from serving_core.errors import ModelError, SettingsError
from serving_core.requests import Request, SamplingParams, Work
from serving_core.settings import EngineSettings
from tests.model_census import write_type
from tests.toy_scheduler import greedy, run_all, token_ids
from tests.transformers_models import NUM_TOKENS, PROMPTS, SEQUENCES, generated, write_transformers_model
from tests.unit.engine.ranks_in_threads import RanksInThreads


@pytest.fixture(autouse=True)
def left_as_it_was():
    """Ranks that are threads leave transformers' classes as they found them."""
    before = PreTrainedModel.tie_weights
    yield
    assert PreTrainedModel.tie_weights is before


@pytest.fixture(params=SEQUENCES)
def folder(request, written):
    return written(write_transformers_model, request.param)


def load(folder, group=None, **fields):
    settings = EngineSettings(**{"model": str(folder), "num_kv_blocks": 200, "block_size": 8, **fields})
    return build_engine(settings, group)


def test_answers_are_those_of_transformers(folder):
    """In chunks that end within blocks, steps of answers beside chunks of prompts."""
    engine = load(folder)
    assert isinstance(engine.model, SequenceDecoder)
    found = token_ids(run_all(engine, PROMPTS, greedy(NUM_TOKENS), chunk_tokens=19, joins_at=[3, 0, 1]))
    assert found == generated(folder, PROMPTS, NUM_TOKENS, found)


def test_a_state_beside_attention_that_could_be_paged_is_seen(tmp_path):
    assert write_type(tmp_path, "zaya")
    found = token_ids(run_all(load(tmp_path), PROMPTS[:2], greedy(6), chunk_tokens=19))
    assert found == generated(tmp_path, PROMPTS[:2], 6, found)


def test_what_is_kept_moves_with_the_blocks(folder):
    """A prompt is computed by one engine, and another one goes on behind a copy of its blocks."""
    engines, prompt = [load(folder) for _ in range(2)], PROMPTS[1]
    request = Request("r", 0, list(prompt), len(prompt), SamplingParams(max_tokens=4, temperature=0))
    layout = engines[0].layout
    here, there = ([*range(start, start + layout.num_blocks_for(len(prompt) + 4))] for start in (3, 50))
    [token] = engines[0].step([Work(request, 0, len(prompt), here)])
    for layer in layout.layers:
        engines[1].pool.write(layer, there, *engines[0].pool.read(layer, here))
    answer = [token.token_id]
    while len(answer) < 4:
        request.token_ids.append(answer[-1])
        [token] = engines[1].step([Work(request, len(request.token_ids) - 1, 1, there)])
        answer.append(token.token_id)
    assert answer == generated(folder, [prompt], 4, [answer])[0]


JOINED = ("diffllama", "falcon_h1", "jamba", "lfm2", "mamba", "qwen3_5", "stablelm")


def test_the_sequences_of_a_step_are_computed_together(folder):
    """One call of the model for all that are about as long, where padding in front changes nothing."""
    engine = load(folder)
    family = engine.config.model_type.removesuffix("_text")
    calls = []
    engine.model.module.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    prompts = [[number, *range(1, 8 + number)] for number in range(3)]
    run_all(engine, [*prompts, list(range(1, 150))], greedy(5, ignore_eos=True))
    of_steps = calls[4:]  # behind the prompts
    assert of_steps == ([3, 1] * 4 if family in JOINED else [1] * 16)


def test_keys_and_values_may_be_in_8_bits(folder, monkeypatch, caplog):
    """The check at the start, which models that tests have tried are spared, finds no more than rounding."""
    monkeypatch.setattr(loading, "TRIED", frozenset())
    with caplog.at_level("INFO"):
        engine = load(folder, kv_cache_dtype="int8")
    assert engine.layout.is_quantized
    assert any("agrees here" in record.message for record in caplog.records)


# Both have sections of several lengths, one a shared one.
@pytest.mark.parametrize(("family", "sizes"), [("qwen3_5", (1, 2)), ("falcon_h1", (2, 1))])
def test_heads_and_channels_of_states_are_divided_over_ranks(family, sizes, written):
    """A prompt is computed by a node of some ranks, and one of others goes on behind the heads of its blocks."""
    folder, prompt = written(write_transformers_model, family), PROMPTS[1]
    nodes = [Node(folder, size) for size in sizes]
    request = Request("r", 0, list(prompt), len(prompt), SamplingParams(max_tokens=4, temperature=0))
    layout = nodes[0].engines[0].model_layout
    assert layout.num_kv_heads == 2
    assert layout == nodes[1].engines[0].model_layout
    for node in nodes:
        assert [engine.layout for engine in node.engines] == [layout.with_heads(2 // node.size)] * node.size
    here, there = ([*range(start, start + layout.num_blocks_for(len(prompt) + 4))] for start in (3, 50))
    token = nodes[0].step(Work(request, 0, len(prompt), here))
    for layer in layout.layers:
        for head in range(2):
            nodes[1].head(head).write(layer, there, *nodes[0].head(head).read(layer, here))
    answer = [token.token_id]
    while len(answer) < 4:
        request.token_ids.append(answer[-1])
        answer.append(nodes[1].step(Work(request, len(request.token_ids) - 1, 1, there)).token_id)
    assert answer == generated(folder, [prompt], 4, [answer])[0]


class Node:
    """The ranks of a node, as threads."""

    def __init__(self, folder, size):
        self.size = size
        self._ranks = RanksInThreads(size)
        self.engines = self._ranks.run(lambda group: load(folder, group, tensor_parallel_size=size))

    def step(self, work):
        def of_rank(group):
            engine = self.engines[group.rank]
            return engine.step([work]) if group.rank == 0 else engine.follow([work.share])

        [token] = self._ranks.run(of_rank)[0]
        return token

    def head(self, head):
        """The part of the pool of the rank that holds this one of two heads."""
        heads_each = 2 // self.size
        return self.engines[head // heads_each].pool.heads(range(head % heads_each, head % heads_each + 1))


def test_parts_of_a_state_are_those_of_its_ranks():
    """Of two sections that are divided and of one that each part has, beside another one."""
    sections = (Section(8), Section(3, is_shared=True), Section(4))
    state = KeptState(0, "conv_states", 0, (1, 15, 2), torch.float16, sections)
    whole = torch.randn(1, 15, 2).half()
    parts = state.split(whole, 4)
    assert parts.shape == (4, state.part_bytes(4)) == (4, (2 + 3 + 1) * 2 * 2)
    assert torch.equal(state.join(parts), whole)
    first, shared, last = torch.split(whole, [8, 3, 4], dim=1)
    of_rank = torch.cat((first[:, 4:], shared, last[:, 2:]), dim=1)
    own = (Section(4), Section(3, is_shared=True), Section(2))
    assert torch.equal(state._replace(shape=(1, 9, 2), sections=own).split(of_rank, 2), parts[2:])


@pytest.mark.parametrize(
    ("family", "sentence"),
    [
        ("stablelm", "StableLmForCausalLM is computed sequence by sequence, and there is no plan to divide its Stab"),
        ("deepseek_v32", "DeepseekV32ForCausalLM keeps a latent, keys of an indexer or a state without heads, which"),
    ],
)
def test_what_ranks_cannot_divide_is_refused(family, sentence, written):
    with pytest.raises((ModelError, SettingsError), match=f"--tensor-parallel-size 2: {sentence}"):
        Node(written(write_transformers_model, family), 2)


def test_more_ranks_than_parts_of_a_state_are_refused(written):
    folder = written(write_transformers_model, "qwen3_5", num_key_value_heads=4)
    with pytest.raises(SettingsError, match="4: 2 heads, groups or channels of Qwen3_5GatedDeltaNet are to be divided"):
        Node(folder, 4)
