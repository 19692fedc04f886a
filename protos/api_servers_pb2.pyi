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
    __slots__ = ("number", "hello", "heartbeat", "call", "over", "stopped", "refused", "http_call", "failed")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    HTTP_CALL_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    number: int
    hello: ApiServerHello
    heartbeat: ApiServerHeartbeat
    call: ForwardedCall
    over: CallOver
    stopped: OutputStopped
    refused: RefusedCall
    http_call: HttpCall
    failed: FailedCall
    def __init__(self, number: _Optional[int] = ..., hello: _Optional[_Union[ApiServerHello, _Mapping]] = ..., heartbeat: _Optional[_Union[ApiServerHeartbeat, _Mapping]] = ..., call: _Optional[_Union[ForwardedCall, _Mapping]] = ..., over: _Optional[_Union[CallOver, _Mapping]] = ..., stopped: _Optional[_Union[OutputStopped, _Mapping]] = ..., refused: _Optional[_Union[RefusedCall, _Mapping]] = ..., http_call: _Optional[_Union[HttpCall, _Mapping]] = ..., failed: _Optional[_Union[FailedCall, _Mapping]] = ...) -> None: ...

class ApiServerHello(_message.Message):
    __slots__ = ("name", "version", "resumes", "protocol_version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RESUMES_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    resumes: bool
    protocol_version: str
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., resumes: _Optional[bool] = ..., protocol_version: _Optional[str] = ...) -> None: ...

class ApiServerHeartbeat(_message.Message):
    __slots__ = ("cpu_s", "listens", "sheds")
    CPU_S_FIELD_NUMBER: _ClassVar[int]
    LISTENS_FIELD_NUMBER: _ClassVar[int]
    SHEDS_FIELD_NUMBER: _ClassVar[int]
    cpu_s: float
    listens: bool
    sheds: _containers.RepeatedCompositeFieldContainer[Shed]
    def __init__(self, cpu_s: _Optional[float] = ..., listens: _Optional[bool] = ..., sheds: _Optional[_Iterable[_Union[Shed, _Mapping]]] = ...) -> None: ...

class Shed(_message.Message):
    __slots__ = ("port", "reason", "number")
    PORT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    port: str
    reason: str
    number: int
    def __init__(self, port: _Optional[str] = ..., reason: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class ForwardedCall(_message.Message):
    __slots__ = ("id", "request", "info", "grammar", "pooling", "num_behind", "left_s", "begun_age_s", "endings")
    ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    NUM_BEHIND_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    BEGUN_AGE_S_FIELD_NUMBER: _ClassVar[int]
    ENDINGS_FIELD_NUMBER: _ClassVar[int]
    id: str
    request: _inference_pb2.GenerateRequest
    info: CallInfo
    grammar: str
    pooling: _fleet_pb2.Pooling
    num_behind: int
    left_s: float
    begun_age_s: float
    endings: _containers.RepeatedCompositeFieldContainer[PromptEnding]
    def __init__(self, id: _Optional[str] = ..., request: _Optional[_Union[_inference_pb2.GenerateRequest, _Mapping]] = ..., info: _Optional[_Union[CallInfo, _Mapping]] = ..., grammar: _Optional[str] = ..., pooling: _Optional[_Union[_fleet_pb2.Pooling, _Mapping]] = ..., num_behind: _Optional[int] = ..., left_s: _Optional[float] = ..., begun_age_s: _Optional[float] = ..., endings: _Optional[_Iterable[_Union[PromptEnding, _Mapping]]] = ...) -> None: ...

class PromptEnding(_message.Message):
    __slots__ = ("token_ids", "logprob_token_ids")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class CallInfo(_message.Message):
    __slots__ = ("request_id", "asker", "operation", "model", "age_s", "traceparent", "tracestate")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ASKER_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    asker: str
    operation: str
    model: str
    age_s: float
    traceparent: _containers.RepeatedScalarFieldContainer[str]
    tracestate: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_id: _Optional[str] = ..., asker: _Optional[str] = ..., operation: _Optional[str] = ..., model: _Optional[str] = ..., age_s: _Optional[float] = ..., traceparent: _Optional[_Iterable[str]] = ..., tracestate: _Optional[_Iterable[str]] = ...) -> None: ...

class CallOver(_message.Message):
    __slots__ = ("id", "failure")
    ID_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    id: str
    failure: str
    def __init__(self, id: _Optional[str] = ..., failure: _Optional[str] = ...) -> None: ...

class OutputStopped(_message.Message):
    __slots__ = ("id", "index")
    ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    id: str
    index: int
    def __init__(self, id: _Optional[str] = ..., index: _Optional[int] = ...) -> None: ...

class RefusedCall(_message.Message):
    __slots__ = ("info", "error")
    INFO_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    info: CallInfo
    error: CallError
    def __init__(self, info: _Optional[_Union[CallInfo, _Mapping]] = ..., error: _Optional[_Union[CallError, _Mapping]] = ...) -> None: ...

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

class CallError(_message.Message):
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

class ApiServerBatch(_message.Message):
    __slots__ = ("number", "fleet", "begun", "responses", "failed", "calls", "outputs", "indexes", "token_ids")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FLEET_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    RESPONSES_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    number: int
    fleet: FleetState
    begun: _containers.RepeatedScalarFieldContainer[str]
    responses: _containers.RepeatedCompositeFieldContainer[_inference_pb2.GenerateResponse]
    failed: _containers.RepeatedCompositeFieldContainer[FailedCall]
    calls: _containers.RepeatedScalarFieldContainer[int]
    outputs: _containers.RepeatedScalarFieldContainer[int]
    indexes: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, number: _Optional[int] = ..., fleet: _Optional[_Union[FleetState, _Mapping]] = ..., begun: _Optional[_Iterable[str]] = ..., responses: _Optional[_Iterable[_Union[_inference_pb2.GenerateResponse, _Mapping]]] = ..., failed: _Optional[_Iterable[_Union[FailedCall, _Mapping]]] = ..., calls: _Optional[_Iterable[int]] = ..., outputs: _Optional[_Iterable[int]] = ..., indexes: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class FailedCall(_message.Message):
    __slots__ = ("id", "error")
    ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    id: str
    error: CallError
    def __init__(self, id: _Optional[str] = ..., error: _Optional[_Union[CallError, _Mapping]] = ...) -> None: ...

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
