import math

import pytest
import torch

from serving_core.errors import SettingsError
from splitserve_bench.accuracy.weights_accuracy import NEXT_TOKENS, START_TOKENS, measure_weights_accuracy, texts_of
from tests.foreign_models import transformers_model
from tests.tiny_models import write_tiny_llama


@pytest.mark.nightly
def test_figures_of_plain_and_of_quantized_weights(tmp_path):
    folder = write_tiny_llama(tmp_path)
    reports = []
    plain, *quantized = measure_weights_accuracy(folder, ["int8", "int4"], reports.append, num_texts=2)
    assert len(reports) == 3
    assert [row.quantization for row in (plain, *quantized)] == ["none", "int8", "int4"]
    assert (plain.same_choice, plain.same_answer, plain.mean_error, plain.largest_error) == (1, 1, 0, 0)
    assert {row.num_tokens for row in (plain, *quantized)} == {2 * NEXT_TOKENS}

    texts = torch.tensor(texts_of(folder, 2))
    with torch.inference_mode():
        logprobs = transformers_model(folder)(texts).logits.log_softmax(-1)
    of_text = logprobs[:, START_TOKENS - 1 : -1].gather(2, texts[:, START_TOKENS:, None])
    assert plain.perplexity == pytest.approx(math.exp(-of_text.mean()), rel=1e-3)

    int8, int4 = quantized
    assert 0 < int8.mean_error < int4.mean_error
    assert int8.mean_error < int8.largest_error
    assert int8.same_choice > 0.8
    assert plain.weight_bytes > int8.weight_bytes > int4.weight_bytes


def test_more_texts_than_there_are(tmp_path):
    with pytest.raises(SettingsError, match="not 100000"):
        measure_weights_accuracy(write_tiny_llama(tmp_path), [], print, num_texts=100_000)
