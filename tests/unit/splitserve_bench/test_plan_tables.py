"""Published tables: what is in them comes out of them, and what is none of them is refused by name."""

import pytest

from serving_core.requests import Work
from splitserve_bench.errors import BenchError
from splitserve_bench.plan.devices import DEVICES, link_of
from splitserve_bench.plan.model_sizes import read_model_sizes
from splitserve_bench.plan.tables import Entry, left_out, read_table
from splitserve_bench.simulate.costs import StepLoad, load_of, seconds_of
from splitserve_bench.simulate.grid import Grid
from tests.unit.splitserve_bench.plan_kit import (
    LAYER_PARTS,
    OPT,
    coefficients,
    distserve_file,
    llmservingsim_folder,
    model_folder,
    splitwise_file,
)

NVLINK = link_of("nvlink", DEVICES["h100"])


@pytest.fixture
def model(tmp_path):
    return read_model_sizes(model_folder(tmp_path / "model"))


def checks_of(table, entry, model=None):
    return {check.what: check for check in table.checks(entry, model)}


def test_distserve_steps_are_its_formulas(tmp_path, model):
    table = read_table(distserve_file(tmp_path / "profile.json"))
    assert table.entries() == [Entry("a/model", "", 1), Entry("a/model", "", 2)]
    steps = table.steps(Entry("a/model", "", 1), model, NVLINK)
    assert steps.chunk_s(1000, 0) == pytest.approx((10 + 0.1 * 1000 + 1e-5 * 1000**2) / 1e3)
    assert steps.answers_s(10, 200) == pytest.approx((8 + 1e-4 * 10 * 200 + 0.05 * 10) / 1e3)
    assert steps.answers_s(95, 200) == pytest.approx((6 + 1e-4 * 95 * 200 + 0.05 * 95) / 1e3)


@pytest.mark.parametrize("chunks", [[(0, 128)] * 16, [(0, 300), (0, 20), (512, 100)], [(700, 64)]])
def test_prompts_of_one_step_add_the_squares_of_each_and_not_of_all(tmp_path, model, chunks):
    steps = read_table(distserve_file(tmp_path / "profile.json")).steps(Entry("a/model", "", 1), model, NVLINK)
    load = load_of([Work(None, start, num_tokens, []) for start, num_tokens in chunks])
    squares = sum((start + num_tokens) ** 2 - start**2 for start, num_tokens in chunks)
    expected_s = (10 + 0.1 * sum(num_tokens for _, num_tokens in chunks) + 1e-5 * squares) / 1e3
    assert seconds_of(steps, load) == pytest.approx(expected_s)


def test_what_more_answers_add_may_be_below_0_as_it_was_published_but_no_step_is(tmp_path, model):
    fitted = {"m": {"2": {**coefficients(), "decoding_smallbs": [141.5, 0.0019, -2.25]}}}
    steps = read_table(distserve_file(tmp_path / "profile.json", fitted)).steps(Entry("m", "", 2), model, NVLINK)
    assert steps.answers_s(8, 100) == pytest.approx((141.5 + 0.0019 * 8 * 100 - 2.25 * 8) / 1e3)
    assert steps.answers_s(94, 0) == 0.0


def test_chunks_take_what_the_whole_prompt_takes_but_for_the_floor(tmp_path, model):
    table = read_table(distserve_file(tmp_path / "profile.json"))
    steps = table.steps(Entry("a/model", "", 1), model, NVLINK)
    in_parts_s = steps.chunk_s(600, 0) + steps.chunk_s(400, 600)
    assert in_parts_s == pytest.approx(steps.chunk_s(1000, 0) + 0.010)


def test_a_step_of_both_is_one_of_prompts_and_the_attention_of_its_answers(tmp_path, model):
    """10 ms, 0.1 for each of 510 tokens, 1e-5 for the square of the 500; 1e-4 for each of 2,000 before answers."""
    steps = read_table(distserve_file(tmp_path / "profile.json")).steps(Entry("a/model", "", 1), model, NVLINK)
    both_s = steps.both_s(StepLoad(10, 2000, 500, 0))
    assert both_s == pytest.approx((10 + 51 + 2.5 + 0.2) / 1e3)


def test_distserve_has_a_size_between_two_others_to_hold_out(tmp_path):
    halves = {str(tp): coefficients(8.0 / tp, 0.2 / tp, 0.0, 16.0 / tp) for tp in (1, 2, 4)}
    table = read_table(distserve_file(tmp_path / "profile.json", {"m": halves}))
    prompts = checks_of(table, Entry("m", "", 2))["prompts, TP 2 from TP 1 and 4"]
    assert (prompts.num_held_out, prompts.mape) == (5, pytest.approx(0, abs=1e-12))
    assert not table.checks(Entry("m", "", 1), None)


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ({"m": {"two": coefficients()}}, "tensor parallel size"),
        ({"m": {"1": {**coefficients(), "prefill": [1, 2]}}}, "prefill .* a list of 3 numbers"),
        ({"m": {"1": {**coefficients(), "decoding_smallbs": [-1, 2, 3]}}}, "finite number"),
        ({"m": {"1": {**coefficients(), "decoding_large_small_bs_threshold": "95"}}}, "threshold"),
        ({"m": []}, "an object"),
        ({"m": {}}, "has no model"),
    ],
)
def test_what_is_not_as_distserve_writes_it_is_refused(tmp_path, models, words):
    with pytest.raises(BenchError, match=words):
        read_table(distserve_file(tmp_path / "profile.json", models))


def test_splitwise_steps_are_its_medians(tmp_path, model):
    table = read_table(splitwise_file(tmp_path / "perf_model.csv"))
    assert len(table.entries()) == 3
    steps = table.steps(Entry("m", "h100-80gb", 1), model, NVLINK)
    assert steps.chunk_s(512, 0) == pytest.approx(0.050 + 0.0001 * 512)
    assert steps.chunk_s(768, 0) == pytest.approx(0.050 + 0.0001 * 768)
    assert steps.answers_s(4, 576) == pytest.approx((24 + 0.001 * 4 * 576) / 1e3)
    assert steps.answers_s(4, 1576) - steps.answers_s(4, 576) == pytest.approx(4 * 1000 * 1e-6)


def test_a_chunk_of_splitwise_is_never_shorter_than_a_prompt_of_its_size(tmp_path, model):
    steps = read_table(splitwise_file(tmp_path / "t.csv")).steps(Entry("m", "h100-80gb", 1), model, NVLINK)
    assert steps.chunk_s(128, 1024) == steps.chunk_s(128, 0)
    assert steps.chunk_s(1024, 1024) >= 0.0001 * 1024


def test_what_is_straight_is_told_exactly_by_the_rest_of_splitwise(tmp_path):
    table = read_table(splitwise_file(tmp_path / "perf_model.csv"))
    for name, check in checks_of(table, Entry("m", "a100-80gb", 1)).items():
        assert check.mape == pytest.approx(0, abs=0.02), name
        assert check.num_held_out > 0


def test_an_odd_one_out_shows_in_the_error(tmp_path):
    rows = [f"m,h,{tokens},1,128,1,1,{ms},20,900,1" for tokens, ms in ((128, 50), (512, 200), (1024, 100))]
    rows += ["m,h,512,2,128,1,1,60,22,900,1"]
    checks = checks_of(read_table(splitwise_file(tmp_path / "t.csv", 5 * rows)), Entry("m", "h", 1))
    between_ms = 50 + 50 * (512 - 128) / (1024 - 128)
    assert checks["prompts, each length in turn"].mape == pytest.approx(1 - between_ms / 200)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (["m,h,128,1,128,1,1,fast,20,900,1"], "line 2: prompt_time must be a number, not 'fast'"),
        (["m,h,128,1,128,1,1,0,20,900,1"], "prompt_time must be above 0"),
        (["m,h,12.5,1,128,1,1,50,20,900,1"], "prompt_size must be a whole number"),
        (["m,,128,1,128,1,1,50,20,900,1"], "hardware is empty"),
        (["m,h,128,1"], "values are needed"),
        ([], "has no rows"),
    ],
)
def test_a_row_that_is_not_as_splitwise_writes_it_is_refused(tmp_path, rows, words):
    with pytest.raises(BenchError, match=words):
        read_table(splitwise_file(tmp_path / "t.csv", rows))


def test_a_column_that_is_missing_is_named(tmp_path):
    with pytest.raises(BenchError, match="no column tensor_parallel"):
        read_table(
            splitwise_file(
                tmp_path / "t.csv",
                ["m,h,1,1,1,1,1,1,1"],
                "model,hardware,prompt_size,batch_size,token_size,peak_power,average_power,prompt_time,token_time",
            )
        )


def test_a_table_with_too_little_cannot_be_fitted(tmp_path, model):
    table = read_table(splitwise_file(tmp_path / "t.csv", ["m,h,128,1,128,1,1,50,20,900,1"]))
    with pytest.raises(BenchError, match="two lengths"):
        table.steps(Entry("m", "h", 1), model, NVLINK)


def test_llmservingsim_steps_are_the_sum_of_their_parts(tmp_path, model):
    table = read_table(llmservingsim_folder(tmp_path))
    entry = Entry("model", "RTX", 1)
    assert table.entries() == [entry]
    steps = table.steps(entry, model, NVLINK)

    def shared_us(tokens, sequences):
        per_layer = len(LAYER_PARTS) + 1  # two norms
        return (per_layer * model.num_layers + 2) * (10 + 0.1 * tokens) + 2 * (100 + sequences)

    assert steps.chunk_s(512, 512) * 1e6 == pytest.approx(shared_us(512, 1) + 8 * (0.2 * 512 + 0.512))
    assert steps.answers_s(16, 1024) * 1e6 == pytest.approx(shared_us(16, 16) + 8 * (16 + 0.01 * 1024 * 16))
    both_us = shared_us(528, 17) + 8 * (0.2 * 512 + 0.512 + 2 * (16 + 0.01 * 1024 * 16))
    assert steps.both_s(StepLoad(16, 16 * 1024, 512, 512 * 512)) * 1e6 == pytest.approx(both_us)


def test_steps_of_both_are_held_out_with_the_model(tmp_path, model):
    table = read_table(llmservingsim_folder(tmp_path))
    checks = checks_of(table, Entry("model", "RTX", 1), model)
    assert checks["whole steps of both, half of the places"].mape == pytest.approx(0, abs=1e-9)
    assert "whole steps of both, half of the places" not in checks_of(table, Entry("model", "RTX", 1))


def test_what_llmservingsim_may_not_have(tmp_path):
    folder = llmservingsim_folder(tmp_path)
    (folder / "tp1" / "moe.csv").write_text("")
    with pytest.raises(BenchError, match="mixture of experts"):
        read_table(folder)
    (folder / "tp1" / "moe.csv").unlink()
    with (folder / "tp1" / "dense.csv").open("a") as file:
        file.write("convolution,1,5\n")
    with pytest.raises(BenchError, match="'convolution'"):
        read_table(folder)
    with pytest.raises(BenchError, match="no folder tp1"):
        read_table(tmp_path)


def test_a_place_left_out_is_told_by_its_neighbours():
    grid = Grid((1, 2, 3), (0,), ((1.0,), (5.0,), (3.0,)))
    assert left_out(grid) == [(2.0, 5.0)]


def test_sizes_of_models_that_tables_are_about(tmp_path, model):
    opt = read_model_sizes(model_folder(tmp_path / "opt-13b", OPT))
    assert opt.weight_bytes / 2 == pytest.approx(12.85e9, rel=0.01)  # weights of OPT-13B
    assert opt.rank_token_bytes(1) == 2 * 40 * 5120 * 2
    assert opt.rank_token_bytes(4) == 2 * 40 * 1280 * 2
    assert model.rank_token_bytes(8) == model.rank_token_bytes(4)  # 4 KV heads: ranks share them
