"""What the log says of the load of weights; tests/unit/splitserve/test_roles_in_terminals.py has the bar."""

import logging

import pytest

from serving_core.model_files import load_progress
from serving_core.model_files.load_progress import LoadProgress, progress_in
from serving_core.process.telemetry import JsonFormatter, TextFormatter, parse_line

MIB = 2**20


@pytest.fixture
def lines(caplog, monkeypatch):
    """The events logged so far, with no time between two."""
    monkeypatch.setattr(load_progress, "LOG_EVERY_S", 0.0)
    caplog.set_level(logging.INFO)
    return lambda: [record.getMessage() for record in caplog.records]


def test_a_load_is_told_from_its_size_to_its_end(lines, caplog):
    with LoadProgress(200 * MIB, 3) as progress:
        assert lines() == ["loading 200.0 MiB of weights"]
        for num_bytes in (9 * MIB, MIB, 190 * MIB):  # 4.5, 5 and 100 %
            progress.add(num_bytes)
    *told, end = lines()
    assert told[1:] == ["loading weights: 5% of 200.0 MiB", "loading weights: 100% of 200.0 MiB"]
    assert end.startswith("weights loaded in ")
    assert caplog.records[0].fields == {"num_bytes": 200 * MIB, "num_tensors": 3}


def test_lines_are_some_time_apart(lines, monkeypatch):
    monkeypatch.setattr(load_progress, "LOG_EVERY_S", 1e9)
    with LoadProgress(100, 1) as progress:
        progress.add(50)
    assert len(lines()) == 2


def test_a_rank_beside_another_one_tells_begin_and_end(lines):
    with LoadProgress(100, 1, is_shown=False) as progress:
        progress.add(50)
    assert len(lines()) == 2


def test_a_load_of_nothing_has_a_begin_and_an_end(lines):
    with LoadProgress(0, 0) as progress:
        progress.add(0)
    assert len(lines()) == 2


def test_a_load_that_fails_is_not_told_as_done(lines):
    with pytest.raises(OSError, match="gone"), LoadProgress(100, 1):
        raise OSError("gone")
    assert len(lines()) == 1


@pytest.mark.parametrize("formatter", [JsonFormatter("decode", "d0"), TextFormatter("d0")])
def test_others_read_how_far_a_load_is_from_the_log(lines, caplog, formatter):
    with LoadProgress(200 * MIB, 3) as progress:
        progress.add(90 * MIB)
    events = [parse_line(formatter.format(record))[1] for record in caplog.records]
    assert [progress_in(event) for event in events] == ["", "45% of 200.0 MiB", "weights loaded"]
