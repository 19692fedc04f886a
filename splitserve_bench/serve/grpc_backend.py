"""SplitServe's own gRPC. The channel does not try a call again: a request that is turned away is one."""

from dataclasses import asdict
from typing import Any, Final

import grpc
import grpc.aio

from protos import inference_pb2, inference_pb2_grpc
from serving_core import reasons
from serving_core.channels import CLIENT_OPTIONS
from splitserve.client.answers import Completion, to_chunk
from splitserve.client.clients import AsyncClient
from splitserve.client.dialling import Dialling
from splitserve.client.errors import ClientError, from_rpc_error
from splitserve.client.questions import generate_request
from splitserve_bench.errors import BenchError
from splitserve_bench.prompts import GREEDY
from splitserve_bench.serve.reply import Reply, RequestFailed
from splitserve_bench.serve.target import ServedModel, Target
from splitserve_bench.serve.timelines import times_of
from splitserve_bench.serve.wire import OrderedRequest

GENERATE: Final = "/splitserve.v1.Inference/Generate"
RETRIES: Final = "grpc.enable_retries"
OPTIONS: Final = (*(option for option in CLIENT_OPTIONS if option[0] != RETRIES), (RETRIES, 0))
# Why a request is turned away before it is begun.
REFUSALS: Final = frozenset(
    [
        reasons.QUEUE_FULL,
        reasons.WOULD_BE_LATE,
        reasons.NO_PREFILL_WORKER,
        reasons.NO_DECODE_WORKER,
        reasons.DRAINING,
    ]
)


class GrpcBackend:
    """One channel, over which all requests of a load go."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._metadata = (("authorization", f"Bearer {target.api_key}"),) if target.api_key else ()
        self._dialling = Dialling.of(target.address, target.tls)
        self._channel = self._dialling.aio_channel(OPTIONS)
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._generate: Any = self._channel.unary_stream(
            GENERATE, request_serializer=None, response_deserializer=inference_pb2.GenerateResponse.FromString
        )

    def prepare(self, request: OrderedRequest) -> bytes:
        message = generate_request(
            request.text or request.prompt,
            model=self._target.model,
            request_id="",
            cache_salt="",
            sampling={**GREEDY, "max_tokens": request.output_tokens, "ignore_eos": request.ignore_eos},
            **{"ttft_ms": request.ttft_ms, "tpot_ms": request.tpot_ms, **self._target.extra_body},
        )
        return message.SerializeToString()

    async def warm_up(self, num_connections: int, deadline_s: float) -> None:
        request = inference_pb2.GetModelInfoRequest()
        try:
            await self._inference.GetModelInfo(request, timeout=deadline_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise BenchError(str(from_rpc_error(error, str(self._dialling)))) from error

    async def answer(self, body: bytes, reply: Reply, timeout_s: float) -> None:
        call = self._generate(body, timeout=timeout_s, metadata=self._metadata)
        try:
            async for response in call:
                _take(response, reply)
        except grpc.RpcError as error:
            failure = from_rpc_error(error, str(self._dialling))
            is_refused = _is_refusal(failure)
            reply.timeline = times_of(failure.metadata) or None
            raise RequestFailed(str(failure), is_refused=is_refused, retry_after_s=failure.retry_after_s) from error
        finally:
            call.cancel()
        reply.check_complete()

    async def close(self) -> None:
        await self._channel.close()


async def describe_grpc(target: Target, deadline_s: float) -> ServedModel:
    """Raises BenchError when the server does not answer in time, or does not serve target.model."""
    try:
        tls: dict[str, Any] = {"tls_cert": target.tls.cert, "tls_key": target.tls.key, "tls_ca": target.tls.ca}
        async with AsyncClient(target.address, api_key=target.api_key, timeout_s=deadline_s, **tls) as client:
            info = await client.model_info()
    except ClientError as error:
        raise BenchError(str(error)) from error
    if target.model not in ("", info.served_model_name):
        raise BenchError(f"{target.address} does not serve {target.model!r} but {info.served_model_name}")
    return ServedModel(info.served_model_name, info.max_model_len, info.vocab_size)


def _take(response: inference_pb2.GenerateResponse, reply: Reply) -> None:
    moment_s = reply.now_s()
    if num_tokens := len(response.chunk.token_ids):
        reply.arrived(moment_s, num_tokens)
    if response.HasField("complete"):
        completion = to_chunk(response).completion
        assert completion is not None
        _end(completion, reply)


def _end(completion: Completion, reply: Reply) -> None:
    reply.num_prompt_tokens = completion.prompt_tokens
    reply.num_output_tokens = completion.completion_tokens
    reply.timeline = times_of(asdict(completion.timeline))
    reply.num_cached_tokens = completion.cached_tokens
    reply.is_ended = True


def _is_refusal(failure: ClientError) -> bool:
    if failure.reason:
        return failure.reason in REFUSALS
    return failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
