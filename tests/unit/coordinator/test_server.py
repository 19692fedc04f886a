"""Refusals, limits, keys and the coming and going of nodes, over real gRPC, with nodes that the test speaks for."""

import asyncio

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from coordinator.dispatcher import Dispatcher
from coordinator.server import CoordinatorServer
from coordinator.settings import CoordinatorSettings
from protos import inference_pb2
from serving_core.errors import ModelError, SettingsError
from tests import fleet_events as events
from tests.scripted_nodes import (
    DEADLINE_S,
    ScriptedNode,
    begin,
    begin_to_write,
    cluster,
    faults_of,
    health_changes,
    read_all,
    refusal_of,
    run,
    step,
    transfer,
)
from tests.tiny_models import EOS, write_fake_model
from tests.unit.coordinator.http_kit import plain_client, url_of

pytestmark = pytest.mark.usefixtures("programs_here")

LENGTH, STOP = events.LENGTH, events.STOP


def test_a_live_id_is_refused_and_free_again_afterwards(tmp_path):
    async def scenario():
        async with cluster(tmp_path) as c:
            call = c.generate()
            attempt, _ = await begin(c)
            code, info, _ = await refusal_of(c.generate())
            assert (code, info.reason) == (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID")
            call.cancel()
            await c.nodes["p0"].answer_cancel(attempt)
            await c.nodes["d0"].answer_cancel(attempt)
            again = c.generate(max_tokens=1)
            new, _ = await begin(c)
            assert new.epoch != attempt.epoch
            await c.nodes["p0"].send(events.first_token(events.sampled(attempt, 0, ord("x"), LENGTH)))
            await c.nodes["p0"].send(events.first_token(events.sampled(new, 0, ord("a"), LENGTH)))
            assert (await read_all(again))[0] == "a"

    run(scenario())


def test_bad_requests_are_refused_before_any_node_hears_of_them(tmp_path):
    async def scenario():
        async with cluster(tmp_path) as c:
            code, info, details = await refusal_of(c.generate(temperature=float("nan")))
            assert (code, info.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_PARAM")
            assert details == "temperature must be within [0, 100], not nan"
            assert (await refusal_of(c.generate("x" * 5000)))[1].reason == "PROMPT_TOO_LONG"
            request = inference_pb2.GenerateRequest(text="a", model="other")
            code, info, _ = await refusal_of(c.stub.Generate(request))
            assert (code, info.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
            await c.until_nothing_is_live()

    run(scenario())


def test_a_call_of_more_answers_than_may_be_in_flight_is_refused_for_good_and_one_that_does_not_fit_now_is_not_begun(
    tmp_path,
):
    async def scenario():
        async with cluster(tmp_path, max_num_queued_reqs=2) as c:
            code, info, details = await refusal_of(c.generate(n=3))
            assert (code, info.reason, info.metadata["field"]) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_PARAM", "n")
            assert details == "n (3) for each of 1 prompts makes 3 sequences, the limit is 2 in flight"
            call = c.generate(max_tokens=2)
            attempt, _ = await begin(c)
            code, info, details = await refusal_of(c.generate(request_id="other", n=2))
            assert (code, info.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
            assert details == "2 do not fit: 1 sequences are in flight, the limit is 2: try again in 1.0 s"
            await transfer(c, attempt, "a")
            await step(c.nodes["d0"], attempt, 1, "b", events.LENGTH)
            await read_all(call)
            both = c.generate(request_id="other", n=2, max_tokens=1)
            begun = [await begin(c), await begin(c)]  # no node has heard of anything in between
            assert {each.request_id for each, _ in begun} == {"other/0", "other/1"}
            both.cancel()

    run(scenario())


INVALID_UTF_8 = b"\x12\x02\xff\xfe"


@pytest.mark.parametrize(
    ("method", "message"),
    [("Generate", INVALID_UTF_8), *((method, b"\xff\xff") for method in ("Generate", "Abort", "GetLoads"))],
)
def test_bytes_that_are_no_request_are_malformed(tmp_path, method, message):
    async def scenario():
        async with cluster(tmp_path, nodes=()) as c:
            rpc = c.channel.unary_stream if method == "Generate" else c.channel.unary_unary
            code, info, _ = await refusal_of(rpc(f"/splitserve.v1.Inference/{method}")(message))
            assert (code, info.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_REQUEST")

    run(scenario())


@pytest.mark.parametrize(
    ("num_ids", "problem"),
    [
        (1025, "request_ids has 1025 entries, the limit is 1024"),
        (2_000_000, "the request has 4000000 bytes, the limit of this method is 262144"),
    ],
)
def test_only_so_many_calls_are_aborted_at_once(tmp_path, num_ids, problem):
    async def scenario():
        async with cluster(tmp_path, nodes=()) as c:
            call = c.channel.unary_unary("/splitserve.v1.Inference/Abort")(b"\x0a\x00" * num_ids)
            code, info, details = await refusal_of(call)
            assert (code, info.reason, details) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_PARAM", problem)
            most = inference_pb2.AbortRequest(request_ids=[f"{number:0128}" for number in range(1024)])
            assert len((await c.stub.Abort(most)).unknown) == 1024

    run(scenario())


def test_a_prompt_that_cannot_fit_is_refused_by_its_length_alone(tmp_path):
    async def scenario():
        async with cluster(tmp_path) as c:
            code, info, details = await refusal_of(c.generate("x" * 3 * 2**20))
            assert (code, info.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG")
            what = "with one output token that is over max_model_len (1000)"
            assert details == f"the prompt has at least {3 * 2**20 // 128} tokens; {what}"

    run(scenario())


def test_a_failure_of_ours_is_internal_without_a_text_and_logged_once(tmp_path, caplog, monkeypatch):
    async def scenario():
        async with cluster(tmp_path) as c:
            monkeypatch.setattr(Dispatcher, "submit", lambda *_, **__: 1 / 0)
            code, info, details = await refusal_of(c.generate())
            assert (code, info.reason, details) == (grpc.StatusCode.INTERNAL, "ENGINE_ERROR", "internal error")

    run(scenario())
    [record] = faults_of(caplog)
    assert record.request_id == "r"


def test_the_clients_deadline_ends_the_answer(tmp_path):
    async def scenario():
        async with cluster(tmp_path) as c:
            await c.until_nothing_is_live()  # is connected
            call = c.generate(timeout=2.0)
            attempt, _ = await begin(c)
            assert (await refusal_of(call))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
            await c.nodes["p0"].answer_cancel(attempt)
            await c.nodes["d0"].answer_cancel(attempt)
            await c.until_nothing_is_live()

    run(scenario())


def test_the_servers_own_deadline_ends_the_answer_with_its_phase(tmp_path):
    async def scenario():
        async with cluster(tmp_path, request_timeout_s=0.1) as c:
            code, info, details = await refusal_of(c.generate())
            assert (code, info.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")
            assert details == "the request was not finished within 0.1 s"
            assert info.metadata["phase"] == "prefill_queue"

    run(scenario())


def test_info_and_loads(tmp_path):
    async def scenario():
        async with cluster(tmp_path, nodes=(), served_model_name="tiny") as c:
            info = await c.stub.GetModelInfo(inference_pb2.GetModelInfoRequest())
            assert (info.served_model_name, info.architecture) == ("tiny", "FakeForCausalLM")
            assert (info.vocab_size, info.max_model_len, list(info.eos_token_ids)) == (260, 4096, [EOS])
            assert info.has_chat_template
            await c.attach("p0", max_model_len=500)
            await c.attach("d0", max_model_len=900, num_blocks=7)
            info = await c.stub.GetModelInfo(inference_pb2.GetModelInfoRequest())
            assert info.max_model_len == 500
            server = await c.stub.GetServerInfo(inference_pb2.GetServerInfoRequest())
            assert [(node.name, node.role) for node in server.nodes] == [("d0", "decode"), ("p0", "prefill")]
            loads = await c.stub.GetLoads(inference_pb2.GetLoadsRequest())
            assert [(load.name, load.num_blocks_free) for load in loads.nodes] == [("d0", 7), ("p0", 100)]
            assert loads.num_live_requests == 0

    run(scenario())


def test_blocks_in_use_are_those_of_the_latest_message(tmp_path):
    """A heartbeat is up to a second old."""

    async def scenario():
        async with cluster(tmp_path, http_port=0) as c:
            call = c.generate()
            attempt = await begin_to_write(c)
            event = events.step_tokens(events.sampled(attempt, 1, ord("b"), LENGTH))
            event.num_blocks_free = 25
            await c.nodes["d0"].send(event)
            assert (await read_all(call))[0] == "ab"
            loads = await c.stub.GetLoads(inference_pb2.GetLoadsRequest())
            assert {load.name: load.num_blocks_free for load in loads.nodes} == {"d0": 25, "p0": 100}
            async with plain_client(base_url=url_of(c)) as client:
                text = (await client.get("/metrics")).text
            assert 'splitserve_node_kv_cache_usage_ratio{node="d0",role="decode"} 0.75' in text

    run(scenario())


def test_each_run_of_a_server_has_an_id(tmp_path):
    async def id_of(**settings):
        async with cluster(tmp_path, nodes=(), **settings) as c:
            return (await c.stub.GetServerInfo(inference_pb2.GetServerInfoRequest())).instance_id

    async def scenario():
        assert await id_of(instance_id="mine") == "mine"
        one, other = await id_of(), await id_of()
        assert len({one, other, ""}) == 3

    run(scenario())


def test_clients_without_the_api_key_get_nowhere(tmp_path):
    async def scenario():
        async with cluster(tmp_path, api_key="sesame") as c:
            for metadata in ((), (("authorization", "Bearer simsim"),), (("authorization", "sesame"),)):
                call = c.stub.GetLoads(inference_pb2.GetLoadsRequest(), metadata=metadata)
                code, info, details = await refusal_of(call)
                assert (code, info.reason) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
                assert "--api-key" in details
            assert (await refusal_of(c.generate()))[0] is grpc.StatusCode.UNAUTHENTICATED
            for scheme in ("Bearer", "bearer"):
                metadata = (("authorization", f"{scheme} sesame"),)
                await c.stub.GetLoads(inference_pb2.GetLoadsRequest(), metadata=metadata)
            health, request = health_pb2_grpc.HealthStub(c.channel), health_pb2.HealthCheckRequest()
            assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
            assert (await refusal_of(health.Watch(request)))[0] is grpc.StatusCode.UNAUTHENTICATED
            assert (
                await health.Watch(request, metadata=metadata).read()
            ).status == health_pb2.HealthCheckResponse.SERVING

    run(scenario())


def test_nodes_without_the_fleet_secret_get_nowhere(tmp_path):
    async def scenario():
        async with cluster(tmp_path, nodes=(), fleet_secret="sesame") as c:
            hello = events.hello("p0", "prefill")
            wrong = await ScriptedNode.dial(c.server.fleet_port, hello, "simsim")
            code, details = await wrong.end_of_stream()
            assert code is grpc.StatusCode.UNAUTHENTICATED
            assert "SPLITSERVE_FLEET_SECRET" in details
            right = await ScriptedNode.dial(c.server.fleet_port, hello, "sesame")
            await right.command("welcome")
            await wrong.close()
            await right.close()

    run(scenario())


def test_a_node_at_the_public_port_is_not_asked_for_the_clients_key(tmp_path):
    async def scenario():
        async with cluster(tmp_path, nodes=(), api_key="sesame", fleet_secret="open") as c:
            attach = c.channel.stream_stream("/splitserve.v1.Fleet/Attach")
            call = attach(metadata=(("authorization", "Bearer open"),))
            assert await call.code() is grpc.StatusCode.UNIMPLEMENTED

    run(scenario())


def test_a_node_of_another_kind_is_refused_with_the_difference(tmp_path):
    async def scenario():
        async with cluster(tmp_path, nodes=()) as c:
            await c.attach("p0", dtype="float32")
            hello = events.hello("d0", "decode", dtype="bfloat16")
            other = await ScriptedNode.dial(c.server.fleet_port, hello)
            refusal = await other.command("refusal")
            assert refusal.reason == "PAIRING_MISMATCH"
            assert refusal.message == "nodes d0 and p0 differ: dtype is bfloat16 and float32"
            assert (await other.end_of_stream())[0] is grpc.StatusCode.OK
            await other.close()

    run(scenario())


@pytest.mark.parametrize("garbage", [b"\xff\xff", b"", events.heartbeat(), events.hello("p0", "prefill")], ids=str)
def test_a_node_that_talks_nonsense_is_cut_off(tmp_path, garbage):
    async def scenario():
        async with cluster(tmp_path) as c:
            if garbage != events.hello("p0", "prefill"):
                stranger = await ScriptedNode.dial(c.server.fleet_port, garbage)
                assert (await stranger.end_of_stream())[0] is grpc.StatusCode.INVALID_ARGUMENT
                await stranger.close()
            if garbage != events.heartbeat():
                await c.nodes["p0"].send(garbage)
                assert (await c.nodes["p0"].end_of_stream())[0] is grpc.StatusCode.INVALID_ARGUMENT
                loads = await c.stub.GetLoads(inference_pb2.GetLoadsRequest())
                assert [load.name for load in loads.nodes] == ["d0"]

    run(scenario())


def test_a_lost_event_ends_the_stream_and_the_answer_goes_on_when_the_node_is_back(tmp_path):
    async def scenario():
        async with cluster(tmp_path, node_wait_s=DEADLINE_S) as c:
            call = c.generate("hi", max_tokens=1)
            await begin(c)
            old = c.nodes["p0"]
            old.lose()
            await old.send(events.heartbeat())
            assert await old.end_of_stream() == (grpc.StatusCode.UNAVAILABLE, "message 2 was lost on the way")
            new = await c.attach("p0", session=old.session)
            job = (await new.command("prefill")).job
            await new.send(events.first_token(events.sampled(job.attempt, 0, ord("a"), LENGTH)))
            assert (await read_all(call))[0] == "a"

    run(scenario())


def test_what_fits_a_node_that_is_away_waits_for_it_and_what_fits_none_is_refused(tmp_path):
    async def scenario():
        async with cluster(tmp_path, nodes=("p0", "d1"), node_wait_s=DEADLINE_S) as c:
            large = await c.attach("d0", num_blocks=100)
            small = await c.attach("d2", num_blocks=10)
            await c.nodes["d1"].close()
            c.server._dispatcher.tick()
            await large.close()
            await c.until_loads(lambda loads: {load.name for load in loads.nodes} == {"p0", "d2"})
            assert (await refusal_of(c.generate("x" * 1001, max_tokens=1)))[1].reason == "PROMPT_TOO_LONG"
            call = c.generate("x" * 900, max_tokens=1)
            again = await c.attach("d0", num_blocks=100)
            assert len((await again.command("reserve")).job.token_ids) == 900
            call.cancel()
            await small.close()

    run(scenario())


async def name_is_taken(c, hello):
    """Asks to attach; the answer is that another has the name."""
    namesake = await ScriptedNode.dial(c.server.fleet_port, hello)
    refusal = await namesake.command("refusal")
    assert (refusal.reason, refusal.message) == ("NAME_TAKEN", "another process is attached as p0")
    assert (await namesake.end_of_stream())[0] is grpc.StatusCode.OK
    await namesake.close()


def test_a_second_node_of_a_name_waits_until_the_first_has_gone(tmp_path, caplog):
    async def scenario():
        async with cluster(tmp_path) as c:
            call = c.generate("hi", max_tokens=1)
            attempt, _ = await begin(c)
            first = c.nodes["p0"]
            for _ in range(3):
                await name_is_taken(c, events.hello("p0", "prefill", incarnation="2"))
            await first.send(events.first_token(events.sampled(attempt, 0, ord("a"), LENGTH)))
            assert (await read_all(call))[0] == "a"
            await first.hang_up()
            await first.end_of_stream()
            await c.attach("p0", incarnation="2")
            await name_is_taken(c, events.hello("p0", "prefill", session=first.session))
            await first.close()

    run(scenario())
    warnings = [record.message for record in caplog.records if record.message.startswith("another process wants")]
    assert len(warnings) == 2  # one for each holder of the name, not one for each time that it was asked for


def test_a_second_node_of_a_name_is_let_in_when_the_first_falls_silent(tmp_path):
    async def scenario():
        async with cluster(tmp_path, nodes=("p0",), heartbeat_s=0.05, node_timeout_s=0.5) as c:
            assert "no heartbeat" in (await c.nodes["p0"].end_of_stream())[1]
            await c.nodes["p0"].close()
            await c.attach("p0")

    run(scenario())


def test_a_process_whose_stream_broke_unnoticed_replaces_itself_at_once(tmp_path):
    async def scenario():
        async with cluster(tmp_path) as c:
            call = c.generate("hi", max_tokens=1)
            await begin(c)
            old = c.nodes["p0"]
            new = await c.attach("p0", session=old.session)
            assert new.session not in (0, old.session)
            job = (await new.command("prefill")).job
            code, details = await old.end_of_stream()
            assert (code, details) == (grpc.StatusCode.UNAVAILABLE, "its process has attached again")
            await old.close()
            await new.send(events.first_token(events.sampled(job.attempt, 0, ord("a"), LENGTH)))
            assert (await read_all(call))[0] == "a"

    run(scenario())


def test_two_coordinators_give_out_different_sessions(tmp_path):
    async def scenario():
        sessions = set()
        for _ in range(2):
            async with cluster(tmp_path) as c:
                sessions |= {node.session for node in c.nodes.values()}
        assert len(sessions) == 4
        assert 0 not in sessions

    run(scenario())


def test_a_node_without_heartbeats_is_lost(tmp_path):
    async def scenario():
        async with cluster(tmp_path, heartbeat_s=0.05, node_timeout_s=0.5) as c:
            assert "no heartbeat" in (await c.nodes["d0"].end_of_stream())[1]

    run(scenario())


def test_readiness_needs_ready_nodes_of_both_roles(tmp_path):
    async def scenario():
        async with cluster(tmp_path, nodes=("p0",)) as c:
            following = await health_changes(c)
            await following("NOT_SERVING")
            await c.attach("d0")
            await following("SERVING")
            await c.nodes["d0"].send(events.heartbeat("draining"))
            await following("NOT_SERVING")
            assert (await refusal_of(c.generate()))[1].reason == "NO_DECODE_WORKER"
            await c.nodes["d0"].send(events.heartbeat("ready"))
            await following("SERVING")
            await c.nodes["p0"].close()
            await following("NOT_SERVING")
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                await health_pb2_grpc.HealthStub(c.channel).Check(health_pb2.HealthCheckRequest(service="other"))
            assert unknown.value.code() is grpc.StatusCode.NOT_FOUND

    run(scenario())


def test_a_draining_server_finishes_its_answers_and_takes_no_more(tmp_path):
    async def scenario():
        async with cluster(tmp_path) as c:
            following = await health_changes(c)
            await following("SERVING")
            call = c.generate(request_id="live", max_tokens=2)
            attempt = await begin_to_write(c)
            draining = asyncio.create_task(c.server.drain())
            await following("NOT_SERVING")
            code, info, _ = await refusal_of(c.generate(request_id="late"))
            assert (code, info.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
            assert not draining.done()
            await step(c.nodes["d0"], attempt, 1, "b", LENGTH)
            assert (await read_all(call))[0] == "ab"
            await draining

    run(scenario())


def test_a_server_that_stops_tells_its_clients_and_nodes(tmp_path):
    async def scenario():
        async with cluster(tmp_path, drain_s=0.0) as c:
            call = c.generate()
            await begin(c)
            await c.server.drain()
            stopping = asyncio.create_task(c.server.stop())
            code, info, _ = await refusal_of(call)
            assert (code, info.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
            assert (await c.nodes["p0"].end_of_stream())[0] is grpc.StatusCode.UNAVAILABLE
            await stopping

    run(scenario())


@pytest.mark.parametrize("version", ["v1alpha", "v1"])
def test_stock_tools_can_ask_what_is_served(tmp_path, version):
    async def scenario():
        async with cluster(tmp_path, nodes=()) as c:
            ask = reflection_pb2.ServerReflectionRequest
            info = c.channel.stream_stream(
                f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
                request_serializer=ask.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )
            [services] = [response async for response in info(iter([ask(list_services="")]))]
            names = [service.name for service in services.list_services_response.service]
            ours = ["splitserve.v1.Inference", "splitserve.v1.Admin", "grpc.health.v1.Health"]
            reflections = [f"grpc.reflection.{each}.ServerReflection" for each in ("v1", "v1alpha")]
            assert sorted(names) == sorted([*ours, *reflections])
            files = info(iter([ask(file_containing_symbol=name) for name in names]))
            described = [each.file_descriptor_response.file_descriptor_proto async for each in files]
            for name, [file, *_] in zip(names, described, strict=True):  # as `grpcurl describe` asks for each
                parsed = descriptor_pb2.FileDescriptorProto.FromString(file)
                assert name in [f"{parsed.package}.{service.name}" for service in parsed.service]
            fleet = c.channel.stream_stream("/splitserve.v1.Fleet/Attach")()
            assert await fleet.code() is grpc.StatusCode.UNIMPLEMENTED

    run(scenario())


def test_a_port_in_use_and_a_missing_model_are_told(tmp_path):
    async def scenario():
        async with cluster(tmp_path, http_port=0) as c:
            ports = {"grpc_port": c.server.port, "fleet_port": c.server.fleet_port, "http_port": c.server.http_port}
            for name, port in ports.items():
                settings = CoordinatorSettings(model=str(tmp_path), **{**dict.fromkeys(ports, 0), name: port})
                with pytest.raises(SettingsError, match=f"port {port} is in use"):
                    await CoordinatorServer(settings).start()
        with pytest.raises(ModelError, match="no model folder was given"):
            CoordinatorServer(CoordinatorSettings())
        with pytest.raises(ModelError, match="there is no model folder"):
            CoordinatorServer(CoordinatorSettings(model=str(tmp_path / "nowhere")))

    write_fake_model(tmp_path)
    run(scenario())
