"""Growing pauses, by example."""

from serving_core.net.backoff import FIRST_PAUSE_S, LONGEST_PAUSE_S, Backoff, Reminder


def test_pauses_grow_up_to_the_longest_and_begin_anew_after_a_calm_time():
    backoff, now, pauses = Backoff(first_s=1.0, longest_s=10.0, calm_s=60.0), 100.0, []
    for _ in range(6):
        pauses.append(backoff.next_s(now))
        now += 60.0
    assert pauses == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert backoff.next_s(now + 1.0) == 1.0
    assert backoff.next_s(now + 2.0) == 2.0


# ---- what stays true is repeated, and not without end ----


def test_what_stays_true_is_said_ever_more_rarely_and_news_at_once():
    reminder = Reminder()
    times = [second for second in range(2000) if reminder.is_due("down", second)]
    assert times == [0, 5, 15, 35, 75, 155, 315, 615, 915, 1215, 1515, 1815]
    assert (FIRST_PAUSE_S, LONGEST_PAUSE_S) == (5, 300)
    assert reminder.is_due("down in another way", 2000)
    assert not any(reminder.is_due(how, 2004) for how in ("down", "down in another way"))
    reminder.forget()
    assert reminder.is_due("down", 2004)
    assert all(reminder.is_due(f"down in way {number}", 2004) for number in range(100))
    assert reminder.is_due("down", 2004)  # forgotten: it does not remember without end
