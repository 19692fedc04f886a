"""Nodes that read and write over real gRPC, with nodes that the test speaks for: readiness, limits, and one answer."""

import pytest

from protos import inference_pb2
from tests import fleet_events as events
from tests.scripted_nodes import cluster, read_all, refusal_of, run, step
from tests.unit.coordinator.test_server import health_changes


def test_a_node_that_does_both_is_ready_alone_and_answers(tmp_path):
    async def scenario():
        async with cluster(tmp_path, nodes=("p0",)) as c:
            following = await health_changes(c)
            await following("NOT_SERVING")
            await c.attach("b0")
            await following("SERVING")
            await c.nodes["p0"].hang_up()
            await c.until_loads(lambda loads: [load.name for load in loads.nodes] == ["b0"])
            call, b0 = c.generate(max_tokens=3), c.nodes["b0"]
            reserve = await b0.command("reserve")
            assert (reserve.local_prefill, reserve.prefill_tp_size) == (True, 0)
            attempt = reserve.job.attempt
            await b0.send(events.first_token(events.sampled(attempt, 0, ord("a")), prefill_s=1e-9))
            await step(b0, attempt, 1, "bc", events.LENGTH)
            text, _, [complete] = await read_all(call)
            assert (text, complete.finish_reason) == ("abc", events.LENGTH)
            timeline = complete.timeline
            assert (timeline.prefill_node, timeline.decode_node) == ("b0", "b0")
            assert timeline.credit_wait_s == timeline.transfer_s == 0.0
            await c.until_nothing_is_live()

    run(scenario())


@pytest.mark.parametrize(("writer", "reason"), [("d0", "PROMPT_TOO_LONG"), ("b0", "")])
def test_what_fits_on_no_prefill_node_is_refused_only_where_it_must_be_read_there(tmp_path, writer, reason):
    """The prefill node holds 32 tokens, the other 1600; either also says so of the longest request."""

    async def scenario():
        async with cluster(tmp_path, nodes=(writer,)) as c:
            await c.attach("p0", num_blocks=2, max_model_len=32)
            longest = (await c.stub.GetModelInfo(inference_pb2.GetModelInfoRequest())).max_model_len
            call = c.generate("x" * 40, max_tokens=1)
            if reason:
                assert (longest, (await refusal_of(call))[1].reason) == (32, reason)
                return
            assert longest == 1000
            reserve = await c.nodes[writer].command("reserve")
            assert reserve.local_prefill
            token = events.sampled(reserve.job.attempt, 0, ord("a"), events.LENGTH)
            await c.nodes[writer].send(events.first_token(token))
            assert (await read_all(call))[0] == "a"

    run(scenario())
