"""Clusters as fixtures; their logs are shown when a test fails."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.system.cluster import Cluster


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed:
        clusters = [value for value in getattr(item, "funcargs", {}).values() if isinstance(value, Cluster)]
        report.sections += [("logs of the cluster", cluster.logs()) for cluster in clusters]
    return report


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.long)], ids=["one door", "two doors"])
def num_doors(request: pytest.FixtureRequest) -> int:
    """For what holds however many doors the coordinator has."""
    return int(request.param)


@pytest.fixture(scope="module")
def start_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Starts clusters that live as long as the module; each must stop cleanly."""
    clusters: list[Cluster] = []

    def start(model: Any, **options: Any) -> Cluster:
        cluster = Cluster(model, tmp_path_factory.mktemp("cluster"), **options).start()
        clusters.append(cluster)
        return cluster

    yield start
    failures = []
    for cluster in clusters:
        try:
            cluster.stop()
        except AssertionError as failure:
            failures.append(str(failure))
    assert not failures, "\n".join(failures)
