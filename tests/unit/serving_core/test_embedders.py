"""What a model folder says of embeddings."""

import json

import pytest

from serving_core.errors import ModelError
from serving_core.model_files.config import Embedder, read_model_config
from serving_core.requests import LAST, MEAN

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
TRANSFORMER, POOLING, NORMALIZE = (
    {"type": f"sentence_transformers.models.{kind}", "path": path}
    for kind, path in (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))
)


def write(folder, modules=None, pooling=None, **config):
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    if modules is not None:
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling or {"pooling_mode_lasttoken": True}))
    return folder


def embedder_of(folder, runner="auto"):
    return read_model_config(folder, runner=runner).embedder


def test_a_decoder_writes_answers_unless_it_is_told_otherwise(tmp_path):
    write(tmp_path)
    assert embedder_of(tmp_path) is None
    assert embedder_of(tmp_path, "generate") is None
    assert embedder_of(tmp_path, "pooling") == Embedder(LAST, normalizes=True)


@pytest.mark.parametrize(
    ("pooling", "kind"),
    [
        ({"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True, "include_prompt": True}, LAST),
        ({"pooling_mode_mean_tokens": True}, MEAN),
        ({"pooling_mode": "mean"}, MEAN),
        ({"pooling_mode": "lasttoken"}, LAST),
    ],
)
def test_modules_of_sentence_transformers_say_how(tmp_path, pooling, kind):
    write(tmp_path, [TRANSFORMER, POOLING], pooling)
    assert embedder_of(tmp_path) == Embedder(kind, normalizes=False)
    assert embedder_of(tmp_path, "generate") is None
    (tmp_path / "modules.json").write_text(json.dumps([TRANSFORMER, POOLING, NORMALIZE]))
    assert embedder_of(tmp_path) == Embedder(kind, normalizes=True)


def test_a_decoder_without_a_head_is_an_embedder(tmp_path):
    write(tmp_path, architectures=["Qwen3Model"])
    config = read_model_config(tmp_path)
    assert (config.architecture, config.qk_norm, config.embedder) == ("Qwen3ForCausalLM", True, Embedder())
    with pytest.raises(ModelError, match=r"^--runner generate: the checkpoint has no head"):
        embedder_of(tmp_path, "generate")


def test_matryoshka(tmp_path):
    write(tmp_path, architectures=["Qwen3Model"], is_matryoshka=True)
    assert embedder_of(tmp_path) == Embedder(may_be_cut=True)
    write(tmp_path, architectures=["Qwen3Model"], matryoshka_dimensions=[8, 16])
    assert embedder_of(tmp_path) == Embedder(may_be_cut=True, lengths=(8, 16))
    write(tmp_path, architectures=["Qwen3Model"], matryoshka_dimensions=[0])
    with pytest.raises(ModelError, match=r"matryoshka_dimensions in .* must be a list of integers above 0"):
        embedder_of(tmp_path)


@pytest.mark.parametrize(
    ("pooling", "message"),
    [
        ({"pooling_mode_cls_token": True}, "pooling of cls_token is not supported; supported are mean_tokens and last"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "pooling of cls_token and mean_tokens"),
        ({"pooling_mode_mean_tokens": False}, "pooling of nothing is not supported"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": False}, "include_prompt in .* is not supported"),
        ({"pooling_mode": 7}, "pooling of nothing"),
    ],
)
def test_other_pooling_is_refused_by_name(tmp_path, pooling, message):
    write(tmp_path, [TRANSFORMER, POOLING], pooling)
    with pytest.raises(ModelError, match=message):
        embedder_of(tmp_path)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([TRANSFORMER, POOLING, {"type": "sentence_transformers.models.Dense", "path": "2"}], "module 'Dense' of mod"),
        ([{"type": "a.Pooling", "path": "../elsewhere"}], "'../elsewhere', which is not a folder beside it"),
        ([{"type": "a.Pooling", "path": "/etc"}], "'/etc', which is not a folder beside it"),
        ([{"type": "a.Pooling", "path": "nowhere"}], "nowhere/config.json cannot be read"),
        ([{"type": "a.Pooling"}], "must hold modules with a type and a path"),
        ([7], "must hold modules with a type and a path, not 7"),
        ({"a": "b"}, "must hold a list of at most 16 modules"),
        ([TRANSFORMER] * 17, "must hold a list of at most 16 modules"),
    ],
)
def test_modules_that_are_not_understood_are_refused(tmp_path, modules, message):
    write(tmp_path, modules)
    with pytest.raises(ModelError, match=message):
        embedder_of(tmp_path)


def test_modules_that_are_no_json(tmp_path):
    write(tmp_path)
    (tmp_path / "modules.json").write_text("[")
    with pytest.raises(ModelError, match=r"modules\.json cannot be read"):
        embedder_of(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"architectures": ["BertModel"], "model_type": "bert"},
            "'BertModel' is not supported: its attention goes both",
        ),
        (
            {"architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta"},
            "'XLMRobertaModel' is not supported: its",
        ),
        ({"architectures": ["T5EncoderModel"], "model_type": "t5"}, "'T5EncoderModel' is not supported: its attention"),
        ({"architectures": ["FakeModel"]}, "architecture 'FakeModel' is not supported; supported are"),
        ({"is_causal": False}, "attention that goes both ways is not supported"),
        ({"use_bidirectional_attention": True}, "attention that goes both ways is not supported"),
    ],
)
def test_attention_that_goes_both_ways_is_refused_by_name(tmp_path, config, message):
    write(tmp_path, **config)
    with pytest.raises(ModelError, match=message):
        embedder_of(tmp_path)
