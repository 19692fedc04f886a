"""Bad input gets its status and reason before any node does a thing, and serving goes on."""

import asyncio
import contextlib
import math
import pickle
import socket
import time

import grpc
import pytest
import zmq

from protos import inference_pb2
from protos.inference_pb2 import AbortRequest
from tests.effort import few
from tests.system.answers import ask, details, outcome, reason, refusal, request, stream
from tests.system.cluster import CALL_DEADLINE_S, FLEET_SECRET, free_port
from tests.system.oracle import fake_answer
from tests.tiny_models import VOCAB_SIZE, write_fake_model

MAX_MODEL_LEN = 512
LATEST_HEARTBEAT_S = 3.0
POOL_TOKENS = 384  # of the decode node; the prefill node has more
GENERATE = "/splitserve.v1.Inference/Generate"
HELLO = list(b"hello")


@pytest.fixture(scope="module")
def data_port():
    return free_port()


@pytest.fixture(scope="module")
def cluster(start_cluster, tmp_path_factory, data_port):
    model = write_fake_model(tmp_path_factory.mktemp("model") / "fake-model", step_s=0.01)
    return start_cluster(
        model,
        coordinator={"max_num_queued_reqs": 16},
        node={"max_model_len": MAX_MODEL_LEN},
        prefill={"num_kv_blocks": 128},
        decode={"num_kv_blocks": POOL_TOKENS // 8, "kv_bind": f"tcp://127.0.0.1:{data_port}"},
    )


@pytest.fixture(autouse=True)
async def _serving_goes_on(cluster):
    """After each test: a right answer."""
    yield
    async with cluster.connect() as stub:
        answer = await ask(stub, HELLO, max_tokens=3, temperature=0, ignore_eos=True)
    assert answer.token_ids == fake_answer(HELLO, 3)


NAN, INF = math.nan, math.inf
BAD_PARAMETERS = {
    "negative temperature": {"temperature": -0.1},
    "temperature not a number": {"temperature": NAN},
    "infinite temperature": {"temperature": INF},
    "top_p of 0": {"top_p": 0.0},
    "top_p above 1": {"top_p": 1.01},
    "negative top_p": {"top_p": -1.0},
    "top_p not a number": {"top_p": NAN},
    "top_k below -1": {"top_k": -2},
    "negative min_p": {"min_p": -0.1},
    "min_p above 1": {"min_p": 1.1},
    "min_p not a number": {"min_p": NAN},
    "frequency_penalty above 2": {"frequency_penalty": 2.1},
    "frequency_penalty below -2": {"frequency_penalty": -2.1},
    "frequency_penalty not a number": {"frequency_penalty": NAN},
    "presence_penalty above 2": {"presence_penalty": 2.1},
    "infinite presence_penalty": {"presence_penalty": -INF},
    "repetition_penalty of 0": {"repetition_penalty": 0.0},
    "negative repetition_penalty": {"repetition_penalty": -1.0},
    "infinite repetition_penalty": {"repetition_penalty": INF},
    "repetition_penalty not a number": {"repetition_penalty": NAN},
    "max_tokens of 0": {"max_tokens": 0},
    "negative max_tokens": {"max_tokens": -1},
    "negative min_tokens": {"min_tokens": -1},
    "min_tokens above max_tokens": {"min_tokens": 9, "max_tokens": 8},
    "empty stop string": {"stop": [""]},
    "10,000 stop strings": {"stop": [f"stop {number}" for number in range(10_000)]},
    "stop string of 1 MB": {"stop": ["x" * 2**20]},
    "unknown stop token": {"stop_token_ids": [VOCAB_SIZE]},
    "10,000 stop tokens": {"stop_token_ids": [1] * 10_000},
    "n of 0": {"n": 0},
    "negative n": {"n": -1},
    "huge n": {"n": 2**31 - 1},
    "negative logprobs": {"logprobs": -1},
    "huge logprobs": {"logprobs": 2**31 - 1},
    "bias of an unknown token": {"logit_bias": {VOCAB_SIZE: 1.0}},
    "bias not a number": {"logit_bias": {1: NAN}},
    "infinite bias": {"logit_bias": {1: INF}},
    "huge logit_bias": {"logit_bias": dict.fromkeys(range(100_000), 1.0)},
}
TOO_LONG = {
    "longer than the model's context": [1] * (MAX_MODEL_LEN + 1),
    "a full context leaves no room for a token": [1] * MAX_MODEL_LEN,
    "longer than the decode node's whole pool": [1] * (POOL_TOKENS + 1),
    "text longer than the context": "x" * 100_000,
}


EMPTY = {
    "no text": request(""),
    "no tokens": request([]),
    "no input at all": inference_pb2.GenerateRequest(),
    "no messages": inference_pb2.GenerateRequest(chat=inference_pb2.ChatInput()),
    "no prompt but parameters": request("", max_tokens=4),
}
OTHERS = {
    "unknown token id": request([1, VOCAB_SIZE, 2]),
    "the largest token id": request([2**32 - 1]),
    "huge request id": request(HELLO, request_id="x" * 100_000),
}
UNKNOWN_MODEL = request(HELLO, model="another-model")
OVER_THE_LIMIT = {
    "answer over the context": request([1] * 10, max_tokens=MAX_MODEL_LEN),
    "answer of the largest int32": request([1] * 10, max_tokens=2**31 - 1),
    "answer over the decode node's whole pool": request([1] * (POOL_TOKENS - 5), max_tokens=20),
}
BAD_REQUESTS = {
    **{name: request(HELLO, **{"max_tokens": 8, **sampling}) for name, sampling in BAD_PARAMETERS.items()},
    **{name: request(prompt) for name, prompt in TOO_LONG.items()},
    **EMPTY,
    **OTHERS,
    **OVER_THE_LIMIT,
    "unknown model": UNKNOWN_MODEL,
}


@pytest.fixture(scope="module")
def refusals(cluster):
    """The errors that all bad requests got. No node may have done a step or given a block for any of them."""
    asyncio.run(_warm_up(cluster))
    before = _work_done(cluster)
    errors = asyncio.run(_send_bad_requests(cluster))
    assert _work_done(cluster) == before
    return errors


async def _warm_up(cluster):
    async with cluster.connect() as stub:
        await ask(stub, HELLO, max_tokens=3)


async def _send_bad_requests(cluster):
    async with cluster.connect() as stub:
        streams = {name: stream(stub, message) for name, message in BAD_REQUESTS.items()}
        return {name: (await answering.end()).error for name, answering in streams.items()}


def _work_done(cluster):
    """When all is over, and heartbeats have told of it, which a busy machine may hold up."""
    cluster.wait_all_free()
    time.sleep(LATEST_HEARTBEAT_S)
    return {name: load.num_steps for name, load in cluster.loads().items()}


def _check_is_for_users(cluster, message):
    """One readable sentence, without paths, addresses and tracebacks."""
    assert message
    assert len(message) < 500
    for leak in ("Traceback", "Error(", str(cluster.folder), str(cluster.model.parent), "127.0.0.1", ".py"):
        assert leak not in message


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_bad_request(cluster, refusals, name):
    error = refusals[name]
    assert error is not None, "not refused"
    if name in TOO_LONG:
        code, reasons = "INVALID_ARGUMENT", {"PROMPT_TOO_LONG"}
    elif name in OVER_THE_LIMIT:
        code, reasons = "INVALID_ARGUMENT", {"PROMPT_TOO_LONG", "BAD_PARAM"}
    elif name == "unknown model":
        code, reasons = "NOT_FOUND", {"MODEL_NOT_FOUND"}
    else:
        code, reasons = "INVALID_ARGUMENT", {"BAD_PARAM"}
    assert error.code().name == code, error.details()
    assert reason(error) in reasons, error.details()
    assert "RetryInfo" not in details(error)
    if code == "INVALID_ARGUMENT":
        assert details(error)["BadRequest"].field_violations
    _check_is_for_users(cluster, error.details())


@pytest.mark.parametrize("name", [*TOO_LONG, *OVER_THE_LIMIT])
def test_the_message_names_the_limit(refusals, name):
    limits = (str(MAX_MODEL_LEN), str(POOL_TOKENS))
    assert any(limit in refusals[name].details() for limit in limits), refusals[name].details()


async def test_an_answer_without_max_tokens_takes_what_is_left(cluster):
    prompt = [1] * (POOL_TOKENS - 20)
    async with cluster.connect() as stub:
        answer = await ask(stub, prompt, temperature=0, ignore_eos=True)
    assert answer.finish_reason == "LENGTH"
    assert 1 <= len(answer.token_ids) <= 21  # the last token is never read again, so it may need no room
    assert answer.token_ids == fake_answer(prompt, len(answer.token_ids))


async def test_the_served_model_by_name(cluster):
    async with cluster.connect() as stub:
        answer = await ask(stub, HELLO, model="fake-model", max_tokens=2, temperature=0, ignore_eos=True)
    assert answer.token_ids == fake_answer(HELLO, 2)


async def test_duplicate_request_id(cluster):
    message = request(HELLO, request_id="twice", max_tokens=300, temperature=0, ignore_eos=True)
    async with cluster.connect() as stub:
        first = stream(stub, message)
        await first.tokens(1)
        error = await refusal(stub, message)
        assert (error.code().name, reason(error)) == ("ALREADY_EXISTS", "DUPLICATE_REQUEST_ID")
        assert (await first.complete()).token_ids == fake_answer(HELLO, 300)
        assert (await ask(stub, HELLO, request_id="twice", max_tokens=1)).request_id == "twice"


async def test_more_requests_than_the_coordinator_takes(cluster):
    """All have come long before the first answer can end, which takes 3 s. Then all but one are aborted."""
    sampling = {"max_tokens": 300, "temperature": 0, "ignore_eos": True}
    async with cluster.connect() as stub:
        messages = [request([number], request_id=f"crowd-{number}", **sampling) for number in range(40)]
        streams = [stream(stub, message) for message in messages]
        async with asyncio.timeout(CALL_DEADLINE_S):
            while sum(answering.has_ended for answering in streams) < 40 - 16:
                await asyncio.sleep(0.01)
        one, *others = (number for number, answering in enumerate(streams) if not answering.has_ended)
        await stub.Abort(AbortRequest(request_ids=[f"crowd-{number}" for number in others]), timeout=CALL_DEADLINE_S)
        ended = [await answering.end() for answering in streams]
        assert outcome(streams[one]) == "LENGTH"
    refused = [answering.error for answering in ended if answering.error is not None]
    assert {(error.code().name, reason(error)) for error in refused} == {("RESOURCE_EXHAUSTED", "QUEUE_FULL")}
    assert all("RetryInfo" in details(error) for error in refused)
    assert len(ended) - len(refused) == 16
    for number, answering in enumerate(ended):
        if answering.error is None:
            assert answering.answer.token_ids == fake_answer([number], len(answering.answer.token_ids))


# ---- bytes that are no request ----

MALFORMED = {
    "invalid UTF-8": b"\x12\x02\xff\xfe",
    "half a character": b"\x12\x01\xc3",
    "invalid UTF-8 in a stop string": b"\x12\x01a\x2a\x03\x52\x01\xff",
    "length beyond the end": b"\x12\x7fabc",
    "no protobuf": b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
    "unfinished varint": b"\x80",
    "group that never ends": b"\x0b" * 1000,
    "pickle": pickle.dumps({"text": "hello"}),
    "HTTP": b"POST / HTTP/1.1\r\nHost: x\r\n\r\n{}",
}


@pytest.mark.parametrize("payload", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_protobuf(cluster, payload):
    with cluster.channel() as channel, pytest.raises(grpc.RpcError) as raised:
        list(channel.unary_stream(GENERATE)(payload, timeout=60))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert reason(raised.value) == "MALFORMED_REQUEST"
    _check_is_for_users(cluster, raised.value.details())


@pytest.mark.parametrize("method", ["Abort", "GetLoads", "GetServerInfo", "GetModelInfo"])
def test_malformed_protobuf_for_the_other_calls(cluster, method):
    with cluster.channel() as channel, pytest.raises(grpc.RpcError) as raised:
        channel.unary_unary(f"/splitserve.v1.Inference/{method}")(b"\x0a\x05abc", timeout=60)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert reason(raised.value) == "MALFORMED_REQUEST"


def test_message_of_5_MiB(cluster):
    with cluster.channel() as channel, pytest.raises(grpc.RpcError) as raised:
        list(channel.unary_stream(GENERATE)(b"\x12" + _varint(5 * 2**20) + b"x" * 5 * 2**20, timeout=60))
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def _varint(number):
    encoded = b""
    while number > 127:
        encoded += bytes([number % 128 + 128])
        number //= 128
    return encoded + bytes([number])


def test_metadata_of_40_kB(cluster):
    with cluster.stub() as stub, pytest.raises(grpc.RpcError) as raised:
        list(stub.Generate(request(HELLO), timeout=60, metadata=[("x-junk", "x" * 40_000)]))
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_unknown_method(cluster):
    with cluster.channel() as channel, pytest.raises(grpc.RpcError) as raised:
        channel.unary_unary("/splitserve.v1.Inference/Shutdown")(b"", timeout=60)
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_the_fleet_is_not_reachable_through_the_public_port(cluster):
    with cluster.channel() as channel, pytest.raises(grpc.RpcError) as raised:
        list(channel.stream_stream("/splitserve.v1.Fleet/Attach")(iter([b""]), timeout=60))
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("payload", [b"\xff" * 100, b""], ids=["garbage", "empty"])
def test_garbage_on_the_fleet_port(cluster, payload):
    attached = cluster.attached()
    with grpc.insecure_channel(f"127.0.0.1:{cluster.fleet_port}") as channel:
        attach = channel.stream_stream("/splitserve.v1.Fleet/Attach")
        events = attach(iter([payload]), timeout=60, metadata=[("authorization", f"Bearer {FLEET_SECRET}")])
        with pytest.raises(grpc.RpcError) as raised:
            list(events)
    assert raised.value.code() is not grpc.StatusCode.UNKNOWN, raised.value.details()
    assert raised.value.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
    assert cluster.attached() == attached


# ---- junk on the data plane ----

JUNK = {
    "one garbage frame": [b"\xff" * 100],
    "an empty frame": [b""],
    "many empty frames": [b""] * 500,
    "frames without a header": [b"\x00" * 4096] * 8,
    "a pickled header": [pickle.dumps(print), b"x"],
    "a msgpack map of nonsense": [b"\x82\xa4type\xa5junk!\xa2id\xcf" + b"\xff" * 8, b"payload"],
    "a deeply nested msgpack header": [b"\x91" * 100_000],
    "a msgpack header that promises 4 billion items": [b"\xdd\xff\xff\xff\xff"],
    "an oversize frame": [b"\x00" * (64 * 2**20)],
}


@pytest.mark.parametrize("name", few(JUNK, *list(JUNK)[-3:]))
async def test_junk_on_the_data_plane(cluster, data_port, name):
    rss_before = cluster.loads()["decode-0"].rss_bytes
    context = zmq.Context()
    try:
        for kind in (zmq.DEALER, zmq.REQ, zmq.PUSH):
            with context.socket(kind) as junk:
                junk.setsockopt(zmq.LINGER, 300)  # nobody takes it without the key of a descriptor
                junk.setsockopt(zmq.SNDTIMEO, 2000)
                junk.connect(f"tcp://127.0.0.1:{data_port}")
                with contextlib.suppress(zmq.Again):
                    junk.send_multipart(JUNK[name])
    finally:
        context.term()
    async with cluster.connect() as stub:
        prompt = list(range(100))
        answer = await ask(stub, prompt, max_tokens=20, temperature=0, ignore_eos=True)
    assert answer.token_ids == fake_answer(prompt, 20)
    cluster.wait_all_free()
    assert cluster.loads()["decode-0"].rss_bytes < rss_before + 200 * 2**20


def test_bytes_that_are_not_ZeroMQ_on_the_data_plane(cluster, data_port):
    for payload in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 65536,
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f" + b"\x00" * 54,
    ):
        with socket.create_connection(("127.0.0.1", data_port), timeout=60) as connection:
            connection.sendall(payload)
