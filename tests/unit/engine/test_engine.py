import copy

import pytest
import torch
from safetensors.torch import load_file

from engine.build import build_engine
from engine.native.library import native_library
from serving_core.errors import ModelError, SettingsError
from serving_core.layout import KVLayout
from serving_core.requests import Request, SamplingParams, Work
from serving_core.settings import EngineSettings
from tests.tiny_models import EOS, write_fake_model, write_tiny_model
from tests.toy_scheduler import greedy, run_all


@pytest.fixture(scope="module")
def folder(written):
    return written(write_tiny_model, "llama", seed=2)


def settings(folder, **fields):
    return EngineSettings(model=str(folder), **{"num_kv_blocks": 64, **fields})


def test_what_an_engine_says_of_itself(folder):
    engine = build_engine(settings(folder, block_size=8, max_model_len=100, device="cpu"))
    assert engine.layout == KVLayout.uniform(3, 2, 12, 8, "float32")
    assert engine.num_blocks == engine.pool.num_blocks == 64
    assert engine.max_model_len == 100
    assert engine.eos_token_ids == (EOS,)
    assert engine.config.architecture == "LlamaForCausalLM"
    assert engine.description == {
        "device": "cpu",
        "dtype": "float32",
        "quantization": "none",
        "attention": "portable" if native_library() is None else "native",
        "program": "modules" if native_library() is None else "native",
        "threads": str(torch.get_num_threads()),
        "tp_size": "1",
        "pp_size": "1",
        "sequence_parallel_min_tokens": "0",
        "layers_offloaded": "0",
        "batch_invariant": "no",
        "model_impl": "native",
    }
    assert engine.model_layout == engine.layout
    assert (engine.group.rank, engine.group.size) == (0, 1)
    assert engine.pool.keys(2).shape == (64, 8, 2, 12)


def test_sizes_follow_from_the_model_and_the_memory(folder):
    engine = build_engine(settings(folder, num_kv_blocks=0, kv_cache_memory_bytes=10 * 9216 + 5000))
    assert engine.max_model_len == 1024
    assert engine.layout.block_bytes == 9216  # 2 * 3 layers * 16 tokens * 2 heads * 12 * 4 bytes
    assert engine.num_blocks == 10
    assert engine.kv_pool_bytes == 10 * 9216


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weight_bytes_are_those_of_the_parameters(folder, dtype):
    tensors = load_file(folder / "model.safetensors")
    num_parameters = sum(tensor.numel() for tensor in tensors.values())
    num_bytes = num_parameters * {"float32": 4, "bfloat16": 2}[dtype]
    # They are packed on a CPU that can, with up to 15 rows of padding below each matrix.
    assert num_bytes <= build_engine(settings(folder, dtype=dtype)).weight_bytes <= num_bytes * 1.05


def test_more_ranks_than_heads_are_refused_before_anything_is_loaded(folder):
    class Five:
        rank, size = 0, 5

    with pytest.raises(SettingsError, match="the model has 4 attention heads, which cannot be divided over 5 ranks"):
        build_engine(settings(folder), Five())


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8_e4m3"])
def test_the_kv_cache_may_have_a_dtype_of_its_own(folder, kv_cache_dtype):
    engine = build_engine(settings(folder, kv_cache_dtype=kv_cache_dtype))
    assert engine.layout == engine.model_layout == KVLayout.uniform(3, 2, 12, 16, kv_cache_dtype)
    assert engine.fingerprint["dtype"] == "float32"
    assert engine.fingerprint["kv_cache_dtype"] == kv_cache_dtype
    assert engine.kv_pool_bytes == 64 * engine.layout.block_bytes
    engine.warm_up()
    assert len(run_all(engine, [list(range(40))], greedy(5, ignore_eos=True), chunk_tokens=16)[0]) == 5


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"model": ""}, "no model folder"),
        ({"max_model_len": 1025}, "--max-model-len 1025 is more than the model's 1024"),
        (
            {"num_kv_blocks": 0, "kv_cache_memory_bytes": 9215},
            "--kv-cache-memory-bytes 9215 holds no block of 9216",
        ),
        ({"num_kv_blocks": 10**12}, r"the KV pool needs [\d.]+ GiB, and [\d.]+ GiB of memory are free"),
    ],
)
def test_settings_that_cannot_be(folder, fields, sentence):
    with pytest.raises(SettingsError, match=sentence):
        build_engine(settings(**{"folder": folder, **fields}) if "model" not in fields else EngineSettings(**fields))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_where_there_is_none(folder):
    with pytest.raises(SettingsError, match="there is no CUDA device here"):
        build_engine(settings(folder, device="cuda"))


def test_missing_folder(tmp_path):
    with pytest.raises(ModelError, match="there is no model folder"):
        build_engine(settings(tmp_path / "nowhere"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_every_dtype_serves(family, dtype, written):
    engine = build_engine(settings(written(write_tiny_model, family), dtype=dtype))
    assert engine.layout.dtype == dtype
    answer = run_all(engine, [list(range(40))], greedy(5, ignore_eos=True), chunk_tokens=16)[0]
    assert len(answer) == 5


def test_a_step_gives_one_token_for_each_share_that_samples_and_changes_no_request(folder):
    engine = build_engine(settings(folder))
    prompts = [[1, 2, 3, 4, 5], [9, 8, 7], [4, 4]]
    requests = [Request(str(i), 0, prompt, len(prompt), greedy(4)) for i, prompt in enumerate(prompts)]
    before = copy.deepcopy([request.token_ids for request in requests])
    works = [Work(requests[0], 0, 3, [0]), Work(requests[1], 0, 3, [1]), Work(requests[2], 0, 2, [2])]
    tokens = engine.step(works)
    assert [request.token_ids for request in requests] == before
    assert tokens == [engine.step([work])[0] for work in works[1:]]
    assert engine.step(works[:1]) == []
    assert len(engine.step([Work(requests[0], 3, 2, [0])])) == 1


def test_seeded_answers_are_the_same_alone_in_a_crowd_and_after_a_restart(folder):
    sampling = SamplingParams(max_tokens=15, temperature=0.8, top_p=0.95, seed=42)
    prompt, others = [5, 6, 7] * 9, [[i] * (3 + 11 * i) for i in range(6)]
    alone = run_all(build_engine(settings(folder)), [prompt], sampling)[0]
    engine = build_engine(settings(folder, block_size=4, num_kv_blocks=200))
    crowd = run_all(engine, [prompt, *others], sampling, chunk_tokens=10, joins_at=[2, 0, 0, 1, 5, 4, 3])[0]
    assert crowd == alone

    # Preempted after six tokens: prompt and output so far are prefilled again, elsewhere.
    token_ids = prompt + [token.token_id for token in alone[:6]]
    request = Request("resumed", 1, token_ids, len(prompt), sampling)
    (token,) = engine.step([Work(request, 0, len(token_ids), list(range(50, 70)))])
    assert token == alone[6]


def test_kv_read_from_one_engine_and_written_into_another_goes_on_as_if_it_had_stayed(folder):
    prefill, decode = (build_engine(settings(folder, block_size=4)) for _ in range(2))
    prompt = list(range(30, 49))
    expected = run_all(prefill, [prompt], greedy(8, ignore_eos=True))[0]

    request = Request("moved", 0, list(prompt), len(prompt), greedy(8, ignore_eos=True))
    tokens = prefill.step([Work(request, 0, len(prompt), [3, 1, 4, 5, 9])])
    for layer in range(prefill.layout.num_layers):
        caches = prefill.pool.read(layer, [3, 1, 4, 5, 9])
        decode.pool.write(layer, [20, 21, 22, 40, 2], *caches)
    for _ in range(7):
        request.token_ids.append(tokens[-1].token_id)
        work = Work(request, len(request.token_ids) - 1, 1, [20, 21, 22, 40, 2, 7, 8])
        tokens += decode.step([work])
    assert tokens == expected


@pytest.mark.parametrize("fields", [{}, {"max_model_len": 1}, {"num_kv_blocks": 1, "block_size": 1}])
def test_warm_up_fits_any_engine(folder, fields, tmp_path):
    build_engine(settings(folder, **fields)).warm_up()
    build_engine(settings(write_fake_model(tmp_path), **fields)).warm_up()
