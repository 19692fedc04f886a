"""What an engine can do beside plain models, on CUDA against the same on the CPU, which tests/unit compares with
transformers or with arithmetic."""

import asyncio
import gc
from itertools import chain

import pytest
import torch

from engine.build import build_engine
from engine.cache.kv_pool import PagedKVPool
from engine.cache.tier_store import TierStore
from kv_transfer.receiver import KVReceiver, Received
from kv_transfer.sender import KVSender, Sent
from kv_transfer.transports.zmq import ZmqDialer, ZmqListener
from serving_core.errors import SettingsError
from serving_core.layout import KVLayout, Widths
from serving_core.node.tiers import Copies
from serving_core.requests import SamplingParams
from serving_core.settings import EngineSettings
from tests.effort import few
from tests.lora_adapters import write_adapter
from tests.tiny_models import write_tiny_model
from tests.toy_scheduler import greedy, run_all
from tests.transformers_models import write_any_model
from tests.unit.kv_transfer.transfer_kit import run, transfer

DEVICE = "cuda"
PROMPTS = [[(7 * i + length) % 250 for i in range(length)] for length in (1, 17, 63, 130)]
DEADLINE_S = 60.0
LAYOUTS = {
    "bfloat16": KVLayout.uniform(3, 2, 64, 16, "bfloat16"),
    "int8": KVLayout.uniform(3, 2, 64, 16, "int8"),
    "latent": KVLayout(1, (Widths(72, 0),) * 3, 16, 4, "bfloat16"),
}


def engine_of(folder, device=DEVICE, **settings):
    return build_engine(EngineSettings(model=str(folder), device=device, num_kv_blocks=128, **settings))


def token_ids(answers):
    return [[token.token_id for token in answer] for answer in answers]


@pytest.mark.parametrize(
    "family",
    few(["mixtral", "qwen3_moe", "qwen2_moe", "deepseek_v3", "gemma2", "gemma3", "gpt_oss"], "deepseek_v3", "gpt_oss"),
)
def test_experts_latents_and_capped_scores(tmp_path, family):
    folder = write_any_model(tmp_path, family, seed=2)
    answers = [
        token_ids(run_all(engine_of(folder, device, dtype="float32"), PROMPTS, greedy(12), chunk_tokens=23))
        for device in ("cpu", DEVICE)
    ]
    assert answers[1] == answers[0]


@pytest.mark.parametrize("quantization", ["int8", "int4", "w8a8"])
def test_quantized_weights_are_those_of_the_cpu(tmp_path, quantization):
    folder = write_tiny_model(tmp_path, seed=4)
    engines = [engine_of(folder, device, dtype="float32", quantization=quantization) for device in ("cpu", DEVICE)]
    outputs = torch.arange(16)
    weights = [
        engine.model.own_layers[0].self_attn.qkv_proj.matrix.rows(outputs.to(engine.pool.device)).cpu()
        for engine in engines
    ]
    torch.testing.assert_close(weights[1], weights[0])
    assert all(len(answer) == 8 for answer in run_all(engines[1], PROMPTS, greedy(8)))


@pytest.mark.parametrize(
    "sampling", few([greedy(16), SamplingParams(max_tokens=16, temperature=1.0, top_p=0.9, seed=3)])
)
def test_draft_tokens_change_no_token(tmp_path, sampling):
    engine = engine_of(write_tiny_model(tmp_path, seed=5), dtype="float32", batch_invariant=True)
    assert engine.is_batch_invariant, "the log says what is not kept"
    plain = run_all(engine, PROMPTS, sampling)
    answers = {
        tuple(prompt): [token.token_id for token in answer] for prompt, answer in zip(PROMPTS, plain, strict=True)
    }

    def propose(request):
        """Two that come, and one that does not."""
        left = answers[tuple(request.token_ids[: request.num_prompt_tokens])][request.num_output_tokens :]
        return [*left[:2], (left[2] + 1) % 250] if len(left) > 4 else []

    assert run_all(engine, PROMPTS, sampling, propose=propose) == plain


def test_penalties_biases_and_logprobs(tmp_path):
    folder = write_tiny_model(tmp_path, seed=6)
    sampling = greedy(
        12,
        logprobs=2,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        presence_penalty=0.2,
        logit_bias=((7, 2.0),),
        min_tokens=4,
        allowed_token_ids=tuple(range(200)),
    )
    on_cpu, on_device = (
        run_all(engine_of(folder, device, dtype="float32"), PROMPTS, sampling) for device in ("cpu", DEVICE)
    )
    assert token_ids(on_device) == token_ids(on_cpu)
    for ours, theirs in zip(chain(*on_device), chain(*on_cpu), strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)


def test_an_adapter(tmp_path):
    folder = write_tiny_model(tmp_path / "model", seed=7)
    adapter = write_adapter(tmp_path / "adapter", folder, seed=1)
    answers = [
        token_ids(
            run_all(
                engine_of(folder, device, dtype="float32", lora=(f"a={adapter}",)),
                PROMPTS,
                greedy(8),
                adapters=["a", "", "a", ""],
            )
        )
        for device in ("cpu", DEVICE)
    ]
    assert answers[1] == answers[0]


def random_pool(layout, device=DEVICE):
    pool = PagedKVPool(layout, 12, torch.device(device))
    for layer in layout.layers:
        sizes = [12 * each for each in layout.cache_bytes(layer)]
        pool.write_tensors(layer, range(12), *(torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes))
    return pool


def content(pool, block_ids):
    return [bytes(cache) for layer in pool.layout.layers for cache in pool.read(layer, block_ids)]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_blocks_go_to_the_kv_offload_and_back(tmp_path, layout):
    pool = random_pool(layout)
    before = content(pool, [7, 2, 3])

    async def scenario():
        store = TierStore(pool, num_host=2, num_disk=2, folder=str(tmp_path))
        try:
            store.offload(Copies([], [7, 2, 3], [0, 1, 2]))
            loaded = asyncio.get_running_loop().create_future()
            store.load(1, [0, 1, 2], [9, 4, 11], lambda load_id, num_good: loaded.set_result(num_good))
            return await asyncio.wait_for(loaded, DEADLINE_S)
        finally:
            store.close()

    assert run(scenario()) == 3
    assert content(pool, [9, 4, 11]) == before


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("to", ["cpu", DEVICE])
def test_blocks_travel_over_zmq_from_a_pool_on_the_device(layout, to):
    source, target = random_pool(layout), PagedKVPool(layout, 12, torch.device(to))

    async def scenario():
        receiver = KVReceiver(ZmqListener("tcp://127.0.0.1:*"), target)
        sender = KVSender(ZmqDialer(), source, deadline_s=DEADLINE_S)
        try:
            return await transfer(sender, receiver, [5, 1, 2, 3], [0, 7, 8, 4])
        finally:
            await sender.close()
            await receiver.close()

    assert tuple(map(type, run(scenario()))) == (Sent, Received)
    assert content(target, [0, 7, 8, 4]) == content(source, [5, 1, 2, 3])


def test_processes_that_share_a_device_are_told_to_divide_its_memory(tmp_path, monkeypatch):
    folder, (free, total) = write_tiny_model(tmp_path, "llama"), torch.cuda.mem_get_info()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free // 4, total))
    settings = EngineSettings(model=str(folder), device="cuda", gpu_memory_utilization=0.9)
    with pytest.raises(SettingsError, match=r"asks for .* of KV, and .* are free: .* two of them at most 0.45 each"):
        build_engine(settings)


def test_a_pool_takes_what_is_left_of_the_device(tmp_path):
    folder, total = write_tiny_model(tmp_path, "llama"), torch.cuda.mem_get_info()[1]
    given, kept = 64 * 2**20, 16 * 2**20

    def pool_bytes(**options):
        gc.collect()
        before = torch.cuda.memory_allocated()
        settings = EngineSettings(
            model=str(folder), device="cuda", gpu_memory_utilization=(before + given) / total, enforce_eager=True
        )
        engine = build_engine(settings, **options)
        assert torch.cuda.memory_allocated() <= before + given
        return engine.kv_pool_bytes + engine.weight_bytes

    assert given - 2**20 < pool_bytes() <= given
    assert given - kept - 2**20 < pool_bytes(num_kept_bytes=kept) <= given - kept
    with pytest.raises(SettingsError, match=r"--gpu-memory-utilization [\d.]+ of [\d.]+ GiB leaves nothing for KV"):
        pool_bytes(num_kept_bytes=given)
