"""Inputs that decoders accept, made anew each time: what is kept in the corpus may be of an earlier version, and then
is refused before it comes far."""

import gzip
import json
import math
import socket
from collections.abc import Callable, Iterator
from typing import Final

from kv_transfer.descriptor import TransferDescriptor
from kv_transfer.distributed_kv.wire import Kind, send_message
from protos import fleet_pb2
from protos.convert import shape_to_wire
from serving_core.shapes import Shape
from tests import fleet_events as events
from tests.unit.kv_transfer.transfer_kit import LAYOUT

MESSAGES: Final = [{"role": "user", "content": "hello"}]


def descriptors() -> Iterator[bytes]:
    """Between nodes of one rank, and of several in stages."""
    for prefill_tp, decode_tp in ((1, 1), (2, 1)):
        addresses = [f"tcp://127.0.0.1:{5600 + rank}" for rank in range(decode_tp)]
        sizes = {"num_blocks": 3, "num_cached_blocks": 1, "ttl_s": 5.0}
        ranks = {"prefill_tp": prefill_tp, "decode_tp": decode_tp}
        yield TransferDescriptor.draw(epoch=7, layout=LAYOUT, addresses=addresses, **ranks, **sizes).encode()


def hellos() -> Iterator[bytes]:
    for name in ("p0", "d0", "b0"):
        yield events.hello(name).hello.SerializeToString()
    yield events.hello("b0", session=5, tp_size=2, kv_keys=[b"k" * 32]).hello.SerializeToString()


def commands() -> Iterator[bytes]:
    descriptor = next(descriptors())
    job = fleet_pb2.Job(token_ids=[1, 2, 3], num_prompt_tokens=3)
    for command in (
        {"prefill": fleet_pb2.Prefill(job=job)},
        {"reserve": fleet_pb2.Reserve(job=job, local_prefill=True)},
        {"reshape": fleet_pb2.Reshape(shape=shape_to_wire(Shape(5, 2, accepts_transfers=True)))},
        {"deliver": fleet_pb2.Deliver(descriptor=descriptor)},
        {"send_prefix": fleet_pb2.SendPrefix(descriptor=descriptor, token_ids=[1, 2])},
    ):
        yield fleet_pb2.NodeCommand(**command).SerializeToString()


def remote_kv_talk() -> Iterator[bytes]:
    for told in ([(Kind.OPEN, b"k" * 32)], [(Kind.PUT, b"blocks"), (Kind.QUERY, b"query"), (Kind.PARTIALS, b"")]):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            for layer, (kind, payload) in enumerate(told):
                send_message(ours, kind, payload, layer=layer, number=2)
            yield theirs.recv(4096)


def bodies(*fields: dict[str, object]) -> Callable[[], Iterator[bytes]]:
    return lambda: (json.dumps(each).encode() for each in fields)


SEEDS: Final[dict[str, Callable[[], Iterator[bytes]]]] = {
    "descriptor": descriptors,
    "hello": hellos,
    "node_command": commands,
    "remote_kv_messages": remote_kv_talk,
    "gzip_body": lambda: (gzip.compress(b'{"prompt": "a"}', mtime=0) for _ in range(1)),
    "batch_file": bodies({"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "\ud800", "seed": math.nan}}),
    "chat_body": bodies({"model": "m", "messages": MESSAGES}, {"messages": MESSAGES, "max_tokens": 5, "n": 2}),
    "responses_body": bodies({"model": "m", "input": "hello", "store": False}),
    "messages_body": bodies({"model": "m", "messages": MESSAGES, "max_tokens": 5}),
    "batch_body": bodies({"model": "m", "messages": [MESSAGES, MESSAGES]}),
    "tokenize_body": bodies({"model": "m", "prompt": "hello"}, {"model": "m", "messages": MESSAGES}),
    "tokens_body": bodies(
        {"token_ids": [1, 2], "sampling_params": {"max_tokens": 5, "logit_bias": {"3": 1}}, "stream": True},
        {"token_ids": [1], "sampling_params": {"structured_outputs": {"choice": ["a"]}}, "output_mode": "text"},
    ),
    "safetensors_index": bodies({"weight_map": {"a": "one.safetensors"}}),
}
