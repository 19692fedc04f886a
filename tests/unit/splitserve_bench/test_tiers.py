"""`splitserve bench kv-tiers`: its arithmetic, worked out by hand; and the table."""

from splitserve.client.answers import TierLoad
from splitserve_bench.clusters.tiers import figures_of
from splitserve_bench.report import tiers_table
from tests.unit.splitserve_bench.test_reuse import MIB, asked, shown

TIER = TierLoad(0, 8 * MIB, 30, 90, 0, 0, 0, 3 * MIB, 0.5, 12 * MIB, 0.25, 1.5)
FIRST = [asked((1,), 0.5), asked((2,), 0.7)]
LATER = [asked((3,), 0.25, cached_tokens=50), asked((4,), 0.75, cached_tokens=70)]


def test_the_figures_of_one_cluster():
    expected = [FIRST, [asked((3,), 1.0), asked((5,), 1.0)]]
    figures = figures_of("a file", [FIRST, LATER], expected, TIER)
    assert (figures.num_requests, figures.prompt_tokens, figures.cached_share) == (4, 400, 0.3)
    assert (figures.later_ttft_s, figures.num_equal, figures.hit_rate) == (0.5, 3, 0.25)
    without = figures_of("the pool alone", [FIRST, LATER], [FIRST, LATER], None)
    assert (without.hit_rate, without.num_equal) == (0, 4)
    rows = shown(tiers_table([without, figures]))
    assert rows[1] == ["the", "pool", "alone", "30%", "500", "2.20", "-", "-", "-", "-", "-", "-", "4/4"]
    assert " ".join(rows[2][2:]) == "30% 500 2.20 25% 3.0 MiB 0.50 12.0 MiB 0.25 1.50 3/4"
