"""Show the progress of loading a model's weights: in the log, or as a bar in a terminal."""

import logging
import re
import time
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Final, Self

from serving_core.process.telemetry import is_read_in_terminal
from serving_core.units import size_of

logger = logging.getLogger(__name__)

LOG_SHARE: Final = 0.05  # of the weights, between two log lines,
LOG_EVERY_S: Final = 1.0  # which are at least this far apart
_PROGRESS: Final = re.compile(r"loading weights: (\d+% of [\d.]+ \w+)|(weights loaded) in ")


def progress_in(event: str) -> str:
    """Return how far a load is by a log event, such as `45% of 14.2 GiB` or `weights loaded`; empty for others."""
    found = _PROGRESS.match(event)
    return found[1] or found[2] if found else ""


class LoadProgress:
    """Show how far a load of tensors is, as a context manager around it: size at first, progress, duration."""

    def __init__(self, num_bytes: int, num_tensors: int, *, is_shown: bool = True) -> None:
        """Prepare to show a load of `num_tensors` tensors, `num_bytes` bytes in all.

        Without `is_shown`, the progress between start and end is left out: one rank shows that of its whole node.
        """
        self._num_bytes = num_bytes
        self._num_tensors = num_tensors
        self._is_shown = is_shown
        self._num_loaded = self._num_logged = 0
        self._begun_s = self._logged_s = 0.0
        self._bar: Any = None  # of tqdm, once drawn
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        self._begun_s = self._logged_s = time.monotonic()
        size = {"num_bytes": self._num_bytes, "num_tensors": self._num_tensors}
        logger.info("loading %s of weights", size_of(self._num_bytes), extra={"fields": size})
        if self._is_shown and is_read_in_terminal():
            self._draw_bar()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._resources.close()
        if error is None:
            logger.info("weights loaded in %.1f s", time.monotonic() - self._begun_s)

    def add(self, num_bytes: int) -> None:
        """Add `num_bytes` that were loaded, and show the progress if it is due."""
        self._num_loaded += num_bytes
        if self._bar is not None:
            self._bar.update(num_bytes)
        elif self._is_shown and self._is_due():
            self._num_logged, self._logged_s = self._num_loaded, time.monotonic()
            percent = 100 * self._num_loaded // self._num_bytes
            logger.info("loading weights: %d%% of %s", percent, size_of(self._num_bytes))

    def _is_due(self) -> bool:
        is_far = self._num_loaded - self._num_logged >= LOG_SHARE * self._num_bytes
        return is_far and self._num_bytes > 0 and time.monotonic() - self._logged_s >= LOG_EVERY_S

    def _draw_bar(self) -> None:
        """Draw a bar, above which log lines appear."""
        from tqdm import tqdm  # here, as nothing else in a process needs it
        from tqdm.contrib.logging import logging_redirect_tqdm

        tqdm.monitor_interval = 0  # it would start a thread that stays
        self._resources.enter_context(logging_redirect_tqdm())
        sizes = {"unit": "iB", "unit_scale": True, "unit_divisor": 1024}
        self._bar = self._resources.enter_context(
            tqdm(total=self._num_bytes, desc="loading weights", leave=False, **sizes)
        )
