from protos import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Attempt(_message.Message):
    __slots__ = ("request_id", "epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class NodeEvent(_message.Message):
    __slots__ = ("hello", "heartbeat", "first_token", "reserved", "transferred", "committed", "step_tokens", "failed", "cancelled", "cache_changed", "revoked", "migration_failed", "taken", "embedded", "prefix_fetch_begun", "prefix_fetch_ended", "progress", "adapter_changed", "number", "num_blocks_free")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    TRANSFERRED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    CACHE_CHANGED_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    MIGRATION_FAILED_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    EMBEDDED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FETCH_BEGUN_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FETCH_ENDED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_CHANGED_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    heartbeat: Heartbeat
    first_token: FirstToken
    reserved: Reserved
    transferred: Transferred
    committed: Committed
    step_tokens: StepTokens
    failed: Failed
    cancelled: Cancelled
    cache_changed: CacheChanged
    revoked: Revoked
    migration_failed: MigrationFailed
    taken: Taken
    embedded: Embedded
    prefix_fetch_begun: PrefixFetchBegun
    prefix_fetch_ended: PrefixFetchEnded
    progress: Progress
    adapter_changed: AdapterChanged
    number: int
    num_blocks_free: int
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., reserved: _Optional[_Union[Reserved, _Mapping]] = ..., transferred: _Optional[_Union[Transferred, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., step_tokens: _Optional[_Union[StepTokens, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., cancelled: _Optional[_Union[Cancelled, _Mapping]] = ..., cache_changed: _Optional[_Union[CacheChanged, _Mapping]] = ..., revoked: _Optional[_Union[Revoked, _Mapping]] = ..., migration_failed: _Optional[_Union[MigrationFailed, _Mapping]] = ..., taken: _Optional[_Union[Taken, _Mapping]] = ..., embedded: _Optional[_Union[Embedded, _Mapping]] = ..., prefix_fetch_begun: _Optional[_Union[PrefixFetchBegun, _Mapping]] = ..., prefix_fetch_ended: _Optional[_Union[PrefixFetchEnded, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., adapter_changed: _Optional[_Union[AdapterChanged, _Mapping]] = ..., number: _Optional[int] = ..., num_blocks_free: _Optional[int] = ...) -> None: ...

class NodeCommand(_message.Message):
    __slots__ = ("welcome", "refusal", "reserve", "prefill", "deliver", "cancel", "reshape", "migrate", "keep", "begun", "send_prefix", "heartbeat_ack", "load_adapter", "unload_adapter", "attempt", "number")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DELIVER_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    RESHAPE_FIELD_NUMBER: _ClassVar[int]
    MIGRATE_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    SEND_PREFIX_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_ACK_FIELD_NUMBER: _ClassVar[int]
    LOAD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    UNLOAD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    refusal: Refusal
    reserve: Reserve
    prefill: Prefill
    deliver: Deliver
    cancel: Cancel
    reshape: Reshape
    migrate: Migrate
    keep: Keep
    begun: Begun
    send_prefix: SendPrefix
    heartbeat_ack: HeartbeatAck
    load_adapter: LoadAdapter
    unload_adapter: UnloadAdapter
    attempt: Attempt
    number: int
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., prefill: _Optional[_Union[Prefill, _Mapping]] = ..., deliver: _Optional[_Union[Deliver, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., reshape: _Optional[_Union[Reshape, _Mapping]] = ..., migrate: _Optional[_Union[Migrate, _Mapping]] = ..., keep: _Optional[_Union[Keep, _Mapping]] = ..., begun: _Optional[_Union[Begun, _Mapping]] = ..., send_prefix: _Optional[_Union[SendPrefix, _Mapping]] = ..., heartbeat_ack: _Optional[_Union[HeartbeatAck, _Mapping]] = ..., load_adapter: _Optional[_Union[LoadAdapter, _Mapping]] = ..., unload_adapter: _Optional[_Union[UnloadAdapter, _Mapping]] = ..., attempt: _Optional[_Union[Attempt, _Mapping]] = ..., number: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("node", "num_blocks", "block_size", "max_model_len", "max_num_seqs", "max_num_queued", "tp_size", "session", "max_num_batched_tokens", "shape", "home", "kv_keys", "pp_size", "num_tier_blocks", "remote_kvs", "keeps_sequences", "adapter_folders", "starved_share")
    class AdapterFoldersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NODE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    HOME_FIELD_NUMBER: _ClassVar[int]
    KV_KEYS_FIELD_NUMBER: _ClassVar[int]
    PP_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_TIER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REMOTE_KVS_FIELD_NUMBER: _ClassVar[int]
    KEEPS_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FOLDERS_FIELD_NUMBER: _ClassVar[int]
    STARVED_SHARE_FIELD_NUMBER: _ClassVar[int]
    node: _inference_pb2.NodeInfo
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_queued: int
    tp_size: int
    session: int
    max_num_batched_tokens: int
    shape: _inference_pb2.Shape
    home: _inference_pb2.Shape
    kv_keys: _containers.RepeatedScalarFieldContainer[bytes]
    pp_size: int
    num_tier_blocks: int
    remote_kvs: HolderOffer
    keeps_sequences: bool
    adapter_folders: _containers.ScalarMap[str, str]
    starved_share: float
    def __init__(self, node: _Optional[_Union[_inference_pb2.NodeInfo, _Mapping]] = ..., num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_queued: _Optional[int] = ..., tp_size: _Optional[int] = ..., session: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., shape: _Optional[_Union[_inference_pb2.Shape, _Mapping]] = ..., home: _Optional[_Union[_inference_pb2.Shape, _Mapping]] = ..., kv_keys: _Optional[_Iterable[bytes]] = ..., pp_size: _Optional[int] = ..., num_tier_blocks: _Optional[int] = ..., remote_kvs: _Optional[_Union[HolderOffer, _Mapping]] = ..., keeps_sequences: _Optional[bool] = ..., adapter_folders: _Optional[_Mapping[str, str]] = ..., starved_share: _Optional[float] = ...) -> None: ...

class KVHolder(_message.Message):
    __slots__ = ("address", "key")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    address: str
    key: bytes
    def __init__(self, address: _Optional[str] = ..., key: _Optional[bytes] = ...) -> None: ...

class HolderOffer(_message.Message):
    __slots__ = ("holder", "num_tokens")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    holder: KVHolder
    num_tokens: int
    def __init__(self, holder: _Optional[_Union[KVHolder, _Mapping]] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("load", "step_age_s")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_S_FIELD_NUMBER: _ClassVar[int]
    load: _inference_pb2.NodeLoad
    step_age_s: float
    def __init__(self, load: _Optional[_Union[_inference_pb2.NodeLoad, _Mapping]] = ..., step_age_s: _Optional[float] = ...) -> None: ...

class Taken(_message.Message):
    __slots__ = ("attempt",)
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("attempt", "num_left", "prefill_s")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_LEFT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    num_left: int
    prefill_s: float
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., num_left: _Optional[int] = ..., prefill_s: _Optional[float] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("attempt", "token", "prefill_s", "num_cached_tokens")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    token: SampledToken
    prefill_s: float
    num_cached_tokens: int
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., token: _Optional[_Union[SampledToken, _Mapping]] = ..., prefill_s: _Optional[float] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class Embedded(_message.Message):
    __slots__ = ("attempt", "embedding", "prefill_s", "num_cached_tokens")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    embedding: bytes
    prefill_s: float
    num_cached_tokens: int
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., embedding: _Optional[bytes] = ..., prefill_s: _Optional[float] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("attempt", "descriptor")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    descriptor: bytes
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., descriptor: _Optional[bytes] = ...) -> None: ...

class Revoked(_message.Message):
    __slots__ = ("attempt",)
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ...) -> None: ...

class Transferred(_message.Message):
    __slots__ = ("attempt", "num_bytes")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    num_bytes: int
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("attempt", "num_bytes", "num_bytes_saved", "next_index")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_SAVED_FIELD_NUMBER: _ClassVar[int]
    NEXT_INDEX_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    num_bytes: int
    num_bytes_saved: int
    next_index: int
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., num_bytes: _Optional[int] = ..., num_bytes_saved: _Optional[int] = ..., next_index: _Optional[int] = ...) -> None: ...

class MigrationFailed(_message.Message):
    __slots__ = ("attempt", "reason", "message")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    reason: str
    message: str
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class StepTokens(_message.Message):
    __slots__ = ("tokens", "step_s", "epochs", "indexes", "token_ids")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[SampledToken]
    step_s: float
    epochs: _containers.RepeatedScalarFieldContainer[int]
    indexes: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokens: _Optional[_Iterable[_Union[SampledToken, _Mapping]]] = ..., step_s: _Optional[float] = ..., epochs: _Optional[_Iterable[int]] = ..., indexes: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SampledToken(_message.Message):
    __slots__ = ("attempt", "index", "token_id", "finish_reason", "logprob", "top", "prompt_logprobs", "num_proposed", "num_accepted")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROPOSED_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    index: int
    token_id: int
    finish_reason: _inference_pb2.FinishReason
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TopLogprob]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TokenLogprobs]
    num_proposed: int
    num_accepted: int
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., index: _Optional[int] = ..., token_id: _Optional[int] = ..., finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[_inference_pb2.TopLogprob, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_inference_pb2.TokenLogprobs, _Mapping]]] = ..., num_proposed: _Optional[int] = ..., num_accepted: _Optional[int] = ...) -> None: ...

class PrefixFetchBegun(_message.Message):
    __slots__ = ("attempt", "descriptor")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    descriptor: bytes
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., descriptor: _Optional[bytes] = ...) -> None: ...

class PrefixFetchEnded(_message.Message):
    __slots__ = ("attempt", "num_blocks", "num_bytes", "seconds")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    num_blocks: int
    num_bytes: int
    seconds: float
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., num_blocks: _Optional[int] = ..., num_bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("attempt", "reason", "message")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    reason: str
    message: str
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Cancelled(_message.Message):
    __slots__ = ("attempt",)
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ...) -> None: ...

class CacheChanged(_message.Message):
    __slots__ = ("stored", "removed", "numerics_ids")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_IDS_FIELD_NUMBER: _ClassVar[int]
    stored: _containers.RepeatedScalarFieldContainer[int]
    removed: _containers.RepeatedScalarFieldContainer[int]
    numerics_ids: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, stored: _Optional[_Iterable[int]] = ..., removed: _Optional[_Iterable[int]] = ..., numerics_ids: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("heartbeat_s", "session", "timeout_s")
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    heartbeat_s: float
    session: int
    timeout_s: float
    def __init__(self, heartbeat_s: _Optional[float] = ..., session: _Optional[int] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("reason", "message")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class HeartbeatAck(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Job(_message.Message):
    __slots__ = ("attempt", "token_ids", "num_prompt_tokens", "sampling_params", "cache_salt", "age", "due", "priority", "adapter", "grammar", "is_suspect", "pooling", "fetch_prefix", "kv_holders", "asker")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    DUE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    IS_SUSPECT_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    FETCH_PREFIX_FIELD_NUMBER: _ClassVar[int]
    KV_HOLDERS_FIELD_NUMBER: _ClassVar[int]
    ASKER_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    sampling_params: _inference_pb2.SamplingParams
    cache_salt: str
    age: int
    due: Due
    priority: int
    adapter: str
    grammar: str
    is_suspect: bool
    pooling: Pooling
    fetch_prefix: FetchPrefix
    kv_holders: _containers.RepeatedCompositeFieldContainer[KVHolder]
    asker: str
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., sampling_params: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., cache_salt: _Optional[str] = ..., age: _Optional[int] = ..., due: _Optional[_Union[Due, _Mapping]] = ..., priority: _Optional[int] = ..., adapter: _Optional[str] = ..., grammar: _Optional[str] = ..., is_suspect: _Optional[bool] = ..., pooling: _Optional[_Union[Pooling, _Mapping]] = ..., fetch_prefix: _Optional[_Union[FetchPrefix, _Mapping]] = ..., kv_holders: _Optional[_Iterable[_Union[KVHolder, _Mapping]]] = ..., asker: _Optional[str] = ...) -> None: ...

class FetchPrefix(_message.Message):
    __slots__ = ("epoch", "num_tokens", "tp_size", "pp_size", "sender_keys", "patience_s")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    PP_SIZE_FIELD_NUMBER: _ClassVar[int]
    SENDER_KEYS_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_S_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    num_tokens: int
    tp_size: int
    pp_size: int
    sender_keys: _containers.RepeatedScalarFieldContainer[bytes]
    patience_s: float
    def __init__(self, epoch: _Optional[int] = ..., num_tokens: _Optional[int] = ..., tp_size: _Optional[int] = ..., pp_size: _Optional[int] = ..., sender_keys: _Optional[_Iterable[bytes]] = ..., patience_s: _Optional[float] = ...) -> None: ...

class Pooling(_message.Message):
    __slots__ = ("kind", "normalizes", "num_dimensions")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NORMALIZES_FIELD_NUMBER: _ClassVar[int]
    NUM_DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    normalizes: bool
    num_dimensions: int
    def __init__(self, kind: _Optional[str] = ..., normalizes: _Optional[bool] = ..., num_dimensions: _Optional[int] = ...) -> None: ...

class Due(_message.Message):
    __slots__ = ("ttft_left_s", "tpot_s", "since_first_s", "refuses_late")
    TTFT_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIRST_S_FIELD_NUMBER: _ClassVar[int]
    REFUSES_LATE_FIELD_NUMBER: _ClassVar[int]
    ttft_left_s: float
    tpot_s: float
    since_first_s: float
    refuses_late: bool
    def __init__(self, ttft_left_s: _Optional[float] = ..., tpot_s: _Optional[float] = ..., since_first_s: _Optional[float] = ..., refuses_late: _Optional[bool] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("job", "prefill_tp_size", "local_prefill", "num_tokens_ahead", "sender_keys", "prefill_pp_size", "is_whole")
    JOB_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_AHEAD_FIELD_NUMBER: _ClassVar[int]
    SENDER_KEYS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_PP_SIZE_FIELD_NUMBER: _ClassVar[int]
    IS_WHOLE_FIELD_NUMBER: _ClassVar[int]
    job: Job
    prefill_tp_size: int
    local_prefill: bool
    num_tokens_ahead: int
    sender_keys: _containers.RepeatedScalarFieldContainer[bytes]
    prefill_pp_size: int
    is_whole: bool
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ..., prefill_tp_size: _Optional[int] = ..., local_prefill: _Optional[bool] = ..., num_tokens_ahead: _Optional[int] = ..., sender_keys: _Optional[_Iterable[bytes]] = ..., prefill_pp_size: _Optional[int] = ..., is_whole: _Optional[bool] = ...) -> None: ...

class Prefill(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: Job
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ...) -> None: ...

class Deliver(_message.Message):
    __slots__ = ("attempt", "descriptor")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    descriptor: bytes
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., descriptor: _Optional[bytes] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("attempt",)
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ...) -> None: ...

class Reshape(_message.Message):
    __slots__ = ("shape", "is_temporary")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    IS_TEMPORARY_FIELD_NUMBER: _ClassVar[int]
    shape: _inference_pb2.Shape
    is_temporary: bool
    def __init__(self, shape: _Optional[_Union[_inference_pb2.Shape, _Mapping]] = ..., is_temporary: _Optional[bool] = ...) -> None: ...

class Migrate(_message.Message):
    __slots__ = ("attempt", "descriptor")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    descriptor: bytes
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., descriptor: _Optional[bytes] = ...) -> None: ...

class Keep(_message.Message):
    __slots__ = ("attempt",)
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ...) -> None: ...

class Begun(_message.Message):
    __slots__ = ("attempt",)
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ...) -> None: ...

class SendPrefix(_message.Message):
    __slots__ = ("attempt", "descriptor", "token_ids", "cache_salt", "adapter")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    descriptor: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    cache_salt: str
    adapter: str
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., descriptor: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ..., cache_salt: _Optional[str] = ..., adapter: _Optional[str] = ...) -> None: ...

class LoadAdapter(_message.Message):
    __slots__ = ("name", "folder")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    name: str
    folder: str
    def __init__(self, name: _Optional[str] = ..., folder: _Optional[str] = ...) -> None: ...

class UnloadAdapter(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class AdapterChanged(_message.Message):
    __slots__ = ("name", "digest", "error")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    error: str
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class Tail(_message.Message):
    __slots__ = ("token_ids", "numerics")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    numerics: _containers.RepeatedCompositeFieldContainer[NumericsRun]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., numerics: _Optional[_Iterable[_Union[NumericsRun, _Mapping]]] = ...) -> None: ...

class NumericsRun(_message.Message):
    __slots__ = ("numerics_id", "num_blocks")
    NUMERICS_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    numerics_id: bytes
    num_blocks: int
    def __init__(self, numerics_id: _Optional[bytes] = ..., num_blocks: _Optional[int] = ...) -> None: ...
