"""The health port of a real node: before and after it is attached, without its coordinator, with its engine stuck, and
while it drains; and who tells of a stuck step."""

import signal

import grpc
import httpx2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from serving_node.watchdog import LEAST_S
from tests.system.answers import outcome, request, stream
from tests.system.cluster import Cluster, free_port, wait_until
from tests.system.oracle import fake_answer
from tests.tiny_models import write_fake_model

pytestmark = pytest.mark.nightly

DEADLINE_S = 240.0
STUCK_AT = 60  # which of its steps
STUCK_S = 20.0  # within which a busy prober has to find it so
STEP_AGES = ("splitserve_step_age_seconds", "splitserve_node_step_age_seconds")
NODE = "mixed-0"
PROMPT = [5, 6, 7]


class Probes:
    """What a node says."""

    def __init__(self, cluster, port):
        self._cluster, self._port = cluster, port

    def _status(self, service):
        with self._cluster.channel(self._port) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
            except grpc.RpcError as error:
                return error.code().name
        return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)

    def until(self, what, *, live="SERVING", ready):
        expected = (live, ready)
        wait_until(lambda: (self._status("live"), self._status("ready")) == expected, f"{what}: {expected}", DEADLINE_S)


def ages_told(port):
    """Seconds of the running step by the name of the figure, of the one node."""
    page = httpx2.get(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S).raise_for_status().text
    samples = [sample for metric in text_string_to_metric_families(page) for sample in metric.samples]
    return {sample.name: sample.value for sample in samples if sample.name in STEP_AGES}


async def _ask(stub, max_tokens):
    answering = stream(stub, request(PROMPT, max_tokens=max_tokens, temperature=0, ignore_eos=True))
    await answering.tokens(1)
    return answering


async def _end(answering, max_tokens):
    await answering.end()
    assert outcome(answering) == "LENGTH"
    assert answering.answer.token_ids == fake_answer(PROMPT, max_tokens)


async def test_what_a_node_says_over_its_life(tmp_path):
    port, metrics_port = free_port(), free_port()
    model = write_fake_model(tmp_path / "model", step_s=0.02)
    flags = {"health_port": port, "metrics_port": metrics_port}
    numbers = {"num_prefill": 0, "num_decode": 0, "num_mixed": 1}
    cluster = Cluster(model, tmp_path, http=True, coordinator={"node_wait_s": DEADLINE_S}, **numbers)
    probes = Probes(cluster, port)
    try:
        cluster.start_node(NODE, env={"SPLITSERVE_FAILPOINTS": f"step:{STUCK_AT}=sleep:{STUCK_S}"}, **flags)
        probes.until("loaded, and nobody there", ready="NOT_SERVING")
        cluster.start_coordinator()
        probes.until("attached", ready="SERVING")
        async with cluster.connect() as stub:
            await _end(await _ask(stub, 10), 10)
        cluster.kill("coordinator")
        probes.until("its coordinator is gone", ready="NOT_SERVING")
        cluster.start_coordinator()
        probes.until("attached again", ready="SERVING")
        async with cluster.connect() as stub:
            answering = await _ask(stub, STUCK_AT + 40)
            assert STEP_AGES[1] in ages_told(cluster.http_port)
            probes.until("its engine is stuck", live="NOT_SERVING", ready="NOT_SERVING")
            assert ages_told(metrics_port)[STEP_AGES[0]] > LEAST_S  # what SplitServeStepHangs asks: it alone tells
            assert ages_told(cluster.http_port) == {}
            probes.until("the step has ended", ready="SERVING")
            await _end(answering, STUCK_AT + 40)
            answering = await _ask(stub, 500)
            node = cluster.expect_end(NODE)
            node.send(signal.SIGTERM)
            probes.until("it drains", ready="NOT_SERVING")
            await _end(answering, 500)
        assert node.wait(DEADLINE_S) == 0
        cluster.stop()
    finally:
        cluster.kill_everything()
