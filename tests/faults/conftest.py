"""The stage of the matrix, one for each worker; and the table of what was seen, at the end. API_SERVERS=2 in the
environment has it all played with two API servers."""

import os

import pytest

from tests.faults.play import PROPERTY, Stage
from tests.system.cluster import Cluster
from tests.tiny_models import write_fake_model

COLUMNS = "fault", "", "ok", "failed", "retried", "detect s", "recover s", "lost", "doubled", "wrong", "leaked"
WIDTHS = 5, 47, 5, 7, 8, 9, 10, 5, 8, 6, 6


@pytest.fixture(scope="session")
def stage(tmp_path_factory):
    """Two nodes of each role, which must end well."""
    folder = tmp_path_factory.mktemp("faults")
    # 8 kB of KV for each token: transfers take long enough to be caught in the middle.
    shape = {"num_layers": 8, "num_kv_heads": 4, "head_dim": 32}
    model = write_fake_model(folder / "model", **shape, step_s=0.01, token_s=0.0005)
    node = {"num_kv_blocks": 1000, "max_num_batched_tokens": 64}
    coordinator = {"api_server_count": os.environ.get("API_SERVERS", "1"), "node_timeout_s": 4.5}
    stage = Stage(Cluster(model, folder / "cluster", num_prefill=2, num_decode=2, coordinator=coordinator, node=node))
    yield stage
    if stage.cluster.children:  # a row may be skipped before it starts anything
        stage.cluster.stop()


def pytest_terminal_summary(terminalreporter):
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)]
    rows = [value for report in reports for name, value in report.user_properties if name == PROPERTY]
    if rows:
        terminalreporter.section("faults")
        for row in (COLUMNS, *sorted(rows, key=lambda row: int(row[0].removeprefix("F")))):
            cells = [*(f"{cell:<{width}}" for cell, width in zip(row[:2], WIDTHS[:2], strict=True))]
            cells += [f"{cell:>{width}}" for cell, width in zip(row[2:], WIDTHS[2:], strict=True)]
            terminalreporter.write_line(" ".join(cells))
