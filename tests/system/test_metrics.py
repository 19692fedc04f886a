"""/metrics and the log of a real cluster, beside what its clients saw."""

import time

import httpx2
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.system.cluster import wait_until
from tests.tiny_models import write_fake_model

PROMPTS = [[index + 1] * (20 + index) for index in range(6)]
DEADLINE_S = 240.0


@pytest.fixture(scope="module")
def cluster(start_cluster, tmp_path_factory, num_api_servers):
    model = write_fake_model(tmp_path_factory.mktemp("fake"), step_s=0.005)
    return start_cluster(
        model, http=True, coordinator={"served_model_name": "fake", "api_server_count": num_api_servers}
    )


def values(cluster):
    """Samples by name and by their labels but the model's."""
    found = {}
    for family in text_string_to_metric_families(httpx2.get(f"{cluster.url}/metrics", timeout=DEADLINE_S).text):
        for sample in family.samples:
            labels = [value for key, value in sorted(sample.labels.items()) if key != "model_name"]
            found[" ".join([sample.name, *labels])] = sample.value
    return found


def stream(client, prompt, seen):
    """Reads an answer, noting what a client can: usage, and the time that it took."""
    began_s = time.monotonic()
    events = client.completions.create(
        model="fake", prompt=prompt, max_tokens=10, stream=True,
        stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
    )  # fmt: skip
    *_, last = events
    seen.append((last.usage, time.monotonic() - began_s))


def test_totals_are_what_clients_saw(cluster):
    seen = []
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        for prompt in [*PROMPTS, PROMPTS[0]]:  # the last is cached in part
            stream(client, prompt, seen)
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="fake", prompt=[1] * 5000)
        endless = {"max_tokens": 2000, "extra_body": {"ignore_eos": True}, "extra_headers": {"X-Request-Id": "left"}}
        with client.completions.create(model="fake", prompt=[9], stream=True, **endless) as events:
            next(iter(events))
            wait_until(lambda: values(cluster)["splitserve_requests_running"] == 1, "one answer runs", DEADLINE_S)
    wait_until(lambda: values(cluster)["splitserve_requests_running"] == 0, "the answer has ended", DEADLINE_S)
    wait_until(lambda: len(ends(cluster)) == len(seen) + 1, "all ends are in the log", DEADLINE_S)
    found = values(cluster)
    usages, seconds = zip(*seen, strict=True)
    num_prompt_tokens = sum(usage.prompt_tokens for usage in usages) + 1
    assert found["splitserve_prompt_tokens_total"] == found["vllm:prompt_tokens_total coordinator"] == num_prompt_tokens
    cached = sum(usage.prompt_tokens_details.cached_tokens for usage in usages)
    assert found["vllm:prefix_cache_hits_total coordinator"] == cached > 0
    [left] = [line for line in ends(cluster) if line["request_id"] == "left"]
    assert left["finish_reason"] == "abort"
    num_tokens = sum(usage.completion_tokens for usage in usages) + left["completion_tokens"]
    assert found["splitserve_generation_tokens_total"] == num_tokens
    assert found["splitserve_inter_token_latency_seconds_count"] == num_tokens - len(seen) - 1
    assert found["splitserve_time_to_first_token_seconds_count"] == len(seen) + 1
    assert found["splitserve_e2e_request_latency_seconds_count"] == len(seen)
    assert 0 < found["splitserve_e2e_request_latency_seconds_sum"] <= sum(seconds)
    phases = ("prefill_queue", "prefill", "kv_alloc", "kv_transfer", "decode_queue", "decode")
    total_s = sum(found[f"splitserve_request_{phase}_seconds_sum"] for phase in phases)
    assert total_s == pytest.approx(found["splitserve_e2e_request_latency_seconds_sum"])
    assert found["splitserve_requests_finished_total length"] == len(seen)
    assert found["vllm:request_success_total coordinator abort"] == 1
    assert found["splitserve_requests_refused_total PROMPT_TOO_LONG"] == 1
    assert found["splitserve_nodes prefill"] == found["splitserve_nodes decode"] == 1
    finished = [line for line in ends(cluster) if line != left]
    assert [line["prompt_tokens"] for line in finished] == [usage.prompt_tokens for usage in usages]
    assert sum(line["kv_bytes"] for line in [*finished, left]) == found["splitserve_kv_transferred_bytes_total"]


def ends(cluster):
    """The lines of requests that were taken, which can come after their answers."""
    return [line for line in cluster.children["coordinator"].lines() if line["event"] == "request finished"]
