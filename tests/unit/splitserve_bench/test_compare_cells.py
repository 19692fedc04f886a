import dataclasses
import json
import os
import signal
import subprocess
import sys

import pytest

from serving_core.errors import SettingsError
from splitserve_bench.compare.contenders import ClusterContender, PeerContender, colocated
from splitserve_bench.compare.run import Cell, Cells, Measured
from splitserve_bench.errors import BenchError
from splitserve_bench.serve.records import PlannedRequest
from tests.effort import few
from tests.unit.splitserve_bench.bench_serve_kit import answered, failed, timeline

ARGUMENTS = {"model": "m", "bench": {"seed": 0, "at_rates": (1.0, 2.0)}, "contenders": [{"name": "a"}]}
PLANNED = [PlannedRequest(i, i / 3, (i, 7), 3, ttft_ms=500.0) for i in range(2)]
CELL = Cell(colocated(1, 2), "2qps-0", PLANNED)
MEASURED = Measured(
    (
        answered(0, 0.1, (1 / 3, 0.7), timeline=timeline(0.1, 0.2)),
        failed(1, 0.4, error="full", is_refused=True, retry_after_s=1.5),
    )
)


def test_what_was_saved_is_found_as_it_was(tmp_path):
    cells = Cells(tmp_path / "new", ARGUMENTS)
    assert (len(cells), CELL in cells, cells.find(CELL)) == (0, False, None)
    cells.begin(CELL)
    cells.save(CELL, MEASURED)
    again = Cells(tmp_path / "new", ARGUMENTS)
    assert (len(again), CELL in again, again.find(CELL)) == (1, True, MEASURED)
    (path,) = (tmp_path / "new" / "probes").iterdir()
    assert path.name.startswith("colocated-1x2-2qps-0-")
    assert json.loads(path.read_text())["requests"][1]["told_ttft_ms"] == 500


OTHERS = {
    "flags": Cell(ClusterContender("colocated 1x2", "colocated", 0, 0, 1, (("block_size", 8),)), "2qps-0", PLANNED),
    "address": Cell(PeerContender("colocated 1x2", "http://x"), "2qps-0", PLANNED),
    "prompt": Cell(CELL.contender, CELL.label, [PLANNED[0], dataclasses.replace(PLANNED[1], prompt=(1, 8))]),
    "moment": Cell(CELL.contender, CELL.label, [PLANNED[0], dataclasses.replace(PLANNED[1], send_at_s=0.5)]),
    "limit": Cell(CELL.contender, CELL.label, [PLANNED[0], dataclasses.replace(PLANNED[1], ttft_ms=None)]),
    "fewer": Cell(CELL.contender, CELL.label, PLANNED[:1]),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_what_was_asked_otherwise_is_another_cell(tmp_path, other):
    cells = Cells(tmp_path, ARGUMENTS)
    cells.save(CELL, MEASURED)
    assert other not in cells


@pytest.mark.parametrize(
    ("arguments", "difference"),
    [
        ({**ARGUMENTS, "bench": {"seed": 1, "at_rates": (1.0, 2.0)}}, "its bench.seed is 0, not 1"),
        ({**ARGUMENTS, "bench": {"seed": 0, "at_rates": (1.0,)}}, r"its bench.at_rates is \[1.0, 2.0\], not \[1.0\]"),
        ({**ARGUMENTS, "cores": 4}, "its cores is None, not 4"),
        ({"model": "m", "bench": ARGUMENTS["bench"]}, r"its contenders is \[{'name': 'a'}\], not None"),
    ],
)
def test_a_comparison_of_other_arguments_is_refused(tmp_path, arguments, difference):
    Cells(tmp_path, ARGUMENTS).save(CELL, MEASURED)
    with pytest.raises(
        SettingsError, match=f"holds a comparison of other arguments or code: {difference}; give another folder"
    ):
        Cells(tmp_path, arguments)
    assert CELL in Cells(tmp_path, ARGUMENTS)  # it is as it was


def test_a_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="cannot be used"):
        Cells(tmp_path / "file", ARGUMENTS)


def test_a_file_that_is_no_cell_is_named(tmp_path):
    cells = Cells(tmp_path, ARGUMENTS)
    (tmp_path / "probes" / f"{CELL.name}.json").write_text("{")
    with pytest.raises(BenchError, match=f"{CELL.name}.json cannot be read: remove it"):
        cells.find(CELL)


def test_what_was_begun_and_not_ended_is_known(tmp_path):
    assert not Cells(tmp_path, ARGUMENTS).begin(CELL)
    again = Cells(tmp_path, ARGUMENTS)
    assert again.begin(CELL)
    assert len(again) == 0
    again.save(CELL, Measured(MEASURED.outcomes, is_repeated=True))
    assert again.find(CELL).is_repeated
    assert not again.begin(CELL)


SAVER = """
import sys
from pathlib import Path
from tests.unit.splitserve_bench.test_compare_cells import ARGUMENTS, CELL, LARGE
from splitserve_bench.compare.run import Cells
cells = Cells(Path(sys.argv[1]), ARGUMENTS)
print("begins", flush=True)
while True:
    cells.save(CELL, LARGE)
"""
LARGE = Measured(tuple(answered(i, 0.0, tuple(i + k / 7 for k in range(500))) for i in range(2)))


@pytest.mark.parametrize("number", few(range(4), 3))
def test_a_file_is_whole_whenever_its_writer_is_killed(tmp_path, number):
    writer = subprocess.Popen(
        [sys.executable, "-c", SAVER, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=os.getcwd()
    )
    with writer:
        assert writer.stdout.readline() == "begins\n"
        cells = Cells(tmp_path, ARGUMENTS)
        while CELL not in cells:
            pass
        for _ in range(number * 3):  # some more rewritings
            assert cells.find(CELL) == LARGE
        writer.send_signal(signal.SIGKILL)
    assert Cells(tmp_path, ARGUMENTS).find(CELL) == LARGE
    assert len(cells) == 1
