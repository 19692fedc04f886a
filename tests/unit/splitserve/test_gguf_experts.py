"""What a GGUF file says of a mixture of experts: the config of the model that it was made of, or one sentence."""

import json
import random

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving_core.errors import ModelError
from serving_core.model_files.config import read_model_config
from serving_core.model_files.gguf_header import read_header
from serving_core.model_files.rope import DefaultRope
from serving_core.node.needs import needs_of
from serving_core.settings import EngineSettings
from splitserve.gguf.folder import gguf_folder
from tests.effort import few
from tests.gguf_files import MERGES, MIXTURES, TOKENS, replace, write_gguf
from tests.tiny_models import CHAT_TEMPLATE, EOS
from tests.unit.splitserve.test_gguf_folder import served_or_refused

Kind = gguf.GGUFValueType
KINDS = {bool: Kind.BOOL, int: Kind.UINT32, float: Kind.FLOAT32, str: Kind.STRING}


def saying(said):
    def change(writer):
        for key, value in said.items():
            if value is None:
                writer.kv_data[0].pop(key)
            else:
                replace(writer, key, value, KINDS.get(type(value), Kind.ARRAY))

    return change


@pytest.fixture
def make(tmp_path):
    """Writes a file, changed, and gives its folder."""

    def make(family, change=lambda writer: None, **options):
        file = write_gguf(tmp_path / "tiny.gguf", family, change=change, num_hidden_layers=2, **options)
        return gguf_folder(file, tmp_path / "cache")

    return make


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("tie_word_embeddings", few([False, True]))
def test_the_config_is_that_of_the_model_it_was_made_of(make, tmp_path, family, tie_word_embeddings):
    options = {"num_experts_per_tok": 3, "tie_word_embeddings": tie_word_embeddings, "rms_norm_eps": 0.25}
    found = read_model_config(make(family, **options))
    written = read_model_config(tmp_path / "tiny")
    for field in set(written.__dataclass_fields__) - {"dtype"}:
        assert getattr(found, field) == getattr(written, field), field


@pytest.mark.parametrize("family", MIXTURES)
def test_its_needs_are_those_of_what_is_loaded(make, tmp_path, family):
    folders = make(family, stored="Q8_0"), tmp_path / "tiny"
    one, other = (
        needs_of(EngineSettings(model=str(each), dtype="bfloat16", num_kv_blocks=8), read_model_config(each))
        for each in folders
    )
    assert one == other


HARMLESS = {
    "scale": ("qwen3_moe", {"qwen3moe.expert_weights_scale": 1.0}),
    "softmax": ("olmoe", {"olmoe.expert_gating_func": 1}),
    "norm": ("qwen3_moe", {"qwen3moe.expert_weights_norm": True}),
    "no norm": ("olmoe", {"olmoe.expert_weights_norm": False}),
    "no shared expert": ("qwen3_moe", {"qwen3moe.expert_shared_feed_forward_length": 0}),
    "no groups": ("qwen3_moe", {"qwen3moe.expert_group_count": 0}),
    "size, again": ("mixtral", {"llama.expert_feed_forward_length": 96}),
    "size, the oldest": (
        "qwen2_moe",
        {"qwen2moe.expert_feed_forward_length": None, "qwen2moe.feed_forward_length": 64},
    ),
    "shared size, the oldest": (
        "qwen2_moe",
        {"qwen2moe.expert_shared_feed_forward_length": None, "qwen2moe.feed_forward_length": 64},
    ),
    "a llama without": ("llama", {"llama.expert_count": 0, "llama.expert_used_count": 0}),
}


@pytest.mark.parametrize(("family", "said"), HARMLESS.values(), ids=HARMLESS)
def test_what_files_say_beside_changes_nothing(make, tmp_path, family, said):
    found = read_model_config(make(family, saying(said)))
    assert found.experts == read_model_config(tmp_path / "tiny").experts


def test_the_metadata_of_published_files_is_taken(make):
    """As llama.cpp's converter and quantizer write it for Qwen3-Coder."""
    tokens = [*TOKENS[:-1], "<|im_end|>"]
    said = {
        "general.type": "model",
        "general.size_label": "30B-A3B",
        "general.tags": ["text-generation"],
        "general.file_type": 15,
        "general.quantization_version": 2,
        "general.sampling.temp": 0.75,
        "qwen3moe.rope.freq_base": 1e7,
        "qwen3moe.expert_shared_feed_forward_length": 0,
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": MERGES[:3],
        "tokenizer.ggml.padding_token_id": EOS,
        "tokenizer.ggml.add_bos_token": False,
        "quantize.imatrix.file": "imatrix.dat",
        "quantize.imatrix.entries_count": 384,
    }
    folder = make("qwen3_moe", saying(said), stored="Q8_0")
    config = read_model_config(folder)
    assert (config.rope, config.eos_token_ids) == (DefaultRope(1e7), (EOS, len(tokens) - 1))
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == CHAT_TEMPLATE
    assert json.loads((folder / "generation_config.json").read_text())["temperature"] == 0.75


def without(name):
    return lambda writer: writer.tensors[0].pop(name)


def with_shape(name, *shape):
    def change(writer):
        writer.tensors[0].pop(name, None)
        writer.add_tensor(name, np.zeros(shape, np.float32))

    return change


GATES = "blk.1.ffn_gate_exps.weight"
REFUSED = {
    "another number": ("mixtral", saying({"llama.expert_count": 5}), r"has shape \[6, 96, 64\], and .* \[5, 96, 64\]"),
    "no number": ("qwen3_moe", saying({"qwen3moe.expert_count": None}), "expert_count is missing"),
    "none": ("olmoe", saying({"olmoe.expert_count": 0}), "expert_count in .* an integer of at least 1"),
    "too many": ("olmoe", saying({"olmoe.expert_count": 1025}), "expert_count in .* at most 1024"),
    "a number that is none": ("mixtral", saying({"llama.expert_count": "6"}), "expert_count in .* an integer"),
    "more taken than there are": (
        "qwen2_moe",
        saying({"qwen2moe.expert_used_count": 7}),
        r"expert_used_count in tiny.gguf must be at most the number of experts \(6\), not 7",
    ),
    "how many is not said": ("mixtral", saying({"llama.expert_used_count": None}), "expert_used_count is missing"),
    "layers without end": (
        "qwen3_moe",
        saying({"qwen3moe.block_count": 2**31 - 1}),
        "says that it has 38654705646 projections of experts; at most 262144 are read",
    ),
    "more layers than experts": ("qwen3_moe", saying({"qwen3moe.block_count": 3}), r"lacks blk\.2\.ffn_gate_exps"),
    "a sigmoid": ("qwen3_moe", saying({"qwen3moe.expert_gating_func": 2}), "says expert_gating_func 2, and a model"),
    "scaled": ("olmoe", saying({"olmoe.expert_weights_scale": 2.5}), r"says expert_weights_scale 2\.5, and a model"),
    "norm": ("olmoe", saying({"olmoe.expert_weights_norm": True}), "expert_weights_norm in .* False for olmoe"),
    "no norm": ("mixtral", saying({"llama.expert_weights_norm": False}), "must be True for llama"),
    "groups": ("qwen3_moe", saying({"qwen3moe.expert_group_count": 4}), "says expert_group_count 4, and a model"),
    "dense layers": ("qwen3_moe", saying({"qwen3moe.leading_dense_block_count": 1}), "says leading_dense_block_count"),
    "a shared expert": (
        "qwen3_moe",
        saying({"qwen3moe.expert_shared_feed_forward_length": 64}),
        "says expert_shared_feed_forward_length 64, and a model",
    ),
    "two sizes": (
        "mixtral",
        saying({"llama.expert_feed_forward_length": 32}),
        r"must be absent, or feed_forward_length \(96\), not 32",
    ),
    "another size": (
        "qwen3_moe",
        saying({"qwen3moe.expert_feed_forward_length": 64}),
        r"blk\.0\.ffn_gate_exps\.weight has shape \[6, 32, 64\], and the model wants \[6, 64, 64\]",
    ),
    "clamped attention": ("olmoe", saying({"olmoe.attention.clamp_kqv": 8.0}), r"says attention\.clamp_kqv"),
    "no experts in a layer": ("mixtral", without(GATES), r"lacks blk\.1\.ffn_gate_exps\.weight"),
    "fewer in a layer": ("mixtral", with_shape(GATES, 5, 96, 64), r"blk\.1\.ffn_gate_exps\.weight has shape \[5, 96"),
    "turned": ("mixtral", with_shape(GATES, 6, 64, 96), r"has shape \[6, 64, 96\], and the model wants \[6, 96, 64\]"),
    "flat": ("mixtral", with_shape(GATES, 6 * 96, 64), r"has shape \[576, 64\], and the model wants \[6, 96, 64\]"),
    "experts of a dense model": ("qwen3", saying({"qwen3.expert_count": 6}), "says expert_count 6, and a model"),
    "biases of a llama": ("mixtral", with_shape("blk.0.attn_q.bias", 64), "does not know attention_bias"),
}


@pytest.mark.parametrize(("family", "change", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_served_is_a_sentence_and_leaves_nothing(make, tmp_path, family, change, sentence):
    with pytest.raises(ModelError, match=sentence):
        make(family, change)
    assert not (tmp_path / "cache").exists() or list((tmp_path / "cache").iterdir()) == []


def test_an_expert_that_an_older_file_lacks_is_named(make):
    with pytest.raises(ModelError, match=r"tiny\.gguf lacks blk\.1\.ffn_up\.5\.weight"):
        make("mixtral", without("blk.1.ffn_up.5.weight"), stacks=False)


def test_no_more_tensors_of_experts_are_made_than_a_model_may_have(make):
    """Those of layers that it lacks count, too: each is as many tensors as there are experts."""

    def change(writer):
        for layer in range(2, 400):
            writer.add_tensor(f"blk.{layer}.ffn_up_exps.weight", np.zeros((660, 1, 1), np.float32))

    with pytest.raises(ModelError, match="says that it has 266640 projections of experts; at most 262144 are read"):
        make("mixtral", change, num_local_experts=660, intermediate_size=2, hidden_size=4, head_dim=2)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_whatever_bytes_are_changed_it_is_served_or_refused(mixture, tmp_path, seed):
    content, rng = bytearray(mixture.read_bytes()), random.Random(seed)
    with mixture.open("rb") as stream:
        header = read_header(stream, "a").content
    start = header.index(b"blk.") if rng.random() < 0.5 else header.index(b"qwen2moe.")
    for _ in range(rng.randint(1, 3)):
        content[rng.randrange(start, len(header))] = rng.choice([0, 1, 2, 6, 8, 32, 127, 255, rng.randrange(256)])
    file = tmp_path / "changed.gguf"
    file.write_bytes(content)
    served_or_refused(file, tmp_path / "cache")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", "qwen2_moe", num_hidden_layers=1)
