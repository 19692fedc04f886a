"""A real gRPC server of the public service that answers as a test tells it to."""

import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_status import rpc_status

from protos import inference_pb2, inference_pb2_grpc
from protos.convert import shape_from_wire, shape_to_wire
from serving_core.net.channels import SERVER_OPTIONS
from serving_core.shapes import preset, role_of

SERVICE = "splitserve.v1.Inference"
STOP_S = 10.0
MIB = 2**20


def chunk(text, first_token_index=0, token_ids=(), **fields):
    return inference_pb2.GenerateResponse(
        request_id="r1",
        chunk=inference_pb2.Chunk(text=text, first_token_index=first_token_index, token_ids=token_ids, **fields),
    )


def complete(index=0, **fields):
    ended = {"finish_reason": inference_pb2.FINISH_REASON_STOP, **fields}
    return inference_pb2.GenerateResponse(request_id="r1", index=index, complete=inference_pb2.Complete(**ended))


def refusal(code, message, reason, retry_after_s=None, **metadata):
    details = [error_details_pb2.ErrorInfo(reason=reason, domain="splitserve", metadata=metadata)]
    if retry_after_s is not None:
        delay = duration_pb2.Duration(seconds=int(retry_after_s), nanos=int(retry_after_s % 1 * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    return rpc_status.to_status(status_pb2.Status(code=code.value[0], message=message, details=packed))


class Script(inference_pb2_grpc.InferenceServicer, inference_pb2_grpc.AdminServicer):
    """Answers as told; keeps what it was asked, and how long it might take. `endless` streams until it is cancelled;
    `broken_off` is the status that ends one answer behind its replies, and `later` are those to the next call."""

    def __init__(self):
        self.requests = []
        self.metadata = []
        self.left_s = []
        self.replies = []
        self.drained = []
        self.failures = []
        self.endless = False
        self.broken_off = None
        self.later = []
        self.cancelled = threading.Event()
        self.num_losses, self.heartbeat_gap_s = 0, 1.0
        self.nodes = [
            inference_pb2.NodeInfo(
                name="p0",
                role="prefill",
                fingerprint={"dtype": "bfloat16"},
                engine={"tp_size": "2"},
                numerics={"cpu": "avx2"},
            )
        ]

    def _note(self, request, context):
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.left_s.append(context.time_remaining())
        if self.failures:
            context.abort_with_status(self.failures.pop(0))

    def Generate(self, request, context):
        self._note(request, context)
        if not context.add_callback(self.cancelled.set):  # the call has ended already
            self.cancelled.set()
        yield from self.replies
        if self.broken_off is not None:
            broken_off, self.broken_off, self.replies = self.broken_off, None, self.later
            context.abort_with_status(broken_off)
        while self.endless and not self.cancelled.is_set():
            yield chunk("x")
            self.cancelled.wait(0.001)
        if not any(reply.HasField("complete") for reply in self.replies):
            yield complete()

    def SetRole(self, request, context):
        """Nodes have 512 tokens a step and 64 running slots."""
        self._note(request, context)
        shape = request.shape
        if request.HasField("role"):
            shape = shape_to_wire(preset(request.role, max_num_batched_tokens=512, max_num_seqs=64))
        role = role_of(shape_from_wire(shape))
        return inference_pb2.SetRoleResponse(node=inference_pb2.NodeLoad(name=request.node, role=role, shape=shape))

    def Drain(self, request, context):
        self._note(request, context)
        for num_left in self.drained:
            yield inference_pb2.DrainProgress(num_left=num_left)

    def Abort(self, request, context):
        return inference_pb2.AbortResponse(aborted=request.request_ids[:1], unknown=request.request_ids[1:])

    def GetModelInfo(self, request, context):
        return inference_pb2.GetModelInfoResponse(
            served_model_name="m", max_model_len=2048, eos_token_ids=[2, 3], has_chat_template=True,
            default_sampling_params=inference_pb2.SamplingParams(temperature=0.2, top_p=0.9, top_k=0),
        )  # fmt: skip

    def GetServerInfo(self, request, context):
        return inference_pb2.GetServerInfoResponse(version="1", uptime_s=2.5, nodes=self.nodes)

    def GetLoads(self, request, context):
        rank = inference_pb2.RankLoad
        p0 = inference_pb2.NodeLoad(
            name="p0", role="prefill", state="ready", num_blocks=8, num_blocks_free=7, num_blocks_cached=5, step_s=0.5,
            rss_bytes=17 * MIB, num_prompt_tokens=80, num_cached_tokens=20, num_kv_bytes=3 * MIB // 2,
            num_transfers_failed=4, prefill_tokens_per_s=1234.0, shape=inference_pb2.Shape(prompt_tokens=512),
            ranks=[
                rank(rank=0, rss_bytes=9 * MIB, kv_pool_bytes=MIB, weight_bytes=3 * MIB),
                rank(rank=1, rss_bytes=8 * MIB),
            ],
            num_losses=self.num_losses,
        )  # fmt: skip
        d0 = inference_pb2.NodeLoad(
            name="d0",
            role="decode",
            state="draining",
            num_blocks=6,
            num_blocks_free=6,
            ranks=[rank()],
            prefill_tokens_per_s=900.0,  # of its warm-up, though it does not prefill
            shape=inference_pb2.Shape(slots=64, accepts_transfers=True),
            longest_heartbeat_gap_s=self.heartbeat_gap_s,
        )
        chat = inference_pb2.SloClassLoad(
            slo_class="chat", limits="ttft:500", num_sequences=8, num_ttft_met=7, num_tpot_met=6, num_met=5
        )
        return inference_pb2.GetLoadsResponse(nodes=[p0, d0], num_live_requests=1, slo_classes=[chat])


@contextmanager
def serving(script: Script, host: str = "127.0.0.1") -> Iterator[str]:
    """Serves on a free port and gives its address; `script.set_health(status)` changes what the health service says."""
    server = grpc.server(futures.ThreadPoolExecutor(8), options=SERVER_OPTIONS)
    inference_pb2_grpc.add_InferenceServicer_to_server(script, server)
    inference_pb2_grpc.add_AdminServicer_to_server(script, server)
    health_service = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    script.set_health = lambda status: health_service.set(SERVICE, status)
    script.set_health(HealthCheckResponse.SERVING)
    port = server.add_insecure_port(f"{host}:0")
    server.start()
    try:
        yield f"{host}:{port}"
    finally:
        server.stop(0).wait(STOP_S)
