"""Limits and priorities of requests on a real cluster, from the client to what the end of an answer, loads and metrics
tell."""

from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from splitserve import Client
from splitserve.client.errors import Overloaded, Refused
from tests.effort import few
from tests.system.cluster import wait_until
from tests.tiny_models import write_fake_model

DEADLINE_S = 240.0
PROMPT = list(range(40))
CLASSES = ("loose=ttft:600000,tpot:600000", "hasty=tpot:0.001", "tight=ttft:1000x,tpot:1000x")


@pytest.fixture(scope="module", params=few(["split", "mixed"]))
def client(request, start_cluster, tmp_path_factory):
    model = write_fake_model(tmp_path_factory.mktemp("fake"), step_s=0.005)
    roles = {"num_prefill": 0, "num_decode": 0, "num_mixed": 1} if request.param == "mixed" else {}
    cluster = start_cluster(model, coordinator={"slo_class": CLASSES}, **roles)
    with Client(cluster.target, timeout_s=DEADLINE_S) as client:
        yield client


def end_of(client, **limits):
    *_, last = client.generate(PROMPT, max_tokens=8, ignore_eos=True, **limits)
    return last.completion.attainment


def counts(client, name):
    (found,) = [each for each in client.loads().slo_classes if each.slo_class == name]
    return found.num_sequences, found.num_ttft_met, found.num_tpot_met, found.num_met


def test_the_end_of_an_answer_tells_what_was_kept(client):
    assert end_of(client) is None
    loose, hasty = end_of(client, slo_class="loose"), end_of(client, slo_class="hasty")
    assert (loose.slo_class, loose.ttft_ms, loose.ttft_met, loose.tpot_met) == ("loose", 600000.0, True, True)
    assert (hasty.ttft_ms, hasty.ttft_met, hasty.tpot_ms, hasty.tpot_met) == (None, None, 0.001, False)
    own = end_of(client, ttft_ms=0.001)
    assert (own.slo_class, own.ttft_ms, own.ttft_met) == ("", 0.001, False)
    assert [counts(client, name) for name in ("loose", "hasty", "none")] == [(1, 1, 1, 1), (1, 1, 0, 0), (1, 0, 1, 0)]


def test_multiples_are_of_what_the_nodes_have_measured(client):
    def measured():
        found = end_of(client, slo_class="tight")
        return found.ttft_ms is not None and found.tpot_ms is not None

    wait_until(measured, "nodes have told what a request takes alone", DEADLINE_S)
    found = end_of(client, slo_class="tight")
    assert found.tpot_ms >= 5000.0  # a thousand steps, of 5 ms at least each
    assert (found.ttft_met, found.tpot_met) == (True, True)


def test_a_class_that_there_is_not_is_refused_by_name(client):
    with pytest.raises(
        Refused, match="slo_class 'batch' is none of the server's: there are loose, hasty, tight"
    ) as error:
        end_of(client, slo_class="batch")
    assert error.value.field == "slo_class"


def test_a_priority_that_cannot_be_is_refused_with_the_limit(client):
    with pytest.raises(Refused, match=r"priority must be within \[-100, 100\], not 101") as error:
        end_of(client, priority=101)
    assert error.value.field == "priority"


@pytest.mark.nightly
@pytest.mark.parametrize(("num_prefill", "num_mixed"), [(1, 1), (0, 1)])
def test_what_would_be_late_is_refused_with_the_time_to_come_back(start_cluster, tmp_path, num_prefill, num_mixed):
    """A prompt of at least 50 ms, of which the first token is due in one, beside a long answer, as soon as nodes have
    told how fast they read. Nodes that have nothing to do refuse nobody."""
    model = write_fake_model(tmp_path / "fake", step_s=0.05, max_position_embeddings=8192)
    roles = {"num_prefill": num_prefill, "num_decode": 0, "num_mixed": num_mixed}
    cluster = start_cluster(model, coordinator={"admission": "timely"}, http=True, **roles)
    with Client(cluster.target, timeout_s=DEADLINE_S) as client:

        def refusal():
            try:
                end_of(client, ttft_ms=1)
            except Overloaded as error:
                return error
            return None

        assert end_of(client, ttft_ms=1).ttft_met is False
        beside = client.generate([1, 2, 3], max_tokens=4000, ignore_eos=True)
        next(beside)
        wait_until(refusal, "nodes have told how fast they read", DEADLINE_S)
        refused = refusal()
        assert refused.reason == "WOULD_BE_LATE"
        assert refused.retry_after_s >= 1.0  # how much more is for what the nodes have measured
        assert refused.retry_after_s == round(refused.retry_after_s)
        assert end_of(client, ttft_ms=60_000).ttft_met
        assert end_of(client) is None  # without limits nothing is refused
        unread = PROMPT[::-1]  # of what has been read by now hardly anything is left to compute
        body = {"prompt": unread, "max_tokens": 8, "ttft_ms": 1}
        response = httpx2.post(f"{cluster.url}/v1/completions", json=body, timeout=DEADLINE_S)
        assert (response.status_code, int(response.headers["retry-after"]) >= 1) == (429, True)
        assert response.json()["error"]["reason"] == "WOULD_BE_LATE"
        beside.close()


@pytest.mark.nightly
def test_a_more_important_prompt_is_read_before_one_that_came_earlier(start_cluster, tmp_path):
    """Both wait behind a third, until it is aborted. The one takes a step, the other 250."""
    model = write_fake_model(tmp_path / "fake", step_s=0.01, max_position_embeddings=30_000)
    sizes = {
        "num_prefill": 0,
        "num_decode": 0,
        "num_mixed": 1,
        "node": {"max_num_batched_tokens": 16, "max_num_seqs": 8},
    }
    cluster = start_cluster(model, coordinator={"slo_class": ("first=priority:-1",)}, **sizes)
    ended = []

    def ask(name, num_tokens, **priority):
        for _ in client.generate([7] * num_tokens, max_tokens=1, request_id=name, cache_salt=name, **priority):
            pass
        ended.append(name)

    with Client(cluster.target, timeout_s=DEADLINE_S) as client, ThreadPoolExecutor() as threads:
        asked = []
        for name, num_tokens, priority in (
            ("ahead", 29_000, {"priority": -100}),
            ("earlier", 4000, {}),
            ("important", 16, {"slo_class": "first"}),
        ):
            asked.append(threads.submit(ask, name, num_tokens, **priority))
            wait_until(lambda: client.loads().num_live_requests == len(asked), f"{name} is there", DEADLINE_S)
        client.abort(["ahead"])
        for each in asked:
            each.result(DEADLINE_S)
    assert ended.index("important") < ended.index("earlier")
