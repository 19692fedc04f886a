"""Growing pauses, by example."""

from serving_core.backoff import Backoff


def test_pauses_grow_up_to_the_longest_and_begin_anew_after_a_calm_time():
    backoff, now, pauses = Backoff(first_s=1.0, longest_s=10.0, calm_s=60.0), 100.0, []
    for _ in range(6):
        pauses.append(backoff.next_s(now))
        now += 60.0
    assert pauses == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert backoff.next_s(now + 1.0) == 1.0
    assert backoff.next_s(now + 2.0) == 2.0
