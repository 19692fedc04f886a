"""The bench of a node's ranks, on a tiny model."""

import re

import pytest

from tests.tiny_models import write_tiny_model
from tests.unit.engine.rank_process import TIMEOUT_S, rank_processes

LINE = re.compile(r" +(\d+) tokens (whole|divided) +\d+ tokens/s, CPU ms .* most MiB of activations (\S+) (\S+)")


@pytest.mark.nightly
def test_divided_steps_hold_less(tmp_path):
    folder = write_tiny_model(tmp_path / "model", hidden_size=480, intermediate_size=80)
    arguments = (folder, "--tokens", "100,201", "--repeats", "1")
    with rank_processes(2, "splitserve_bench.engine.sequence_parallel", *arguments) as processes:
        leader, follower = (process.communicate(timeout=TIMEOUT_S)[0] for process in processes)
    lines = [match.groups() for line in leader.splitlines() if (match := LINE.fullmatch(line))]
    assert [line[:2] for line in lines] == [(num, name) for num in ("100", "201") for name in ("whole", "divided")]
    for whole, divided in (lines[:2], lines[2:]):
        assert all(0 < float(less) < float(more) for less, more in zip(divided[2:], whole[2:], strict=True))
    assert "tokens/s" not in follower
