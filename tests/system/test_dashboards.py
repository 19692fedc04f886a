"""What deploy/'s dashboards and alerts ask for, and vLLM's dashboards too, is there on a real cluster."""

import contextlib
import random
import re

import httpx2
import openai
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from tests.observability import DASHBOARDS, problems, queries, told_by
from tests.system.cluster import wait_until
from tests.tiny_models import write_fake_model
from tests.vllm_dashboards import queries as vllm_queries

DEADLINE_S = 240.0
PORT = re.compile(r"figures of this node are at port (\d+)")
CLASSES = ("hasty=tpot:0.001", "loose=ttft:600000,tpot:600000")
OPENMETRICS = {"accept": "application/openmetrics-text; version=1.0.0"}


@pytest.fixture(scope="module")
def cluster(start_cluster, tmp_path_factory):
    model = write_fake_model(tmp_path_factory.mktemp("fake"), step_s=0.002)
    coordinator = {"served_model_name": "fake", "slo_class": CLASSES}
    cluster = start_cluster(model, http=True, coordinator=coordinator, node={"metrics_port": 0})
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        for slo_class in ("hasty", "loose", None):
            extra = {"ignore_eos": True, **({"slo_class": slo_class} if slo_class else {})}
            client.completions.create(model="fake", prompt=[7] * 40, max_tokens=8, extra_body=extra)
        with contextlib.suppress(openai.BadRequestError):
            client.completions.create(model="fake", prompt=[1] * 5000)
    wait_until(lambda: steps_told(cluster) > 0, "heartbeats have told of the steps", DEADLINE_S)
    return cluster


def ports(cluster):
    """Of the nodes' figures, by name; the last one where a node was started again."""
    return {name: PORT.findall(cluster.children[name].output())[-1] for name in cluster.names}


def page(url, headers=None):
    reply = httpx2.get(url, headers=headers, timeout=DEADLINE_S)
    assert reply.status_code == 200, reply.text
    return reply.text


def of_coordinator(cluster):
    return list(text_string_to_metric_families(page(f"{cluster.url}/metrics")))


def of_node(cluster, name):
    return list(text_string_to_metric_families(page(f"http://127.0.0.1:{ports(cluster)[name]}/metrics")))


def everything(cluster):
    return [*of_coordinator(cluster), *(metric for name in cluster.names for metric in of_node(cluster, name))]


def total(metrics, name, **labels):
    samples = [sample for metric in metrics for sample in metric.samples if sample.name == name]
    return sum(each.value for each in samples if labels.items() <= each.labels.items())


def steps_told(cluster):
    return min(total(of_coordinator(cluster), "splitserve_node_steps_total", node=name) for name in cluster.names)


def test_dashboards_and_alerts_ask_for_what_there_is(cluster):
    told = told_by(everything(cluster))
    asked = list(queries())
    assert len(DASHBOARDS) == 1
    assert len(asked) > 50
    assert [(where, problem) for where, query, legend in asked for problem in problems(told, query, legend)] == []


def test_what_nobody_tells_would_be_noticed(cluster):
    told = told_by(everything(cluster))
    assert problems(told, "sum(rate(splitserve_step_token_sum[1m]))") == ["nobody tells splitserve_step_token_sum"]
    assert problems(told, 'splitserve_slo_attained_total{limit="all"}')
    assert problems(told, "sum by (roll) (splitserve_nodes)")
    assert problems(told, "splitserve_nodes", "{{roll}}")
    with pytest.raises(ValueError, match="bracket"):
        problems(told, "sum(rate(splitserve_nodes[1m])")


def test_vllms_dashboards_fill(cluster):
    told = told_by(of_coordinator(cluster))
    assert [problem for query in vllm_queries("fake") for problem in problems(told, query)] == []


def test_a_node_tells_of_its_own_steps_and_transfers(cluster):
    prefill, decode = (of_node(cluster, name) for name in ("prefill-0", "decode-0"))
    coordinator = of_coordinator(cluster)
    cached = total(coordinator, "splitserve_prompt_tokens_cached_total")
    computed = "splitserve_computed_tokens_total"
    assert total(prefill, computed, phase="prefill") == 3 * 40 - cached
    assert total(decode, computed, phase="decode") == 3 * 7  # the first of 8 is the other node's
    assert total(prefill, computed, phase="decode") == total(decode, computed, phase="prefill") == 0
    assert total(decode, "splitserve_step_seconds_count", phase="decode") == 3 * 7
    assert total(decode, "splitserve_step_tokens_sum") == total(decode, "splitserve_step_sequences_sum") == 3 * 7
    num_bytes = total(coordinator, "splitserve_kv_transferred_bytes_total")
    assert total(prefill, "splitserve_transfer_bytes_total", direction="out") == num_bytes > 0
    assert total(decode, "splitserve_transfer_bytes_total", direction="in") == num_bytes
    shared = total(prefill, "splitserve_transfer_shared_bytes_total", direction="out")
    assert total(decode, "splitserve_transfer_shared_bytes_total", direction="in") == shared <= num_bytes
    for metrics, direction in ((prefill, "out"), (decode, "in")):
        assert total(metrics, "splitserve_transfer_seconds_count", direction=direction) == 3
        assert total(metrics, "splitserve_transfer_seconds_sum", direction=direction) > 0
        assert total(metrics, "splitserve_kv_blocks_leaked") == total(metrics, "splitserve_stage_requests") == 0
        assert total(metrics, "process_open_fds") > 0
        assert total(metrics, "process_resident_memory_bytes") > 1e7


def test_every_page_is_open_metrics_too(cluster):
    for name, port in ports(cluster).items():
        told = openmetrics_families(page(f"http://127.0.0.1:{port}/metrics", OPENMETRICS))
        assert {sample.labels.get("node", name) for metric in told for sample in metric.samples} == {name}


def test_what_clients_send_makes_no_series(cluster):
    def series():
        return {
            (sample.name, *sorted(sample.labels.items()))
            for metric in everything(cluster)
            for sample in metric.samples
            if not sample.name.startswith("http_")  # whose endpoints and classes of status come as they are called
        }

    def call(index):
        path = ("completions", "chat/completions", f"models/m{index}", f"no/such/{index}")[index % 4]
        body = {"model": f"m{index}", "prompt": [index + 1], "slo_class": f"c{index}", "user": f"u{index}"}
        headers = {"x-request-id": f"r{index}", "user-agent": f"a{index}"}
        return httpx2.request("POST", f"{cluster.url}/v1/{path}", json=body, headers=headers, timeout=DEADLINE_S)

    before = series()
    statuses = {call(index).status_code for index in range(40)}
    assert statuses <= {400, 404, 405}
    assert series() == before
    handlers = told_by(of_coordinator(cluster))["http_requests_total"]
    assert handlers["handler"] == {"/v1/completions", "/v1/chat/completions", "/v1/models/{model}", "other"}
    assert handlers["status"] == {"2xx", "4xx"}
    assert handlers["method"] == {"POST"}


def test_blocks_go_through_shared_memory_once_the_nodes_have_met(cluster):
    def is_shared():
        prompt = [random.randrange(3, 100) for _ in range(40)]  # of which nothing is cached
        body = {"model": "fake", "prompt": prompt, "max_tokens": 4}
        httpx2.post(f"{cluster.url}/v1/completions", json=body, timeout=DEADLINE_S).raise_for_status()
        return total(of_node(cluster, "decode-0"), "splitserve_transfer_shared_bytes_total", direction="in") > 0

    wait_until(is_shared, "blocks come through shared memory", DEADLINE_S)
    assert "go through shared memory" in cluster.children["prefill-0"].output()


@pytest.mark.nightly
def test_counters_never_go_down_while_nodes_come_and_go(cluster):
    def counters(metrics):
        return {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for metric in metrics
            if metric.type in ("counter", "histogram")
            for sample in metric.samples
            if not {"node", "engine"} & sample.labels.keys() or sample.labels.get("engine") == "coordinator"
        }

    def grows(before):
        after = counters(of_coordinator(cluster))
        return {key: (value, after.get(key)) for key, value in before.items() if value > after.get(key, -1)}

    before = counters(of_coordinator(cluster))
    steps = steps_told(cluster)
    cluster.kill("decode-0")
    wait_until(lambda: "decode-0" not in cluster.loads(), "the node is lost", DEADLINE_S)
    assert grows(before) == {}
    assert httpx2.get(f"{cluster.url}/ready", timeout=DEADLINE_S).json() == {
        "ready": False,
        "reason": "no node that decodes sequences is ready",
    }
    gone = of_coordinator(cluster)
    assert total(gone, "splitserve_ready") == total(gone, "splitserve_node_steps_total", node="decode-0") == 0
    cluster.heal()
    assert grows(before) == {}
    assert httpx2.get(f"{cluster.url}/ready", timeout=DEADLINE_S).json() == {"ready": True}
    assert total(of_coordinator(cluster), "splitserve_node_steps_total", node="prefill-0") >= steps > 0
