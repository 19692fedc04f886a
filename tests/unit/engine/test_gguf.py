"""GGUF files in the engine: against the model that a file was made of, and against transformers, which reads the same
file by code of its own."""

import itertools
import os
import struct

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from engine.model.checkpoint import PIECE_ELEMENTS, GgufCheckpoint, Part
from engine.model.llama import LlamaDecoder
from engine.model.weights import load_weights, open_checkpoint
from engine.parallel import alone
from serving_core.errors import ModelError
from serving_core.model_files.config import read_model_config
from serving_core.model_files.gguf_header import TENSOR_TYPES
from serving_core.sharding import Extent, shard_of, whole
from splitserve.gguf.folder import gguf_folder
from tests.gguf_files import write_gguf
from tests.tiny_models import FAMILIES
from tests.transformers_models import transformers_model
from tests.unit.engine.gguf_kit import answers, check_answers

CPU = torch.device("cpu")
SHAPE = (264, 2 * 256)
SMALL = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 4}
BIASES = {"attention_bias": True, "mlp_bias": True}


@pytest.fixture
def made(tmp_path):
    """Writes a file, and gives it and the folder that serves it."""

    def make(family="llama", **options):
        file = write_gguf(tmp_path / "tiny.gguf", family, **options)
        return file, gguf_folder(file, tmp_path / "cache")

    return make


def parameters(folder, rank=0, tp_size=1):
    config = read_model_config(folder)
    with torch.device("meta"):
        decoder = LlamaDecoder(config, CPU, shard_of(config, rank, tp_size), alone())
    load_weights(decoder, folder, torch.float32, CPU)
    return dict(decoder.named_parameters())


@pytest.mark.parametrize("part_tensors", [0, 4])
def test_the_bytes_of_a_tensor_are_where_it_is_said(part_tensors, made):
    """As the library's own reader finds them."""
    file, folder = made(stored="Q8_0", part_tensors=part_tensors)
    parts = [gguf.GGUFReader(part) for part in file.parent.glob("*.gguf")]
    assert (len(parts) > 1) == (part_tensors > 0)
    tensors = {tensor.name: tensor for part in parts for tensor in part.tensors}
    checkpoint = GgufCheckpoint(folder)
    for name, theirs in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.1.mlp.down_proj.weight", "blk.1.ffn_down.weight"),
        ("model.norm.weight", "output_norm.weight"),
    ):
        shape, _ = checkpoint.describe(name)
        (span,) = checkpoint.spans(Part(name, tuple(map(whole, shape))))
        assert span.file.read_bytes()[span.start : span.stop] == tensors[theirs].data.tobytes()
    rows, columns = checkpoint.describe("model.embed_tokens.weight")[0]
    part = Part("model.embed_tokens.weight", (Extent(rows, range(3, 7)), Extent(columns, range(columns // 2))))
    (span,) = checkpoint.spans(part)
    assert span.file.read_bytes()[span.start : span.stop] == tensors["token_embd.weight"].data[3:7].tobytes()


KINDS = ("BF16", "F16", "F32", "Q4_1", "Q8_0")
IN_GATE = {("llama", "Q4_1"), ("mistral", "Q4_1"), ("qwen2", "BF16"), ("qwen3", "Q4_1")}


@pytest.mark.parametrize(
    ("family", "stored"),
    [
        pytest.param(*pair, marks=[] if pair in IN_GATE else pytest.mark.nightly)
        for pair in itertools.product(FAMILIES, KINDS)
    ],
)
def test_tokens_equal_those_of_transformers_from_the_same_file(made, family, stored):
    config = {"sliding_window": None} if family == "mistral" else {}
    file, folder = made(family, stored=stored, tie_word_embeddings=stored == "F16", **config)
    known = {}
    if family == "qwen3":  # of which transformers does not read the size of a head
        known["config"] = transformers.AutoConfig.from_pretrained(file.with_suffix(""))
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, **known
    ).eval()
    check_answers(answers(folder, dtype="float32"), reference)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3} | BIASES),
        ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    ],
)
def test_every_rank_reads_its_part_of_the_very_weights_that_were_written(made, family, config):
    file, folder = made(family, **config)
    for rank, tp_size in ((0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3)):
        found, written = (parameters(each, rank, tp_size) for each in (folder, file.with_suffix("")))
        assert found.keys() == written.keys()
        assert all(torch.equal(found[name], written[name]) for name in found)


GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


@pytest.mark.parametrize(
    ("family", "config"),
    [
        pytest.param("gemma", {"attention_bias": False}, marks=pytest.mark.nightly),
        pytest.param("gemma2", {"query_pre_attn_scalar": 16}, marks=pytest.mark.nightly),
        ("gemma3", {"num_hidden_layers": 7, "layer_types": None, "rope_parameters": GEMMA3_ROPES}),
    ],
)
def test_gemma_answers_as_transformers_does_from_what_the_file_was_made_of(made, family, config):
    """transformers' own reading of the file knows neither the caps nor the second rope."""
    config |= {"query_pre_attn_scalar": 16, "tie_word_embeddings": True} if family != "gemma" else {}
    file, folder = made(family, **config)
    written = file.with_suffix("")
    found, known = read_model_config(folder), read_model_config(written)
    assert (found.differences, found.rope, found.sliding_windows) == (
        known.differences,
        known.rope,
        known.sliding_windows,
    )
    found = answers(folder, dtype="float32")
    check_answers(found, transformers_model(written, attn_implementation="eager"))
    assert answers(folder) == answers(written, dtype="bfloat16")  # norms too are what they were


WHOLE_HEADS = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
FAMILIES_OF_TRANSFORMERS = {
    "cohere": {},
    "cohere2": {"layer_types": None, "num_hidden_layers": 5},
    "gpt_oss": {"max_position_embeddings": 16384, "num_experts_per_tok": 2},
    "granite": {},
    "lfm2": {"tie_word_embeddings": True, "block_auto_adjust_ff_dim": False},
    "olmo2": {},
    "phi3": {},
    "qwen3_5": {"stored": "Q8_0", "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_value_head_dim": 32},
    "qwen3_5_moe": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "linear_value_head_dim": 16},
    "smollm3": {"no_rope_layers": None, "layer_types": None, "use_sliding_window": False, "num_hidden_layers": 5},
}


@pytest.mark.parametrize(("family", "config"), FAMILIES_OF_TRANSFORMERS.items(), ids=FAMILIES_OF_TRANSFORMERS)
def test_other_families_answer_as_transformers_does_from_what_the_file_was_made_of(made, family, config):
    """transformers' own reading of a file knows few of them."""
    file, folder = made(family, **{**WHOLE_HEADS, **config})
    written = file.with_suffix("")
    found, known = read_model_config(folder), read_model_config(written)
    assert (found.rope, found.sliding_windows) == (known.rope, known.sliding_windows)
    check_answers(answers(folder, dtype="float32"), transformers_model(written))
    assert answers(folder, dtype="float32") == answers(written, dtype="float32")


def test_experts_of_gpt_oss_are_read_as_a_checkpoint_has_them_and_in_parts(made):
    """Columns alternate between gate and up projection."""
    file, folder = made("gpt_oss", **WHOLE_HEADS, max_position_embeddings=16384)
    stored, written = open_checkpoint(folder), open_checkpoint(file.with_suffix(""))
    assert stored.names() == written.names()
    for name in stored.names():
        assert stored.describe(name) == written.describe(name)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    experts, inputs, outputs = stored.describe(name)[0]
    part = Part(name, (Extent(experts, range(1, 4)), Extent(inputs, range(8, 40)), Extent(outputs, range(5, 70))))
    assert torch.equal(stored.read_all(part), written.read_all(part))
    assert stored.stored_bytes(part) == 4 * experts * inputs * outputs


def test_a_file_without_quantization_answers_as_the_folder_it_was_made_of(made):
    file, folder = made("qwen2")
    assert answers(folder, dtype="float32") == answers(file.with_suffix(""), dtype="float32")


def test_a_model_in_parts_answers_as_the_folder_it_was_made_of(made):
    file, folder = made(part_tensors=4)
    assert file.name == "tiny-00001-of-00008.gguf"
    assert answers(folder, dtype="float32") == answers(file.with_name("tiny"))


def test_it_is_bfloat16_unless_told_otherwise_and_int8_when_asked(made):
    file, folder = made()
    assert read_model_config(folder).dtype == "bfloat16"
    written = {"dtype": "bfloat16", "quantization": "int8"}
    assert answers(folder, quantization="int8") == answers(file.with_suffix(""), **written)


FACTORS = [1.0, 1.5, 4.0, 32.0, 32.0, 32.0, 32.0, 32.0]


def test_the_factors_of_a_rope_slow_its_pairs(made):
    plain = answers(made()[1], dtype="float32")
    file, folder = made(change=lambda writer: writer.add_tensor("rope_freqs.weight", np.array(FACTORS, np.float32)))
    reference = transformers_model(file.with_suffix(""))
    reference.model.rotary_emb.inv_freq /= torch.tensor(FACTORS)
    found = answers(folder, dtype="float32")
    check_answers(found, reference)
    assert found != plain


def type_name(type_id):
    return TENSOR_TYPES[type_id].name


@pytest.fixture(scope="module")
def typed(tmp_path_factory):
    """Write a file with a tensor of random bytes of each type; return the bytes of each type, and the checkpoint."""
    folder, stored = tmp_path_factory.mktemp("typed"), {}
    for type_id in TENSOR_TYPES:
        block, block_bytes = gguf.GGML_QUANT_SIZES[type_id]
        shape = (SHAPE[0], SHAPE[1] // block * block_bytes)
        stored[type_id] = np.random.default_rng(type_id).integers(0, 256, shape, np.uint8)

    def change(writer):
        for layer, (type_id, data) in enumerate(stored.items()):
            writer.tensors[0].pop(f"blk.{layer}.ffn_up.weight")
            writer.add_tensor(f"blk.{layer}.ffn_up.weight", data, raw_dtype=gguf.GGMLQuantizationType(type_id))

    file = write_gguf(folder / "typed.gguf", change=change, num_hidden_layers=len(stored), **SMALL)
    return stored, GgufCheckpoint(gguf_folder(file, folder / "cache"))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random bytes are no sensible scales
@pytest.mark.parametrize("type_id", TENSOR_TYPES, ids=type_name)
def test_any_part_of_a_tensor_of_any_type_is_what_the_whole_one_has_there(typed, type_id):
    stored, checkpoint = typed
    with np.errstate(all="ignore"):
        floats = gguf.quants.dequantize(stored[type_id], gguf.GGMLQuantizationType(type_id)).reshape(SHAPE)
    for rows, columns in (
        tuple(map(whole, SHAPE)),
        (Extent(SHAPE[0], range(100, 131)), Extent(SHAPE[1], range(133, 400))),
    ):
        part = Part(f"model.layers.{[*stored].index(type_id)}.mlp.up_proj.weight", (rows, columns))
        checkpoint.check(part)
        expected = floats[rows.held.start : rows.held.stop, columns.held.start : columns.held.stop]
        read = checkpoint.read_all(part).contiguous().numpy()
        assert np.array_equal(read.view(np.int32), np.ascontiguousarray(expected).view(np.int32))


def test_the_types_are_those_that_the_library_turns_into_floats():
    known = {type_id: (kind.name, kind.block, kind.block_bytes) for type_id, kind in TENSOR_TYPES.items()}
    theirs = {}
    for kind, sizes in gguf.GGML_QUANT_SIZES.items():
        try:
            gguf.quants.dequantize(np.zeros((1, sizes[1]), np.uint8), kind)
        except NotImplementedError:
            continue
        theirs[int(kind)] = (kind.name, *sizes)
    assert known == theirs


def test_a_large_tensor_is_read_a_part_at_a_time(made, tmp_path):
    sizes = {"vocab_size": 264, "hidden_size": 64, "intermediate_size": PIECE_ELEMENTS // 64 * 2 + 5}
    file, folder = made(num_hidden_layers=1, **sizes)
    checkpoint = GgufCheckpoint(folder)
    up = load_file(file.with_suffix("") / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    pieces = list(checkpoint.read(Part("model.layers.0.mlp.up_proj.weight", tuple(map(whole, up.shape)))))
    assert [row for row, _ in pieces] == [0, PIECE_ELEMENTS // 64, PIECE_ELEMENTS // 64 * 2]
    assert torch.equal(torch.cat([piece for _, piece in pieces]), up)


def test_a_file_that_is_replaced_behind_its_folder_is_refused(made, tmp_path):
    file, folder = made()
    other = write_gguf(tmp_path / "other.gguf", num_hidden_layers=2)
    other.replace(file)
    with pytest.raises(ModelError, match=r"tiny\.gguf is no longer the file that .* was made of"):
        answers(folder)
    file.unlink()
    with pytest.raises(ModelError, match=r"tiny\.gguf cannot be read: No such file"):
        answers(folder)


def test_a_file_that_is_written_to_while_it_is_loaded_is_refused(made):
    file, folder = made()
    checkpoint = GgufCheckpoint(folder)
    with file.open("r+b") as stream:
        stream.seek(-4, os.SEEK_END)
        stream.write(struct.pack("<f", 1.0))
    os.utime(file, ns=(0, 0))  # or within one tick of the clock
    with pytest.raises(ModelError, match="no longer the file"):
        checkpoint.read_all(Part("model.norm.weight", (whole(64),)))


CONVOLUTION = "blk.0.shortconv.conv.weight"
OF_LFM2 = {
    "missing": ("blk.0.shortconv.in_proj.weight", (), r"the weights lack model\.layers\.0\.conv\.in_proj\.weight$"),
    "unknown": ("blk.0.shortconv.conv.bias", (64,), r"the weights hold .*conv\.bias, which the model has no use for$"),
    "another width": (CONVOLUTION, (64, 4), r"has shape \[64, 1, 4\], and the model wants \[64, 1, 3\]$"),
    "a vector": (CONVOLUTION, (64,), r"has shape \[64\], and the model wants \[64, 1, 3\]$"),
    "two inputs": (CONVOLUTION, (64, 2, 3), r"has shape \[64, 2, 3\] in the GGUF file; a dimension between"),
}


@pytest.mark.parametrize(("name", "shape", "sentence"), OF_LFM2.values(), ids=OF_LFM2)
def test_tensors_of_lfm2_that_are_wrong_are_sentences(made, name, shape, sentence):
    def change(writer):
        writer.tensors[0].pop(name, None)
        if shape:
            writer.add_tensor(name, np.zeros(shape, np.float32))

    _, folder = made("lfm2", change=change, **WHOLE_HEADS)
    with pytest.raises(ModelError, match=sentence):
        answers(folder)


DECAYS = "blk.0.ssm_a"
OF_QWEN35 = {
    "a positive decay": (DECAYS, [-1.0, 0.5, -1.0, -1.0], r"0\.linear_attn\.A_log .* not negative and finite$"),
    "no decay": (DECAYS, [-1.0, 0.0, -1.0, -1.0], r"0\.linear_attn\.A_log of the GGUF file has decays that are not"),
    "no number": (DECAYS, [-1.0, float("nan"), -1.0, -1.0], r"0\.linear_attn\.A_log .* not negative and finite$"),
    "other heads": (DECAYS, [-1.0] * 5, r"0\.linear_attn\.A_log has 5 values, which 4 heads do not divide$"),
    "more heads": (DECAYS, [-1.0] * 8, r"A_log has shape \[8\], and the model wants \[4\]$"),
    "no values": ("blk.0.attn_qkv.weight", [[0.5] * 64] * 48, r"has shape \[48, 64\], and the model wants \[96, 64\]$"),
    "another width": ("blk.0.ssm_conv1d.weight", [[0.5] * 3] * 96, r"has shape \[96, 1, 3\], and the model wants"),
    "missing": ("blk.0.ssm_dt.bias", [], r"the weights lack model\.layers\.0\.linear_attn\.dt_bias$"),
}


@pytest.mark.parametrize(("name", "values", "sentence"), OF_QWEN35.values(), ids=OF_QWEN35)
def test_tensors_of_linear_attention_that_are_wrong_are_sentences(made, name, values, sentence):
    def change(writer):
        writer.tensors[0].pop(name)
        if values:
            writer.add_tensor(name, np.array(values, np.float32))

    _, folder = made("qwen3_5", change=change)
    with pytest.raises(ModelError, match=sentence):
        answers(folder)


def test_missing_and_unknown_tensors_are_sentences(made):
    _, folder = made(change=lambda writer: writer.tensors[0].pop("blk.1.attn_k.weight"))
    with pytest.raises(ModelError, match=r"the weights lack model\.layers\.1\.self_attn\.k_proj\.weight$"):
        answers(folder)
    for name in ("blk.0.ssm_a", "blk.00.attn_norm.weight", "blk.3.attn_norm.weight", "model.norm.weight"):
        _, folder = made(change=lambda writer, name=name: writer.add_tensor(name, np.zeros(64, np.float32)))
        with pytest.raises(ModelError, match=r"the weights hold (gguf|model)[^ ]*, which the model has no use for$"):
            answers(folder)
