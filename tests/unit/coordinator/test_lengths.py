"""What the lengths of ended answers say of one that goes on."""

from coordinator.control.lengths import MAX_SAMPLES, MIN_SAMPLES, Lengths


def ended(*lengths):
    found = Lengths()
    for each in lengths:
        found.ended(each)
    return found


def test_until_enough_have_ended_an_answer_may_be_as_long_as_its_request_allows():
    assert ended(*[10] * (MIN_SAMPLES - 1)).left(0, 500) == 500
    assert ended(*[10] * MIN_SAMPLES).left(0, 500) == 10
    assert ended(*[10] * MIN_SAMPLES).left(0, 7) == 7


def test_three_of_four_that_came_as_far_got_no_more():
    found = ended(*range(1, 101))
    assert found.left(0, 500) == 76
    assert found.left(50, 450) == 38  # of 51 to 100


def test_where_too_few_came_as_far_there_are_as_many_again():
    found = ended(*range(1, 101))
    assert found.left(90, 410) == 90  # ten came so far
    assert found.left(100, 400) == 100
    assert found.left(100, 7) == 7


def test_what_is_old_is_forgotten():
    found = ended(*[1000] * MAX_SAMPLES, *[5] * MAX_SAMPLES)
    assert found.left(0, 4000) == 5
