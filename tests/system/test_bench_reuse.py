"""`splitserve bench reuse` with the clusters that it starts: the same answers, and little of a second turn is read."""

import json

import pytest
from click.testing import CliRunner

from splitserve_bench.commands import reuse
from tests.tiny_models import write_fake_model

ARGUMENTS = ["--conversations", "2", "--turn-tokens", "100", "--requests", "2", "--shared-tokens", "100"]
ARGUMENTS += ["--own-tokens", "20", "--output-tokens", "40", "--json"]


@pytest.mark.nightly
def test_what_was_read_or_written_is_not_read_again(tmp_path):
    model = write_fake_model(tmp_path / "fake", step_s=0.002, token_s=0.0005)
    result = CliRunner().invoke(reuse, [str(model), *ARGUMENTS])
    assert result.exit_code == 0, result.output
    figures = {each["name"]: each for each in json.loads(result.stdout)}
    assert all(each["num_equal"] == each["num_requests"] == 2 for each in figures.values())
    chat, beginning = figures["second turn of a chat"], figures["shared beginning"]
    assert chat["cached_tokens"] >= 2 * 96  # of 100 in blocks of 16; and of the answer, where that is lent
    assert beginning["cached_tokens"] == 96
    assert figures["shared beginning, at once"]["cached_tokens"] == 96  # nobody computes it beside the first one
    assert chat["kv_bytes_saved"] > 0 < beginning["kv_bytes_saved"]
