"""Equal names of blocks, equal bits; and engines whose bits may differ are told apart."""

import pytest
import torch

from engine.build import build_engine
from engine.native.library import native_library
from engine.native.linear import best_variant
from engine.numerics import numerics_facts
from serving_core.node.blocks import BlockAllocator
from serving_core.settings import EngineSettings
from tests.tiny_models import write_tiny_model
from tests.toy_scheduler import greedy, run_all

PROMPT = [(7 * place * place + place) % 250 for place in range(45)]
OTHER = [*PROMPT[:20], *range(30)]


@pytest.fixture(scope="module")
def folder(written):
    return written(write_tiny_model, seed=3)


def load(folder, **fields):
    return build_engine(EngineSettings(model=str(folder), num_kv_blocks=64, block_size=8, dtype="bfloat16", **fields))


def blocks(engine, prompts, max_tokens=20):
    """The bits of all blocks that a chat of two turns has left, by name."""
    allocator = BlockAllocator(engine.num_blocks)
    answers = run_all(engine, prompts, greedy(max_tokens, ignore_eos=True), allocator=allocator)
    turn = [*prompts[0], *(token.token_id for token in answers[0]), *range(9)]
    run_all(engine, [turn], greedy(max_tokens, ignore_eos=True), allocator=allocator)
    layers = range(engine.layout.num_layers)
    return {
        name: torch.cat([caches for layer in layers for caches in engine.pool.read_tensors(layer, [block])])
        for name, block in allocator.blocks_by_name.items()
    }


def test_blocks_of_one_name_have_equal_bits_whatever_they_were_computed_beside(folder):
    alone = blocks(load(folder, batch_invariant=True), [PROMPT])
    beside = blocks(load(folder, batch_invariant=True), [PROMPT, OTHER])
    assert set(alone) < set(beside)
    assert len(alone) == (len(PROMPT) + 20 + 9 + 20 - 1) // 8
    assert all(torch.equal(bits, beside[name]) for name, bits in alone.items())


@pytest.mark.parametrize(("kv_cache_dtype", "num_alike"), [("auto", len(PROMPT) + 20), ("int8", len(PROMPT))])
def test_an_answer_and_the_same_tokens_read_as_a_prompt_have_one_name_where_they_have_the_same_bits(
    folder, kv_cache_dtype, num_alike
):
    engine = load(folder, batch_invariant=True, kv_cache_dtype=kv_cache_dtype)
    assert engine.is_batch_invariant == (kv_cache_dtype == "auto")
    [answer] = run_all(engine, [PROMPT], greedy(20, ignore_eos=True))
    written = blocks(engine, [PROMPT])
    read = blocks(engine, [[*PROMPT, *(token.token_id for token in answer)]])
    shared = set(written) & set(read)
    assert len(shared) == num_alike // 8
    assert all(torch.equal(written[name], read[name]) for name in shared)


@pytest.mark.skipif(native_library() is None, reason="the native kernels are not built")
def test_engines_without_the_compiled_kernels_have_other_names(folder, monkeypatch):
    native = load(folder)
    monkeypatch.setenv("SPLITSERVE_NATIVE", "off")
    portable = load(folder)
    assert native.fingerprint == portable.fingerprint
    assert not set(blocks(native, [PROMPT])) & set(blocks(portable, [PROMPT]))
    monkeypatch.setenv("SPLITSERVE_NATIVE", "plain")
    assert load(folder).numerics not in (native.numerics, portable.numerics)


def test_an_origin_is_the_same_for_the_same_engine_and_another_for_other_ways_to_compute(folder, monkeypatch):
    numerics = [load(folder).numerics, load(folder, batch_invariant=True).numerics]
    assert numerics[0] == load(folder).numerics
    assert len(numerics[0]) == 8
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_f": False})
    numerics.append(load(folder).numerics)
    assert len(set(numerics)) == len(numerics)


def test_the_number_of_threads_counts_where_torch_computes_alone(folder, monkeypatch):
    monkeypatch.setenv("SPLITSERVE_NATIVE", "off")
    portable = load(folder)
    torch.set_num_threads(torch.get_num_threads() + 1)
    assert load(folder).numerics != portable.numerics
    assert portable.numerics_facts["is_batch_invariant"] == "no"


@pytest.mark.skipif(best_variant(torch.bfloat16) is None, reason="bfloat16 products are not native here")
def test_engines_of_unlike_threads_are_of_one_kind_where_kernels_compute_everything(folder):
    native = load(folder)
    torch.set_num_threads(torch.get_num_threads() + 1)
    assert load(folder).numerics_facts == native.numerics_facts
    assert native.numerics_facts["is_batch_invariant"] == "yes"


def test_traits_tell_of_the_cpu_its_instructions_and_where_torch_computes_its_caches_too(monkeypatch):
    cpu = {"avx2": True, "avx512_f": False, "cpu_name": "Some CPU", "num_sockets": 2, "l2_cache_size": 4096}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: cpu)
    description = {"attention": "native", "threads": "3", "program": "Some"}
    native, portable = (
        numerics_facts(description, torch.device("cpu"), kernels_alone=alone) for alone in (True, False)
    )
    assert (native["cpu"], portable["cpu"]) == ("avx2", "avx2 cpu_name=Some-CPU l2_cache_size=4096")
    assert portable.keys() - native.keys() == {"threads", "program"}
    assert native["kernels"] == portable["kernels"]
