"""Decode by CUDA graphs against the same engine with --enforce-eager."""

import random

import pytest
import torch

from engine.attention.paged import PortableAttention
from engine.build import build_engine
from engine.cuda_graphs import StaticDecode
from engine.forward_batch import build_batch
from serving_core.requests import Share
from serving_core.settings import EngineSettings
from tests.effort import few
from tests.gpu.devices import need_devices, need_flash_attention
from tests.tiny_models import FAMILIES, VOCAB_SIZE, write_tiny_model
from tests.toy_scheduler import greedy, run_all
from tests.unit.engine.histories_kit import run_program
from tests.unit.engine.rank_process import rank_case, run_ranks

BLOCK_SIZE, NUM_BLOCKS = 256, 200
PROMPTS = [[(7 * i + length) % 250 for i in range(length)] for length in (1, 15, 16, 17, 63, 200, 320)]


def load(folder, family="llama", **fields):
    write_tiny_model(folder, family, seed=3, dtype="bfloat16", head_dim=64)
    chosen = {"block_size": BLOCK_SIZE, "num_kv_blocks": NUM_BLOCKS, **fields}
    return build_engine(EngineSettings(model=str(folder), device="cuda", **chosen))


def captured(folder, family="llama", **fields):
    engine = load(folder, family, **fields)
    need_flash_attention()
    assert engine.attention.name.startswith("varlen_attn"), "the log says why varlen_attn is not taken"
    assert isinstance(engine.program, StaticDecode), "nothing was captured; the log says why"
    return engine


def random_decode(engine, num_requests, seed):
    draw = random.Random(seed)
    order = draw.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    shares = []
    for _ in range(num_requests):
        length = draw.randint(1, (1 if num_requests > NUM_BLOCKS // 3 else 3) * BLOCK_SIZE)
        blocks = [order.pop() for _ in range(-(-length // BLOCK_SIZE))]
        shares.append(Share([draw.randrange(VOCAB_SIZE)], length - 1, blocks, samples=True))
    return build_batch(shares, BLOCK_SIZE, engine.pool.device)


def caches_of(engine):
    layers = range(engine.layout.num_layers)
    return [cache for layer in layers for cache in (engine.pool.keys(layer), engine.pool.values(layer))]


@pytest.mark.parametrize("family", few(FAMILIES))
@torch.inference_mode()
def test_replays_agree_with_the_modules(tmp_path, family):
    engine = captured(tmp_path, family)
    for cache in caches_of(engine):
        cache.normal_()
    for seed, num_requests in enumerate((1, 2, 3, 7, 64, 5, 33, 100, 128, 1)):
        batch = random_decode(engine, num_requests, seed)
        expected = engine.model(batch, engine.attention)
        replayed = run_program(engine.program, batch)
        difference = (replayed - expected).abs().max() / expected.abs().max()
        assert float(difference) < 0.05


@torch.inference_mode()
def test_a_replay_writes_to_the_slots_of_its_requests_alone(tmp_path):
    engine = captured(tmp_path)
    for cache in caches_of(engine):
        cache.normal_()
    for seed, num_requests in enumerate((7, 3, 5)):
        before = [cache[:NUM_BLOCKS].clone() for cache in caches_of(engine)]
        batch = random_decode(engine, num_requests, seed)
        run_program(engine.program, batch)
        for cache, then in zip(caches_of(engine), before, strict=True):
            changed = (cache[:NUM_BLOCKS] != then).flatten(0, 1).flatten(1).any(1).nonzero().flatten()
            assert changed.tolist() == sorted(batch.slots.tolist())


def test_answers_repeat(tmp_path):
    engine = captured(tmp_path)
    once, again = (run_all(engine, PROMPTS, greedy(24), chunk_tokens=64) for _ in range(2))
    assert once == again


def test_eager_where_it_is_asked_for(tmp_path):
    engine = load(tmp_path, enforce_eager=True)
    assert engine.program is None
    assert engine.pool.num_blocks == engine.num_blocks


@pytest.mark.parametrize("tp_size", few([2, 4]))
def test_ranks_have_graphs_of_their_parts(tmp_path, tp_size):
    need_devices(tp_size)
    need_flash_attention()
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 263}
    # In bfloat16 the logprobs of either are up to 0.2 from those of float32, in float16 up to 0.02.
    folder = write_tiny_model(tmp_path / "model", "llama", seed=6, dtype="float16", **sizes)
    cases = {
        name: rank_case(folder, PROMPTS, 12, 64, block_size=BLOCK_SIZE, enforce_eager=name == "eager")
        for name in ("graphs", "eager")
    }
    sampled, facts = run_ranks(tmp_path, tp_size, cases, device="cuda")
    assert [each["graphs"]["program"] for each in facts] == ["StaticDecode"] * tp_size, "the log says why not"
    assert {each["eager"]["program"] for each in facts} == {"NoneType"}
    for ours, theirs in zip(sampled["graphs"], sampled["eager"], strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one["logprob"] == pytest.approx(other["logprob"], abs=0.05)
            if one["token_id"] != other["token_id"]:  # two of them were about as likely
                break


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_the_host_does_not_wait_before_it_reads_the_tokens(tmp_path, enforce_eager):
    engine = captured(tmp_path) if not enforce_eager else load(tmp_path, enforce_eager=True)
    if isinstance(engine.attention, PortableAttention):
        pytest.skip("no kernel takes this pool here, and the portable backend plans on the host")
    shares = [Share([1 + row], row, [row], samples=True) for row in range(5)]

    def logits():
        return engine._logits(shares, None)

    with torch.inference_mode():
        logits()  # first calls may wait
        torch.cuda.set_sync_debug_mode("error")
        try:
            logits()
        finally:
            torch.cuda.set_sync_debug_mode("default")
