"""Loads recorded at other services."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve_bench.errors import BenchError
from splitserve_bench.serve.traces import (
    TracedRequest,
    at_rate,
    read_azure_trace,
    read_mooncake_trace,
    trace_load,
)

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
    scaled = read_azure_trace(azure(AZURE), length_scale=1 / 16, time_scale=0.5, limit=2)
    assert [(each.input_tokens, each.output_tokens) for each in scaled] == [(131, 1), (7, 1)]
    assert [each.at_s for each in scaled] == pytest.approx([0.0, 0.01833], abs=1e-6)


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


@pytest.mark.parametrize("scales", [{"length_scale": 0}, {"time_scale": -1}, {"length_scale": math.inf}])
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
