"""Clusters, as the system's tests have them."""

from tests.system.conftest import pytest_runtest_makereport, start_cluster

__all__ = ["pytest_runtest_makereport", "start_cluster"]
