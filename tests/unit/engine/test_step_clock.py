"""Parts of steps, by a clock that is told what time it is."""

from engine.engine import BETWEEN, BUILD, COMPUTE, DRAFT, IDLE, PARTS, PLAN, StepClock


def test_parts_sum_up_to_the_time_from_the_start_to_the_last_lap():
    moments = iter([10.0, 11.0, 13.0, 17.0, 25.0, 41.0])
    clock = StepClock(lambda: next(moments))
    for part in (PLAN, BUILD, COMPUTE, PLAN, IDLE):
        clock.lap(part)
    assert {part: seconds for part, seconds in clock.seconds.items() if seconds} == {
        PLAN: 9.0,
        BUILD: 2.0,
        COMPUTE: 4.0,
        IDLE: 16.0,
    }
    assert {*BETWEEN, COMPUTE, DRAFT, IDLE} == {*PARTS} == {*clock.seconds}
