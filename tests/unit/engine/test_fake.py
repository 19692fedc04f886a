import json
import time

import pytest

from engine.build import build_engine
from engine.engine import WARM_UP_TOKENS
from serving_core.errors import ModelError, SettingsError
from serving_core.requests import Request, SamplingParams, Work
from serving_core.settings import EngineSettings
from tests.tiny_models import EOS, VOCAB_SIZE, write_fake_model
from tests.toy_scheduler import greedy, run_all


def fake_engine(folder, block_size=4, **model):
    write_fake_model(folder, **model)
    return build_engine(EngineSettings(model=str(folder), block_size=block_size, num_kv_blocks=64))


def answer_on_paper(prompt, num_tokens):
    context = list(prompt)
    while len(context) < len(prompt) + num_tokens:
        total = sum(token * place for place, token in enumerate(context, start=1))
        context.append((total + len(context)) % VOCAB_SIZE)
    return context[len(prompt) :]


def test_the_example_of_the_docstring(tmp_path):
    ((token,),) = run_all(fake_engine(tmp_path), [[97, 98]], greedy(1, logprobs=3))
    assert token.token_id == 35
    assert [token_id for token_id, _ in token.top_logprobs] == [35, 36, 37]


def test_ranking_goes_round_the_vocabulary(tmp_path):
    ((token,),) = run_all(fake_engine(tmp_path), [[258]], greedy(1, logprobs=2))  # 258 * 1 + 1 = 259
    assert [token_id for token_id, _ in token.top_logprobs] == [259, 0]


@pytest.mark.parametrize("chunk_tokens", [1, 3, 100])
def test_answers_equal_those_on_paper(chunk_tokens, tmp_path):
    engine = fake_engine(tmp_path, num_layers=3, num_kv_heads=1, head_dim=5)
    prompts = [[97, 98], [5], list(range(30)), [255] * 9]
    sampled = run_all(engine, prompts, greedy(12, ignore_eos=True), chunk_tokens=chunk_tokens, joins_at=[0, 3, 1, 7])
    assert [[token.token_id for token in answer] for answer in sampled] == [answer_on_paper(p, 12) for p in prompts]


def test_tokens_and_positions_lie_in_the_pool(tmp_path):
    engine = fake_engine(tmp_path)
    request = Request("r", 0, [11, 12, 13, 14, 15], 5, greedy(1))
    engine.step([Work(request, 0, 5, [9, 2])])
    for layer in range(2):
        assert engine.pool.keys(layer)[9, :, 0, 0].tolist() == [11, 12, 13, 14]
        assert engine.pool.values(layer)[9, :, 1, 3].tolist() == [0, 1, 2, 3]
        assert (engine.pool.keys(layer)[2, 0] == 15).all()
        assert (engine.pool.values(layer)[2, 0] == 4).all()


def test_a_changed_block_changes_the_answer(tmp_path):
    engine = fake_engine(tmp_path)
    request = Request("r", 0, [50] * 9, 9, greedy(1))
    blocks = [4, 5, 6]
    (before,) = engine.step([Work(request, 0, 9, blocks)])
    engine.pool.keys(1)[5, 2, 1, :] += 1  # one head of one token in one layer
    (after,) = engine.step([Work(request, 8, 1, blocks)])
    assert before != after


def test_steps_take_as_long_as_config_says(tmp_path, monkeypatch):
    naps = []
    monkeypatch.setattr(time, "sleep", naps.append)
    engine = fake_engine(tmp_path, step_s=0.5, token_s=0.125)
    engine.step([Work(Request("r", 0, [1, 2, 3], 3, greedy(1)), 0, 2, [0])])
    assert naps == [0.75]


def test_sampled_answers_come_out_different_by_seed(tmp_path):
    engine = fake_engine(tmp_path)
    sampling = [SamplingParams(max_tokens=8, seed=seed, ignore_eos=True) for seed in (1, 2, 1)]
    first, second, again = run_all(engine, [[65, 66]] * 3, sampling)
    assert first == again != second


def test_it_is_an_engine_like_any_other(tmp_path):
    engine = fake_engine(tmp_path)
    assert engine.eos_token_ids == (EOS,)
    assert engine.fingerprint["architecture"] == "FakeForCausalLM"
    assert 0 < engine.warm_up() < float("inf")


def test_warm_up_measures_prompts(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    engine = fake_engine(tmp_path, step_s=0.5, token_s=0.125)
    assert engine.warm_up() == pytest.approx(WARM_UP_TOKENS / (0.5 + WARM_UP_TOKENS * 0.125))
    assert fake_engine(tmp_path).warm_up() > 0  # on a clock that stands still


def test_refusals(tmp_path):
    write_fake_model(tmp_path)
    with pytest.raises(SettingsError, match="counts in float32"):
        build_engine(EngineSettings(model=str(tmp_path), dtype="bfloat16", num_kv_blocks=4))
    with pytest.raises(SettingsError, match="--kv-cache-dtype int8: the fake model counts in float32"):
        build_engine(EngineSettings(model=str(tmp_path), kv_cache_dtype="int8", num_kv_blocks=4))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2**25}))
    with pytest.raises(ModelError, match=f"at most {2**24}"):
        build_engine(EngineSettings(model=str(tmp_path), num_kv_blocks=4))
    (tmp_path / "config.json").write_text(json.dumps({**config, "step_s": -1}))
    with pytest.raises(ModelError, match="step_s"):
        build_engine(EngineSettings(model=str(tmp_path), num_kv_blocks=4))
