"""The checker, on histories written by hand: it is silent about a good one, and names what is wrong with a bad one."""

from dataclasses import replace

import pytest

from tests.schedules.history import LIVE_S, Asked, Calm, Crashed, Ended, Left, Rest, Stood, Told, Wrote, problems_of
from tests.schedules.model import answer_of

PROMPT = (5, 6, 7)
ANSWER = answer_of(PROMPT, 4, "")
ASKED = Asked(0.0, "r0", PROMPT, 4, "", 10.0)
END = Ended(2.0, "r0", "length", 4)
WROTE = Wrote(1.0, "n0", 3, 8, "step", (("r0", 8),))


def told(first_index, *token_ids):
    return Told(1.0, "r0", first_index, token_ids)


GOOD = [ASKED, told(0, ANSWER[0]), WROTE, told(1, *ANSWER[1:3]), told(3, ANSWER[3]), END, Rest(3.0, "n0", "blocks", 0)]


def test_a_good_history_has_no_problem():
    assert problems_of(GOOD) == []


def test_the_model_depends_on_every_token_and_the_salt():
    others = [answer_of(prompt, 4, "") for prompt in ((5, 6, 8), (5, 9, 7), (1, 6, 7), (5, 6, 7, 0), (6, 5, 7))]
    others.append(answer_of(PROMPT, 4, "salt"))
    assert ANSWER not in others
    assert len(set(map(tuple, others))) == len(others)
    assert answer_of((*PROMPT, ANSWER[0]), 3, "") == ANSWER[1:]


BAD = {
    "never ended": [*GOOD[:5]],
    "ended 2 times: length, abort": [*GOOD, replace(END, how="abort")],
    "got tokens after its end": [*GOOD[:4], END, GOOD[4]],
    "got token 2 twice": [ASKED, told(0, *ANSWER[:3]), told(2, *ANSWER[2:])],
    "never got token 1, and then token 2": [ASKED, told(0, ANSWER[0]), told(2, *ANSWER[2:])],
    "got token 1 doubled, at index 2": [ASKED, told(0, *ANSWER[:2], ANSWER[1], ANSWER[2]), END],
    "lost token 1": [ASKED, told(0, ANSWER[0], ANSWER[2]), END],
    "got the wrong token 1 at index 1": [ASKED, told(0, ANSWER[0], 1), END],
    "ended as complete with 3 of 4 tokens": [ASKED, told(0, *ANSWER[:3]), replace(END, num_tokens=3)],
    "was told of 4 tokens at its end, and got 3": [ASKED, told(0, *ANSWER[:3]), END],
    "and there was nothing wrong with it": [ASKED, replace(END, how="DUPLICATE_REQUEST_ID", num_tokens=None)],
    "after its deadline": [*GOOD[:5], replace(END, time_s=12.1)],
    "after the last fault": [replace(ASKED, deadline_s=300.0), *GOOD[1:5], Calm(1.0), replace(END, time_s=2 + LIVE_S)],
    "which nobody held": [*GOOD, replace(WROTE, holders=())],
    "which epoch 9 held": [*GOOD, replace(WROTE, holders=(("r1", 9),))],
    "which 2 attempts held": [*GOOD, replace(WROTE, holders=(("r0", 8), ("r1", 9)))],
    "n0 still holds 2 blocks": [*GOOD, Rest(3.0, "n0", "blocks", 2)],
    "n0 raised what nobody expects: KeyError": [*GOOD, Crashed(1.0, "n0", "KeyError")],
}


@pytest.mark.parametrize("problem", BAD)
def test_a_bad_history_has_this_problem(problem):
    assert any(problem in each for each in problems_of(BAD[problem])), problems_of(BAD[problem])


def test_errors_may_come_early_and_who_has_left_hears_no_end():
    assert problems_of([ASKED, told(0, *ANSWER[:2]), Ended(1.5, "r0", "WORKER_LOST")]) == []
    assert problems_of([ASKED, told(0, *ANSWER[:2]), Left(1.5, "r0")]) == []


def test_a_coordinator_that_stands_still_may_be_late_by_that_time():
    late = replace(END, time_s=14.0)
    assert problems_of([*GOOD[:5], Stood(9.0, 3.0), late]) == []
    assert len(problems_of([*GOOD[:5], Stood(9.0, 1.0), late])) == 1
