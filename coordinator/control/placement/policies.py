"""Name the placement policies. Pure."""

from typing import Final

from coordinator.control.placement.baselines import ARROW, LEAST_LOADED, LMETRIC
from coordinator.control.placement.cheapest import Cheapest
from coordinator.control.placement.policy import Policy

AUTO: Final = "auto"
POLICIES: Final[dict[str, Policy]] = {
    AUTO: Cheapest(),
    "sum": Cheapest(counts_late=False),
    "never": Cheapest(may_be_two=False),
    "always": Cheapest(may_be_alone=False),
    "least-loaded": LEAST_LOADED,
    "lmetric": LMETRIC,
    "arrow": ARROW,
}
