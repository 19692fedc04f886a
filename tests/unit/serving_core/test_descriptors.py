"""Limits on open files, and what is kept back for when there are none left; against the system's own limit."""

import asyncio
import logging
import os
import subprocess
import sys

import pytest

from serving_core.net import descriptors
from serving_core.net.descriptors import Spares, connections_within, kept_spares, num_descriptors
from tests.descriptors import limited
from tests.unit.serving_core.scarcity import no_descriptors_left

DEADLINE_S = 60.0


def limits_after_raising(soft, hard):
    program = (
        "import resource; from serving_core.net.descriptors import raise_limit; raise_limit(); "
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    argv = limited([sys.executable, "-c", program], soft, hard)
    told = subprocess.run(argv, check=True, capture_output=True, timeout=DEADLINE_S)
    return tuple(map(int, told.stdout.split()))


@pytest.mark.parametrize("soft", [100, 700])
def test_the_soft_limit_becomes_the_hard_one(soft):
    assert limits_after_raising(soft, 700) == (700, 700)


def test_connections_take_a_quarter_of_the_descriptors_at_most(monkeypatch):
    monkeypatch.setattr(descriptors, "num_descriptors", lambda: 1024)
    assert connections_within(256, descriptors_each=4) == 64
    assert connections_within(50, descriptors_each=4) == 50
    assert connections_within(256, descriptors_each=1024) == 1


def test_what_is_kept_back_is_there_when_nothing_else_is():
    spares = Spares(5)
    assert spares.hold()
    with no_descriptors_left() as close:
        with pytest.raises(OSError, match="Too many open files"):
            os.open(os.devnull, os.O_RDONLY)
        assert not spares.hold()  # it has all, but nobody could open one more
        spares.release()
        for descriptor in [os.open(os.devnull, os.O_RDONLY) for _ in range(5)]:
            os.close(descriptor)
        taken = os.open(os.devnull, os.O_RDONLY)
        assert not spares.hold()  # some of them
        os.close(taken)
        close(1)
        assert spares.hold()
        spares.release()


async def test_a_shortage_is_told_once_and_ends(caplog, monkeypatch):
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(descriptors, "LOOK_S", 0.001)
    async with asyncio.timeout(DEADLINE_S), kept_spares() as spares:
        with no_descriptors_left():
            sentence = f"all {num_descriptors()} descriptors are in use"
            spares.release()
            while sentence not in caplog.text:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.1)  # for many looks more
        while not spares.hold():
            await asyncio.sleep(0.001)
    told = [record.getMessage() for record in caplog.records if "descriptors are in use" in record.getMessage()]
    assert len(told) == 1
