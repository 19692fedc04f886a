"""Clusters, as the system's tests have them."""

from tests.system.conftest import end_what_a_test_started, pytest_runtest_makereport, start_cluster

__all__ = ["end_what_a_test_started", "pytest_runtest_makereport", "start_cluster"]
