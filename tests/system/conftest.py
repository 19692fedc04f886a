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


@pytest.fixture(
    scope="module", params=[1, pytest.param(2, marks=pytest.mark.nightly)], ids=["one API server", "two API servers"]
)
def num_api_servers(request: pytest.FixtureRequest) -> int:
    """For what holds however many API servers the coordinator has."""
    return int(request.param)


class Starter:
    """Starts clusters, and stops them; each must stop cleanly."""

    def __init__(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.clusters: list[Cluster] = []
        self._folders = tmp_path_factory

    def __call__(self, model: Any, **options: Any) -> Cluster:
        cluster = Cluster(model, self._folders.mktemp("cluster"), **options).start()
        self.clusters.append(cluster)
        return cluster

    def stop(self, first: int = 0) -> None:
        """All from the `first` that it started."""
        failures = []
        while len(self.clusters) > first:
            try:
                self.clusters.pop().stop()
            except AssertionError as failure:
                failures.append(str(failure))
        assert not failures, "\n".join(failures)


@pytest.fixture(scope="module")
def start_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    """What a fixture starts lives as long as its module, what a test starts ends with it."""
    starter = Starter(tmp_path_factory)
    yield starter
    starter.stop()


@pytest.fixture(autouse=True)
def end_what_a_test_started(request: pytest.FixtureRequest) -> Iterator[None]:
    if "start_cluster" not in request.fixturenames:
        yield
        return
    starter = request.getfixturevalue("start_cluster")
    first = len(starter.clusters)
    yield
    starter.stop(first)
