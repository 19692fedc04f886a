from protos import fleet_pb2 as _fleet_pb2
from protos import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MetricsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MetricsResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: bytes
    def __init__(self, text: _Optional[bytes] = ...) -> None: ...

class ApiServerEvent(_message.Message):
    __slots__ = ("hello", "opened", "taken", "begin", "over", "stopped", "failed", "refused", "http_call", "number")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    HTTP_CALL_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    hello: ApiServerHello
    opened: Opened
    taken: BatchTaken
    begin: NewCall
    over: CallOver
    stopped: Stopped
    failed: CallFailed
    refused: Refused
    http_call: HttpCall
    number: int
    def __init__(self, hello: _Optional[_Union[ApiServerHello, _Mapping]] = ..., opened: _Optional[_Union[Opened, _Mapping]] = ..., taken: _Optional[_Union[BatchTaken, _Mapping]] = ..., begin: _Optional[_Union[NewCall, _Mapping]] = ..., over: _Optional[_Union[CallOver, _Mapping]] = ..., stopped: _Optional[_Union[Stopped, _Mapping]] = ..., failed: _Optional[_Union[CallFailed, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., http_call: _Optional[_Union[HttpCall, _Mapping]] = ..., number: _Optional[int] = ...) -> None: ...

class ApiServerHello(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BatchTaken(_message.Message):
    __slots__ = ("cpu_s", "sheds")
    CPU_S_FIELD_NUMBER: _ClassVar[int]
    SHEDS_FIELD_NUMBER: _ClassVar[int]
    cpu_s: float
    sheds: _containers.RepeatedCompositeFieldContainer[Shed]
    def __init__(self, cpu_s: _Optional[float] = ..., sheds: _Optional[_Iterable[_Union[Shed, _Mapping]]] = ...) -> None: ...

class Shed(_message.Message):
    __slots__ = ("port", "reason", "number")
    PORT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    port: str
    reason: str
    number: int
    def __init__(self, port: _Optional[str] = ..., reason: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class NewCall(_message.Message):
    __slots__ = ("number", "info", "prompt", "cache_salt", "adapter", "pooling", "sampling_params", "grammar", "seeds", "so_far", "limits", "deadline_s", "begun_s", "num_behind", "call_number")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    SEEDS_FIELD_NUMBER: _ClassVar[int]
    SO_FAR_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    BEGUN_S_FIELD_NUMBER: _ClassVar[int]
    NUM_BEHIND_FIELD_NUMBER: _ClassVar[int]
    CALL_NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    info: CallInfo
    prompt: _containers.RepeatedScalarFieldContainer[int]
    cache_salt: str
    adapter: str
    pooling: _fleet_pb2.Pooling
    sampling_params: _inference_pb2.SamplingParams
    grammar: str
    seeds: _containers.RepeatedScalarFieldContainer[int]
    so_far: _containers.RepeatedCompositeFieldContainer[AnswerBegun]
    limits: _inference_pb2.GenerateRequest
    deadline_s: float
    begun_s: float
    num_behind: int
    call_number: int
    def __init__(self, number: _Optional[int] = ..., info: _Optional[_Union[CallInfo, _Mapping]] = ..., prompt: _Optional[_Iterable[int]] = ..., cache_salt: _Optional[str] = ..., adapter: _Optional[str] = ..., pooling: _Optional[_Union[_fleet_pb2.Pooling, _Mapping]] = ..., sampling_params: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., grammar: _Optional[str] = ..., seeds: _Optional[_Iterable[int]] = ..., so_far: _Optional[_Iterable[_Union[AnswerBegun, _Mapping]]] = ..., limits: _Optional[_Union[_inference_pb2.GenerateRequest, _Mapping]] = ..., deadline_s: _Optional[float] = ..., begun_s: _Optional[float] = ..., num_behind: _Optional[int] = ..., call_number: _Optional[int] = ...) -> None: ...

class CallInfo(_message.Message):
    __slots__ = ("request_id", "asker", "operation", "model", "arrived_s", "traceparent", "tracestate")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ASKER_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_S_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    asker: str
    operation: str
    model: str
    arrived_s: float
    traceparent: _containers.RepeatedScalarFieldContainer[str]
    tracestate: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_id: _Optional[str] = ..., asker: _Optional[str] = ..., operation: _Optional[str] = ..., model: _Optional[str] = ..., arrived_s: _Optional[float] = ..., traceparent: _Optional[_Iterable[str]] = ..., tracestate: _Optional[_Iterable[str]] = ...) -> None: ...

class AnswerBegun(_message.Message):
    __slots__ = ("token_ids", "finish_reason", "since_first_s", "has_ended")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIRST_S_FIELD_NUMBER: _ClassVar[int]
    HAS_ENDED_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: _inference_pb2.FinishReason
    since_first_s: float
    has_ended: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., since_first_s: _Optional[float] = ..., has_ended: _Optional[bool] = ...) -> None: ...

class CallOver(_message.Message):
    __slots__ = ("number", "failure")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    number: int
    failure: str
    def __init__(self, number: _Optional[int] = ..., failure: _Optional[str] = ...) -> None: ...

class Stopped(_message.Message):
    __slots__ = ("number", "index", "stop", "num_tokens")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    number: int
    index: int
    stop: str
    num_tokens: int
    def __init__(self, number: _Optional[int] = ..., index: _Optional[int] = ..., stop: _Optional[str] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class CallFailed(_message.Message):
    __slots__ = ("number", "error")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    number: int
    error: ApiServerError
    def __init__(self, number: _Optional[int] = ..., error: _Optional[_Union[ApiServerError, _Mapping]] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("info", "error")
    INFO_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    info: CallInfo
    error: ApiServerError
    def __init__(self, info: _Optional[_Union[CallInfo, _Mapping]] = ..., error: _Optional[_Union[ApiServerError, _Mapping]] = ...) -> None: ...

class HttpCall(_message.Message):
    __slots__ = ("handler", "method", "status", "seconds")
    HANDLER_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    handler: str
    method: str
    status: int
    seconds: float
    def __init__(self, handler: _Optional[str] = ..., method: _Optional[str] = ..., status: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class ApiServerError(_message.Message):
    __slots__ = ("reason", "message", "metadata")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    metadata: _containers.ScalarMap[str, str]
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ..., metadata: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ControlBatch(_message.Message):
    __slots__ = ("fleet", "admitted", "runs", "ended", "failed", "number")
    FLEET_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    fleet: FleetState
    admitted: _containers.RepeatedCompositeFieldContainer[Admitted]
    runs: _containers.RepeatedCompositeFieldContainer[TokenRun]
    ended: _containers.RepeatedCompositeFieldContainer[AnswerEnded]
    failed: _containers.RepeatedCompositeFieldContainer[CallEnded]
    number: int
    def __init__(self, fleet: _Optional[_Union[FleetState, _Mapping]] = ..., admitted: _Optional[_Iterable[_Union[Admitted, _Mapping]]] = ..., runs: _Optional[_Iterable[_Union[TokenRun, _Mapping]]] = ..., ended: _Optional[_Iterable[_Union[AnswerEnded, _Mapping]]] = ..., failed: _Optional[_Iterable[_Union[CallEnded, _Mapping]]] = ..., number: _Optional[int] = ...) -> None: ...

class FleetState(_message.Message):
    __slots__ = ("is_serving", "why_not_ready", "max_model_len", "prefill_pool_tokens", "decode_pool_tokens", "knows_adapters", "adapters", "ready_nodes", "num_live", "own_pool_tokens")
    IS_SERVING_FIELD_NUMBER: _ClassVar[int]
    WHY_NOT_READY_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    PREFILL_POOL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_POOL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KNOWS_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    READY_NODES_FIELD_NUMBER: _ClassVar[int]
    NUM_LIVE_FIELD_NUMBER: _ClassVar[int]
    OWN_POOL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    is_serving: bool
    why_not_ready: str
    max_model_len: int
    prefill_pool_tokens: int
    decode_pool_tokens: int
    knows_adapters: bool
    adapters: _containers.RepeatedScalarFieldContainer[str]
    ready_nodes: _containers.RepeatedScalarFieldContainer[str]
    num_live: int
    own_pool_tokens: int
    def __init__(self, is_serving: _Optional[bool] = ..., why_not_ready: _Optional[str] = ..., max_model_len: _Optional[int] = ..., prefill_pool_tokens: _Optional[int] = ..., decode_pool_tokens: _Optional[int] = ..., knows_adapters: _Optional[bool] = ..., adapters: _Optional[_Iterable[str]] = ..., ready_nodes: _Optional[_Iterable[str]] = ..., num_live: _Optional[int] = ..., own_pool_tokens: _Optional[int] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("number", "error")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    number: int
    error: ApiServerError
    def __init__(self, number: _Optional[int] = ..., error: _Optional[_Union[ApiServerError, _Mapping]] = ...) -> None: ...

class TokenRun(_message.Message):
    __slots__ = ("numbers", "indexes", "token_ids", "others")
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    numbers: _containers.RepeatedScalarFieldContainer[int]
    indexes: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    others: _containers.RepeatedCompositeFieldContainer[AnswerTokens]
    def __init__(self, numbers: _Optional[_Iterable[int]] = ..., indexes: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., others: _Optional[_Iterable[_Union[AnswerTokens, _Mapping]]] = ...) -> None: ...

class AnswerTokens(_message.Message):
    __slots__ = ("number", "index", "num_cached_tokens", "tokens")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    number: int
    index: int
    num_cached_tokens: int
    tokens: _containers.RepeatedCompositeFieldContainer[_fleet_pb2.SampledToken]
    def __init__(self, number: _Optional[int] = ..., index: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[_fleet_pb2.SampledToken, _Mapping]]] = ...) -> None: ...

class AnswerEnded(_message.Message):
    __slots__ = ("number", "index", "complete", "embedding")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    number: int
    index: int
    complete: _inference_pb2.Complete
    embedding: bytes
    def __init__(self, number: _Optional[int] = ..., index: _Optional[int] = ..., complete: _Optional[_Union[_inference_pb2.Complete, _Mapping]] = ..., embedding: _Optional[bytes] = ...) -> None: ...

class CallEnded(_message.Message):
    __slots__ = ("number", "error")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    number: int
    error: ApiServerError
    def __init__(self, number: _Optional[int] = ..., error: _Optional[_Union[ApiServerError, _Mapping]] = ...) -> None: ...
