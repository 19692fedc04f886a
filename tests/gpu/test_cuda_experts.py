"""Mixtures of experts, all of a layer computed at once: the host does not learn which a token takes."""

import pytest
import torch

from engine.build import build_engine
from engine.cuda_graphs import StaticDecode
from engine.model.experts import MixtureOfExperts, StackedProduct
from engine.parallel import Residual, alone
from serving_core.settings import EngineSettings
from tests.effort import few
from tests.gpu.devices import need_flash_attention
from tests.gpu.test_cuda_graphs import caches_of, random_decode
from tests.transformers_models import MIXTURES, write_any_model
from tests.unit.engine.histories_kit import run_program


def engine_of(folder, **fields):
    chosen = {"block_size": 256, "num_kv_blocks": 200, "dtype": "bfloat16", **fields}
    return build_engine(EngineSettings(model=str(folder), device="cuda", **chosen))


def mixtures(engine):
    return [module for module in engine.model.modules() if isinstance(module, MixtureOfExperts)]


def products_of(engine):
    return [type(each) for mixture in mixtures(engine) for each in mixture._products]


@pytest.mark.parametrize("family", few(MIXTURES))
@torch.inference_mode()
def test_all_at_once_are_each_by_itself_and_the_host_does_not_wait(tmp_path, family):
    engine = engine_of(write_any_model(tmp_path, family, seed=3), enforce_eager=True)
    assert set(products_of(engine)) == {StackedProduct}, "the log says why not"
    for num_tokens in (1, 3, 40):
        x = torch.randn(num_tokens, engine.config.hidden_size, device="cuda").bfloat16()
        residual = Residual(alone(), num_tokens, is_divided=False)
        for mixture in mixtures(engine):
            torch.cuda.set_sync_debug_mode("error")
            try:
                together = mixture(x, engine.model.ops, residual)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            products, mixture._products = mixture._products, (None, None)
            one_by_one = mixture(x, engine.model.ops, residual)
            mixture._products = products
            torch.testing.assert_close(together, one_by_one, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("family", few(MIXTURES))
@torch.inference_mode()
def test_steps_are_graphs(tmp_path, family):
    sizes = {"hidden_size": 64, "head_dim": 16, "max_position_embeddings": 1024}
    engine = engine_of(write_any_model(tmp_path, family, seed=3, **sizes))
    need_flash_attention()
    assert isinstance(engine.program, StaticDecode), "nothing was captured; the log says why"
    for cache in caches_of(engine):
        cache.normal_()
    for seed, num_requests in enumerate((1, 7, 64)):
        batch = random_decode(engine, num_requests, seed)
        expected = engine.model(batch, engine.attention)
        replayed = run_program(engine.program, batch)
        assert float((replayed - expected).abs().max() / expected.abs().max()) < 0.05


@pytest.mark.parametrize("fields", few([{"quantization": "int8"}, {"dtype": "float32"}]))
def test_others_are_computed_one_by_one_without_graphs(tmp_path, fields):
    engine = engine_of(write_any_model(tmp_path, "qwen3_moe", seed=3), **fields)
    assert StackedProduct not in products_of(engine)
    assert engine.program is None


def test_batch_invariant_experts_are_computed_in_tiles(tmp_path):
    engine = engine_of(write_any_model(tmp_path, "qwen3_moe", seed=3), batch_invariant=True)
    assert not any(each.takes(torch.bfloat16) for mixture in mixtures(engine) for each in mixture._products)
    assert engine.program is None
