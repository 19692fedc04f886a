"""Shapes: what each role amounts to, and which a node cannot take."""

import pytest

from serving_core.errors import RequestError
from serving_core.shapes import ROLES, Shape, check_shape, preset, role_of

LIMITS = {"max_num_batched_tokens": 512, "max_num_seqs": 64}


@pytest.mark.parametrize(
    ("role", "shape"),
    [("prefill", Shape(512, 0, False)), ("decode", Shape(0, 64, True)), ("mixed", Shape(512, 64, True))],
)
def test_a_role_is_a_preset_of_a_shape(role, shape):
    assert preset(role, **LIMITS) == shape
    assert role_of(shape) == role
    check_shape(shape, **LIMITS)


@pytest.mark.parametrize(
    ("shape", "role"),
    [(Shape(1, 0, False), "prefill"), (Shape(0, 1, False), "decode"), (Shape(7, 1, False), "mixed")],
)
def test_other_shapes_amount_to_a_role_too(shape, role):
    check_shape(shape, **LIMITS)
    assert role_of(shape) == role
    assert (shape.prefills, shape.decodes) == (role != "decode", role != "prefill")


def test_every_role_can_be_taken_by_a_node_of_the_least_limits():
    for role in ROLES:
        check_shape(preset(role, max_num_batched_tokens=1, max_num_seqs=1), max_num_batched_tokens=1, max_num_seqs=1)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (Shape(513, 0, False), "prompt_tokens of a shape is 513, the node's max_num_batched_tokens is 512"),
        (Shape(0, 65, True), "slots of a shape is 65, the node's max_num_seqs is 64"),
        (
            Shape(0, 0, False),
            "a shape needs prompt_tokens or slots above 0: a node that does neither does nothing",
        ),
        (Shape(1, 0, True), "a shape that accepts KV transfers needs slots above 0"),
    ],
)
def test_a_shape_that_cannot_be_taken_is_one_sentence(shape, message):
    with pytest.raises(RequestError) as error:
        check_shape(shape, **LIMITS)
    assert (error.value.reason, str(error.value)) == ("BAD_PARAM", message)


def test_an_unknown_role_is_one_sentence():
    with pytest.raises(RequestError, match="a role is prefill, decode or mixed, not 'writer'"):
        preset("writer", **LIMITS)
