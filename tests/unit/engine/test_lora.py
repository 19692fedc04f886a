"""LoRA adapters in one batch with the model alone: against transformers with the adapters in its weights, and their
bits against those of other histories."""

import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.build import build_engine
from engine.native.library import ENVIRONMENT, OFF
from engine.native.linear import best_variant
from serving_core.errors import ModelError
from serving_core.node.blocks import BlockAllocator
from serving_core.settings import EngineSettings
from splitserve.gguf.folder import gguf_folder
from tests.effort import effort, few
from tests.gguf_files import write_gguf
from tests.lora_adapters import ATTENTION, WEIGHTS, write_adapter, write_merged
from tests.tiny_models import write_tiny_model
from tests.toy_scheduler import CountingEngine, greedy, random_prompts, run_all, token_ids
from tests.transformers_models import (
    DESCRIBED,
    MIXTURES,
    generated,
    greedy_answers,
    is_greedy_answer,
    transformers_model,
    write_transformers_model,
)
from tests.unit.engine.company import BLOCK_SIZE, Neighbour
from tests.unit.engine.histories_kit import num_blocks_for, play, prompt_of, random_cuts
from tests.unit.engine.native_kit import choose_native
from tests.unit.engine.rank_process import run_ranks

PROMPTS = random_prompts([5, 33, 70])
NAMES = ("", "all", "org/some.v1", "one")
NUM_TOKENS = 12  # of an answer


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The model alone and with each adapter in its weights, and what --lora is given."""
    root = tmp_path_factory.mktemp("models")
    # Of 2 ranks one has more of the heads and neurons than the other.
    sizes = {"hidden_size": 54, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 77}
    model = write_tiny_model(root / "model", attention_bias=True, mlp_bias=True, **sizes)
    some = ("q_proj", "v_proj", "up_proj", "down_proj")
    adapters = {
        "all": write_adapter(root / "all", model, seed=1),
        "org/some.v1": write_adapter(root / "some", model, seed=2, targets=some, r=3, use_rslora=True),
        "one": write_adapter(root / "one", model, seed=3, targets=ATTENTION, r=1, lora_alpha=3, dtype=torch.bfloat16),
    }
    merged = {name: write_merged(root / f"merged-{folder.name}", model, folder) for name, folder in adapters.items()}
    return {"": model, **merged}, tuple(f"{name}={folder}" for name, folder in adapters.items())


@pytest.fixture(scope="module")
def expected_of(folders):
    """Return a function that gives transformers' answers to the prompts with each adapter, in the order of NAMES,
    computed once; `drafts` as for `greedy_answers`."""
    known = []

    def expected(drafts):
        if not known:
            for name, of_name in zip(NAMES, drafts, strict=True):
                known.append(greedy_answers(transformers_model(folders[0][name]), PROMPTS, NUM_TOKENS, of_name))
        assert len({str(answers) for answers in known}) == len(NAMES)
        return known

    return expected


def load(folders, **settings):
    models, lora = folders
    return build_engine(EngineSettings(model=str(models[""]), lora=lora, **{"num_kv_blocks": 200, **settings}))


@pytest.mark.parametrize("is_native", [True, False])
def test_a_mixed_batch_answers_as_models_with_adapters_in_their_weights(is_native, folders, expected_of, monkeypatch):
    choose_native(monkeypatch, is_native)
    adapters = [name for name in NAMES for _ in PROMPTS]
    joins_at = [3 * place % 8 for place in range(len(adapters))]
    answers = run_all(
        load(folders), PROMPTS * len(NAMES), greedy(NUM_TOKENS), chunk_tokens=23, joins_at=joins_at, adapters=adapters
    )
    found = batched(token_ids(answers))
    assert found == expected_of(found)


def batched(answers):
    """Return the answers to all prompts of each adapter, one after the other."""
    return [answers[start : start + len(PROMPTS)] for start in range(0, len(answers), len(PROMPTS))]


@pytest.mark.parametrize(
    "family",
    few([family for family in DESCRIBED if family not in ("phi3", *MIXTURES)], "cohere", "gemma2", "granite", "olmo2"),
)
def test_families_that_are_described_take_adapters(family, written, tmp_path):
    """In their order of weights, and before norms of projections."""
    model = written(write_transformers_model, family)
    adapter = write_adapter(tmp_path / "adapter", model, seed=1)
    merged = write_merged(tmp_path / "merged", model, adapter)
    engine = load(({"": model}, [f"one={adapter}"]))
    found = token_ids(run_all(engine, PROMPTS, greedy(NUM_TOKENS), adapters=["one"] * len(PROMPTS)))
    assert found == generated(merged, PROMPTS, NUM_TOKENS, found)
    plain = transformers_model(model)
    assert not all(is_greedy_answer(plain, *pair, NUM_TOKENS) for pair in zip(PROMPTS, found, strict=True))


def test_adapters_of_projections_that_are_stored_as_one_are_refused(written, tmp_path):
    model = written(write_transformers_model, "phi3")
    adapter = write_adapter(tmp_path / "adapter", model, seed=1, targets=["qkv_proj"])
    with pytest.raises(ModelError, match=r"qkv_proj.lora_A.weight, which is not LoRA of a projection"):
        load(({"": model}, [f"one={adapter}"]))


def test_no_prefix_is_shared_but_with_the_same_adapter(folders, expected_of):
    engine, allocator = CountingEngine(load(folders, block_size=4, num_kv_blocks=400)), BlockAllocator(400)
    computed, found = [], []  # tokens of the prompts, and the answers
    for name in NAMES * 2:
        before = engine.num_tokens
        answers = run_all(engine, PROMPTS, greedy(NUM_TOKENS), allocator=allocator, adapters=[name] * len(PROMPTS))
        found.append(token_ids(answers))
        computed.append(engine.num_tokens - before - sum(len(answer) - 1 for answer in answers))
    assert found == expected_of(found[: len(NAMES)]) * 2
    first, again = sum(map(len, PROMPTS)), sum((len(prompt) - 1) % 4 + 1 for prompt in PROMPTS)
    assert computed == [first] * len(NAMES) + [again] * len(NAMES)


@pytest.mark.parametrize("native", few([True, False]))
def test_a_row_has_the_same_bits_in_any_company(native, folders, monkeypatch):
    """By the kernels as they are, and by torch with the flag."""
    if native and best_variant(torch.bfloat16) is None:
        pytest.skip("bfloat16 products are not native here")
    if not native:
        monkeypatch.setenv(ENVIRONMENT, OFF)
    num_tokens, names, seeds = effort((60, NAMES[1:3], (1,)), (120, NAMES, (1, 2)), (120, NAMES, (1, 2)))
    models, lora = folders
    chosen = models, tuple(each for each in lora if each.partition("=")[0] in names)
    sizes = {"block_size": BLOCK_SIZE, "num_kv_blocks": num_blocks_for(num_tokens, BLOCK_SIZE)}
    engine = load(chosen, dtype="bfloat16" if native else "float32", batch_invariant=not native, **sizes)
    assert engine.is_batch_invariant
    prompt, rng = prompt_of(num_tokens), random.Random(5)
    for name in names:
        kv, logits = play(engine, prompt, [num_tokens], adapter=name)
        for seed in seeds:
            neighbours = [Neighbour(place, rng, ("", *names)[place % (1 + len(names))]) for place in range(5)]
            cuts = random_cuts(num_tokens, seed)
            again, others = play(engine, prompt, cuts, neighbours, seed, adapter=name)
            assert again == kv, name
            assert others[num_tokens] == logits[num_tokens], name


@pytest.mark.parametrize("quantization", ["int8", "w8a8"])
def test_quantized_weights_take_adapters(quantization, folders):
    """These stay as they are: with bytes under them the likeliest token is the same one, or nearly as likely."""
    engine = load(folders, quantization=quantization)
    [prompt] = random_prompts([40], seed=4)
    for name, folder in folders[0].items():
        with torch.inference_mode():
            truth = transformers_model(folder)(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        [[token]] = run_all(engine, [prompt], greedy(1), adapters=[name])
        assert truth.max() - truth[token.token_id] < 0.5, name


def test_a_gguf_file_takes_adapters_of_the_model_that_it_was_made_of(tmp_path):
    """In the file itself, rows of queries and keys are in another order."""
    file = write_gguf(tmp_path / "tiny.gguf")
    adapter = write_adapter(tmp_path / "a", file.with_suffix(""), seed=1)
    merged = transformers_model(write_merged(tmp_path / "merged", file.with_suffix(""), adapter))
    engine = load(({"": gguf_folder(file, tmp_path / "cache")}, (f"a={adapter}",)), dtype="float32")
    found = token_ids(run_all(engine, PROMPTS, greedy(NUM_TOKENS), adapters=["a"] * len(PROMPTS)))
    assert found == greedy_answers(merged, PROMPTS, NUM_TOKENS, found)


def test_numbers_that_are_not_finite_are_refused_with_the_adapter(folders, tmp_path):
    model = folders[0][""]
    adapter = write_adapter(tmp_path / "a", model, seed=1)
    tensors = load_file(adapter / WEIGHTS)
    tensors["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"][0, 0] = 1e38
    save_file(tensors, adapter / WEIGHTS)
    load(({"": model}, (f"huge={adapter}",)), num_kv_blocks=4)
    with pytest.raises(ModelError, match="adapter huge holds numbers that are not finite as float16"):
        load(({"": model}, (f"huge={adapter}",)), num_kv_blocks=4, dtype="float16")


@pytest.mark.nightly
def test_two_ranks_hold_their_parts_of_adapters(folders, expected_of, tmp_path):
    models, lora = folders
    case = {
        "settings": {"model": str(models[""]), "num_kv_blocks": 200, "lora": lora},
        "prompts": PROMPTS * len(NAMES),
        "adapters": [name for name in NAMES for _ in PROMPTS],
        "sampling": {"max_tokens": NUM_TOKENS},
        "chunk_tokens": 23,
    }
    sampled, facts = run_ranks(tmp_path, 2, {"lora": case})
    found = batched([[token["token_id"] for token in answer] for answer in sampled["lora"]])
    assert found == expected_of(found)
    assert all(rank["lora"]["weight_bytes"] < load(folders).weight_bytes for rank in facts)
