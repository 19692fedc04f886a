"""What has run on a card is said by one file: doctor and the pages follow it."""

import json

import torch

from splitserve_bench.device_report import DONE, FAILED, NEVER, kept_report, verdict, write_report
from splitserve_bench.doctor.environment import find_environment
from tests.device_table import PAGE, page, table
from tests.doc_table import DOCS

STEPS = {
    "device": {"state": DONE, "seconds": 3.0, "command": ["python"], "output": "NVIDIA H200\nready\n", "log": []},
    "tests": {"state": FAILED, "seconds": 9.0, "command": ["python"], "output": "2 failed, 330 passed\n", "log": ["x"]},
}


def test_a_report_says_what_ran_where(tmp_path):
    assert kept_report(tmp_path / "report.json") is None
    write_report(tmp_path, "some model", STEPS)
    report = kept_report(tmp_path / "report.json")
    report["about"]["device"] = "NVIDIA H200"
    assert report["steps"] == json.loads(json.dumps(STEPS))
    said = verdict(report)
    assert torch.__version__ in said
    assert said.endswith("1 of 2 steps done; not tests (failed)")
    assert "| tests | failed, 9.0 s | 2 failed, 330 passed |" in table(report)
    assert verdict(None) == NEVER
    assert verdict({**report, "about": {**report["about"], "device": "CPU"}}) == NEVER, "a trial without a device"


def test_doctor_and_pages_say_what_the_kept_report_says():
    assert PAGE.read_text() == page(), "make tables writes it"
    assert verdict(kept_report()) in find_environment("", [0]).facts["CUDA on a card"]
    for path in (DOCS.parent / "README.md", DOCS / "reference" / "limits.md", DOCS / "start" / "faq.md"):
        text = path.read_text()
        assert "design/cuda.md#what-has-run-on-a-card" in text, path
        assert ("never run on a card" in text) == (kept_report() is None), path
