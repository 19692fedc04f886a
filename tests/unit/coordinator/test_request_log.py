"""One log line for every end of a request, with its figures, and no word of what was asked or answered."""

import json
import logging

import pytest

from coordinator.control.instructions import End
from coordinator.control.metrics import Metrics
from coordinator.control.request import Timeline
from coordinator.control.request_log import CallRecord, RequestLog
from protos import inference_pb2
from serving_core.errors import RequestError
from serving_core.process.telemetry import JsonFormatter
from tests import fleet_events as events
from tests.scripted_nodes import begin, begin_to_write, cluster, read_all, refusal_of, run, step, transfer
from tests.unit.coordinator.http_kit import plain_client, url_of

pytestmark = pytest.mark.usefixtures("programs_here")

SECRET = "swordfish"


@pytest.fixture(autouse=True)
def info(caplog):
    caplog.set_level(logging.INFO)


def lines(caplog, event=""):
    """The lines of the request log as they would be written."""
    formatter = JsonFormatter("coordinator", "c0")
    found = [json.loads(formatter.format(record)) for record in caplog.records if record.name == RequestLog.__module__]
    assert SECRET not in str(found)
    return [line for line in found if event in line["event"]]


def test_a_finished_request(tmp_path, caplog):
    async def scenario():
        async with cluster(tmp_path) as c:
            call = c.generate(SECRET, max_tokens=20)
            attempt = await begin_to_write(c, "s", num_cached_tokens=4, num_bytes=800)
            await step(c.nodes["d0"], attempt, 1, "wordfish", events.LENGTH)
            assert (await read_all(call))[0] == SECRET

    run(scenario())
    [line] = lines(caplog)
    phases = [
        line.pop(f"{name}_s")
        for name in ("prefill_queue", "prefill", "kv_alloc", "kv_transfer", "decode_queue", "decode")
    ]
    assert sum(phases) == pytest.approx(line.pop("e2e_s"), abs=1e-5)
    assert line.pop("ttft_s") > 0
    assert line.pop("ts")
    assert line == {
        "level": "info",
        "role": "coordinator",
        "node": "c0",
        "event": "request finished",
        "request_id": "r",
        "index": 0,
        "finish_reason": "length",
        "prompt_tokens": len(SECRET),
        "cached_tokens": 4,
        "completion_tokens": len(SECRET),
        "prefill_node": "p0",
        "decode_node": "d0",
        "restarts": 0,
        "kv_bytes": 800,
    }


def test_a_stop_string_is_the_reason_whatever_the_nodes_say(tmp_path, caplog):
    async def scenario():
        async with cluster(tmp_path) as c:
            call = c.generate(stop=["b"])
            attempt = await begin_to_write(c, "a")
            await step(c.nodes["d0"], attempt, 1, "bcd", events.LENGTH)
            assert (await read_all(call))[0] == "a"

    run(scenario())
    [line] = lines(caplog)
    assert (line["finish_reason"], line["completion_tokens"]) == ("stop", 2)


def test_a_client_that_leaves_and_one_that_aborts(tmp_path, caplog):
    async def scenario():
        async with cluster(tmp_path) as c:
            call = c.generate()
            attempt, _ = await begin(c)
            call.cancel()
            for node in c.nodes.values():
                await node.answer_cancel(attempt)
            await c.until_nothing_is_live()
            call = c.generate(request_id="other")
            await begin(c)
            await c.stub.Abort(inference_pb2.AbortRequest(request_ids=["other"]))
            await read_all(call)

    run(scenario())
    assert [(line["request_id"], line["finish_reason"]) for line in lines(caplog)] == [
        ("r", "abort"),
        ("other", "abort"),
    ]


def test_a_failed_request_has_one_line_for_each_of_its_answers(tmp_path, caplog):
    async def scenario():
        async with cluster(tmp_path) as c:
            call = c.generate(n=2)
            attempt, _ = await begin(c)
            other, _ = await begin(c)
            await transfer(c, attempt, "a")
            await c.nodes["d0"].send(events.failed(attempt, "ENGINE_ERROR", "out of luck"))
            await refusal_of(call)
            for node in c.nodes.values():
                await node.answer_cancel(other)

    run(scenario())
    attempt_failed, *failed = lines(caplog)
    assert [attempt_failed[key] for key in ("event", "level", "failed_node", "reason", "message", "request_id")] == [
        "attempt failed", "warning", "d0", "ENGINE_ERROR", "out of luck", "r",
    ]  # fmt: skip
    assert {(line["event"], line["level"], line["reason"], line["message"]) for line in failed} == {
        ("request failed", "warning", "ENGINE_ERROR", "the engine of the decode node failed: out of luck")
    }
    assert sorted((line["index"], line["tokens_emitted"]) for line in failed) == [(0, "1"), (1, "0")]


def test_a_failed_transfer_tells_its_cause(tmp_path, caplog):
    async def scenario():
        async with cluster(tmp_path, nodes=("p0", "d0", "p1", "d1")) as c:
            call = c.generate()
            attempt, _ = await begin(c)
            await c.nodes["d0"].send(events.failed(attempt, "KV_CHECKSUM_MISMATCH", "block 3 is damaged"))
            await c.nodes["p0"].answer_cancel(attempt)
            again = (await c.nodes["p1"].command("prefill")).job.attempt
            await c.nodes["p1"].send(events.first_token(events.sampled(again, 0, ord("a"), events.LENGTH)))
            await c.nodes["d1"].command("reserve")
            await c.nodes["d1"].answer_cancel(again)
            await read_all(call)

    run(scenario())
    failed, finished = lines(caplog)
    assert [failed[key] for key in ("event", "failed_node", "reason", "message", "request_id")] == [
        "transfer failed", "d0", "KV_CHECKSUM_MISMATCH", "block 3 is damaged", "r",
    ]  # fmt: skip
    assert (finished["restarts"], finished["prefill_node"]) == (1, "p1")


def test_refused_requests_are_told_without_what_they_said(tmp_path, caplog):
    async def scenario():
        async with cluster(tmp_path, nodes=(), http_port=0, max_num_queued_reqs=1) as c:
            await refusal_of(c.generate(temperature=-1))
            await refusal_of(c.generate(SECRET * 1000))
            await refusal_of(c.stub.Generate(inference_pb2.GenerateRequest(text="a", model=SECRET, request_id="r")))
            await refusal_of(c.generate(request_id="x" * 5000))
            async with plain_client(base_url=url_of(c), headers={"x-request-id": "h"}) as http:
                await http.post("/v1/chat/completions", json={"messages": SECRET})
                await http.post("/v1/completions", json={"prompt": "a"})
                headers = {"content-type": "application/json"}
                await http.post("/v1/completions", content=SECRET, headers=headers)

    run(scenario())
    found = lines(caplog, "request refused")
    assert [(line["request_id"], line["reason"], line.get("field"), "message" in line) for line in found] == [
        ("r", "BAD_PARAM", "temperature", False),
        ("r", "PROMPT_TOO_LONG", "input", True),
        ("r", "NO_PREFILL_WORKER", None, True),
        ("x" * 128, "BAD_PARAM", "request_id", False),
        ("h", "BAD_PARAM", "messages", False),
        ("h", "NO_PREFILL_WORKER", None, True),
        ("h", "MALFORMED_REQUEST", None, False),
    ]


def test_every_end_is_counted_once():
    metrics = Metrics()
    request_log = RequestLog(metrics)
    complete = inference_pb2.Complete(finish_reason=events.STOP, completion_tokens=1)
    request_log.ended(End("a/0", complete, Timeline(0.0), 1.0))
    request_log.ended(End("b/0", RequestError("WORKER_LOST", "gone"), Timeline(0.0), 1.0))
    request_log.refused(CallRecord("c"), RequestError("DRAINING", "going"))
    assert (metrics.finished, metrics.failed, metrics.refused) == ({"stop": 1}, {"WORKER_LOST": 1}, {"DRAINING": 1})
    assert (sum(metrics.e2e.counts), sum(metrics.tpot.counts)) == (1, 0)  # one token has no time after the first
