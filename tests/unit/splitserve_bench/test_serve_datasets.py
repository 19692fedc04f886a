"""Loads: random ones and recorded ones, what is cut to the length of the model, and when requests are sent."""

import itertools
import json
import math
import random
import statistics
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.text.tokenizer import TokenLimit, read_tokenizer
from splitserve_bench.compare.run import Workload
from splitserve_bench.errors import BenchError
from splitserve_bench.serve.arrivals import send_times_s
from splitserve_bench.serve.command import Dataset
from splitserve_bench.serve.datasets import (
    Shape,
    TracedRequest,
    at_rate,
    fit,
    ordinary_ids,
    plan,
    random_load,
    read_azure_trace,
    read_mooncake_trace,
    trace_load,
)
from splitserve_bench.serve.records import ServedModel
from splitserve_bench.serve.workload import Texts, workload_of
from tests.tiny_models import write_tokenizer
from tests.unit.splitserve_bench.bench_serve_kit import staged_options

# ---- random loads ----


def test_fixed_lengths_and_equal_seeds():
    load = random_load(5, 7, 3, 0.0, 100, random.Random(1))
    assert [(len(shape.prompt), shape.output_tokens) for shape in load] == [(7, 3)] * 5
    assert load == random_load(5, 7, 3, 0.0, 100, random.Random(1))
    assert len({shape.prompt for shape in load}) == 5
    assert load != random_load(5, 7, 3, 0.0, 100, random.Random(2))


def test_a_shared_beginning_comes_before_what_each_prompt_has_of_its_own():
    load = random_load(20, 7, 3, 0.4, 5000, random.Random(1), prefix_tokens=30)
    (prefix,) = {shape.prompt[:30] for shape in load}
    assert {len(shape.prompt) for shape in load} <= set(range(30 + 4, 30 + 11))
    assert len({shape.prompt[30] for shape in load}) > 15
    assert len(set(prefix)) > 25
    assert load != random_load(20, 7, 3, 0.4, 5000, random.Random(2), prefix_tokens=30)


def test_lengths_are_spread_over_the_whole_range():
    load = random_load(3000, 10, 5, 0.25, 50, random.Random(3))
    prompts = [len(shape.prompt) for shape in load]
    answers = [shape.output_tokens for shape in load]
    assert set(prompts) == set(range(7, 14))  # floor(7.5) to ceil(12.5)
    assert set(answers) == set(range(3, 8))  # floor(3.75) to ceil(6.25)
    assert all(abs(prompts.count(length) - 3000 / 7) < 100 for length in range(7, 14))


def test_no_length_is_0():
    load = random_load(200, 1, 1, 0.9, 50, random.Random(4))
    assert {len(shape.prompt) for shape in load} == {shape.output_tokens for shape in load} == {1, 2}


def test_prompts_share_their_ids():
    """An int of its own for each token would take four times the rest of a prompt."""
    ids = {id(each) for each in ordinary_ids(50_000)}
    drawn = random_load(4, 500, 1, 0.0, 50_000, random.Random(0))
    traced = trace_load([TracedRequest(0.0, 300, 1), TracedRequest(0.0, 300, 1, hash_ids=(1, 2))], 50_000, 0)
    assert {id(token) for shape in (*drawn, *traced) for token in shape.prompt} <= ids


def test_ids_keep_away_from_both_ends():
    assert ordinary_ids(128_256) == tuple(range(1024, 127_232))  # Llama 3: special from 128,000 on
    assert ordinary_ids(151_936) == tuple(range(1024, 150_912))  # Qwen: special from 151,643 on
    assert ordinary_ids(260) == tuple(range(32, 228))
    assert ordinary_ids(1) == tuple(range(1))
    ids = {each for shape in random_load(200, 100, 1, 0.0, 260, random.Random(5)) for each in shape.prompt}
    assert ids == set(range(32, 228))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"range_ratio": 1.0}, r"in \[0, 1\), not 1"),
        ({"range_ratio": -0.1}, r"in \[0, 1\), not -0.1"),
        ({"input_tokens": 0}, "at least 1 token, not 0"),
        ({"output_tokens": -3}, "at least 1 token, not -3"),
        ({"vocab_size": 0}, "has 1 to 4194304 tokens, not 0"),
        ({"vocab_size": 2**40}, "has 1 to 4194304 tokens, not 1099511627776"),
    ],
)
def test_what_cannot_be_a_load(change, message):
    usual = {"num_requests": 1, "input_tokens": 4, "output_tokens": 4, "range_ratio": 0.5, "vocab_size": 9}
    with pytest.raises(BenchError, match=message):
        random_load(**(usual | change), rng=random.Random())


@pytest.mark.parametrize(
    ("prompt", "answer", "fitted"),
    [
        (6, 4, (6, 4)),
        (90, 4, (6, 4)),  # a short answer stays as it is
        (3, 90, (3, 7)),  # and so does a short prompt
        (90, 90, (5, 5)),
        (9, 2, (8, 2)),
    ],
)
def test_what_is_too_long_is_cut_to_the_limit(prompt, answer, fitted):
    shape = Shape(tuple(range(prompt)), answer)
    load = fit([shape], 10)
    assert load.shapes == (Shape(tuple(range(fitted[0])), fitted[1]),)
    assert load.num_clipped == (fitted != (prompt, answer))


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), max_size=20), st.integers(2, 60))
def test_fitted_loads_fit_and_keep_what_fits(lengths, max_model_len):
    shapes = [Shape(tuple(range(prompt)), answer) for prompt, answer in lengths]
    load = fit(iter(shapes), max_model_len)
    too_long = [len(shape.prompt) + shape.output_tokens > max_model_len for shape in shapes]
    assert load.num_clipped == sum(too_long)
    for before, after, was_long in zip(shapes, load.shapes, too_long, strict=True):
        assert min(len(after.prompt), after.output_tokens) >= 1
        assert after.prompt == before.prompt[: len(after.prompt)]
        assert len(after.prompt) + after.output_tokens == max_model_len if was_long else after == before


def test_a_model_without_room():
    with pytest.raises(BenchError, match="1 tokens has no room"):
        fit([], 1)


def test_a_plan_gives_each_shape_its_time():
    shapes = [Shape((1, 2), 3), Shape((4,), 5)]
    first, second = plan(shapes, [0.5, 1.5])
    assert (first.index, first.send_at_s, first.prompt, first.output_tokens) == (0, 0.5, (1, 2), 3)
    assert (second.index, second.send_at_s, second.prompt, second.output_tokens) == (1, 1.5, (4,), 5)
    with pytest.raises(ValueError, match="shorter"):
        plan(shapes, [0.5])


# ---- loads recorded at other services ----

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:32:27.5236810,2091,10
2023-11-16 18:32:27.5603410,106,7
2023-11-16 18:32:30.0236810,492,0"""


@pytest.fixture
def azure(tmp_path):
    def write(text):
        path = tmp_path / "azure.csv"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def mooncake(tmp_path):
    def write(*rows):
        path = tmp_path / "mooncake.jsonl"
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
        return path

    return write


def row(timestamp, input_length, output_length, hash_ids):
    return {
        "timestamp": timestamp,
        "input_length": input_length,
        "output_length": output_length,
        "hash_ids": hash_ids,
    }


def test_an_azure_trace_as_published(azure):
    first, second, third = read_azure_trace(azure(AZURE))
    assert (first.at_s, first.input_tokens, first.output_tokens) == (0.0, 2091, 10)
    assert (second.at_s, second.input_tokens, second.output_tokens) == (pytest.approx(0.03666, abs=1e-6), 106, 7)
    assert (third.at_s, third.input_tokens, third.output_tokens) == (pytest.approx(2.5, abs=1e-6), 492, 1)


def test_scales_and_limit(azure):
    scaled = read_azure_trace(azure(AZURE), length_scale=1 / 16, limit=2)
    assert [(each.input_tokens, each.output_tokens) for each in scaled] == [(131, 1), (7, 1)]
    assert [each.at_s for each in scaled] == pytest.approx([0.0, 0.03666], abs=1e-6)


def test_timestamps_with_an_offset_and_other_columns(azure):
    rows = (
        "Extra,TIMESTAMP,ContextTokens,GeneratedTokens",
        "x,2024-05-10 00:00:00.5,1,2",
        "y,2024-05-10 01:00:01+01:00,3,4",
    )
    text = "\n".join(rows)
    assert [each.at_s for each in read_azure_trace(azure(text))] == [0.0, 0.5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: no column TIMESTAMP, ContextTokens, GeneratedTokens"),
        ("TIMESTAMP,ContextTokens\n", "line 1: no column GeneratedTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
        (AZURE + "\nyesterday,1,1", "line 5: TIMESTAMP cannot be 'yesterday'"),
        (AZURE + "\n2023-11-16 18:32:31,1.5,1", "line 5: ContextTokens cannot be '1.5'"),
        (AZURE + "\n2023-11-16 18:32:31,1,-1", "line 5: GeneratedTokens cannot be '-1'"),
        (AZURE + "\n2023-11-16 18:32:31,1", "line 5: GeneratedTokens cannot be 'None'"),
        (AZURE + "\n2023-11-16 18:32:31,999999999,1", "line 5: ContextTokens cannot be '999999999'"),
        (AZURE + "\n2023-11-16 18:32:29.0236810,1,1", "line 5: 1 s before the row above it"),
    ],
)
def test_bad_azure_rows_are_named(azure, text, message):
    path = azure(text)
    with pytest.raises(BenchError) as caught:
        read_azure_trace(path)
    assert str(caught.value).startswith(str(path))
    assert str(caught.value).endswith(message)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(BenchError, match=r"none\.csv cannot be read: "):
        read_azure_trace(tmp_path / "none.csv")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe{}")
    with pytest.raises(BenchError, match=r"binary\.jsonl cannot be read: "):
        read_mooncake_trace(tmp_path / "binary.jsonl")


@pytest.mark.parametrize("scales", [{"length_scale": 0}, {"length_scale": -1}, {"length_scale": math.inf}])
def test_bad_scales(azure, scales):
    with pytest.raises(BenchError, match="scale must be above 0"):
        read_azure_trace(azure(AZURE), **scales)


def test_a_mooncake_trace_as_published(mooncake):
    path = mooncake(row(27_000, 600, 52, [46, 47]), "", row(30_000, 512, 3, [46]))
    first, second = read_mooncake_trace(path)
    assert first == TracedRequest(0.0, 600, 52, (46, 47), 512.0)
    assert second == TracedRequest(3.0, 512, 3, (46,), 512.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 2: line cannot be '{\\n'"),
        ("[1]", "line 2: line cannot be '[1]\\n'"),
        ("{}", "line 2: timestamp cannot be 'None'"),
        (json.dumps(row(math.nan, 1, 1, [])), "line 2: timestamp cannot be 'nan'"),
        (json.dumps(row(1, True, 1, [])), "line 2: input_length cannot be 'True'"),
        (json.dumps(row(1, 5, 2.5, [])), "line 2: output_length cannot be '2.5'"),
        (json.dumps(row(1, 5, 2, "ab")), "line 2: hash_ids cannot be 'ab'"),
        (json.dumps(row(1, 5, 2, [-1])), "line 2: hash_ids cannot be '[-1]'"),
        (json.dumps(row(1, 513, 2, [1])), "line 2: 1 hash_ids for 513 tokens instead of 2"),
    ],
)
def test_bad_mooncake_rows_are_named(mooncake, text, message):
    path = mooncake(row(0, 5, 2, [9]), text)
    with pytest.raises(BenchError) as caught:
        read_mooncake_trace(path)
    assert str(caught.value) == f"{path}, {message}"


@pytest.mark.parametrize("length_scale", [1.0, 1 / 16, 1 / 100, 0.0001, 1.7])
def test_equal_hash_ids_give_equal_beginnings(mooncake, length_scale):
    path = mooncake(row(0, 1500, 1, [1, 2, 3]), row(1, 2048, 1, [1, 2, 4, 5]), row(2, 1500, 1, [7, 2, 3]))
    traced = read_mooncake_trace(path, length_scale=length_scale)
    first, second, third = (shape.prompt for shape in trace_load(traced, 50_000, seed=0))
    assert [len(first), len(second), len(third)] == [each.input_tokens for each in traced]
    shared = min(round(2 * 512 * length_scale), len(first))
    assert first[:shared] == second[:shared]
    if length_scale > 0.01:
        assert first[shared : shared + 20] != second[shared : shared + 20]
        assert first[:20] != third[:20]
        assert first[round(512 * length_scale) :] == third[round(512 * length_scale) :]


def test_prompts_depend_on_seed_and_hash_ids_alone(mooncake):
    path = mooncake(*(row(i, 700, 2, [i, i + 100]) for i in range(6)))
    load = trace_load(read_mooncake_trace(path), 1000, seed=3)
    assert load[:2] == trace_load(read_mooncake_trace(path, limit=2), 1000, seed=3)
    assert load[0] != trace_load(read_mooncake_trace(path, limit=1), 1000, seed=4)[0]
    assert all(125 <= each < 875 for shape in load for each in shape.prompt)
    assert [shape.output_tokens for shape in load] == [2] * 6


def test_a_prompt_ends_within_a_block():
    (shape,) = trace_load([TracedRequest(0.0, 3, 1, (8, 9), block_tokens=5.0)], 1000, seed=0)
    (longer,) = trace_load([TracedRequest(0.0, 7, 1, (8, 9), block_tokens=5.0)], 1000, seed=0)
    assert (len(shape.prompt), len(longer.prompt)) == (3, 7)
    assert longer.prompt[:3] == shape.prompt


def test_without_hash_ids_prompts_have_nothing_in_common(azure):
    load = trace_load(read_azure_trace(azure(AZURE)), 1000, seed=3)
    assert [len(shape.prompt) for shape in load] == [2091, 106, 492]
    assert len({shape.prompt[:20] for shape in load}) == 3
    assert load == trace_load(read_azure_trace(azure(AZURE)), 1000, seed=3)


def test_a_rate_stretches_the_gaps_alike():
    traced = [TracedRequest(at_s, 5, 6) for at_s in (0.0, 1.0, 1.5, 4.0)]
    assert [each.at_s for each in at_rate(traced, 6.0)] == pytest.approx([0.0, 0.125, 0.1875, 0.5])
    assert [each.at_s for each in at_rate(traced, math.inf)] == [0.0] * 4
    assert at_rate([TracedRequest(3.0, 5, 6)], 2.0) == [TracedRequest(0.0, 5, 6)]


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=50), st.floats(0.01, 1e3))
def test_the_mean_rate_is_the_one_asked_for(gaps, rate):
    times = [math.fsum(gaps[:number]) for number in range(len(gaps) + 1)]
    traced = [TracedRequest(at_s, 1, 1) for at_s in times]
    if times[-1] == 0:
        with pytest.raises(BenchError, match=f"the {len(times)} requests came at one moment"):
            at_rate(traced, rate)
        return
    stretched = [each.at_s for each in at_rate(traced, rate)]
    assert stretched == sorted(stretched)
    assert len(gaps) / (stretched[-1] - stretched[0]) == pytest.approx(rate)


def test_a_rate_of_nothing():
    with pytest.raises(BenchError, match="above 0"):
        at_rate([], 0)


# ---- when an open-loop load is sent ----


@given(
    st.integers(1, 200),
    st.floats(0.01, 1e4),
    st.floats(0.05, 1e3) | st.just(math.inf),
    st.integers(0, 2**32),
)
def test_times_are_in_order_and_end_at_n_over_rate(num_requests, rate, burstiness, seed):
    times = send_times_s(num_requests, rate, burstiness, random.Random(seed))
    assert len(times) == num_requests
    assert all(earlier <= later for earlier, later in itertools.pairwise([0.0, *times]))
    assert times[-1] == num_requests / rate
    assert times == send_times_s(num_requests, rate, burstiness, random.Random(seed))


def test_the_gaps_are_drawn_and_scaled_as_written_down():
    class Drawn(random.Random):
        gaps = iter([2.0, 1.0, 5.0])

        def gammavariate(self, alpha, beta):
            assert (alpha, alpha * beta) == (0.25, 1.0)  # shape, and a mean of one before the scaling
            return next(self.gaps)

    assert send_times_s(3, 0.375, 0.25, Drawn()) == [2.0, 3.0, 8.0]  # 3 requests at 0.375/s take 8 s


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_vary_by_one_over_the_root_of_burstiness(burstiness):
    times = send_times_s(20_000, 10.0, burstiness, random.Random(1))
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.01)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)


def test_a_poisson_process_has_exponential_gaps():
    times = send_times_s(20_000, 1.0, 1.0, random.Random(2))
    gaps = [later - earlier for earlier, later in itertools.pairwise([0.0, *times])]
    for at in (0.1, 0.5, 1.0, 2.0, 4.0):
        assert sum(gap > at for gap in gaps) / len(gaps) == pytest.approx(math.exp(-at), abs=0.015)


def test_an_infinite_rate_sends_all_at_once_and_an_infinite_burstiness_evenly():
    assert send_times_s(3, math.inf, 1.0, random.Random()) == [0.0, 0.0, 0.0]
    assert send_times_s(4, 2.0, math.inf, random.Random()) == [0.5, 1.0, 1.5, 2.0]
    assert send_times_s(0, 2.0, 1.0, random.Random()) == []


@pytest.mark.parametrize(("rate", "burstiness"), [(0, 1), (-1, 1), (math.nan, 1), (1, 0), (1, -2), (1, math.nan)])
def test_what_cannot_be_a_rate_or_burstiness(rate, burstiness):
    with pytest.raises(BenchError, match="must be above 0"):
        send_times_s(1, rate, burstiness, random.Random())


# ---- texts; the tests' tokenizer has a token for each byte ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("model")
    write_tokenizer(made)
    return made


def conversation(*lengths):
    return {"id": "x", "conversations": [{"from": "human", "value": "x" * length} for length in lengths]}


KEPT = [(4, 4), (1024, 4), (4, 2044), (1024, 1024), (5, 6)]
LEFT_OUT = [(3, 4), (4, 3), (1025, 4), (4, 2045), (1024, 1025), (0, 9)]


def sharegpt(path, lengths):
    path.write_text(
        json.dumps([{"id": "y"}, conversation(), conversation(9), *(conversation(*one) for one in lengths)])
    )
    return path


def lines_of(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def as_they_stand(path, folder):
    return Texts(Dataset("custom", str(path), skip_chat_template=True), folder)


async def test_a_custom_prompt_is_what_a_chat_of_it_is(folder, tmp_path):
    path = lines_of(tmp_path / "prompts.jsonl", [{"prompt": "ä <|eos|>", "output_tokens": 3}])
    (shape,) = Texts(Dataset("custom", str(path)), folder).shapes(9, Random(0))
    limit = TokenLimit(1000, lambda found: AssertionError(found))
    chat = await read_tokenizer(folder).encode_chat([{"role": "user", "content": "ä <|eos|>"}], limit)
    assert (list(shape.prompt), shape.output_tokens, shape.text) == (chat, 3, "")
    assert len(shape.prompt) > len(as_they_stand(path, folder).shapes(1, Random(0))[0].prompt)


def test_without_a_chat_template_prompts_are_sent_as_they_stand_or_not_at_all(tmp_path):
    write_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    path = lines_of(tmp_path / "p", [{"prompt": "a"}])
    for source, said in ((None, "has no chat template: --skip-chat-template"), ("{{ raise_exception('No.') }}", "No")):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": source}))
        with pytest.raises(BenchError, match=said):
            Texts(Dataset("custom", str(path)), tmp_path).shapes(1, Random(0))
        assert as_they_stand(path, tmp_path).shapes(1, Random(0))[0].text == "a"


def test_conversations_of_the_lengths_that_vllm_takes(folder, tmp_path):
    path = sharegpt(tmp_path / "chats.json", [*KEPT, *LEFT_OUT, (7, 8, 5000)])
    shapes = Texts(Dataset("sharegpt", str(path)), folder).shapes(100, Random(0))
    assert Counter((len(each.prompt), each.output_tokens) for each in shapes) == Counter([*KEPT, (7, 8)])
    assert all(bytes(each.prompt).decode() == each.text for each in shapes)


def test_an_answer_whose_length_is_given_may_be_short(folder, tmp_path):
    path = sharegpt(tmp_path / "chats.json", [*KEPT, *LEFT_OUT])
    shapes = Texts(Dataset("sharegpt", str(path), text_output_len=1), folder).shapes(100, Random(0))
    prompts = [prompt for prompt, _ in [*KEPT, *LEFT_OUT] if 4 <= prompt <= 1024]
    assert Counter((len(each.prompt), each.output_tokens) for each in shapes) == Counter((each, 1) for each in prompts)


def test_lines_have_256_tokens_where_they_tell_nothing_else(folder, tmp_path):
    rows = [{"prompt": "ä", "output_tokens": 3}, {"prompt": "bb", "more": 1}, {"prompt": "c", "output_tokens": None}]
    path = lines_of(tmp_path / "prompts.jsonl", rows)
    shapes = as_they_stand(path, folder).shapes(9, Random(0))
    assert {each.text: (len(each.prompt), each.output_tokens) for each in shapes} == {
        "ä": (2, 3),
        "bb": (2, 256),
        "c": (1, 256),
    }
    assert {
        each.output_tokens
        for each in Texts(Dataset("custom", str(path), text_output_len=7), folder).shapes(9, Random(0))
    } == {7}


def test_a_seed_draws_the_order_and_no_text_comes_twice(folder, tmp_path):
    texts = as_they_stand(lines_of(tmp_path / "p", [{"prompt": f"{i:02}"} for i in range(50)]), folder)
    drawn = [[each.text for each in texts.shapes(50, Random(seed))] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert set(drawn[0]) == set(drawn[2]) == {f"{i:02}" for i in range(50)}
    assert [each.text for each in texts.shapes(3, Random(1))] == drawn[0][:3]
    assert len(texts.shapes(51, Random(1))) == 50


def test_a_text_of_which_something_is_cut_off_is_sent_as_token_ids(folder, tmp_path):
    rows = [{"prompt": "a" * 10, "output_tokens": 90}, {"prompt": "b" * 70, "output_tokens": 90}]
    shapes = as_they_stand(lines_of(tmp_path / "p", rows), folder).shapes(2, Random(0))
    fitted = sorted(fit(shapes, 60).shapes, key=lambda each: each.prompt)
    assert [(each.prompt, each.output_tokens, each.text) for each in fitted] == [
        ((97,) * 10, 50, "a" * 10),
        ((98,) * 30, 30, ""),
    ]


BAD_FILES = {
    "no JSON": ("sharegpt", '[{"id": 1},\n{"id" 2}]', "file, line 2: no JSON: "),
    "no list": ("sharegpt", '{"conversations": []}', "file is no JSON list of conversations"),
    "depths": ("sharegpt", "[" * 100_000, "file is nested too deeply"),
    "a deep line": ("custom", "[" * 100_000, "file, line 1: line cannot be '[["),
    "an entry that is none": ("sharegpt", "[{}, 7]", "file, entry 2: conversations cannot be '7'"),
    "no turns": ("sharegpt", '[{"conversations": "hello"}]', "file, entry 1: conversations cannot be "),
    "a turn without text": (
        "sharegpt",
        '[{"conversations": [{"value": "hello"}, {"text": "you"}]}]',
        """file, entry 1: a turn's value cannot be "{'text': 'you'}\"""",
    ),
    "nothing that is kept": (
        "sharegpt",
        json.dumps([conversation(3, 9)]),
        "file has no requests, prompts of 4 to 1024",
    ),
    "no object": ("custom", '{"prompt": "a"}\n\n["b"]', "file, line 3: line cannot be "),
    "a line that is no JSON": ("custom", '{"prompt": "a"}\nhello', "file, line 2: line cannot be 'hello"),
    "no prompt": ("custom", '{"text": "a"}', "file, line 1: prompt cannot be 'None'"),
    "an empty prompt": ("custom", '{"prompt": ""}', "file, line 1: prompt cannot be ''"),
    "half a character": ("custom", '{"prompt": "\\ud800"}', "file, line 1: prompt cannot be "),
    "no answer": ("custom", '{"prompt": "a", "output_tokens": 0}', "file, line 1: output_tokens cannot be '0'"),
    "a part of a token": ("custom", '{"prompt": "a", "output_tokens": 2.5}', "line 1: output_tokens cannot be '2.5'"),
    "an empty file": ("custom", "\n", "file has no requests"),
}


@pytest.mark.parametrize(("name", "text", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_what_cannot_be_used_is_named(folder, tmp_path, name, text, message):
    (tmp_path / "file").write_text(text)
    with pytest.raises(BenchError) as raised:
        Texts(Dataset(name, str(tmp_path / "file")), folder).shapes(1, Random(0))
    assert message in str(raised.value)


def test_a_file_that_is_no_text_is_named(folder, tmp_path):
    (tmp_path / "file").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(BenchError, match="file cannot be read: "):
        Texts(Dataset("custom", str(tmp_path / "file")), folder)


def test_a_comparison_draws_other_texts_for_every_seed(folder, tmp_path):
    rows = [{"prompt": f"{i:03}" * 10, "output_tokens": 40} for i in range(100)]
    data = Dataset("custom", str(lines_of(tmp_path / "p", rows)), skip_chat_template=True)
    workload = Workload(data, ServedModel("", 69, 260), folder)
    load = workload.load(2.0, 20, seed=1)
    assert load == workload.load(2.0, 20, seed=1)
    assert [each.text for each in load] != [each.text for each in workload.load(2.0, 20, seed=2)]
    assert load[-1].send_at_s == pytest.approx(20 / 2)
    assert {(len(each.prompt), each.output_tokens) for each in load} == {(30, 39)}
    assert workload.clipped_share() == 1
    assert len(workload.load(2.0, 500, seed=1)) == 100


def test_stages_begin_texts_anew(folder, tmp_path):
    path = lines_of(tmp_path / "p", [{"prompt": word} for word in "abc"])
    options = staged_options("1x7", dataset_name="custom", dataset_path=path, tokenizer=folder, skip_chat_template=True)
    planned = workload_of(options, 1000, 260).planned
    assert [sorted(each.text for each in planned[i : i + 3]) for i in (0, 3)] == [["a", "b", "c"]] * 2
