"""By what a process is to end."""

import signal

import pytest

from serving_core.process import ending_signals


@pytest.mark.parametrize(("handler", "ends"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
def test_a_hangup_ends_a_process_unless_it_was_told_to_ignore_it(handler, ends):
    before = signal.signal(signal.SIGHUP, handler)
    try:
        assert (signal.SIGHUP in ending_signals()) == ends
        assert {signal.SIGTERM, signal.SIGINT} <= set(ending_signals())
    finally:
        signal.signal(signal.SIGHUP, before)
