"""How much the tests try: little in the gate, more of the rooms that a change touches, most of it each night.

The Hypothesis profile is `gate` in `make test`, `ci` in what CI runs beside it, and `nightly` in `make test-nightly`.
Gate and CI try the same examples each time. The nightly draws new ones; a failure prints how to reproduce it.
"""

import itertools
from collections.abc import Collection, Iterable
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings

T = TypeVar("T")

GATE, CI, NIGHTLY = "gate", "ci", "nightly"
NUM_EXAMPLES = {GATE: 25, CI: 100, NIGHTLY: 500}


def register_profiles() -> None:
    """Make the profiles known and take the gate's; `--hypothesis-profile` takes another."""
    for name, num_examples in NUM_EXAMPLES.items():
        drawn = name == NIGHTLY
        settings.register_profile(
            name,
            max_examples=num_examples,
            deadline=None,  # no example fails for the time that it takes: machines differ, and may be busy
            derandomize=not drawn,
            print_blob=drawn,
            suppress_health_check=[HealthCheck.too_slow],
        )
    settings.load_profile(GATE)


def effort(gate: T, ci: T, nightly: T) -> T:
    """Return the value of the profile in use, such as a number of seeds."""
    return {GATE: gate, CI: ci, NIGHTLY: nightly}[settings.get_current_profile_name()]


def few(values: Iterable[Any], *gate: Any) -> list[Any]:
    """Return all `values` as parameters of a test, of which those named, or else the first, run in the gate."""
    given = list(values)
    chosen: Collection[Any] = gate or given[:1]
    assert all(each in given for each in chosen), "a value for the gate is not among them"
    return [each if each in chosen else _nightly(each) for each in given]


def pairwise(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test over the product of the axes. The gate runs both corners, of all first and of all last values,
    and of the rest as few as it takes for each two values of two axes to meet."""
    values = [list(axis) for axis in axes.values()]
    points = list(itertools.product(*(range(len(axis)) for axis in values)))
    chosen = _meeting(points)
    names = list(axes) if len(axes) > 1 else next(iter(axes))
    rows = [pytest.param(*(axis[index] for axis, index in zip(values, point, strict=True))) for point in points]
    return pytest.mark.parametrize(
        names, [row if point in chosen else _nightly(row) for point, row in zip(points, rows, strict=True)]
    )


def _meeting(points: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Choose points so that of any two axes each two values occur in one of them."""

    def pairs(point: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(itertools.combinations(enumerate(point), 2))

    chosen = {points[0], points[-1]}
    missing = set().union(*map(pairs, points)).difference(*map(pairs, chosen))
    while missing:
        best = max(points, key=lambda point: len(pairs(point) & missing))
        chosen.add(best)
        missing -= pairs(best)
    return chosen


def _nightly(each: Any) -> Any:
    """Mark a parameter, which may have marks and a name already."""
    if not isinstance(each, type(pytest.param())):
        each = pytest.param(each)
    return each._replace(marks=(*each.marks, pytest.mark.nightly))
