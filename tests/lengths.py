"""How long tests take, and which run when."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def few(values: Iterable[Any], *quick: Any) -> list[Any]:
    """All `values` as parameters of a test: those named, or the first one, run with the quick tests, the others with
    the long ones."""
    given = list(values)
    chosen: Collection[Any] = quick or given[:1]
    assert all(each in given for each in chosen), "a quick one is not among them"
    return [each if each in chosen else _long(each) for each in given]


def _long(each: Any) -> Any:
    """`each` may be a parameter already, with marks and a name of its own."""
    if not isinstance(each, type(pytest.param())):
        each = pytest.param(each)
    return each._replace(marks=(*each.marks, pytest.mark.long))
