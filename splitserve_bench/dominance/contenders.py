"""Who meets whom: fleets by their names, such as 1P+1B-lmetric-timely."""

import re
from dataclasses import dataclass
from typing import Final

from coordinator.control.placement.policies import AUTO as AUTO_POLICY
from coordinator.control.placement.policies import POLICIES
from coordinator.settings import ADMIT_ALL, ADMIT_TIMELY
from serving_core.errors import SettingsError
from splitserve_bench.simulate.fleet import FleetSize

AUTO: Final = "2B-timely"
# Colocated, split, and the other policies on nodes of which one or both do both.
OTHERS: Final = (
    "2B-never", "1P+1D",
    "1P+1B-sum", "1P+1B-always", "1P+1B-least-loaded", "1P+1B-lmetric", "1P+1B-arrow",
    "2B-sum", "2B-least-loaded", "2B-lmetric", "2B-arrow",
)  # fmt: skip
BESIDE: Final = ("2B", "1P+1B-timely")
WHOLE: Final = "1B"  # one node on all cores
_COUNTS: Final = re.compile(r"(?!\+)(?:([0-9]{1,4})P)?(?:(?:^|\+)([0-9]{1,4})D)?(?:(?:^|\+)([0-9]{1,4})B)?")


@dataclass(frozen=True, slots=True)
class Contender:
    """A fleet of nodes of this profile. Of those that are `beside`, figures are shown, and nothing is concluded."""

    name: str
    fleet: FleetSize
    profile: str
    is_beside: bool = False


def parse_fleet(text: str) -> FleetSize:
    """What str() has made of it. Raises SettingsError."""
    admission = ADMIT_TIMELY if text.endswith(f"-{ADMIT_TIMELY}") else ADMIT_ALL
    counts, dash, policy = text.removesuffix(f"-{admission}").partition("-")
    matched = _COUNTS.fullmatch(counts)
    if matched is None or not counts or (dash and policy not in POLICIES):
        raise SettingsError(
            f"a fleet is named like 1P+1D, 2B-never or 1P+1B-sum-timely, with a policy of {', '.join(POLICIES)}, "
            f"not {text!r}"
        )
    prefill, decode, both = (int(each or 0) for each in matched.groups())
    size = FleetSize(prefill, decode, both, policy=policy or AUTO_POLICY, admission=admission)
    size.check()
    return size
