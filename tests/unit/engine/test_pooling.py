"""Embeddings of the engine against transformers' last hidden states, pooled by hand."""

import itertools

import numpy as np
import pytest
import torch
from transformers import AutoModel

from engine.build import build_engine
from serving_core.errors import ModelError, SettingsError
from serving_core.requests import LAST, MEAN, Pooling, Request, SamplingParams, Work
from serving_core.settings import EngineSettings
from tests.effort import few
from tests.lora_adapters import write_adapter, write_merged
from tests.tiny_models import write_fake_model, write_tiny_embedder, write_tiny_model

TEXTS = [[5, 80, 11, 250, 7, 7, 42, 200, 9], [3, 100], [17] * 4]
NO_ANSWER = SamplingParams(max_tokens=0)


def engine_of(folder, **settings):
    return build_engine(EngineSettings(model=str(folder), dtype="float32", block_size=4, num_kv_blocks=64, **settings))


def embedded(engine, texts, pooling, chunk_tokens=100, runs=1, adapter=""):
    """The embeddings of texts that are read beside each other in chunks; again and again, as one that gave way is."""
    requests = [
        Request(str(index), 0, list(text), len(text), NO_ANSWER, pooling=pooling, adapter=adapter)
        for index, text in enumerate(texts)
    ]
    found = {}
    for start in [*range(0, max(map(len, texts)), chunk_tokens)] * runs:
        works = [
            Work(request, start, min(chunk_tokens, len(request.token_ids) - start), range(8 * place, 8 * place + 8))
            for place, request in enumerate(requests)
            if start < len(request.token_ids)
        ]
        given = iter(engine.step(works))
        found |= {work.request.request_id: next(given).embedding for work in works if work.samples}
        assert next(given, None) is None
    return [np.frombuffer(found[request.request_id], dtype="<f4") for request in requests]


def by_hand(folder, texts, kind):
    """Not of length 1."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        states = [model(torch.tensor([text])).last_hidden_state[0] for text in texts]
    return [(each.mean(0) if kind == MEAN else each[-1]).numpy() for each in states]


@pytest.mark.parametrize("family", few(["mistral", "qwen3", "gemma2", "llama", "qwen2"], "mistral", "qwen3", "gemma2"))
def test_embeddings_are_those_of_transformers_however_texts_are_cut(written, family):
    folder = written(write_tiny_embedder, family)
    engine = engine_of(folder)
    tolerance = 5e-5 if family == "gemma2" else 1e-5  # which norms twice as often, and to twice the size
    by_kind = {kind: by_hand(folder, TEXTS, kind) for kind in (MEAN, LAST)}
    for (kind, expected), chunk_tokens in itertools.product(by_kind.items(), (1, 4, 100)):
        found = embedded(engine, TEXTS, Pooling(kind, normalizes=False), chunk_tokens)
        for vector, other in zip(found, expected, strict=True):
            assert vector == pytest.approx(other, abs=tolerance)


def test_a_model_with_a_head_embeds_without_it(written):
    folder = written(write_tiny_model, "granite", logits_scaling=4.0, tie_word_embeddings=False)
    engine = engine_of(folder, runner="pooling")
    assert engine.program is None
    assert engine.weight_bytes < engine_of(folder).weight_bytes
    [found] = embedded(engine, TEXTS[:1], Pooling(LAST, normalizes=False))
    assert found == pytest.approx(by_hand(folder, TEXTS[:1], LAST)[0], abs=1e-5)


def test_an_adapter_of_a_model_without_a_head_changes_its_embeddings(written, tmp_path):
    """PEFT calls layers as transformers does there."""
    folder = written(write_tiny_embedder)
    adapter = write_adapter(tmp_path / "adapter", folder, seed=1)
    merged = write_merged(tmp_path / "merged", folder, adapter)
    engine = engine_of(folder, lora=(f"a={adapter}",))
    [found] = embedded(engine, TEXTS[:1], Pooling(LAST, normalizes=False), adapter="a")
    assert found == pytest.approx(by_hand(merged, TEXTS[:1], LAST)[0], abs=1e-4)
    assert found != pytest.approx(by_hand(folder, TEXTS[:1], LAST)[0], abs=0.1)


def test_what_gave_way_is_pooled_anew(written):
    folder = written(write_tiny_embedder)
    [once], [twice] = (embedded(engine_of(folder), TEXTS[:1], Pooling(MEAN), 4, runs) for runs in (1, 2))
    assert once.tobytes() == twice.tobytes()


def test_length_and_leading_numbers(written):
    folder = written(write_tiny_embedder)
    engine, [plain] = engine_of(folder), by_hand(folder, TEXTS[:1], LAST)
    for num_dimensions in (0, 16):
        kept = plain[: num_dimensions or None]
        for normalizes in (False, True):
            [found] = embedded(engine, TEXTS[:1], Pooling(LAST, normalizes, num_dimensions))
            assert found == pytest.approx(kept / np.linalg.norm(kept) if normalizes else kept, abs=1e-5)


def test_a_text_at_which_the_model_overflows_gets_no_embedding_and_those_beside_it_do(written):
    engine = engine_of(written(write_tiny_embedder))
    expected = embedded(engine, TEXTS[1:], Pooling(MEAN))
    engine.model.embed_tokens.weight.data[TEXTS[0][0]] = torch.inf
    requests = [
        Request(str(index), 0, text, len(text), NO_ANSWER, pooling=Pooling(MEAN)) for index, text in enumerate(TEXTS)
    ]
    works = [Work(each, 0, len(each.token_ids), range(8 * place, 8 * place + 8)) for place, each in enumerate(requests)]
    failed, *others = engine.step(works)
    assert (failed.error.reason, failed.embedding) == ("STEP_FAILED", b"")
    assert [each.embedding for each in others] == [each.tobytes() for each in expected]
    engine.model.norm.weight.data.fill_(torch.inf)
    with pytest.raises(ModelError, match="not finite"):
        engine.warm_up()


def test_warm_up_and_what_cannot_embed(written):
    assert engine_of(written(write_tiny_embedder)).warm_up() > 0
    with pytest.raises(SettingsError, match="no hidden states"):
        engine_of(written(write_fake_model), runner="pooling")
    folder = written(write_tiny_model, "phi")
    with pytest.raises(SettingsError, match="transformers computes PhiForCausalLM, and embeddings are made by"):
        engine_of(folder, runner="pooling")
