"""A real Prometheus, where one is installed, scrapes a real cluster and answers what the dashboards ask."""

import shutil
import subprocess
import threading
import time

import httpx2
import openai
import pytest
import yaml

from tests.observability import queries
from tests.system.cluster import free_port, wait_until
from tests.system.test_dashboards import CLASSES, ports
from tests.tiny_models import write_fake_model
from tests.vllm_dashboards import queries as vllm_queries

PROMETHEUS = shutil.which("prometheus")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed (Debian: apt install prometheus)"),
]
DEADLINE_S = 240.0
# What has nothing to show in a cluster where all is well: ratios without a divisor, and what is shown above 0.
QUIET = (
    "splitserve_requests_failed_total",
    "splitserve_migration_pause_seconds_bucket",
    "splitserve_transfer_failures_total",
    'rank!="0"',
)


@pytest.fixture(scope="module")
def cluster(start_cluster, tmp_path_factory):
    model = write_fake_model(tmp_path_factory.mktemp("fake"), step_s=0.002)
    coordinator = {"served_model_name": "fake", "slo_class": CLASSES}
    return start_cluster(model, http=True, coordinator=coordinator, node={"metrics_port": 0})


@pytest.fixture(scope="module")
def api(cluster, tmp_path_factory):
    """Of a Prometheus that scrapes the cluster every two seconds, while requests run."""
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    nodes = [f"127.0.0.1:{port}" for port in ports(cluster).values()]
    jobs = {"splitserve": [f"127.0.0.1:{cluster.http_port}"], "splitserve-nodes": nodes}
    scrapes = [{"job_name": name, "static_configs": [{"targets": targets}]} for name, targets in jobs.items()]
    config = {"global": {"scrape_interval": "2s", "scrape_timeout": "2s"}, "scrape_configs": scrapes}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    argv = [PROMETHEUS, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    over = threading.Event()
    asking = threading.Thread(target=ask, args=(cluster, over))
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen([*argv, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    asking.start()
    try:
        yield f"http://127.0.0.1:{port}/api/v1"
    finally:
        over.set()
        asking.join()
        server.terminate()
        server.wait(timeout=30)


def ask(cluster, over):
    """Requests of every kind, until it is over."""
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        for number in range(100_000):
            if over.is_set():
                return
            name = ("hasty", "loose", None)[number % 3]
            extra = {"ignore_eos": True, **({"slo_class": name} if name else {})}
            client.completions.create(model="fake", prompt=[number % 250 + 1] * 40, max_tokens=8, extra_body=extra)


def result(api, query):
    query = query.replace("$__rate_interval", "60s")
    reply = httpx2.get(f"{api}/query", params={"query": query}, timeout=DEADLINE_S).raise_for_status().json()
    assert reply["status"] == "success", reply
    return reply["data"]["result"]


def is_there(api, query):
    try:
        return bool(result(api, query))
    except httpx2.HTTPError:  # it is starting
        return False


def wait_for_results(api, queries):
    """Until each has had a result, though not all at once: on a busy machine a scrape fails, and its series pause."""
    missing = list(queries)
    end = time.monotonic() + DEADLINE_S
    while missing := [query for query in missing if not result(api, query)]:
        assert time.monotonic() < end, f"nothing to show within {DEADLINE_S:g} s: {missing}"
        time.sleep(0.5)


def test_panels_fill(api):
    wait_until(lambda: is_there(api, "rate(splitserve_generation_tokens_total[60s]) > 0"), "a rate", DEADLINE_S)
    asked = [query for where, query, _ in queries() if not where.startswith("alert")]
    asked = [query for query in asked if not any(word in query for word in QUIET)]
    assert len(asked) > 40
    wait_for_results(api, asked)


def test_vllms_panels_fill(api):
    asked = [query.replace("[1m]", "[60s]") for query in vllm_queries("fake")]
    wait_until(lambda: is_there(api, asked[0]), "a rate", DEADLINE_S)
    wait_for_results(api, asked)


def test_no_alert_is_raised(api):
    wait_until(lambda: is_there(api, "splitserve_ready"), "a scrape", DEADLINE_S)
    alerts = [query for where, query, _ in queries() if where.startswith("alert") and "SloMissed" not in where]
    assert [query for query in alerts if result(api, query)] == []
