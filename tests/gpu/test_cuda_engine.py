"""The engine on CUDA against the same engine on the CPU, which tests/unit compares with transformers."""

import pytest
import torch

from engine.attention.backends import choose_attention
from engine.attention.paged import PortableAttention
from engine.build import build_engine
from engine.cache.kv_pool import PagedKVPool
from engine.forward_batch import build_batch
from serving_core.layout import KVLayout
from serving_core.requests import Request, SamplingParams, Work
from serving_core.settings import EngineSettings
from tests.effort import few
from tests.gpu.devices import need_devices
from tests.tiny_models import FAMILIES, write_tiny_model
from tests.toy_scheduler import greedy, run_all
from tests.unit.engine.rank_process import run_ranks

PROMPTS = [[(7 * i + length) % 250 for i in range(length)] for length in (1, 15, 16, 17, 63, 200, 320)]


def tokens(engine, **options):
    return [[token.token_id for token in answer] for answer in run_all(engine, PROMPTS, greedy(24), **options)]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_those_of_the_cpu(tmp_path, family):
    folder = write_tiny_model(tmp_path, family, seed=3)
    engines = [
        build_engine(EngineSettings(model=str(folder), device=device, dtype="float32", num_kv_blocks=256))
        for device in ("cpu", "cuda")
    ]
    torch.backends.cuda.matmul.allow_tf32 = False
    on_cpu, on_cuda = (tokens(engine, chunk_tokens=23, joins_at=range(len(PROMPTS))) for engine in engines)
    assert on_cuda == on_cpu


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_the_cuda_backend_agrees_with_the_portable_one(window, block_size):
    device = torch.device("cuda")
    pool = PagedKVPool(KVLayout.uniform(1, 2, 64, block_size, "bfloat16"), 64, device)
    chosen = choose_attention(pool, num_heads=8)
    generator = torch.Generator(device).manual_seed(0)
    for cache in (pool.keys(0), pool.values(0)):
        cache.normal_(generator=generator)
    works, first = [], 0
    for start, num_tokens in ((0, 1), (0, 90), (33, 50), (255, 1), (511, 1)):
        length = start + num_tokens
        blocks = range(first, first + pool.layout.num_blocks_for(length))
        first = blocks.stop
        request = Request("r", 0, [0] * length, length, SamplingParams(max_tokens=1))
        works.append(Work(request, start, num_tokens, blocks))
    batch = build_batch([work.share for work in works], block_size, device)
    query = torch.randn(len(batch.token_ids), 8, 64, device=device, generator=generator).bfloat16()
    outputs = [
        backend.attend(query, 0, backend.plan(batch, window)) for backend in (chosen, PortableAttention(pool, 8))
    ]
    torch.testing.assert_close(*outputs, atol=0.02, rtol=0.02)


def test_blocks_go_out_and_come_back_byte_for_byte():
    pool = PagedKVPool(KVLayout.uniform(2, 3, 64, 16, "bfloat16"), 12, torch.device("cuda"))
    for layer in range(2):
        pool.keys(layer).normal_()
        pool.values(layer).normal_()
    caches = pool.read(1, [2, 3, 7])
    assert caches[0][: pool.layout.cache_shape.num_bytes] == pool.keys(1)[2].cpu().view(torch.uint8).numpy().tobytes()
    pool.write(1, [9, 4, 5], *caches)
    for source, target in ((2, 9), (3, 4), (7, 5)):
        assert torch.equal(pool.keys(1)[source], pool.keys(1)[target])
        assert torch.equal(pool.values(1)[source], pool.values(1)[target])


def test_a_seeded_request_gives_the_same_tokens_and_logprobs_again(tmp_path):
    folder = write_tiny_model(tmp_path, "llama", seed=5, dtype="bfloat16", head_dim=64)
    engine = build_engine(EngineSettings(model=str(folder), device="cuda", num_kv_blocks=256))
    sampling = SamplingParams(max_tokens=16, temperature=1.0, seed=11, logprobs=3)
    once = [run_all(engine, [prompt], sampling)[0] for prompt in PROMPTS[:3]]
    again = [run_all(engine, [prompt], sampling)[0] for prompt in PROMPTS[:3]]
    assert once == again


@pytest.mark.parametrize("tp_size", few([2, 4]))
def test_ranks_over_nccl_answer_as_one_on_the_cpu(tp_size, tmp_path):
    need_devices(tp_size)
    sizes = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 263}
    folder = write_tiny_model(tmp_path / "model", "llama", seed=6, **sizes)
    settings = {"model": str(folder), "dtype": "float32", "num_kv_blocks": 256}
    sampling = {"max_tokens": 24}
    case = {"settings": settings, "prompts": PROMPTS, "sampling": sampling, "chunk_tokens": 23}
    sampled, _ = run_ranks(tmp_path, tp_size, {"llama": case}, device="cuda")
    expected = run_all(
        build_engine(EngineSettings(device="cpu", **settings)), PROMPTS, greedy(**sampling), chunk_tokens=23
    )
    assert [[token["token_id"] for token in answer] for answer in sampled["llama"]] == [
        [token.token_id for token in answer] for answer in expected
    ]


def test_a_step_that_gives_no_token_has_ended_on_the_device_too(tmp_path, monkeypatch):
    """Chunks of a prompt are timed, and may be cancelled between two."""
    engine = build_engine(EngineSettings(model=str(write_tiny_model(tmp_path)), device="cuda", num_kv_blocks=64))
    request = Request("r", 0, [*range(3, 103)], 100, SamplingParams(max_tokens=1))
    awaited = []
    wait = torch.cuda.Stream.synchronize
    monkeypatch.setattr(torch.cuda.Stream, "synchronize", lambda self: awaited.append(self) or wait(self))
    assert engine.step([Work(request, 0, 60, range(7))]) == []
    assert len(awaited) == 1
    assert torch.cuda.current_stream().query()
    assert len(engine.step([Work(request, 60, 40, range(7))])) == 1
