"""Engines with --quantization."""

import pytest
import torch

from engine.build import build_engine
from serving_core.errors import SettingsError
from serving_core.settings import EngineSettings
from tests.tiny_models import VOCAB_SIZE, write_fake_model, write_tiny_model
from tests.toy_scheduler import greedy, random_prompts, run_all
from tests.unit.engine.rank_process import run_ranks

pytestmark = pytest.mark.nightly

(PROMPT,) = random_prompts([60])


def load(folder, quantization, **settings):
    return build_engine(
        EngineSettings(model=str(folder), device="cpu", num_kv_blocks=8, quantization=quantization, **settings)
    )


def logprobs(engine):
    ((token,),) = run_all(engine, [PROMPT], greedy(1, logprobs=VOCAB_SIZE), chunk_tokens=40)
    return by_token(token.top_logprobs)


def by_token(top_logprobs):
    return torch.tensor([logprob for _, logprob in sorted(top_logprobs)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_8_bits_change_little_and_4_bits_more(family, tied, dtype, tmp_path):
    folder = write_tiny_model(tmp_path, family, dtype=dtype, tie_word_embeddings=tied)
    truth = logprobs(load(folder, "none", dtype="float32"))
    names = ("int8", "int4", "w8a8")
    errors = {name: (logprobs(load(folder, name)) - truth).square().mean().sqrt() for name in names}
    assert errors["int8"] < 0.15  # of logprobs that are some 3 apart
    assert errors["w8a8"] < 0.25
    assert errors["int8"] < errors["int4"] < 2


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("quantization", "share"), [("int8", 0.53), ("int4", 0.36)])
def test_weights_take_less_memory(quantization, share, tied, tmp_path):
    folder = write_tiny_model(
        tmp_path, dtype="bfloat16", hidden_size=256, intermediate_size=512, tie_word_embeddings=tied
    )
    plain, ours = load(folder, "none"), load(folder, quantization)
    embedding_bytes = 2 * VOCAB_SIZE * 256
    # Once beside the head in either case, if only in "none" the two are one; and 8 bits for the head.
    plain_bytes, our_bytes = plain.weight_bytes - embedding_bytes, ours.weight_bytes
    our_bytes -= 0 if tied else embedding_bytes
    head_bytes = embedding_bytes * (0.55 if quantization == "int4" else 0)
    assert our_bytes - head_bytes < share * (plain_bytes - (embedding_bytes if head_bytes else 0))


def test_nodes_tell_their_quantization_apart(tmp_path):
    folder = write_tiny_model(tmp_path)
    engines = {name: load(folder, name) for name in ("none", "int8", "int4", "w8a8")}
    prints = {name: engine.fingerprint for name, engine in engines.items()}
    for name, engine in engines.items():
        assert engine.description["quantization"] == name
        differences = {key for key in prints["none"] if prints["none"][key] != prints[name][key]}
        assert differences == ({"quantization"} if name != "none" else set())


@pytest.mark.parametrize("quantization", ["int8", "int4", "w8a8"])
def test_two_ranks_are_near_one(quantization, tmp_path):
    """Not the same: a rank rounds its own columns of a projection."""
    folder = write_tiny_model(tmp_path, intermediate_size=77, vocab_size=VOCAB_SIZE + 3, tie_word_embeddings=True)
    case = {
        "settings": {"model": str(folder), "num_kv_blocks": 8, "quantization": quantization},
        "prompts": [PROMPT],
        "sampling": {"max_tokens": 1, "logprobs": 300},
        "chunk_tokens": 23,
    }
    whole, _ = run_ranks(tmp_path, 1, {"case": case})
    parts, facts = run_ranks(tmp_path, 2, {"case": case})
    ours, theirs = (by_token(answer["case"][0][0]["top_logprobs"]) for answer in (parts, whole))
    assert (ours - theirs).square().mean().sqrt() < {"int8": 0.15, "int4": 2, "w8a8": 0.25}[quantization]
    assert {rank["case"]["description"]["quantization"] for rank in facts} == {quantization}


def test_the_fake_model_has_no_weights_to_quantize(tmp_path):
    with pytest.raises(SettingsError, match="--quantization int8: the fake model has no weights"):
        load(write_fake_model(tmp_path), "int8")


def test_without_native_kernels_the_answers_are_near_and_the_log_says_so(tmp_path, monkeypatch, caplog):
    folder = write_tiny_model(tmp_path, tie_word_embeddings=True)
    expected = logprobs(load(folder, "int4"))
    caplog.clear()
    monkeypatch.setenv("SPLITSERVE_NATIVE", "off")
    engine = load(folder, "int4")
    torch.testing.assert_close(logprobs(engine), expected, rtol=0, atol=2e-3)
    assert "no kernel computes with them" in caplog.text
