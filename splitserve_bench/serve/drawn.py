"""Parse the distributions that flags give for lengths, numbers of turns and times."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Final

import click

_DRAWN: Final = re.compile(
    r"(?P<low>\d+(?:\.\d+)?)(?:-(?P<high>\d+(?:\.\d+)?))?|exp:(?P<mean>\d+(?:\.\d+)?)"
    r"|lognormal:(?P<median>\d+(?:\.\d+)?):(?P<sigma>\d+(?:\.\d+)?)",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A distribution: equally likely between two values, exponential, or lognormal."""

    text: str
    draw: Callable[[Random], float]

    def count(self, rng: Random, least: int = 1) -> int:
        """Return a drawn value as a whole number, at least `least`."""
        return max(least, round(self.draw(rng)))


def parse_drawn(text: str) -> Drawn:
    """Return the distribution of a text: N, LOW-HIGH, exp:MEAN or lognormal:MEDIAN:SIGMA.

    Raises ValueError for another text.
    """
    match = _DRAWN.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is none of N, LOW-HIGH, exp:MEAN and lognormal:MEDIAN:SIGMA")
    given = {name: float(value) for name, value in match.groupdict().items() if value is not None}
    if "mean" in given:
        return Drawn(text, lambda rng: rng.expovariate(1.0) * given["mean"])
    if "median" in given:
        return Drawn(text, lambda rng: given["median"] * rng.lognormvariate(0.0, given["sigma"]))
    low, high = given["low"], given.get("high", given["low"])
    if high < low:
        raise ValueError(f"{text!r} ends below its beginning")
    return Drawn(text, lambda rng: rng.uniform(low, high))


class DrawnBy(click.ParamType[str]):
    """Check the text of a distribution: N, LOW-HIGH, exp:MEAN or lognormal:MEDIAN:SIGMA."""

    name = "DISTRIBUTION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return parse_drawn(value).text
        except ValueError as error:
            self.fail(str(error), param, ctx)
