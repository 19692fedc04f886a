"""What the coordinator expected of a request with limits when it decided on it. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Expectation:
    """Fields of the Timeline message: seconds, 0 where nothing is known or there is no limit."""

    expected_ttft_s: float
    expected_prefill_s: float
    ttft_margin_s: float
    expected_tpot_s: float
    deferred_s: float
