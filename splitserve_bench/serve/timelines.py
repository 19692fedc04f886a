"""What is kept of a server's timeline."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from splitserve.client.answers import Timeline

KEPT: Final = tuple(field.name for field in fields(Timeline) if field.type in (float, bool))


def times_of(told: Mapping[str, Any]) -> dict[str, float]:
    """Return what is told in seconds, in a timeline or by a refusal, by the field names of Timeline; is_late is 1 or
    0."""
    return {name: float(told[name]) for name in KEPT if name in told}
