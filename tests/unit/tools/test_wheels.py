"""Which packages are gathered for a machine without an index, and which of their wheels it accepts."""

import pytest
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

from tools.wheels import platforms, requirements


def test_what_the_machine_has_is_left_out():
    names = {Requirement(each).name for each in requirements(["node"], ["Torch", "grpcio"])}
    assert {"pyzmq", "click", "grpcio-status"} <= names
    assert names.isdisjoint({"torch", "grpcio", "matplotlib"})


@pytest.mark.parametrize(
    ("tag", "is_accepted"),
    [
        ("manylinux_2_34_x86_64", True),
        ("manylinux2014_x86_64", True),
        ("manylinux_2_40_x86_64", False),
        ("manylinux_2_34_aarch64", False),
    ],
)
def test_wheels_fit_the_glibc_and_the_architecture(tag, is_accepted):
    *_, tags = parse_wheel_filename(f"cryptography-50.0.2-cp311-abi3-{tag}.whl")
    assert ({each.platform for each in tags} <= set(platforms("x86_64", (2, 39)))) == is_accepted
