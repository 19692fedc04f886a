"""Published tables: what is in them is in the profiles that are made of them, and plans are made with these."""

import json

import pytest

from splitserve_bench.plan.model_sizes import read_model_sizes
from splitserve_bench.plan.search import study_of
from tests.published_tables import TABLES, profiles_of
from tests.unit.splitserve_bench.plan_kit import asked, asked_nodes, model_folder


def coefficients(base=10.0, each=0.1, squared=1e-5, step=8.0):
    """Of DistServe's form, for one size; a step of answers from 96 on is 2 ms shorter than the other form would say."""
    return {
        "decoding_large_small_bs_threshold": 95,
        "prefill": [base, each, squared],
        "decoding_smallbs": [step, 1e-4, 0.05],
        "decoding_largebs": [step - 2.0, 1e-4, 0.05],
    }


def distserve_file(path, models=None):
    path.write_text(json.dumps(models or {"a/model": {"1": coefficients(), "2": coefficients(6.0, 0.05, 5e-6, 5.0)}}))
    return path


SPLITWISE_COLUMNS = (
    "model,hardware,prompt_size,batch_size,token_size,peak_power,average_power,prompt_time,token_time,e2e_time,"
    "tensor_parallel"
)


def splitwise_file(path, rows=None, columns=SPLITWISE_COLUMNS):
    """Prompts of 50 ms + 0.1 ms a token; a step of n answers is 20 + n ms, and 1 µs longer for each token before."""
    if rows is None:
        rows = [
            f"m,{hardware},{tokens},{batch},128,1.0,0.7,{50 + 0.1 * tokens * batch},"
            f"{20 + batch + 0.001 * batch * (tokens + 64)},900,{tp}"
            for hardware, tp in (("h100-80gb", 1), ("a100-80gb", 1), ("h100-80gb", 2))
            for tokens, batch in ((128, 1), (512, 1), (512, 2), (512, 4), (512, 8), (1024, 1), (2048, 1))
            for _ in range(3)
        ]
    path.write_text("\n".join([columns, *rows]) + "\n")
    return path


LAYER_PARTS = ("layernorm", "qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj")


def llmservingsim_folder(path, beside=2):
    """Every part of a layer takes 10 µs and 0.1 µs a token; attention of a chunk 0.2 µs a token and 0.001 µs a token
    before it, of an answer 1 µs and 0.01 µs a token before it, so many times that beside a chunk."""
    folder = path / "RTX" / "a" / "model" / "bf16" / "tp1"
    folder.mkdir(parents=True)
    parts = (*LAYER_PARTS, "embedding", "final_layernorm")
    dense = [f"{part},{tokens},{10 + 0.1 * tokens}" for part in parts for tokens in (1, 128, 512, 2048)]
    (folder / "dense.csv").write_text("\n".join(["layer,tokens,time_us", *dense]) + "\n")
    heads = [f"{part},{num},{100 + num}" for part in ("lm_head", "sampler") for num in (1, 16, 256)]
    (folder / "per_sequence.csv").write_text("\n".join(["layer,sequences,time_us", *heads]) + "\n")
    chunk_us = {(chunk, before): 0.2 * chunk + 0.001 * before for chunk in (16, 512, 2048) for before in (0, 512, 4096)}
    answer_us = {(num, each): num + 0.01 * each * num for num in (1, 16, 256) for each in (16, 1024, 4096)}
    rows = [f"{chunk},{before},0,0,{us}" for (chunk, before), us in chunk_us.items()]
    rows += [f"0,0,{num},{each},{us}" for (num, each), us in answer_us.items()]
    rows += [
        f"{chunk},{before},{num},{each},{us + beside * more_us}"
        for (chunk, before), us in chunk_us.items()
        for (num, each), more_us in answer_us.items()
    ]
    header = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"
    (folder / "attention.csv").write_text("\n".join([header, *rows]) + "\n")
    return folder.parent


@pytest.fixture
def folder(tmp_path):
    return model_folder(tmp_path / "model")


def steps_of(table, source, folder, table_model="m", hardware="h100-80gb"):
    return TABLES[table](source, table_model, hardware, read_model_sizes(folder))


def test_distserve_steps_are_its_formulas(tmp_path, folder):
    sizes = steps_of("distserve", distserve_file(tmp_path / "profile.json"), folder, "a/model")
    assert sorted(sizes) == [1, 2]
    steps = sizes[1]
    assert steps.chunk_s(1000, 0) == pytest.approx((10 + 0.1 * 1000 + 1e-5 * 1000**2) / 1e3)
    assert steps.answers_s(10, 200) == pytest.approx((8 + 1e-4 * 10 * 200 + 0.05 * 10) / 1e3)
    assert steps.answers_s(95, 200) == pytest.approx((6 + 1e-4 * 95 * 200 + 0.05 * 95) / 1e3)
    assert steps.chunk_s(600, 0) + steps.chunk_s(400, 600) == pytest.approx(steps.chunk_s(1000, 0) + 0.010)


def test_splitwise_steps_are_its_medians(tmp_path, folder):
    sizes = steps_of("splitwise", splitwise_file(tmp_path / "perf_model.csv"), folder)
    assert sorted(sizes) == [1, 2]
    steps = sizes[1]
    assert steps.chunk_s(512, 0) == pytest.approx(0.050 + 0.0001 * 512)
    assert steps.chunk_s(768, 0) == pytest.approx(0.050 + 0.0001 * 768)
    assert steps.chunk_s(128, 1024) == steps.chunk_s(128, 0)
    assert steps.answers_s(4, 576) == pytest.approx((24 + 0.001 * 4 * 576) / 1e3)
    assert steps.answers_s(4, 1576) - steps.answers_s(4, 576) == pytest.approx(4 * 1000 * 1e-6)


def test_llmservingsim_steps_are_the_sum_of_their_parts(tmp_path, folder):
    (steps,) = steps_of("llmservingsim", llmservingsim_folder(tmp_path), folder).values()

    def shared_us(tokens, sequences):
        per_layer = len(LAYER_PARTS) + 1  # two norms
        return (per_layer * 8 + 2) * (10 + 0.1 * tokens) + 2 * (100 + sequences)

    assert steps.chunk_s(512, 512) * 1e6 == pytest.approx(shared_us(512, 1) + 8 * (0.2 * 512 + 0.512))
    assert steps.answers_s(16, 1024) * 1e6 == pytest.approx(shared_us(16, 16) + 8 * (16 + 0.01 * 1024 * 16))


@pytest.mark.parametrize("table", ["distserve", "splitwise"])
def test_plans_are_made_with_a_profile_of_each_size(tmp_path, folder, table):
    """Splitwise's prompts take longer on two ranks than half of what one takes, so that one rank a node is best."""
    source = {"distserve": distserve_file, "splitwise": splitwise_file}[table](tmp_path / "table")
    nodes = asked_nodes(model=str(folder), both_hardware=("h100-80gb",))
    paths = []
    for tp, profile in profiles_of(table, source, {"distserve": "a/model", "splitwise": "m"}[table], nodes).items():
        paths.append(str(tmp_path / f"tp{tp}.json"))
        profile.save(tmp_path / f"tp{tp}.json")
    names = dict.fromkeys(("prefill_hardware", "decode_hardware", "both_hardware"), ())
    study = study_of(asked(asked_nodes(profiles=tuple(paths), **names), gpus=4, candidates=9))
    assert {kind.num_devices for kind in study.machines.kinds} == {1, 2}
    assert {pool.kind.tp for plan in study.plans for pool in plan.pools} == {1, 2}
    first = study.probe(0, 1.0, 0)
    assert first.num_counted == 40
    if table == "splitwise":
        assert all(pool.kind.tp == 1 for pool in study.plans[0].pools)
