"""Both clients against a real gRPC server whose answers the test writes."""

import asyncio
import json
import socket
import subprocess
import sys
import threading
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import psutil
import pytest
from google.rpc import status_pb2
from grpc.aio import AioRpcError, Metadata
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_status import rpc_status

from protos import inference_pb2
from serving_core.errors import SettingsError
from splitserve import AsyncClient, Client
from splitserve.client import answers
from splitserve.client.errors import (
    Cancelled,
    DeadlineExceeded,
    Overloaded,
    Refused,
    ServerFault,
    Unauthenticated,
    Unavailable,
    from_rpc_error,
)
from splitserve.client.questions import Sampling, abort_request, generate_request
from tests.scripted_server import Script, chunk, complete, refusal, serving

DEADLINE_S = 60.0
OWN_ADDRESSES = sorted(
    {entry.address for entries in psutil.net_if_addrs().values() for entry in entries if entry.family == socket.AF_INET}
)
USER_HI = {"role": "user", "content": "hi"}


@pytest.fixture
def script():
    return Script()


@pytest.fixture
def target(script):
    with serving(script) as target:
        yield target


def ask(target, prompt="hi", **options):
    with Client(target) as client:
        return list(client.generate(prompt, **options))


async def ask_async(target, prompt="hi", **options):
    async with AsyncClient(target) as client:
        return [item async for item in client.generate(prompt, **options)]


@pytest.fixture(params=["sync", "async"])
def asked(request):
    """The same question through either client."""
    if request.param == "sync":
        return ask
    return lambda *args, **options: asyncio.run(ask_async(*args, **options))


def test_an_answer_becomes_typed_chunks(script, target, asked):
    logprobs = [inference_pb2.TokenLogprobs(token_id=7, logprob=-0.5, top=[inference_pb2.TopLogprob(token_id=8)])]
    timeline = inference_pb2.Timeline(
        prefill_s=1.5, e2e_s=2.0, decode_node="d0", num_restarts=1, num_moves=2, move_pause_s=0.5, loan_s=0.25
    )
    script.replies = [
        chunk("Par", 0, [7], logprobs=logprobs),
        chunk("is", 1, [9, 10]),
        complete(
            matched_stop_str=".",
            prompt_tokens=5,
            completion_tokens=3,
            cached_tokens=2,
            timeline=timeline,
            kv_bytes=2**40,
            kv_bytes_saved=9,
            moved_kv_bytes=4,
            proposed_tokens=6,
            accepted_tokens=1,
            lent_kv_bytes=6,
        ),
    ]
    first, second, last = asked(target)
    assert (first.text, first.token_ids, first.first_token_index, first.request_id) == ("Par", (7,), 0, "r1")
    assert first.logprobs == (answers.TokenLogprob(7, -0.5, (answers.TopLogprob(8, 0.0),)),)
    assert first.completion is None
    assert (second.first_token_index, second.token_ids) == (1, (9, 10))
    assert (last.text, last.token_ids) == ("", ())
    end = last.completion
    assert (end.finish_reason, end.matched_stop) == ("stop", ".")
    assert (end.prompt_tokens, end.completion_tokens, end.cached_tokens) == (5, 3, 2)
    assert (end.proposed_tokens, end.accepted_tokens) == (6, 1)
    assert (end.kv_bytes, end.kv_bytes_saved, end.moved_kv_bytes, end.lent_kv_bytes) == (2**40, 9, 4, 6)
    assert end.timeline.loan_s == 0.25
    assert (end.timeline.prefill_s, end.timeline.decode_node, end.timeline.num_restarts) == (1.5, "d0", 1)
    assert (end.timeline.num_moves, end.timeline.move_pause_s) == (2, 0.5)


def test_the_matched_stop_may_be_a_token_or_nothing(script, target, asked):
    script.replies = [complete(matched_token_id=0)]
    assert asked(target)[0].completion.matched_stop == 0
    script.replies = [complete()]
    assert asked(target)[0].completion.matched_stop is None


@pytest.mark.parametrize(
    ("prompt", "kind", "sent"),
    [
        ("héllo", "text", "héllo"),
        ("", "text", ""),
        ([1, 2, 3], "tokenized", inference_pb2.TokenizedInput(input_ids=[1, 2, 3])),
        ([], "tokenized", inference_pb2.TokenizedInput()),
        (
            [{"role": "user", "content": "hi"}],
            "chat",
            inference_pb2.ChatInput(messages=[inference_pb2.ChatMessage(role="user", content="hi")]),
        ),
    ],
)
def test_text_token_ids_and_conversations_are_sent_as_such(script, target, asked, prompt, kind, sent):
    asked(target, prompt)
    (request,) = script.requests
    assert request.WhichOneof("input") == kind
    assert getattr(request, kind) == sent


def test_only_sampling_fields_that_were_given_are_sent(script, target, asked):
    asked(target, temperature=0, top_k=None, stop="x", logit_bias={5: -1.0}, model="m", request_id="mine")
    (request,) = script.requests
    assert (request.model, request.request_id) == ("m", "mine")
    assert request.sampling_params == inference_pb2.SamplingParams(temperature=0, stop=["x"], logit_bias={5: -1.0})
    assert request.sampling_params.HasField("temperature")


def test_a_salt_is_sent_when_it_is_given(script, target, asked):
    asked(target, cache_salt="tenant-é")
    asked(target)
    assert [request.cache_salt for request in script.requests] == ["tenant-é", ""]


def test_limits_are_sent_when_they_are_given_and_what_became_of_them_comes_back(script, target, asked):
    attainment = inference_pb2.Attainment(slo_class="chat", ttft_ms=500.0, ttft_met=False)
    script.replies = [complete(attainment=attainment)]
    (end,) = asked(target, ttft_ms=500, slo_class="chat")
    assert end.completion.attainment == answers.Attainment("chat", 500.0, None, False, None)
    script.replies = [complete()]
    (end,) = asked(target)
    assert end.completion.attainment is None
    first, second = script.requests
    assert (first.ttft_ms, first.HasField("tpot_ms"), first.slo_class) == (500.0, False, "chat")
    assert (second.HasField("ttft_ms"), second.HasField("tpot_ms"), second.slo_class) == (False, False, "")


def test_a_priority_is_sent_when_it_is_given_be_it_0(script, target, asked):
    for priority in (-3, 0, None):
        asked(target, priority=priority)
    found = [(request.priority, request.HasField("priority")) for request in script.requests]
    assert found == [(-3, True), (0, True), (0, False)]


@pytest.mark.parametrize("priority", [2**31, 0.5, "high"])
def test_a_priority_that_the_wire_cannot_carry_is_refused_at_once(priority):
    with pytest.raises(Refused) as caught:
        generate_request("hi", model="", request_id="", cache_salt="", sampling={}, priority=priority)
    assert caught.value.reason == "BAD_PARAM"


@pytest.mark.parametrize("salt", ["\ud800", 5])
def test_a_salt_that_the_wire_cannot_carry_is_refused_at_once(salt):
    with pytest.raises(Refused) as caught:
        generate_request("hi", model="", request_id="", cache_salt=salt, sampling={})
    assert caught.value.reason == "BAD_PARAM"


def test_every_sampling_field_of_the_wire_can_be_given():
    assert set(Sampling.__annotations__) == set(inference_pb2.SamplingParams.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (answers.Timeline, inference_pb2.Timeline),
        (answers.NodeLoad, inference_pb2.NodeLoad),
        (answers.RankLoad, inference_pb2.RankLoad),
        (answers.NodeInfo, inference_pb2.NodeInfo),
        (answers.ModelInfo, inference_pb2.GetModelInfoResponse),
        (answers.ServerInfo, inference_pb2.GetServerInfoResponse),
        (answers.Loads, inference_pb2.GetLoadsResponse),
        (answers.Aborted, inference_pb2.AbortResponse),
    ],
)
def test_answers_leave_no_wire_field_out(record, message):
    assert {field.name for field in fields(record)} == set(message.DESCRIPTOR.fields_by_name)


def request_of(prompt="hi", **sampling):
    return generate_request(prompt, model="", request_id="", cache_salt="", sampling=sampling)


@pytest.mark.parametrize(
    ("prompt", "field", "message"),
    [
        ("\ud800", "prompt", "prompt must be a string of valid Unicode, not '\\ud800'"),
        ([-1], "prompt", "prompt must be a list of integers from 0 to 2**32 - 1, not [-1]"),
        ([2**32], "prompt", "prompt must be a list of integers from 0 to 2**32 - 1, not [4294967296]"),
        (["a"], "prompt", "prompt must be a list of integers from 0 to 2**32 - 1, not ['a']"),
        ([1.5], "prompt", "prompt must be a list of integers from 0 to 2**32 - 1, not [1.5]"),
        (5, "prompt", "prompt must be text, token ids or a conversation, not 5"),
        (b"hi", "prompt", "prompt must be text, token ids or a conversation, not b'hi'"),
        (bytearray(b"hi"), "prompt", "prompt must be text, token ids or a conversation, not bytearray(b'hi')"),
        ([{"role": "user", "text": "hi"}], "prompt[0]", "prompt[0] has no content"),
        ([USER_HI, "hi"], "prompt[1]", "prompt[1] must be a message, not 'hi'"),
        ([USER_HI | {"content": 5}], "prompt[0].content", "prompt[0].content must be a string of valid Unicode, not 5"),
        ([USER_HI | {"name": {1}}], "prompt[0]", None),
        (
            [USER_HI | {"content": [{"type": "image_url"}]}],
            "prompt[0].content[0]",
            "prompt[0].content[0] must be a text part: models read text alone, not {'type': 'image_url'}",
        ),
    ],
)
def test_a_prompt_that_is_none_is_refused_at_once(prompt, field, message):
    with pytest.raises(Refused) as caught:
        request_of(prompt)
    assert (caught.value.reason, caught.value.field) == ("BAD_PARAM", field)
    assert message is None or caught.value.message == message


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_tokens", "8", "an integer of 32 bits, not '8'"),
        ("max_tokens", 2**31, "an integer of 32 bits, not 2147483648"),
        ("seed", 1.5, "an integer of 64 bits, not 1.5"),
        ("temperature", "a", "a number, not 'a'"),
        ("ignore_eos", "no", "true or false, not 'no'"),
        ("stop", [1], "a list of strings of valid Unicode, not [1]"),
        ("choice", [1], "a list of strings of valid Unicode, not [1]"),
        ("stop_token_ids", b"ab", "a list of integers from 0 to 2**32 - 1, not b'ab'"),
        ("regex", b"ab", "a string of valid Unicode, not b'ab'"),
        ("logit_bias", {"5": 1}, "a mapping of integers from 0 to 2**32 - 1 to numbers, not {'5': 1}"),
        ("bad_tokens", 5, "a list of lists of token ids, not 5"),
        ("bad_tokens", [[4], 5], "a list of lists of token ids, not 5"),
        ("bad_tokens", [[4], [-5]], "a list of integers from 0 to 2**32 - 1, not [-5]"),
        ("json_schema", 5, "a string of valid Unicode, not 5"),
    ],
)
def test_a_sampling_field_that_the_wire_cannot_carry_is_named(name, value, expected):
    with pytest.raises(Refused) as caught:
        request_of(**{name: value})
    assert (caught.value.reason, caught.value.field) == ("BAD_PARAM", name)
    assert caught.value.message == f"{name} must be {expected}"


def test_a_schema_may_be_a_mapping():
    schema = {"type": "integer", "minimum": 3}
    assert json.loads(request_of(json_schema=schema).sampling_params.json_schema) == schema
    assert request_of(json_schema="{}").sampling_params.json_schema == "{}"


def test_messages_may_be_as_openai_writes_them():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "c1", "name": None},
    ]
    user, assistant, tool = request_of(messages).chat.messages
    assert (user.content, user.extra_json) == ("a\nb", "")
    assert assistant.content == ""
    made = call | {"function": {"name": "f", "arguments": {"x": 1}}}
    assert json.loads(assistant.extra_json) == {"tool_calls": [made]}
    assert json.loads(tool.extra_json) == {"tool_call_id": "c1"}


def test_one_id_to_abort_is_one_id():
    assert list(abort_request("ab1").request_ids) == ["ab1"]
    assert list(abort_request(("ab1", "ab2")).request_ids) == ["ab1", "ab2"]
    with pytest.raises(Refused, match=r"request_ids must be a list of strings of valid Unicode, not b'ab1'"):
        abort_request(b"ab1")


def test_an_unknown_sampling_field_is_a_type_error():
    with pytest.raises(TypeError, match="max_new_tokens"):
        generate_request("hi", model="", request_id="", cache_salt="", sampling={"max_new_tokens": 1})


@pytest.mark.parametrize(
    ("code", "reason", "expected"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG", Refused),
        (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND", Refused),
        (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID", Refused),
        (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED", Unauthenticated),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", Overloaded),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, "", Cancelled),
        (grpc.StatusCode.INTERNAL, "ENGINE_ERROR", ServerFault),
        (grpc.StatusCode.DATA_LOSS, "KV_CHECKSUM_MISMATCH", ServerFault),
    ],
)
def test_a_status_becomes_its_exception(script, target, asked, code, reason, expected):
    script.failures = [refusal(code, "the sentence", reason, retry_after_s=0.25)]
    with pytest.raises(expected, match="the sentence") as caught:
        asked(target, request_id="r")
    error = caught.value
    assert (error.code, error.reason, error.message, error.retry_after_s) == (code, reason, "the sentence", 0.25)


def test_a_status_without_details_still_has_its_exception(script, target, asked):
    script.failures = [rpc_status.to_status(status_pb2.Status(code=grpc.StatusCode.INTERNAL.value[0]))]
    with pytest.raises(ServerFault, match="INTERNAL") as caught:
        asked(target)
    assert (caught.value.reason, caught.value.retry_after_s) == ("", None)


def test_unavailable_before_the_first_message_is_tried_three_times(script, target, asked):
    script.failures = [refusal(grpc.StatusCode.UNAVAILABLE, "draining", "DRAINING")] * 2
    script.replies = [chunk("ok")]
    assert [item.text for item in asked(target)] == ["ok"]
    assert len(script.requests) == 3


def test_and_not_a_fourth_time(script, target, asked):
    script.failures = [refusal(grpc.StatusCode.UNAVAILABLE, "draining", "DRAINING")] * 3
    with pytest.raises(Unavailable, match="draining"):
        asked(target)
    assert len(script.requests) == 3


def test_a_refusal_is_not_repeated(script, target, asked):
    script.failures = [refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", "QUEUE_FULL")]
    with pytest.raises(Overloaded):
        asked(target)
    assert len(script.requests) == 1


def test_nobody_listening_is_a_sentence(asked):
    with pytest.raises(Unavailable, match=r"no server answers at 127\.0\.0\.1:1; start one with: splitserve up"):
        asked("127.0.0.1:1")


def test_a_server_that_is_too_busy_to_shake_hands_is_not_said_to_be_down():
    """The call may take as long as it was given."""
    with (
        socket.create_server(("127.0.0.1", 0)) as mute,
        Client(f"127.0.0.1:{mute.getsockname()[1]}", timeout_s=6.0) as client,
        pytest.raises(DeadlineExceeded, match="did not finish the call before its deadline"),
    ):
        client.loads()
    details = "failed to connect to all addresses; last error: timed out before receiving SETTINGS frame"
    error = AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), details)
    told = str(from_rpc_error(error, "localhost:50051"))
    assert told == "localhost:50051 takes connections, but does not answer: it is busy, or hangs"


def test_an_http_port_is_no_server_that_is_down(asked):
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with pytest.raises(Unavailable, match="does not speak gRPC, as a server's HTTP port"):
                asked(f"127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()
            thread.join()


def test_a_name_of_several_addresses_may_have_an_http_port_at_another_one():
    """Of these gRPC tells of the last."""
    details = "failed to connect to all addresses; last error: UNKNOWN: ipv6:%5B::1%5D:1: Connection refused"
    error = AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), details)
    told = str(from_rpc_error(error, "localhost:8000"))
    assert told == (
        "no server answers at localhost:8000 in gRPC, whose port is 50051 by default; start one with: splitserve up"
    )


def test_an_address_may_say_that_it_is_without_tls(script, target, asked):
    asked(f"http://{target}/")
    assert [request.text for request in script.requests] == ["hi"]


@pytest.mark.parametrize("nowhere", ["ftp://localhost:1", "localhost:port", "nowhere.invalid:1"])
def test_what_is_no_address_is_called_so(nowhere, asked):
    with pytest.raises(Unavailable, match=f"{nowhere} is not an address that can be resolved"):
        asked(nowhere)


@pytest.mark.parametrize("nowhere", [None, "", "http://", "https:///"])
@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_an_address_that_is_missing_is_refused_when_the_client_is_made(client, nowhere):
    with pytest.raises(SettingsError, match=r"a server is HOST:PORT or https://HOST:PORT, not "):
        client(nowhere)


def test_the_deadline_ends_an_endless_answer(script, target, asked):
    script.endless = True
    for deadline_s in (0.2, 2.0, 20.0):
        with pytest.raises(DeadlineExceeded, match="deadline"):
            asked(target, deadline_s=deadline_s)
        if script.requests:  # else the call never came that far
            break
    assert script.cancelled.wait(DEADLINE_S)


def test_the_api_key_goes_with_every_call(script, target):
    with Client(target, api_key="k") as client:
        list(client.generate("hi"))
    assert script.metadata[0]["authorization"] == "Bearer k"


def test_break_cancels_on_the_server(script, target):
    script.endless = True
    with Client(target) as client:
        for _ in client.generate("hi"):
            break
        assert script.cancelled.wait(DEADLINE_S)


def test_an_exception_in_the_loop_cancels_on_the_server(script, target):
    script.endless = True

    def fail_in_the_loop() -> None:
        for _ in client.generate("hi"):
            raise ZeroDivisionError

    with Client(target) as client:
        with pytest.raises(ZeroDivisionError):
            fail_in_the_loop()
        assert script.cancelled.wait(DEADLINE_S)


def test_close_of_the_iterator_cancels_on_the_server(script, target):
    script.endless = True
    with Client(target) as client:
        stream = client.generate("hi")
        next(stream)
        stream.close()
        assert script.cancelled.wait(DEADLINE_S)


@pytest.mark.parametrize("host", OWN_ADDRESSES)
def test_no_proxy_is_asked_for_a_server_on_this_machine(asked, script, host, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # nobody listens there
    monkeypatch.delenv("no_proxy", raising=False)
    with serving(script, host) as target:
        assert asked(target) == []  # what the script says


async def wait_for(event: threading.Event) -> bool:
    return await asyncio.get_running_loop().run_in_executor(None, event.wait, DEADLINE_S)


def test_async_break_cancels_on_the_server(script, target):
    script.endless = True

    async def leave() -> bool:
        async with AsyncClient(target) as client:
            async for _ in client.generate("hi"):
                break
            return await wait_for(script.cancelled)

    assert asyncio.run(leave())


def test_a_cancelled_task_cancels_on_the_server(script, target):
    script.endless = True

    async def cancel() -> bool:
        async with AsyncClient(target) as client:
            started = asyncio.Event()

            async def read() -> None:
                async for _ in client.generate("hi"):
                    started.set()

            task = asyncio.create_task(read())
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return await wait_for(script.cancelled)

    assert asyncio.run(cancel())


def test_closing_the_client_under_a_reader_raises_cancelled(script, target):
    script.endless = True

    async def close_in_the_loop() -> None:
        client = AsyncClient(target)
        async for _ in client.generate("hi"):
            await client.close()

    with pytest.raises(Cancelled):
        asyncio.run(close_in_the_loop())


@pytest.mark.parametrize("call", ["embed", "wait_until_healthy"])
def test_closing_the_client_ends_a_short_call_as_one_of_its_own_errors(call):
    """At a port that takes connections and says nothing."""

    async def close_meanwhile(port):
        client = AsyncClient(f"127.0.0.1:{port}")
        calls = {"embed": client.embed("x"), "wait_until_healthy": client.wait_until_healthy(deadline_s=60)}
        waiting = asyncio.create_task(calls.pop(call))
        calls.popitem()[1].close()
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(Cancelled, match="closed"):
            await waiting

    with socket.create_server(("127.0.0.1", 0)) as mute:
        asyncio.run(close_meanwhile(mute.getsockname()[1]))


def test_a_closed_client_says_so(target):
    async def ask_when_closed():
        client = AsyncClient(target)
        await client.close()
        with pytest.raises(Cancelled, match="closed"):
            await client.loads()
        with pytest.raises(Cancelled, match="closed"):
            await anext(aiter(client.generate("hi")))

    asyncio.run(ask_when_closed())
    client = Client(target)
    client.close()
    with pytest.raises(Cancelled, match="closed"):
        client.loads()
    with pytest.raises(Cancelled, match="closed"):
        next(iter(client.generate("hi")))


def test_the_short_calls(script, target):
    async def call() -> tuple[object, ...]:
        async with AsyncClient(target) as client:
            return (
                await client.abort(["a", "b"]),
                await client.model_info(),
                await client.server_info(),
                await client.loads(),
                await client.health(),
            )

    with Client(target) as client:
        replies = client.abort(["a", "b"]), client.model_info(), client.server_info(), client.loads(), client.health()
    assert asyncio.run(call()) == replies
    aborted, model, server, loads, healthy = replies
    assert aborted == answers.Aborted(("a",), ("b",))
    assert (model.served_model_name, model.eos_token_ids, model.has_chat_template) == ("m", (2, 3), True)
    assert (server.uptime_s, server.nodes[0].fingerprint) == (2.5, {"dtype": "bfloat16"})
    assert loads.nodes[0].ranks == (
        answers.RankLoad(0, 9 * 2**20, 2**20, 3 * 2**20),
        answers.RankLoad(1, 8 * 2**20, 0, 0),
    )
    assert (loads.num_live_requests, loads.nodes[0].num_blocks_free, loads.nodes[0].step_s) == (1, 7, 0.5)
    assert healthy


async def drain_async(target, *args, **options):
    async with AsyncClient(target, api_key="k") as client:
        return [num_left async for num_left in client.drain(*args, **options)]


def drain(target, *args, **options):
    with Client(target, api_key="k") as client:
        return list(client.drain(*args, **options))


@pytest.mark.parametrize(
    "drain", [drain, lambda *args, **options: asyncio.run(drain_async(*args, **options))], ids=["sync", "async"]
)
def test_a_drain_counts_down(script, target, drain):
    script.drained = [7, 2, 0]
    assert drain(target, "d0", deadline_s=DEADLINE_S) == [7, 2, 0]
    assert (script.requests[-1].node, script.metadata[-1]["authorization"]) == ("d0", "Bearer k")
    script.failures = [refusal(grpc.StatusCode.NOT_FOUND, "no node 'd9' is attached", "NODE_NOT_FOUND")]
    with pytest.raises(Refused, match="no node 'd9' is attached") as caught:
        drain(target, "d9")
    assert caught.value.reason == "NODE_NOT_FOUND"


def test_health_follows_the_server(script, target):
    script.set_health(HealthCheckResponse.NOT_SERVING)
    with Client(target) as client:
        assert not client.health()

    async def wait() -> None:
        async with AsyncClient(target) as client:
            with pytest.raises(DeadlineExceeded):
                await client.wait_until_healthy(deadline_s=0.2)
            asyncio.get_running_loop().call_later(0.05, script.set_health, HealthCheckResponse.SERVING)
            await client.wait_until_healthy(deadline_s=DEADLINE_S)

    asyncio.run(wait())


def test_short_calls_raise_the_same_exceptions(target):
    with Client("127.0.0.1:1", timeout_s=DEADLINE_S) as client, pytest.raises(Unavailable, match="no server answers"):
        client.loads()


def test_the_client_needs_no_torch():
    probe = (
        "import json, sys, splitserve; splitserve.Client; splitserve.AsyncClient; print(json.dumps(list(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, check=True, timeout=DEADLINE_S)
    assert not {"torch", "transformers", "numpy"} & set(json.loads(done.stdout))
