"""Parse and run SPLITSERVE_FAILPOINTS: rules separated by semicolons, POINT=ACTION for each time that the process
reaches the point, POINT:N=ACTION for the Nth time only.

    kill        SIGKILL to the process itself
    raise       FailpointReached is raised, as by a bug
    sleep:S     the whole process pauses for S seconds; at `step`, only its engine

    step        before a step is computed
    sent        after a message with blocks is given to the transport
    arrived     after a message for reserved blocks has come, before it is examined
    commit      after every block of a channel is verified, before its sender knows
    release     after a transfer has ended at its sender, which still holds the blocks
    before.KIND, after.KIND     before or after a message between node and coordinator is sent
    on.KIND                     after it has come, before it is processed

KIND is a message's name in protos/fleet.proto, once the node is attached: `after.reserved`, `on.migrate`.
"""

import difflib
import itertools
import logging
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from serving_core.errors import SettingsError

logger = logging.getLogger(__name__)

KILL, RAISE, SLEEP = "kill", "raise", "sleep"
MAX_SLEEP_S: Final = 600.0
RULE: Final = "a rule is POINT=ACTION or POINT:N=ACTION, and an action kill, raise or sleep:SECONDS"

COMMANDS: Final = (
    "reserve",
    "prefill",
    "deliver",
    "cancel",
    "reshape",
    "migrate",
    "keep",
    "begun",
    "send_prefix",
    "heartbeat_ack",
    "load_adapter",
    "unload_adapter",
)
EVENTS: Final = (
    *("heartbeat", "first_token", "reserved", "transferred", "committed", "step_tokens", "embedded"),
    *(
        "failed",
        "cancelled",
        "cache_changed",
        "revoked",
        "migration_failed",
        "taken",
        "prefix_fetch_begun",
        "prefix_fetch_ended",
        "progress",
        "adapter_changed",
    ),
)
POINTS: Final = (
    *("step", "sent", "arrived", "commit", "release"),
    *(f"{moment}.{kind}" for moment in ("before", "after", "on") for kind in (*COMMANDS, *EVENTS)),
)


class FailpointReached(Exception):
    """Raised by a rule with the action `raise`."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The action of one point."""

    point: str
    action: str
    sleep_s: float = 0.0
    at: int | None = None  # the occurrence that triggers it; None: every one
    count: Iterator[int] = field(default_factory=lambda: itertools.count(1), compare=False)


class Failpoints:
    """Hold the rules of one process, and carry them out."""

    def __init__(self, text: str, variable: str) -> None:
        """Parse the rules in `text`, and log them. `variable` is the environment variable that they come from.

        Raises SettingsError for a malformed rule.
        """
        self._rules: defaultdict[str, list[Rule]] = defaultdict(list)
        for part in filter(None, map(str.strip, text.split(";"))):
            rule = parse_rule(part, variable)
            self._rules[rule.point].append(rule)
        logger.warning("%s is set: %s", variable, text)

    def act(self, point: str, message: Any) -> None:
        """Carry out the actions of the rules for this point; with a message, for POINT.KIND.

        An action may kill this process, raise FailpointReached or sleep.
        """
        name = point if message is None else f"{point}.{_kind(message)}"
        for rule in self._rules.get(name, ()):
            number = next(rule.count)
            if rule.at in (None, number):
                logger.warning("failpoint %s reached, time %d: %s", name, number, rule.action)
                _do(rule)


def parse_rule(text: str, variable: str) -> Rule:
    """Parse one rule, POINT=ACTION or POINT:N=ACTION.

    Raises SettingsError, which names `variable`, if it is malformed.
    """

    def refuse(why: str) -> NoReturn:
        raise SettingsError(f"{variable} has {text!r}: {why}")

    place, is_rule, what = text.partition("=")
    point, is_counted, number = place.strip().partition(":")
    action, _, seconds = what.strip().partition(":")
    if not is_rule or action not in (KILL, RAISE, SLEEP) or (action != SLEEP and seconds):
        refuse(RULE)
    if point not in POINTS:
        nearest = difflib.get_close_matches(point, POINTS, n=1)
        refuse(f"there is no point {point!r}" + (f", perhaps {nearest[0]!r}" if nearest else ""))
    if is_counted and not (number.isdecimal() and int(number)):
        refuse(f"N must be a whole number from 1 on, not {number!r}")
    sleep_s = _seconds(seconds) if action == SLEEP else 0.0
    if sleep_s is None:
        refuse(f"it may sleep for more than 0 and up to {MAX_SLEEP_S:g} seconds, not {seconds!r}")
    return Rule(point, action, sleep_s, int(number) if is_counted else None)


def _seconds(text: str) -> float | None:
    """Return the seconds that a rule names; None if invalid."""
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0 < seconds <= MAX_SLEEP_S else None


def _kind(message: Any) -> str | None:
    kind: str | None = message.WhichOneof(message.DESCRIPTOR.oneofs[0].name)
    return kind


def _do(rule: Rule) -> None:
    if rule.action == KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    elif rule.action == RAISE:
        raise FailpointReached(rule.point)
    time.sleep(rule.sleep_s)
