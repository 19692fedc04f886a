"""The bench of prompts that are divided over nodes, with hosts that are processes."""

import re

import pytest
from click.testing import CliRunner

from splitserve_bench.engine.divided_prompts import main
from tests.unit.engine.native_kit import needs_library

ROW = re.compile(r"\| (\d+) \| (\d+) ms \| (\d+) ms \| \d+ ms \| \d+ ms \| equal \|")


@pytest.mark.nightly
@needs_library
def test_a_step_over_one_pool_and_over_two_nodes():
    arguments = "--shape smollm2-135m --layers 1 --tokens 1024 --chunk 70 --hosts 1 --repeats 1"
    given = CliRunner().invoke(main, arguments.split(), catch_exceptions=False)
    rows = [match.groups() for line in given.output.splitlines() if (match := ROW.fullmatch(line))]
    assert [row[0] for row in rows] == ["1", "2"]
    assert all(int(step) >= int(attention) for _, step, attention in rows)
