"""Mixtures of experts out of GGUF files, against transformers' own model classes with the same weights."""

import math

import numpy as np
import pytest
import torch

from engine.model.checkpoint import PIECE_ELEMENTS, GgufCheckpoint, Part
from engine.model.weights import open_checkpoint
from serving_core.errors import ModelError
from serving_core.model_files.config import read_model_config
from serving_core.sharding import Extent, whole
from splitserve.gguf.folder import gguf_folder
from tests.effort import few
from tests.gguf_files import MIXTURES, write_gguf
from tests.transformers_models import transformers_model
from tests.unit.engine.gguf_kit import NUM_TOKENS, PROMPTS, answers, check_answers
from tests.unit.engine.rank_process import rank_case, run_ranks


def make(path, family, **options):
    """Writes a file, and gives the folder that serves it and one of the same model as safetensors."""
    path.mkdir(exist_ok=True)
    file = write_gguf(path / "tiny.gguf", family, **options)
    return gguf_folder(file, path / "cache"), path / "tiny"


def check_varied(found, written):
    """Check that answers are those of transformers, and that the model does not say the same all the time."""
    check_answers(found, transformers_model(written))
    assert len({token for answer in found for token in answer}) > 10


def whole_tensors(checkpoint):
    shapes = {name: checkpoint.describe(name)[0] for name in checkpoint.names()}
    return {name: checkpoint.read_all(Part(name, tuple(map(whole, shape)))) for name, shape in shapes.items()}


@pytest.mark.parametrize("family", few(MIXTURES, "mixtral", "qwen2_moe"))
@pytest.mark.parametrize("stored", few(["Q8_0", "F32"]))
def test_tokens_equal_those_of_transformers(family, stored, tmp_path):
    folder, written = make(tmp_path, family, stored=stored)
    check_varied(answers(folder, dtype="float32"), written)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("tp_size", "pp_size", "kinds"), [(2, 1, ["BF16", "Q8_0"]), (1, 2, ["Q8_0"])], ids=["two ranks", "two stages"]
)
def test_ranks_and_stages_answer_as_transformers(tp_size, pp_size, kinds, tmp_path):
    """Two ranks divide 96 neurons of an expert within a block of 32."""
    sizes = {"intermediate_size": 96, "moe_intermediate_size": 96}
    made = {
        f"{family}-{stored}": make(tmp_path / f"{family}-{stored}", family, stored=stored, **sizes)
        for family in MIXTURES
        for stored in kinds
    }
    settings = {"dtype": "float32", "pipeline_parallel_size": pp_size}
    cases = {name: rank_case(folder, PROMPTS, NUM_TOKENS, 23, **settings) for name, (folder, _) in made.items()}
    sampled, facts = run_ranks(tmp_path, tp_size * pp_size, cases)
    for name, (_, written) in made.items():
        found = [[token["token_id"] for token in answer] for answer in sampled[name]]
        check_varied(found, written)
        held = [rank[name]["weight_bytes"] for rank in facts]
        assert max(held) < 0.65 * sum(held)


@pytest.mark.parametrize("family", few(MIXTURES, "mixtral", "qwen2_moe"))
def test_every_tensor_is_the_one_that_was_written_and_so_is_its_half(family, tmp_path):
    """A model in several files, of experts whose rows are no whole blocks once they are divided."""
    folder, written = make(tmp_path, family, stored="Q8_0", part_tensors=9, intermediate_size=96)
    found, known = open_checkpoint(folder), open_checkpoint(written)
    tensors = whole_tensors(known)
    assert found.names() == tensors.keys()
    for name, tensor in tensors.items():
        assert found.describe(name)[0] == tensor.shape
        halves = [Extent(size, range(size // 2, size)) for size in tensor.shape]
        if name.endswith((".q_proj.weight", ".k_proj.weight", "bias")):  # whole heads alone are asked for
            halves[0] = whole(tensor.shape[0])
        assert torch.equal(found.read_all(Part(name, tuple(map(whole, tensor.shape)))), tensor), name
        own = tensor[tuple(slice(half.held.start, half.held.stop) for half in halves)]
        assert torch.equal(found.read_all(Part(name, tuple(halves))), own), name


def test_files_with_a_tensor_for_each_expert_are_read_too(tmp_path):
    """As llama.cpp wrote Mixtral at first."""
    stacked, _ = make(tmp_path / "stacked", "mixtral", stored="Q8_0")
    single, _ = make(tmp_path / "single", "mixtral", stored="Q8_0", stacks=False)
    found, known = whole_tensors(open_checkpoint(single)), whole_tensors(open_checkpoint(stacked))
    assert found.keys() == known.keys()
    assert all(torch.equal(found[name], known[name]) for name in known)
    assert read_model_config(single) == read_model_config(stacked)


def test_of_all_experts_of_a_layer_a_few_rows_are_floats_at_once(tmp_path):
    neurons = PIECE_ELEMENTS // 64 * 2
    folder, _ = make(tmp_path, "mixtral", num_hidden_layers=1, intermediate_size=neurons)
    checkpoint = GgufCheckpoint(folder)
    name = "model.layers.0.block_sparse_moe.experts.{}.w1.weight"
    for expert in range(6):
        part = Part(name.format(expert), (whole(neurons), whole(64)))
        assert [math.prod(piece.shape) for _, piece in checkpoint.read(part)] == [PIECE_ELEMENTS] * 2


def test_experts_become_8_bits_when_asked(tmp_path):
    folder, written = make(tmp_path, "qwen2_moe", stored="Q8_0")
    kinds = [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"}]
    plain, quantized = (answers(folder, **kind) for kind in kinds)
    assert [plain, quantized] == [answers(written, **kind) for kind in kinds]
    assert plain != quantized


def without(name):
    return lambda writer: writer.tensors[0].pop(name)


def with_another(name, *shape):
    return lambda writer: writer.add_tensor(name, np.zeros(shape, np.float32))


@pytest.mark.parametrize(
    ("family", "change", "sentence"),
    [
        ("mixtral", without("blk.1.ffn_gate_inp.weight"), r"lack model\.layers\.1\.block_sparse_moe\.gate\.weight$"),
        ("qwen2_moe", without("blk.1.ffn_up_shexp.weight"), r"lack model\.layers\.1\.mlp\.shared_expert\.up_proj\."),
        ("olmoe", with_another("blk.0.ffn_up_shexp.weight", 96, 64), r"hold model\.layers\.0\.mlp\.shared_expert\S*, "),
        ("olmoe", with_another("blk.4.ffn_up_exps.weight", 6, 96, 64), r"hold model\.layers\.4\.\S*, \S*, \S* and 3"),
        ("olmoe", with_another("blk.4.ffn_up_exps.weight", 2**20, 1, 1), r"hold gguf:blk\.4\.ffn_up_exps\.weight, "),
        ("mixtral", with_another("blk.0.ffn_up.3.weight", 96, 64), r"hold gguf:blk\.0\.ffn_up\.3\.weight, "),
        ("mixtral", with_another("blk.0.ffn_up_exps.bias", 6, 96), r"hold gguf:blk\.0\.ffn_up_exps\.bias, "),
        ("llama", with_another("blk.0.ffn_up_exps.weight", 6, 96, 64), r"hold gguf:blk\.0\.ffn_up_exps\.weight, "),
    ],
)
def test_missing_and_unknown_tensors_are_sentences(family, change, sentence, tmp_path):
    folder, _ = make(tmp_path, family, change=change)
    with pytest.raises(ModelError, match=sentence):
        answers(folder)
