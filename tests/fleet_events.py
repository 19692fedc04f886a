"""Events as nodes send them, for tests of the coordinator."""

import hashlib
import struct

from protos import fleet_pb2, inference_pb2
from protos.convert import PROTOCOL_VERSION, shape_to_wire
from serving_core.shapes import Shape, preset
from serving_core.version import VERSION

STOP, LENGTH = inference_pb2.FINISH_REASON_STOP, inference_pb2.FINISH_REASON_LENGTH
ABORT = inference_pb2.FINISH_REASON_ABORT

BLOCK_SIZE = 16
NUMERICS_IDS = [b"a node: c", b"a node: s"]  # that it computed its blocks in chunks or in decode steps
MODEL = {  # as of the folder that write_fake_model writes
    "architecture": "FakeForCausalLM",
    "vocab_size": "260",
    "embedder": "None",
    "weights": "none",
    "hidden_size": "8",
    "num_layers": "2",
    "num_heads": "2",
    "num_kv_heads": "2",
}

ROLES = {"p": "prefill", "d": "decode", "b": "mixed"}  # by the first letter of a node's name, unless a test says else


def hello(
    name,
    role=None,
    *,
    incarnation="1",
    session=0,
    num_blocks=100,
    max_model_len=1000,
    max_num_batched_tokens=512,
    max_num_seqs=64,
    shape=None,
    home=None,
    tp_size=0,
    pp_size=0,
    numerics=None,
    kv_keys=(),
    starved_share=0.0,
    keeps_sequences=False,
    version=VERSION,
    **fingerprint,
):
    role = role or ROLES[name[0]]
    limits = {"max_num_batched_tokens": max_num_batched_tokens, "max_num_seqs": max_num_seqs}
    shape = shape or preset(role, **limits)
    info = inference_pb2.NodeInfo(
        name=name,
        role=role,
        incarnation=incarnation,
        version=version,
        fingerprint={"protocol_version": PROTOCOL_VERSION, **MODEL, **fingerprint},
        numerics=numerics,
    )
    return fleet_pb2.NodeEvent(
        hello=fleet_pb2.Hello(
            node=info,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            tp_size=tp_size,
            pp_size=pp_size,
            session=session,
            max_num_batched_tokens=max_num_batched_tokens,
            shape=shape_to_wire(shape),
            home=shape_to_wire(home or shape),
            kv_keys=kv_keys,
            starved_share=starved_share,
            keeps_sequences=keeps_sequences,
        )
    )


def heartbeat(state="ready", step_age_s=0.0, **load):
    """Of a node whose steps take what is expected, unless it tells other margins."""
    load = inference_pb2.NodeLoad(**{"state": state, "decode_margin": 1.0, **load})
    return fleet_pb2.NodeEvent(heartbeat=fleet_pb2.Heartbeat(load=load, step_age_s=step_age_s))


def shape(prompt_tokens, slots, *, accepts_transfers):
    return shape_to_wire(Shape(prompt_tokens, slots, accepts_transfers))


def sampled(attempt, index, token_id, finish_reason=0, **logprobs):
    return fleet_pb2.SampledToken(
        attempt=attempt, index=index, token_id=token_id, finish_reason=finish_reason, **logprobs
    )


def first_token(token, prefill_s=0.0, num_cached_tokens=0):
    event = fleet_pb2.FirstToken(
        attempt=token.attempt, token=token, prefill_s=prefill_s, num_cached_tokens=num_cached_tokens
    )
    return fleet_pb2.NodeEvent(first_token=event)


def progress(attempt, num_left, prefill_s):
    return fleet_pb2.NodeEvent(progress=fleet_pb2.Progress(attempt=attempt, num_left=num_left, prefill_s=prefill_s))


def embedded(attempt, embedding=b"\0\0\x80\x3f", prefill_s=0.0, num_cached_tokens=0):
    event = fleet_pb2.Embedded(
        attempt=attempt, embedding=embedding, prefill_s=prefill_s, num_cached_tokens=num_cached_tokens
    )
    return fleet_pb2.NodeEvent(embedded=event)


def step_tokens(*tokens, step_s=0.0):
    """As a node does, tokens of which there is no more to report go in lists."""
    told = fleet_pb2.StepTokens(step_s=step_s)
    for token in tokens:
        if {field.name for field, _ in token.ListFields()} <= {"attempt", "index", "token_id"}:
            told.epochs.append(token.attempt.epoch)
            told.indexes.append(token.index)
            told.token_ids.append(token.token_id)
        else:
            told.tokens.append(token)
    return fleet_pb2.NodeEvent(step_tokens=told)


def all_tokens(step, request_ids=()):
    """Return a step of which all tokens are messages; `request_ids` by the epoch of the attempt."""
    told, request_ids = fleet_pb2.StepTokens(step_s=step.step_s), dict(request_ids)
    for epoch, index, token_id in zip(step.epochs, step.indexes, step.token_ids, strict=True):
        attempt = fleet_pb2.Attempt(request_id=request_ids.get(epoch, ""), epoch=epoch)
        told.tokens.append(sampled(attempt, index, token_id))
    told.tokens.extend(step.tokens)
    return told


def reserved(attempt, descriptor=b"descriptor"):
    return fleet_pb2.NodeEvent(reserved=fleet_pb2.Reserved(attempt=attempt, descriptor=descriptor))


def committed(attempt, num_bytes=0, num_bytes_saved=0, next_index=0):
    event = fleet_pb2.Committed(
        attempt=attempt, num_bytes=num_bytes, num_bytes_saved=num_bytes_saved, next_index=next_index
    )
    return fleet_pb2.NodeEvent(committed=event)


def revoked(attempt):
    return fleet_pb2.NodeEvent(revoked=fleet_pb2.Revoked(attempt=attempt))


def migration_failed(attempt, reason="TRANSFER_FAILED", message="what happened"):
    return fleet_pb2.NodeEvent(
        migration_failed=fleet_pb2.MigrationFailed(attempt=attempt, reason=reason, message=message)
    )


def taken(attempt):
    return fleet_pb2.NodeEvent(taken=fleet_pb2.Taken(attempt=attempt))


def transferred(attempt):
    return fleet_pb2.NodeEvent(transferred=fleet_pb2.Transferred(attempt=attempt))


def failed(attempt, reason, message="what happened"):
    return fleet_pb2.NodeEvent(failed=fleet_pb2.Failed(attempt=attempt, reason=reason, message=message))


def cancelled(attempt):
    return fleet_pb2.NodeEvent(cancelled=fleet_pb2.Cancelled(attempt=attempt))


def cache_changed(stored=(), removed=(), numerics_ids=NUMERICS_IDS):
    return fleet_pb2.NodeEvent(
        cache_changed=fleet_pb2.CacheChanged(stored=stored, removed=removed, numerics_ids=numerics_ids)
    )


def block_hints(token_ids, cache_salt="", made="", **fingerprint):
    """The hints of the full blocks of a prompt on nodes of `hello`, worked out from the description of the names.
    `made` tells how they were computed, by a letter for each; "c" where there is none."""
    texts = [cache_salt]
    for key, value in sorted({**MODEL, **fingerprint}.items()):  # of adapters the request's own alone, under "lora:"
        texts += [key, value]
    root = b"splitserve: root of block names" + b"\0"
    name = hashlib.sha256(root + b"".join(struct.pack("<Q", len(text.encode())) + text.encode() for text in texts))
    hints = []
    for start in range(0, len(token_ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
        block = b"".join(token_id.to_bytes(4, "little") for token_id in token_ids[start : start + BLOCK_SIZE])
        kind = made[len(hints) : len(hints) + 1] or "c"
        name = hashlib.sha256(name.digest() + b"a node: " + kind.encode() + block)
        hints.append(struct.unpack("<Q", name.digest()[:8])[0])
    return hints
