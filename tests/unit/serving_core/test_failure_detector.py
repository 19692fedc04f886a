"""How long a peer may be silent, and what its own delays are to a process that waits for others."""

import pytest

from serving_core.net.failure_detector import AwakeClock, FailureDetector


def detector_after(*gaps_s, timeout_s=4.0):
    """Return a detector that has heard a heartbeat after each of the gaps, and when the last one came."""
    now, detector = 0.0, FailureDetector(timeout_s, 0.0)
    for gap_s in gaps_s:
        now += gap_s
        detector.heard(now)
    return detector, now


@pytest.mark.parametrize(
    ("gaps_s", "limit_s"),
    [
        ((), 4.0),
        ((1.0, 0.98, 0.9), 4.0),  # as on an idle machine
        ((1.0, 2.0, 1.0), 8.0),
        ((3.9, 9.0, 20.0), 20.0),  # at most five times what was configured
        ((100.0,), 16.0),  # it counts as the limit that it was found by
        ((3.0, *[1.0] * 63), 12.0),
        ((3.0, *[1.0] * 64), 4.0),  # long ago
    ],
)
def test_the_limit_is_four_times_the_longest_recent_gap(gaps_s, limit_s):
    detector, now = detector_after(*gaps_s)
    assert detector.limit_s == pytest.approx(limit_s)
    assert detector.why_suspected(now + limit_s - 0.01) is None
    assert f"(limit {limit_s:.1f} s)" in detector.why_suspected(now + limit_s + 0.01)


def test_load_that_grows_at_most_fourfold_from_gap_to_gap_loses_nobody():
    now, detector = 0.0, FailureDetector(4.0, 0.0)
    for gap_s in (1.0, 3.5, 13.0, 19.0, 8.0, 1.0):
        assert detector.why_suspected(now + gap_s) is None
        now += gap_s
        detector.heard(now)


def test_time_in_which_the_process_does_not_run_does_not_pass():
    clock = AwakeClock(0.5)
    for now in (10.0, 10.25, 10.75):
        clock.note(now)
    assert clock.read(10.75) == 10.75
    assert clock.note(17.0) == 6.25
    assert clock.read(17.0) == 11.25
    assert clock.read(17.3) == pytest.approx(11.55)
