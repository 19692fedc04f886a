"""`splitserve bench ranks`: what it takes, and the table."""

import pytest
from click.testing import CliRunner

from splitserve.cli import main
from splitserve_bench.clusters.ranks import ONE, Division, RanksFigures
from splitserve_bench.report import ranks_table
from tests.unit.splitserve_bench.test_reuse import MIB, shown


def test_the_table_has_a_row_for_each_way():
    times = {"start_s": 1.25, "lone_prompt_s": 0.7, "lone_tpot_s": 0.0196, "prompt_tokens_per_s": 644.4, "tpot_s": 0.03}
    whole = RanksFigures(ONE, **times, weight_bytes=(300 * MIB,), rss_bytes=(500 * MIB,), num_answers=5, num_equal=5)
    weights, resident = (160 * MIB, 150 * MIB), (400 * MIB, 390 * MIB)
    divided = RanksFigures(
        Division(2, 1), **times, weight_bytes=weights, rss_bytes=resident, num_answers=5, num_equal=4
    )
    _, first, second = shown(ranks_table([whole, divided]))
    assert " ".join(first) == "one process 1.2 700 19.6 644 30.0 300.0 MiB 500.0 MiB 5/5"
    assert " ".join(second) == "2 stages 1.2 700 19.6 644 30.0 160.0 MiB, 150.0 MiB 400.0 MiB, 390.0 MiB 4/5"


@pytest.mark.parametrize(
    ("division", "words"), [(Division(1, 2), "2 ranks"), (Division(2, 2), "2 stages of 2 ranks"), (ONE, "one process")]
)
def test_a_way_in_words(division, words):
    assert str(division) == words


@pytest.mark.parametrize("given", ["2", "0x1", "1x100", "2x1x1", ""])
def test_what_is_no_way_is_refused(given):
    result = CliRunner().invoke(main, ["bench", "ranks", "--divisions", given])
    assert result.exit_code == 2
    assert "STAGESxRANKS" in result.output or "one at least" in result.output
