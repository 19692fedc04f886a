"""Local prefill over real gRPC, with nodes that the test speaks for: readiness, limits, and one answer."""

import pytest

from protos import inference_pb2
from tests import fleet_events as events
from tests.scripted_nodes import cluster, read_all, refusal_of, run, step
from tests.unit.coordinator.test_server import health_changes


@pytest.mark.parametrize("policy", ["auto", "always"])
def test_decode_nodes_alone_are_ready_and_answer(tmp_path, policy):
    async def scenario():
        async with cluster(tmp_path, nodes=("p0",), local_prefill=policy) as c:
            following = await health_changes(c)
            await following("NOT_SERVING")
            await c.attach("d0")
            await following("SERVING")
            await c.nodes["p0"].hang_up()
            await c.until_loads(lambda loads: [load.name for load in loads.nodes] == ["d0"])
            call, d0 = c.generate(max_tokens=3), c.nodes["d0"]
            reserve = await d0.command("reserve")
            assert (reserve.local_prefill, reserve.prefill_tp_size) == (True, 0)
            attempt = reserve.job.attempt
            await d0.send(events.first_token(events.sampled(attempt, 0, ord("a")), prefill_s=1e-9))
            await step(d0, attempt, 1, "bc", events.LENGTH)
            text, _, [complete] = await read_all(call)
            assert (text, complete.finish_reason) == ("abc", events.LENGTH)
            timeline = complete.timeline
            assert (timeline.prefill_node, timeline.decode_node) == ("d0", "d0")
            assert timeline.credit_wait_s == timeline.transfer_s == 0.0
            await c.until_nothing_is_live()

    run(scenario())


@pytest.mark.parametrize(("policy", "reason"), [("never", "PROMPT_TOO_LONG"), ("auto", ""), ("always", "")])
def test_what_fits_on_no_prefill_node_is_refused_only_where_it_must_be_computed_there(tmp_path, policy, reason):
    """The prefill node holds 32 tokens, the decode node 1600; either also says so of the longest request."""

    async def scenario():
        async with cluster(tmp_path, nodes=("d0",), local_prefill=policy) as c:
            await c.attach("p0", num_blocks=2, max_model_len=32)
            longest = (await c.stub.GetModelInfo(inference_pb2.GetModelInfoRequest())).max_model_len
            call = c.generate("x" * 40, max_tokens=1)
            if reason:
                assert (longest, (await refusal_of(call))[1].reason) == (32, reason)
                return
            assert longest == 1000
            reserve = await c.nodes["d0"].command("reserve")
            assert reserve.local_prefill
            token = events.sampled(reserve.job.attempt, 0, ord("a"), events.LENGTH)
            await c.nodes["d0"].send(events.first_token(token))
            assert (await read_all(call))[0] == "a"

    run(scenario())
