import pytest

from serving_core.errors import SettingsError
from splitserve_bench.accuracy import kv_cache
from splitserve_bench.accuracy.kv_cache import measure_accuracy
from tests.effort import effort
from tests.tiny_models import write_tiny_llama


def test_rows_compare_each_dtype_with_the_compute_dtype(tmp_path, monkeypatch):
    num_tokens = effort(16, 64, 64)
    monkeypatch.setattr(kv_cache, "OUTPUT_TOKENS", num_tokens)
    folder, told = write_tiny_llama(tmp_path, seed=1), []
    rows = measure_accuracy(folder, ["auto", "int8", "fp8_e4m3"], [20, 70], told.append, num_answers=1)
    assert [(row.kv_cache_dtype, row.context_tokens) for row in rows] == [
        (dtype, context) for dtype in ("float32", "int8", "fp8_e4m3") for context in (20, 70)
    ]
    assert {row.num_tokens for row in rows} == {num_tokens}
    assert len(told) == 1 + len(rows)
    for row in rows[:2]:
        assert (row.same_choice, row.same_answer, row.mean_error, row.largest_error) == (1, 1, 0, 0)
        assert row.kv_bytes_per_token == 2 * 3 * 2 * 12 * 4  # K and V, layers, heads, head size, float32
    for int8, fp8 in zip(rows[2:4], rows[4:6], strict=True):
        assert int8.kv_bytes_per_token == fp8.kv_bytes_per_token == 2 * 3 * (2 * 12 + 2 * 4 // 16) + 3
        assert 0 < int8.mean_error < fp8.mean_error < 0.5  # 1/254 of the largest value against 1/16 of each
        assert int8.mean_error < int8.largest_error
        assert 0.8 < int8.same_choice <= 1
        assert int8.same_answer <= int8.same_choice


def test_a_context_longer_than_the_text_is_refused(tmp_path):
    folder = write_tiny_llama(tmp_path)
    with pytest.raises(SettingsError, match=r"a context of 10000000 tokens is more than the \d+ of text"):
        measure_accuracy(folder, ["int8"], [10_000_000], print)
