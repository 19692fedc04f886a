"""Every decoder of what comes from a socket, or out of a file that a user brings, as a function of bytes. What it
cannot read it refuses with an error that it documents; anything else that it raises is a fault."""

import contextlib
import json
import socket
import tempfile
import zlib
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from safetensors.numpy import save, save_file
from starlette.exceptions import HTTPException

from coordinator.api.authentication import BearerSecrets
from coordinator.api.http.anthropic_messages import MessagesCall
from coordinator.api.http.anthropic_messages_models import MessagesRequest
from coordinator.api.http.body import MAX_BODY_BYTES, gunzipped, json_object
from coordinator.api.http.field_types import RequestModel
from coordinator.api.http.openai_responses import ResponsesCall
from coordinator.api.http.openai_responses_models import ResponsesRequest
from coordinator.api.http.request_models import (
    BatchRequest,
    ChatRequest,
    CompletionRequest,
    EmbeddingsRequest,
    Scheduled,
    TokenizeRequest,
    TokensRequest,
)
from coordinator.api.http.requests import (
    embed_requests,
    parse_batch,
    parse_chat,
    parse_completion,
    parse_tokenize,
    set_limits,
)
from coordinator.api.http.tokens import parse_tokens
from coordinator.api.preprocess import check_counts, read_so_far
from coordinator.api.prompts import check_truncation, cut
from coordinator.api.unknown_fields import check_num_fields, unknown_in_message
from coordinator.api.validation import Limits, check_input, plan_request
from coordinator.control.load import Ledger, Prompt
from coordinator.control.metrics import Metrics
from coordinator.control.nodes import Registry
from coordinator.control.request_log import RequestLog
from coordinator.control.roles import FIXED, Roles
from coordinator.control.scheduler import Scheduler
from coordinator.dispatcher import Dispatcher
from coordinator.served_model import read_sampling_defaults
from coordinator.text.answer_format import READERS, AnswerFormat
from coordinator.text.rendering import Renderer
from coordinator.text.tokenizer import read_tokenizer
from kv_transfer import wire
from kv_transfer.descriptor import TransferDescriptor
from kv_transfer.distributed_kv.wire import MAX_BYTES, receive_header, receive_payload
from kv_transfer.results import TransferError
from kv_transfer.shared_memory import notes
from kv_transfer.transports.dist_stream import DistAddress, pack_key, pack_sizes, unpack_key, unpack_message
from protos import convert, fleet_pb2, inference_pb2, ranks_pb2
from serving_core.errors import ModelError, RequestError, SettingsError
from serving_core.json_fields import JsonFields
from serving_core.model_files.adapters import CONFIG_FILE, WEIGHTS_FILE, read_adapters
from serving_core.model_files.config import ModelConfig, read_embedder, read_model_config
from serving_core.model_files.stored_tensors import stored_tensors
from serving_core.model_files.weight_files import INDEX_FILE, SINGLE_FILE
from serving_core.net.api_keys import read_api_keys
from serving_core.net.numbering import MessageLost
from serving_core.process.telemetry import parse_line
from serving_core.requests import SamplingParams
from serving_node.ranks.leading import Meeting, share_from_wire
from splitserve.batches import answered, batch_requests, failed
from splitserve.launch.supervisor import LastWords
from splitserve_bench.errors import BenchError
from splitserve_bench.serve.backends import take_event
from splitserve_bench.serve.datasets import read_azure_trace, read_mooncake_trace
from splitserve_bench.serve.records import PlannedRequest, Reply, RequestFailed
from splitserve_bench.simulate.profile import read_profile
from tests import fleet_events as events
from tests.tiny_models import write_tokenizer

Decoder = Callable[[bytes], None]

DECODERS: dict[str, Decoder] = {}
EOS = 257
LIMITS = Limits(("m",), 260, 1000, 20, 900, 900)


def refuses(*errors: type[Exception]) -> Callable[[Callable[[bytes], Any]], Decoder]:
    """Enters a decoder under its name; these errors are how it refuses."""

    def enter(decode: Callable[[bytes], Any]) -> Decoder:
        @wraps(decode)
        def decoder(data: bytes) -> None:
            with contextlib.suppress(*errors):
                decode(data)

        DECODERS[decode.__name__] = decoder
        return decoder

    return enter


@cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="splitserve-fuzz-"))
    write_tokenizer(folder)
    return folder


@contextlib.contextmanager
def _file(name: str, data: bytes):
    """A folder with a tokenizer and this file."""
    path = _folder() / name
    before = path.read_bytes() if path.exists() else None
    path.write_bytes(data)
    try:
        yield path
    finally:
        path.unlink() if before is None else path.write_bytes(before)


# ---- the data plane ----


@refuses(TransferError)
def transfer_message(data: bytes) -> None:
    """The checksum in front is made good: what it keeps out is not worth a search."""
    message = wire.decode(zlib.crc32(data).to_bytes(4, "big") + data)
    assert wire.decode(wire.encode(message)) == message


@refuses(TransferError)
def shared_memory_note(data: bytes) -> None:
    """As above."""
    note = notes.decode(zlib.crc32(data).to_bytes(4, "big") + data)
    assert notes.decode(notes.encode(note)) == note


@refuses(TransferError)
def transfer_header(data: bytes) -> None:
    wire.decode(data)


@refuses(TransferError)
def remote_kv_messages(data: bytes) -> None:
    """By lengths that the header announces, as far as the receiver would have them."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(10)
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        while (header := receive_header(ours)) is not None:
            assert header.num_bytes <= MAX_BYTES
            receive_payload(ours, header, min(header.num_bytes, len(data)))


@refuses(TransferError)
def descriptor(data: bytes) -> None:
    found = TransferDescriptor.decode(data)
    assert TransferDescriptor.decode(found.encode()) == found
    for rank in range(found.prefill_tp * found.prefill_pp):
        found.channels_from(rank)
    for rank in range(found.decode_tp * found.decode_pp):
        assert found.channels_to(rank)


@refuses(ValueError)
def tail(data: bytes) -> None:
    convert.from_tail(data)


@refuses(TransferError)
def dist_message(data: bytes) -> None:
    sizes, header = unpack_message(data)
    assert pack_sizes(sizes) + bytes(header) == data


@refuses(TransferError)
def dist_key(data: bytes) -> None:
    assert pack_key(*unpack_key(data)) == data


@refuses(TransferError)
def dist_address(data: bytes) -> None:
    address = DistAddress.parse(data.decode(errors="replace"))
    assert DistAddress.parse(str(address)) == address


# ---- the public API servers ----


@refuses(RequestError, DecodeError)
def generate_request(data: bytes) -> None:
    check_num_fields(data)
    request = inference_pb2.GenerateRequest.FromString(data)
    unknown_in_message(request)
    check_input(request, LIMITS)
    check_counts(request, LIMITS)
    check_truncation(request, LIMITS)
    prompt = cut(list(request.tokenized.input_ids) or [1], request, LIMITS)
    plan = plan_request(request, prompt, LIMITS, inference_pb2.SamplingParams())
    so_far = read_so_far(request, plan, LIMITS, (EOS,))
    assert len(so_far) == len(plan.samplings) <= 16


def _body(model: type[RequestModel], parse: Callable[[Any], Any]) -> Callable[[bytes], None]:
    def read(data: bytes) -> None:
        request = model.read(json_object(data))
        asked = parse(request)
        headers = {} if data.startswith(b"{") else {"x-slo-ttft-ms": data[:8].decode("latin-1")}
        if isinstance(request, Scheduled):
            set_limits(asked.requests, request, headers)
        request.unknown_fields()

    return read


@refuses(RequestError, HTTPException)
def gzip_body(data: bytes) -> None:
    assert len(gunzipped(data)) <= MAX_BODY_BYTES


@refuses(SettingsError)
def batch_file(data: bytes) -> None:
    for request in batch_requests(data.splitlines(keepends=True)):
        for line in (answered(request, 200, "r", {}), failed(request, "invalid_request", request.problem)):
            assert line.encode().decode().splitlines() == [line]


@refuses(RequestError)
def completion_body(data: bytes) -> None:
    _body(CompletionRequest, lambda request: parse_completion(request, "r"))(data)


@refuses(RequestError)
def chat_body(data: bytes) -> None:
    _body(ChatRequest, lambda request: parse_chat(request, "r", AnswerFormat("hermes")))(data)


@refuses(RequestError)
def responses_body(data: bytes) -> None:
    _body(ResponsesRequest, lambda request: ResponsesCall().parse(request, "r", AnswerFormat("hermes")))(data)


@refuses(RequestError)
def messages_body(data: bytes) -> None:
    _body(MessagesRequest, lambda request: MessagesCall().parse(request, "r", AnswerFormat("hermes")))(data)


@refuses(RequestError)
def batch_body(data: bytes) -> None:
    _body(BatchRequest, lambda request: parse_batch(request, "r", AnswerFormat("hermes")))(data)


@refuses(RequestError)
def embeddings_body(data: bytes) -> None:
    _body(EmbeddingsRequest, lambda request: embed_requests(request, "r"))(data)


@refuses(RequestError)
def tokenize_body(data: bytes) -> None:
    _body(TokenizeRequest, parse_tokenize)(data)


@refuses(RequestError)
def tokens_body(data: bytes) -> None:
    _body(TokensRequest, lambda request: parse_tokens(request, "r", AnswerFormat("hermes", thinks=True)))(data)


@refuses()
def authorization(data: bytes) -> None:
    """As HTTP headers are decoded."""
    assert BearerSecrets({"the secret of this test": "me"}).holder([data.decode("latin-1")]) is None


@refuses(SettingsError)
def api_keys(data: bytes) -> None:
    with _file("keys", data) as path:
        assert all(read_api_keys(path))


@refuses()
def answer_text(data: bytes) -> None:
    """What a model writes, in every format of calls: nothing of it is kept back at the end, and it may be anything."""
    text = data.decode(errors="replace")
    for calls in READERS:
        reader = AnswerFormat(calls, thinks=True).reader(text[:8], {"f": {"properties": {"a": {"type": "integer"}}}})
        for piece in reader.feed(text) + reader.finish():
            piece.text.encode()


@refuses()
def rendered_conversation(data: bytes) -> None:
    """The JSON in a conversation, which the process that renders reads."""
    text = data.decode(errors="replace")
    given = {"add_generation_prompt": True, "continue_final_message": len(data) % 2 == 1}
    given |= {"tools_json": text, "template_kwargs_json": text}
    message = {"role": "user", "content": "a", "extra_json": text}
    renderer = Renderer("{{ messages | tojson }}", "", {}, "")
    for fields in ({}, {"tools_json": ""}, {"tools_json": "", "template_kwargs_json": ""}):
        assert renderer.answer({"messages": [message], **given, **fields}).endswith(b"\n")


# ---- the fleet ----


@refuses(RequestError, DecodeError)
def hello(data: bytes) -> None:
    """Of this version: what it keeps out is not worth a search."""
    told = fleet_pb2.Hello.FromString(data)
    told.node.fingerprint["protocol_version"] = convert.PROTOCOL_VERSION
    dispatcher, _ = _dispatcher_and_scheduler()
    dispatcher.attach(told)


@refuses(RequestError, DecodeError, MessageLost)
def node_event(data: bytes) -> None:
    event = fleet_pb2.NodeEvent.FromString(data)
    if event.WhichOneof("event") in (None, "hello"):
        return
    dispatcher, scheduler = _dispatcher_and_scheduler()
    link = dispatcher.attach(events.hello("b0").hello)
    options = {"arrived_s": 0.0, "deadline_s": 1e9, "now": 0.0}
    scheduler.submit("r/0", Prompt([1, 2, 3]), SamplingParams(max_tokens=5), **options)
    dispatcher.receive(link, event)
    dispatcher.tick()


@refuses(DecodeError, TransferError)
def node_command(data: bytes) -> None:
    command = fleet_pb2.NodeCommand.FromString(data)
    for job in (command.reserve.job, command.prefill.job):
        convert.job_to_wire(convert.request_from_wire(job))
        convert.due_from_wire(job.due, 0.0)
    convert.shape_from_wire(command.reshape.shape)
    for packed in filter(None, (command.deliver.descriptor, command.send_prefix.descriptor)):
        TransferDescriptor.decode(packed)


@refuses(DecodeError)
def rank_command(data: bytes) -> None:
    for share in ranks_pb2.RankCommand.FromString(data).step.shares:
        share_from_wire(share)


@refuses(UnicodeDecodeError)
def rank_meeting(data: bytes) -> None:
    assert Meeting.decode(data[: 2**10]).port < 2**16


def _dispatcher_and_scheduler() -> tuple[Dispatcher, Scheduler]:
    registry = Registry({}, node_timeout_s=1e9, step_timeout_s=1e9)
    ledger, metrics = Ledger(), Metrics()
    scheduler = Scheduler(registry, ledger, metrics, first_epoch=0, max_live=10, max_restarts=1, keep_after_s=1.0)
    return Dispatcher(registry, scheduler, Roles(registry, ledger, policy=FIXED), RequestLog(metrics)), scheduler


# ---- what a command reads from others ----


@refuses(RequestFailed)
def completion_event(data: bytes) -> None:
    take_event(data.decode(errors="replace"), 0.0, Reply(PlannedRequest(0, 0.0, (1,), 2), lambda: 0.0))


@refuses()
def log_line(data: bytes) -> None:
    words = LastWords("node")
    for line in data.decode(errors="replace").splitlines():
        words.hear(*parse_line(line))


# ---- files ----


@refuses(ModelError)
def config_json(data: bytes) -> None:
    with _file("config.json", data) as path:
        read_model_config(path.parent)


@refuses(ModelError)
def generation_config_json(data: bytes) -> None:
    with _file("generation_config.json", data) as path:
        read_sampling_defaults(path.parent)


@refuses(ModelError)
def tokenizer_config_json(data: bytes) -> None:
    with _file("tokenizer_config.json", data) as path:
        read_tokenizer(path.parent, embeds=True)


@refuses(ModelError)
def modules_json(data: bytes) -> None:
    with _file("modules.json", data) as path:
        read_embedder(path.parent, JsonFields({}, "config.json"), "auto", is_headless=True)


@refuses(ModelError)
def pooling_json(data: bytes) -> None:
    modules = [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]
    with _file("modules.json", json.dumps(modules).encode()) as path:
        (path.parent / "1_Pooling").mkdir(exist_ok=True)
        (path.parent / "1_Pooling" / "config.json").write_bytes(data)
        read_embedder(path.parent, JsonFields({}, "config.json"), "auto", is_headless=True)


@refuses(ModelError)
def tokenizer_json(data: bytes) -> None:
    with _file("tokenizer.json", data) as path:
        tokenizer = read_tokenizer(path.parent)
        detokenizer = tokenizer.detokenizer(skip_special_tokens=True)
        detokenizer.add(0)
        detokenizer.flush()


@refuses(ModelError)
def safetensors_header(data: bytes) -> None:
    with _file(SINGLE_FILE, data) as path:
        stored_tensors(path.parent)


@refuses(ModelError)
def safetensors_index(data: bytes) -> None:
    """Beside a file with the tensor `a`."""
    with _file("one.safetensors", save({"a": np.zeros(1, np.float32)})), _file(INDEX_FILE, data) as path:
        stored_tensors(path.parent)


@refuses(ModelError)
def adapter_config_json(data: bytes) -> None:
    with _file(CONFIG_FILE, data) as path:
        read_adapters([f"a={path.parent}"], _adapted_model())


@cache
def _adapted_model() -> ModelConfig:
    """One that the adapter's tensors beside the file fit."""
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{name}.lora_A.weight": np.ones((2, 4), np.float32),
        f"{name}.lora_B.weight": np.ones((4, 2), np.float32),
    }
    save_file(tensors, _folder() / WEIGHTS_FILE)
    fours = dict.fromkeys(("hidden_size", "intermediate_size", "max_position_embeddings", "vocab_size"), 4)
    config = {"model_type": "llama", "num_attention_heads": 1, "num_hidden_layers": 1, **fours}
    with _file("config.json", json.dumps(config).encode()) as path:
        return read_model_config(path.parent)


@refuses(BenchError)
def azure_trace(data: bytes) -> None:
    with _file("trace.csv", data) as path:
        read_azure_trace(path)


@refuses(BenchError)
def mooncake_trace(data: bytes) -> None:
    with _file("trace.jsonl", data) as path:
        read_mooncake_trace(path)


@refuses(SettingsError)
def profile(data: bytes) -> None:
    with _file("profile.json", data) as path:
        read_profile(path)
