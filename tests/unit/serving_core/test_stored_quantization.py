"""GPTQ and AWQ checkpoints against transformers with the weights that they stand for."""

import itertools
import json
import shutil

import pytest
import torch
import transformers

from engine.build import build_engine
from engine.model.llama import LlamaDecoder
from engine.model.weights import load_weights
from engine.parallel import alone
from serving_core.errors import ModelError, SettingsError
from serving_core.json_fields import JsonFields
from serving_core.model_files.config import read_model_config
from serving_core.model_files.stored_quantization import WHOLE as ONE_GROUP
from serving_core.model_files.stored_quantization import StoredQuantization, read_stored_quantization
from serving_core.settings import EngineSettings
from serving_core.sharding import shard_of
from tests.effort import few
from tests.tiny_models import VOCAB_SIZE
from tests.toy_scheduler import greedy, random_prompts, run_all
from tests.transformers_models import transformers_model
from tests.unit.engine.quantized_checkpoints import describe, edit, write_quantized
from tests.unit.engine.rank_process import run_ranks

(PROMPT,) = random_prompts([40])
CHECKPOINTS = {
    "gptq": ("gptq", {}),
    "gptq-symmetric": ("gptq", {"symmetric": True}),
    "gptq-8-bits": ("gptq", {"bits": 8}),
    "gptq-8-bits-symmetric": ("gptq", {"bits": 8, "symmetric": True}),
    "gptq-one-group": ("gptq", {"group_size": -1}),
    "gptq-groups-of-16": ("gptq", {"group_size": 16}),
    "gptq-last-group-smaller": ("gptq", {"group_size": 64}),  # of 96 neurons
    "gptq-second-format": ("gptq", {"fields": {"checkpoint_format": "gptq_v2"}}),
    "gptq-act-order": ("gptq", {"act_order": "alike"}),
    "gptq-act-order-of-each": ("gptq", {"act_order": "each"}),
    "gptq-groups-of-8": ("gptq", {"group_size": 8}),
    "gptq-qwen2": ("gptq", {"family": "qwen2"}),
    "gptq-biases": ("gptq", {"attention_bias": True, "mlp_bias": True}),
    "awq": ("awq", {}),
    "awq-one-group": ("awq", {"group_size": -1}),
    "awq-groups-of-8": ("awq", {"group_size": 8}),
    "awq-qwen3-tied": ("awq", {"family": "qwen3", "tie_word_embeddings": True}),
}
ALIKE = ("gptq-8-bits-symmetric", "gptq-groups-of-16", "gptq-qwen2")  # to others, in each of what they are made of
WHOLE = ("gptq-act-order-of-each", "gptq-groups-of-8", "awq-groups-of-8")  # some of whose layers cannot stay small
LAYERS = {"awq-groups-of-8": 8, "gptq-groups-of-8": 8, "gptq-act-order-of-each": 4}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Write a checkpoint of each method, which no test changes."""
    return {method: write_quantized(tmp_path_factory.mktemp(method), method)[0] for method in ("gptq", "awq")}


@pytest.fixture
def stored_as(written, tmp_path):
    """Return a function that copies the checkpoint of a method."""
    return lambda method: shutil.copytree(written[method], tmp_path / method)


def logprobs(engine):
    """Of the whole vocabulary, after the prompt in chunks."""
    ((token,),) = run_all(engine, [PROMPT], greedy(1, logprobs=VOCAB_SIZE), chunk_tokens=23)
    return torch.tensor([logprob for _, logprob in sorted(token.top_logprobs)])


def load(folder, **settings):
    return build_engine(EngineSettings(model=str(folder), device="cpu", num_kv_blocks=8, **settings))


def oracle(folder, dtype):
    """Return the log-probabilities of the vocabulary after the prompt, computed by transformers."""
    with torch.inference_mode():
        logits = transformers_model(folder, dtype)(torch.tensor([PROMPT])).logits
    return logits[0, -1].float().log_softmax(-1)


def distance(one, other):
    return (one - other).square().mean().sqrt()


@pytest.mark.parametrize(
    "name_and_dtype",
    few(
        itertools.product(CHECKPOINTS, ["float32", "bfloat16", "float16"]),
        *((name, "float32") for name in CHECKPOINTS if name not in ALIKE),
        ("gptq", "bfloat16"),
        ("awq", "float16"),
    ),
    ids="-".join,
)
def test_logprobs_are_those_of_transformers_with_the_same_weights(name_and_dtype, tmp_path, caplog):
    name, dtype = name_and_dtype
    method, options = CHECKPOINTS[name]
    stored, dense = write_quantized(tmp_path, method, **options)
    engine, truth = load(stored, dtype=dtype), oracle(dense, torch.float32)
    limits = {"float32": 2e-3, "float16": 0.02}
    limit = limits.get(dtype) or 2 * distance(oracle(dense, torch.bfloat16), truth)
    assert distance(logprobs(engine), truth) < limit
    assert engine.description["quantization"] == f"{method}-int{options.get('bits', 4)}"
    kept = [record.message for record in caplog.records if "are kept as" in record.message]
    assert [int(message.split()[0]) for message in kept] == ([LAYERS[name]] if name in WHOLE else [])


@pytest.mark.parametrize("name", few(["gptq", "gptq-8-bits", "awq"], "gptq-8-bits", "awq"))
def test_weights_stay_small(name, tmp_path):
    method, options = CHECKPOINTS[name]
    stored, dense = write_quantized(tmp_path, method, **options, hidden_size=256, intermediate_size=512)
    sizes = [load(folder, dtype="bfloat16").weight_bytes for folder in (stored, dense)]
    embeddings = 2 * 2 * VOCAB_SIZE * 256
    assert sizes[0] - embeddings < (0.65 if options.get("bits") == 8 else 0.4) * (sizes[1] - embeddings)


@pytest.mark.parametrize("name", ["gptq", "gptq-act-order", "awq", "gptq-8-bits"])
def test_ranks_take_their_parts(name, tmp_path):
    """Rank 1 of 2 starts at neuron 48, within a group of 32; rank 1 of 3 at none that a word of 8 starts with."""
    method, options = CHECKPOINTS[name]
    stored, dense = write_quantized(tmp_path, method, **options, intermediate_size=104)
    for tp_size in (2, 3):
        for rank in range(tp_size):
            ours, theirs = (loaded(folder, rank, tp_size) for folder in (stored, dense))
            for ours_layer, theirs_layer in zip(ours.own_layers, theirs.own_layers, strict=True):
                for path in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
                    layer, plain = ours_layer.get_submodule(path), theirs_layer.get_submodule(path)
                    num_inputs = plain.weight.shape[1] if plain.matrix is None else plain.matrix.num_inputs
                    x = torch.randn(5, num_inputs, generator=torch.Generator().manual_seed(1))
                    torch.testing.assert_close(layer(x), plain(x), rtol=1e-3, atol=1e-3)


def loaded(folder, rank, tp_size):
    config, cpu = read_model_config(folder), torch.device("cpu")
    with torch.device("meta"):
        decoder = LlamaDecoder(config, cpu, shard_of(config, rank, tp_size), alone())
    load_weights(decoder, folder, torch.float32, cpu, stored=config.stored_quantization)
    return decoder


@pytest.mark.nightly
def test_two_ranks_give_the_same_as_one(tmp_path):
    stored, _ = write_quantized(tmp_path, "gptq")
    case = {
        "settings": {"model": str(stored), "num_kv_blocks": 8},
        "prompts": [PROMPT],
        "sampling": {"max_tokens": 6, "ignore_eos": True, "logprobs": VOCAB_SIZE},
        "chunk_tokens": 23,
    }
    alone_answer, answer = (run_ranks(tmp_path, size, {"case": case})[0]["case"] for size in (1, 2))
    assert [token["token_id"] for token in answer[0]] == [token["token_id"] for token in alone_answer[0]]


def test_biases_of_zeros_that_the_model_has_no_use_for(stored_as):
    stored = stored_as("gptq")
    expected = logprobs(load(stored))
    name = "model.layers.1.mlp.up_proj.bias"
    edit(stored, lambda tensors: tensors.update({name: torch.zeros(96, dtype=torch.float16)}))
    assert torch.equal(logprobs(load(stored)), expected)
    edit(stored, lambda tensors: tensors.update({name: torch.full((96,), 0.1)}))
    with pytest.raises(ModelError, match=rf"hold {name}, which the model has no use"):
        load(stored)


def test_a_zero_of_0_in_the_first_format(tmp_path):
    """It is stored as 15; no group of the random weights has one."""
    stored, _ = write_quantized(tmp_path, "gptq", fields={"checkpoint_format": "gptq_v2"})
    zeros = "model.layers.0.mlp.up_proj.qzeros"
    edit(stored, lambda tensors: tensors[zeros].zero_())
    expected = logprobs(load(stored))

    def as_first_format(tensors):
        for name, tensor in tensors.items():
            if name.endswith("qzeros"):
                nibbles = torch.stack([(tensor >> shift) + 15 & 15 for shift in range(0, 32, 4)])
                words = sum(nibbles[i].long() << 4 * i for i in range(8))
                tensor.copy_(torch.where(words >= 2**31, words - 2**32, words).int())

    edit(stored, as_first_format)
    describe(stored, {"quant_method": "gptq", "bits": 4, "group_size": 32})
    assert torch.equal(logprobs(load(stored)), expected)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"quant_method": "quark"}, "quant_method 'quark' .* supported are gptq, awq"),
        ({"quant_method": "bitsandbytes"}, "qweight is not stored as bitsandbytes stores a weight"),
        ({}, "quant_method '' .* is not supported"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 32}, "bits 3 .* supported are 4, 8"),
        ({"quant_method": "awq", "bits": 8, "group_size": 32}, "bits 8 .* supported are 4"),
        ({"quant_method": "gptq", "group_size": 32}, "bits is missing"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size .* above 0"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}, "version 'gemv' .* gemm"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": False}, "zero_point False"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "marlin"},
            "checkpoint_format 'marlin' .* supported are gptq, gptq_v2",
        ),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"-:lm_head": {}}}, "dynamic settings"),
    ],
)
def test_settings_that_cannot_be_read_are_named(fields, sentence, stored_as):
    stored = stored_as("gptq")
    describe(stored, fields)
    with pytest.raises(ModelError, match=sentence):
        load(stored)


def as_read(fields):
    """What a quantization_config says, once it has been through JSON."""
    return read_stored_quantization(JsonFields(json.loads(json.dumps({"quantization_config": fields})), "config.json"))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"format": "gptq"},
        {"format": "gptq_v2"},
        {"format": "GPTQ_V2", "checkpoint_format": None},
        {"format": "gptq", "checkpoint_format": "gptq_v2"},
        {"format": "gptq_v2", "checkpoint_format": "gptq"},
    ],
)
def test_which_format_of_gptq_it_is_follows_transformers(fields):
    said = transformers.GPTQConfig(bits=4, group_size=32, **fields)
    for written in ({"quant_method": "gptq", "bits": 4, "group_size": 32, **fields}, said.to_dict()):
        assert as_read(written) == StoredQuantization("gptq", 4, 32, zeros_start_at_one=said.format == "gptq")


def test_the_second_format_by_the_name_of_newer_tools(tmp_path):
    stored, _ = write_quantized(tmp_path, "gptq", fields={"checkpoint_format": "gptq_v2"})
    expected = logprobs(load(stored))
    describe(stored, {"quant_method": "gptq", "bits": 4, "group_size": 32, "format": "gptq_v2"})
    assert torch.equal(logprobs(load(stored)), expected)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"format": "gemm"},
        {"format": "gemv"},
        {"format": "gemv", "version": "GEMM"},
        {"format": "gemm", "version": "gemv"},
    ],
)
def test_which_format_of_awq_it_is_follows_transformers(fields):
    said = transformers.AwqConfig(bits=4, group_size=32, **fields)
    for written in ({"quant_method": "awq", "bits": 4, "group_size": 32, **fields}, said.to_dict()):
        if said.format == "gemm":
            assert as_read(written) == StoredQuantization("awq", 4, 32)
        else:
            with pytest.raises(ModelError, match=r"version 'gemv' .* supported are gemm"):
                as_read(written)


def test_fp8_as_transformers_describes_it():
    said = transformers.FineGrainedFP8Config()
    block = said.weight_block_size
    assert as_read(said.to_dict()) == StoredQuantization("fp8", 8, ONE_GROUP, block=block, become_floats=True)
    said = transformers.FineGrainedFP8Config(weight_block_size=(8, 16), modules_to_not_convert=["lm_head"])
    assert as_read(said.to_dict()) == StoredQuantization("fp8", 8, ONE_GROUP, block=(8, 16), become_floats=True)


@pytest.mark.parametrize(("name", "value"), [("scale_fmt", "ue8m0"), ("expert_dtype", "fp4")])
def test_fp8_of_other_kinds_is_refused(name, value):
    with pytest.raises(ModelError, match=f"{name} '{value}' of a quantization_config is not supported"):
        as_read(transformers.FineGrainedFP8Config(**{name: value}).to_dict())


def test_config_fields_of_older_awq_tools(stored_as):
    stored = stored_as("awq")
    expected = logprobs(load(stored))
    describe(stored, {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM", "zero_point": True})
    assert torch.equal(logprobs(load(stored)), expected)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda tensors, name: tensors.pop(f"{name}.qzeros"), r"lack .*qzeros"),
        (lambda tensors, name: tensors.update({f"{name}.scales": torch.zeros(3, 96)}), r"scales has shape \[3, 96\]"),
        (lambda tensors, name: tensors.update({f"{name}.qweight": torch.zeros(8, 96)}), r"qweight is stored as F32"),
        (lambda tensors, name: tensors[f"{name}.g_idx"].fill_(2), r"g_idx names groups outside 0 to 1"),
        (lambda tensors, name: tensors[f"{name}.g_idx"].fill_(-1), r"g_idx names groups outside 0 to 1"),
    ],
)
def test_broken_tensors(change, sentence, stored_as):
    stored = stored_as("gptq")
    edit(stored, lambda tensors: change(tensors, "model.layers.0.mlp.up_proj"))
    with pytest.raises(ModelError, match=sentence):
        load(stored)


@pytest.mark.parametrize(("method", "sentence"), [("gptq", "packs 8 of 4 bits"), ("awq", "AWQ packs 8 of them")])
def test_sizes_that_do_not_fit_words(method, sentence, stored_as):
    stored = stored_as(method)
    path = stored / "config.json"
    path.write_text(path.read_text().replace('"intermediate_size": 96', '"intermediate_size": 97'))
    with pytest.raises(ModelError, match=sentence):
        load(stored)


def test_what_is_quantized_already_is_not_quantized_again(stored_as):
    stored = stored_as("gptq")
    with pytest.raises(SettingsError, match="--quantization int8: the weights are stored as gptq-int4 already"):
        load(stored, quantization="int8")
