from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason

class GetOverviewRequest(_message.Message):
    __slots__ = ("after",)
    AFTER_FIELD_NUMBER: _ClassVar[int]
    after: int
    def __init__(self, after: _Optional[int] = ...) -> None: ...

class Overview(_message.Message):
    __slots__ = ("now_s", "uptime_s", "served_model_name", "nodes", "phases", "rates", "recent_tokens_per_s", "window_s", "times", "live", "ended")
    NOW_S_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    SERVED_MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    RATES_FIELD_NUMBER: _ClassVar[int]
    RECENT_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    now_s: float
    uptime_s: float
    served_model_name: str
    nodes: _containers.RepeatedCompositeFieldContainer[NodeOverview]
    phases: _containers.RepeatedCompositeFieldContainer[PhaseCount]
    rates: Rates
    recent_tokens_per_s: _containers.RepeatedScalarFieldContainer[float]
    window_s: float
    times: _containers.RepeatedCompositeFieldContainer[TimesOverview]
    live: _containers.RepeatedCompositeFieldContainer[SequenceHistory]
    ended: _containers.RepeatedCompositeFieldContainer[SequenceHistory]
    def __init__(self, now_s: _Optional[float] = ..., uptime_s: _Optional[float] = ..., served_model_name: _Optional[str] = ..., nodes: _Optional[_Iterable[_Union[NodeOverview, _Mapping]]] = ..., phases: _Optional[_Iterable[_Union[PhaseCount, _Mapping]]] = ..., rates: _Optional[_Union[Rates, _Mapping]] = ..., recent_tokens_per_s: _Optional[_Iterable[float]] = ..., window_s: _Optional[float] = ..., times: _Optional[_Iterable[_Union[TimesOverview, _Mapping]]] = ..., live: _Optional[_Iterable[_Union[SequenceHistory, _Mapping]]] = ..., ended: _Optional[_Iterable[_Union[SequenceHistory, _Mapping]]] = ...) -> None: ...

class NodeOverview(_message.Message):
    __slots__ = ("load", "num_tokens_to_compute", "num_sequences", "num_incoming", "num_tokens_used", "num_pool_tokens", "prompt_tokens_per_s", "tokens_per_s")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_TO_COMPUTE_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_INCOMING_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_USED_FIELD_NUMBER: _ClassVar[int]
    NUM_POOL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    load: NodeLoad
    num_tokens_to_compute: int
    num_sequences: int
    num_incoming: int
    num_tokens_used: int
    num_pool_tokens: int
    prompt_tokens_per_s: float
    tokens_per_s: float
    def __init__(self, load: _Optional[_Union[NodeLoad, _Mapping]] = ..., num_tokens_to_compute: _Optional[int] = ..., num_sequences: _Optional[int] = ..., num_incoming: _Optional[int] = ..., num_tokens_used: _Optional[int] = ..., num_pool_tokens: _Optional[int] = ..., prompt_tokens_per_s: _Optional[float] = ..., tokens_per_s: _Optional[float] = ...) -> None: ...

class PhaseCount(_message.Message):
    __slots__ = ("phase", "num_sequences")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    phase: str
    num_sequences: int
    def __init__(self, phase: _Optional[str] = ..., num_sequences: _Optional[int] = ...) -> None: ...

class Rates(_message.Message):
    __slots__ = ("tokens_per_s", "prompt_tokens_per_s", "requests_per_s")
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_S_FIELD_NUMBER: _ClassVar[int]
    tokens_per_s: float
    prompt_tokens_per_s: float
    requests_per_s: float
    def __init__(self, tokens_per_s: _Optional[float] = ..., prompt_tokens_per_s: _Optional[float] = ..., requests_per_s: _Optional[float] = ...) -> None: ...

class TimesOverview(_message.Message):
    __slots__ = ("slo_class", "limits", "num_sequences", "num_limited", "num_met", "ttft_s", "tpot_s")
    SLO_CLASS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_LIMITED_FIELD_NUMBER: _ClassVar[int]
    NUM_MET_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    slo_class: str
    limits: str
    num_sequences: int
    num_limited: int
    num_met: int
    ttft_s: Percentiles
    tpot_s: Percentiles
    def __init__(self, slo_class: _Optional[str] = ..., limits: _Optional[str] = ..., num_sequences: _Optional[int] = ..., num_limited: _Optional[int] = ..., num_met: _Optional[int] = ..., ttft_s: _Optional[_Union[Percentiles, _Mapping]] = ..., tpot_s: _Optional[_Union[Percentiles, _Mapping]] = ...) -> None: ...

class Percentiles(_message.Message):
    __slots__ = ("p50", "p90", "p99")
    P50_FIELD_NUMBER: _ClassVar[int]
    P90_FIELD_NUMBER: _ClassVar[int]
    P99_FIELD_NUMBER: _ClassVar[int]
    p50: float
    p90: float
    p99: float
    def __init__(self, p50: _Optional[float] = ..., p90: _Optional[float] = ..., p99: _Optional[float] = ...) -> None: ...

class SequenceHistory(_message.Message):
    __slots__ = ("number", "sequence_id", "start_s", "spans", "end", "prompt_tokens", "cached_tokens", "completion_tokens", "ttft_s", "tpot_s", "num_restarts", "num_migrations", "migration_pause_s", "kv_bytes", "attainment")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    START_S_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    NUM_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    NUM_MIGRATIONS_FIELD_NUMBER: _ClassVar[int]
    MIGRATION_PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    ATTAINMENT_FIELD_NUMBER: _ClassVar[int]
    number: int
    sequence_id: str
    start_s: float
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    end: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_s: float
    tpot_s: float
    num_restarts: int
    num_migrations: int
    migration_pause_s: float
    kv_bytes: int
    attainment: Attainment
    def __init__(self, number: _Optional[int] = ..., sequence_id: _Optional[str] = ..., start_s: _Optional[float] = ..., spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ..., end: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., ttft_s: _Optional[float] = ..., tpot_s: _Optional[float] = ..., num_restarts: _Optional[int] = ..., num_migrations: _Optional[int] = ..., migration_pause_s: _Optional[float] = ..., kv_bytes: _Optional[int] = ..., attainment: _Optional[_Union[Attainment, _Mapping]] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("phase", "begin_s", "end_s", "prefill_node", "decode_node")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    BEGIN_S_FIELD_NUMBER: _ClassVar[int]
    END_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NODE_FIELD_NUMBER: _ClassVar[int]
    DECODE_NODE_FIELD_NUMBER: _ClassVar[int]
    phase: str
    begin_s: float
    end_s: float
    prefill_node: str
    decode_node: str
    def __init__(self, phase: _Optional[str] = ..., begin_s: _Optional[float] = ..., end_s: _Optional[float] = ..., prefill_node: _Optional[str] = ..., decode_node: _Optional[str] = ...) -> None: ...

class SetRoleRequest(_message.Message):
    __slots__ = ("node", "role", "shape")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    node: str
    role: str
    shape: Shape
    def __init__(self, node: _Optional[str] = ..., role: _Optional[str] = ..., shape: _Optional[_Union[Shape, _Mapping]] = ...) -> None: ...

class SetRoleResponse(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: NodeLoad
    def __init__(self, node: _Optional[_Union[NodeLoad, _Mapping]] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "folder")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    name: str
    folder: str
    def __init__(self, name: _Optional[str] = ..., folder: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ("num_live",)
    NUM_LIVE_FIELD_NUMBER: _ClassVar[int]
    num_live: int
    def __init__(self, num_live: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("node", "all")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    node: str
    all: bool
    def __init__(self, node: _Optional[str] = ..., all: _Optional[bool] = ...) -> None: ...

class DrainProgress(_message.Message):
    __slots__ = ("num_left",)
    NUM_LEFT_FIELD_NUMBER: _ClassVar[int]
    num_left: int
    def __init__(self, num_left: _Optional[int] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "text", "tokenized", "chat", "sampling_params", "model", "cache_salt", "ttft_ms", "tpot_ms", "slo_class", "priority", "so_far", "truncate_prompt_tokens", "call_number")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZED_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    SLO_CLASS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SO_FAR_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CALL_NUMBER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    tokenized: TokenizedInput
    chat: ChatInput
    sampling_params: SamplingParams
    model: str
    cache_salt: str
    ttft_ms: float
    tpot_ms: float
    slo_class: str
    priority: int
    so_far: _containers.RepeatedCompositeFieldContainer[OutputSoFar]
    truncate_prompt_tokens: int
    call_number: int
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., tokenized: _Optional[_Union[TokenizedInput, _Mapping]] = ..., chat: _Optional[_Union[ChatInput, _Mapping]] = ..., sampling_params: _Optional[_Union[SamplingParams, _Mapping]] = ..., model: _Optional[str] = ..., cache_salt: _Optional[str] = ..., ttft_ms: _Optional[float] = ..., tpot_ms: _Optional[float] = ..., slo_class: _Optional[str] = ..., priority: _Optional[int] = ..., so_far: _Optional[_Iterable[_Union[OutputSoFar, _Mapping]]] = ..., truncate_prompt_tokens: _Optional[int] = ..., call_number: _Optional[int] = ...) -> None: ...

class OutputSoFar(_message.Message):
    __slots__ = ("token_ids", "num_chars", "has_ended", "since_first_s", "finish_reason")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHARS_FIELD_NUMBER: _ClassVar[int]
    HAS_ENDED_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIRST_S_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_chars: int
    has_ended: bool
    since_first_s: float
    finish_reason: FinishReason
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., num_chars: _Optional[int] = ..., has_ended: _Optional[bool] = ..., since_first_s: _Optional[float] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ...) -> None: ...

class TokenizedInput(_message.Message):
    __slots__ = ("input_ids",)
    INPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    input_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, input_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatInput(_message.Message):
    __slots__ = ("messages", "tools_json", "template_kwargs_json", "add_generation_prompt", "continue_final_message")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_KWARGS_JSON_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    tools_json: str
    template_kwargs_json: str
    add_generation_prompt: bool
    continue_final_message: bool
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., tools_json: _Optional[str] = ..., template_kwargs_json: _Optional[str] = ..., add_generation_prompt: _Optional[bool] = ..., continue_final_message: _Optional[bool] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "extra_json", "content_parts")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    EXTRA_JSON_FIELD_NUMBER: _ClassVar[int]
    CONTENT_PARTS_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    extra_json: str
    content_parts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., extra_json: _Optional[str] = ..., content_parts: _Optional[_Iterable[str]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "max_tokens", "min_tokens", "stop", "stop_token_ids", "skip_special_tokens", "ignore_eos", "n", "logprobs", "seed", "include_stop_str_in_output", "logit_bias", "prompt_logprobs", "json_schema", "json_object", "regex", "grammar", "choice", "disable_any_whitespace", "whitespace_pattern", "allowed_token_ids", "logprob_token_ids", "bad_words", "bad_tokens", "disable_additional_properties")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    DISABLE_ANY_WHITESPACE_FIELD_NUMBER: _ClassVar[int]
    WHITESPACE_PATTERN_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    BAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DISABLE_ADDITIONAL_PROPERTIES_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    max_tokens: int
    min_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    skip_special_tokens: bool
    ignore_eos: bool
    n: int
    logprobs: int
    seed: int
    include_stop_str_in_output: bool
    logit_bias: _containers.ScalarMap[int, float]
    prompt_logprobs: int
    json_schema: str
    json_object: bool
    regex: str
    grammar: str
    choice: Choice
    disable_any_whitespace: bool
    whitespace_pattern: str
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    bad_tokens: _containers.RepeatedCompositeFieldContainer[TokenizedInput]
    disable_additional_properties: bool
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., skip_special_tokens: _Optional[bool] = ..., ignore_eos: _Optional[bool] = ..., n: _Optional[int] = ..., logprobs: _Optional[int] = ..., seed: _Optional[int] = ..., include_stop_str_in_output: _Optional[bool] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., prompt_logprobs: _Optional[int] = ..., json_schema: _Optional[str] = ..., json_object: _Optional[bool] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ..., choice: _Optional[_Union[Choice, _Mapping]] = ..., disable_any_whitespace: _Optional[bool] = ..., whitespace_pattern: _Optional[str] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[str]] = ..., bad_tokens: _Optional[_Iterable[_Union[TokenizedInput, _Mapping]]] = ..., disable_additional_properties: _Optional[bool] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("choices",)
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    choices: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, choices: _Optional[_Iterable[str]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "index", "chunk", "complete")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    index: int
    chunk: Chunk
    complete: Complete
    def __init__(self, request_id: _Optional[str] = ..., index: _Optional[int] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., complete: _Optional[_Union[Complete, _Mapping]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("first_token_index", "token_ids", "text", "logprobs", "prompt_logprobs", "cached_tokens", "finish_reason")
    FIRST_TOKEN_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    first_token_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    cached_tokens: int
    finish_reason: FinishReason
    def __init__(self, first_token_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., cached_tokens: _Optional[int] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("token_id", "logprob", "top")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class Complete(_message.Message):
    __slots__ = ("finish_reason", "matched_token_id", "matched_stop_str", "prompt_tokens", "completion_tokens", "cached_tokens", "timeline", "kv_bytes", "kv_bytes_saved", "migrated_kv_bytes", "attainment", "resumed_tokens", "proposed_tokens", "accepted_tokens", "fetched_kv_bytes", "error", "embedding")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_STR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_SAVED_FIELD_NUMBER: _ClassVar[int]
    MIGRATED_KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    ATTAINMENT_FIELD_NUMBER: _ClassVar[int]
    RESUMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    finish_reason: FinishReason
    matched_token_id: int
    matched_stop_str: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    timeline: Timeline
    kv_bytes: int
    kv_bytes_saved: int
    migrated_kv_bytes: int
    attainment: Attainment
    resumed_tokens: int
    proposed_tokens: int
    accepted_tokens: int
    fetched_kv_bytes: int
    error: str
    embedding: bytes
    def __init__(self, finish_reason: _Optional[_Union[FinishReason, str]] = ..., matched_token_id: _Optional[int] = ..., matched_stop_str: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., timeline: _Optional[_Union[Timeline, _Mapping]] = ..., kv_bytes: _Optional[int] = ..., kv_bytes_saved: _Optional[int] = ..., migrated_kv_bytes: _Optional[int] = ..., attainment: _Optional[_Union[Attainment, _Mapping]] = ..., resumed_tokens: _Optional[int] = ..., proposed_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., fetched_kv_bytes: _Optional[int] = ..., error: _Optional[str] = ..., embedding: _Optional[bytes] = ...) -> None: ...

class Attainment(_message.Message):
    __slots__ = ("slo_class", "ttft_ms", "tpot_ms", "ttft_met", "tpot_met")
    SLO_CLASS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MET_FIELD_NUMBER: _ClassVar[int]
    TPOT_MET_FIELD_NUMBER: _ClassVar[int]
    slo_class: str
    ttft_ms: float
    tpot_ms: float
    ttft_met: bool
    tpot_met: bool
    def __init__(self, slo_class: _Optional[str] = ..., ttft_ms: _Optional[float] = ..., tpot_ms: _Optional[float] = ..., ttft_met: _Optional[bool] = ..., tpot_met: _Optional[bool] = ...) -> None: ...

class Timeline(_message.Message):
    __slots__ = ("prefill_queue_s", "prefill_s", "kv_alloc_s", "kv_transfer_s", "decode_queue_s", "decode_s", "e2e_s", "ttft_s", "prefill_node", "decode_node", "num_restarts", "num_migrations", "migration_pause_s", "prefix_fetch_s", "expected_ttft_s", "expected_prefill_s", "ttft_margin_s", "expected_tpot_s", "deferred_s", "is_late")
    PREFILL_QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    KV_ALLOC_S_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    E2E_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NODE_FIELD_NUMBER: _ClassVar[int]
    DECODE_NODE_FIELD_NUMBER: _ClassVar[int]
    NUM_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    NUM_MIGRATIONS_FIELD_NUMBER: _ClassVar[int]
    MIGRATION_PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FETCH_S_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TTFT_S_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_MARGIN_S_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TPOT_S_FIELD_NUMBER: _ClassVar[int]
    DEFERRED_S_FIELD_NUMBER: _ClassVar[int]
    IS_LATE_FIELD_NUMBER: _ClassVar[int]
    prefill_queue_s: float
    prefill_s: float
    kv_alloc_s: float
    kv_transfer_s: float
    decode_queue_s: float
    decode_s: float
    e2e_s: float
    ttft_s: float
    prefill_node: str
    decode_node: str
    num_restarts: int
    num_migrations: int
    migration_pause_s: float
    prefix_fetch_s: float
    expected_ttft_s: float
    expected_prefill_s: float
    ttft_margin_s: float
    expected_tpot_s: float
    deferred_s: float
    is_late: bool
    def __init__(self, prefill_queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., kv_alloc_s: _Optional[float] = ..., kv_transfer_s: _Optional[float] = ..., decode_queue_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., e2e_s: _Optional[float] = ..., ttft_s: _Optional[float] = ..., prefill_node: _Optional[str] = ..., decode_node: _Optional[str] = ..., num_restarts: _Optional[int] = ..., num_migrations: _Optional[int] = ..., migration_pause_s: _Optional[float] = ..., prefix_fetch_s: _Optional[float] = ..., expected_ttft_s: _Optional[float] = ..., expected_prefill_s: _Optional[float] = ..., ttft_margin_s: _Optional[float] = ..., expected_tpot_s: _Optional[float] = ..., deferred_s: _Optional[float] = ..., is_late: _Optional[bool] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted", "unknown")
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    aborted: _containers.RepeatedScalarFieldContainer[str]
    unknown: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, aborted: _Optional[_Iterable[str]] = ..., unknown: _Optional[_Iterable[str]] = ...) -> None: ...

class EmbedRequest(_message.Message):
    __slots__ = ("request_id", "text", "tokenized", "model", "cache_salt", "priority", "truncate_prompt_tokens", "dimensions", "normalize")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZED_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    tokenized: TokenizedInput
    model: str
    cache_salt: str
    priority: int
    truncate_prompt_tokens: int
    dimensions: int
    normalize: bool
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., tokenized: _Optional[_Union[TokenizedInput, _Mapping]] = ..., model: _Optional[str] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., truncate_prompt_tokens: _Optional[int] = ..., dimensions: _Optional[int] = ..., normalize: _Optional[bool] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("request_id", "text", "chat", "model", "cache_salt", "ttft_ms", "slo_class", "priority", "items")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    SLO_CLASS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    chat: ChatInput
    model: str
    cache_salt: str
    ttft_ms: float
    slo_class: str
    priority: int
    items: _containers.RepeatedCompositeFieldContainer[ScoreItem]
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[ChatInput, _Mapping]] = ..., model: _Optional[str] = ..., cache_salt: _Optional[str] = ..., ttft_ms: _Optional[float] = ..., slo_class: _Optional[str] = ..., priority: _Optional[int] = ..., items: _Optional[_Iterable[_Union[ScoreItem, _Mapping]]] = ...) -> None: ...

class ScoreItem(_message.Message):
    __slots__ = ("text", "labels")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    text: str
    labels: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, text: _Optional[str] = ..., labels: _Optional[_Iterable[str]] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("request_id", "items", "prompt_tokens", "cached_tokens", "timeline")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    items: _containers.RepeatedCompositeFieldContainer[LabelLogprobs]
    prompt_tokens: int
    cached_tokens: int
    timeline: Timeline
    def __init__(self, request_id: _Optional[str] = ..., items: _Optional[_Iterable[_Union[LabelLogprobs, _Mapping]]] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., timeline: _Optional[_Union[Timeline, _Mapping]] = ...) -> None: ...

class LabelLogprobs(_message.Message):
    __slots__ = ("logprobs",)
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class EmbedResponse(_message.Message):
    __slots__ = ("request_id", "embedding", "prompt_tokens", "cached_tokens", "timeline")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    embedding: bytes
    prompt_tokens: int
    cached_tokens: int
    timeline: Timeline
    def __init__(self, request_id: _Optional[str] = ..., embedding: _Optional[bytes] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., timeline: _Optional[_Union[Timeline, _Mapping]] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("served_model_name", "architecture", "vocab_size", "max_model_len", "eos_token_ids", "has_chat_template", "default_sampling_params", "adapters", "embedding_size")
    SERVED_MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_SIZE_FIELD_NUMBER: _ClassVar[int]
    served_model_name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    has_chat_template: bool
    default_sampling_params: SamplingParams
    adapters: _containers.RepeatedScalarFieldContainer[str]
    embedding_size: int
    def __init__(self, served_model_name: _Optional[str] = ..., architecture: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., has_chat_template: _Optional[bool] = ..., default_sampling_params: _Optional[_Union[SamplingParams, _Mapping]] = ..., adapters: _Optional[_Iterable[str]] = ..., embedding_size: _Optional[int] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "protocol_version", "uptime_s", "nodes", "instance_id")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    version: str
    protocol_version: str
    uptime_s: float
    nodes: _containers.RepeatedCompositeFieldContainer[NodeInfo]
    instance_id: str
    def __init__(self, version: _Optional[str] = ..., protocol_version: _Optional[str] = ..., uptime_s: _Optional[float] = ..., nodes: _Optional[_Iterable[_Union[NodeInfo, _Mapping]]] = ..., instance_id: _Optional[str] = ...) -> None: ...

class NodeInfo(_message.Message):
    __slots__ = ("name", "role", "incarnation", "fingerprint", "engine", "numerics", "version")
    class FingerprintEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class EngineEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class NumericsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: str
    incarnation: str
    fingerprint: _containers.ScalarMap[str, str]
    engine: _containers.ScalarMap[str, str]
    numerics: _containers.ScalarMap[str, str]
    version: str
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., incarnation: _Optional[str] = ..., fingerprint: _Optional[_Mapping[str, str]] = ..., engine: _Optional[_Mapping[str, str]] = ..., numerics: _Optional[_Mapping[str, str]] = ..., version: _Optional[str] = ...) -> None: ...

class GetLoadsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadsResponse(_message.Message):
    __slots__ = ("nodes", "num_live_requests", "slo_classes")
    NODES_FIELD_NUMBER: _ClassVar[int]
    NUM_LIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SLO_CLASSES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[NodeLoad]
    num_live_requests: int
    slo_classes: _containers.RepeatedCompositeFieldContainer[SloClassLoad]
    def __init__(self, nodes: _Optional[_Iterable[_Union[NodeLoad, _Mapping]]] = ..., num_live_requests: _Optional[int] = ..., slo_classes: _Optional[_Iterable[_Union[SloClassLoad, _Mapping]]] = ...) -> None: ...

class SloClassLoad(_message.Message):
    __slots__ = ("slo_class", "limits", "num_sequences", "num_ttft_met", "num_tpot_met", "num_met")
    SLO_CLASS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_TTFT_MET_FIELD_NUMBER: _ClassVar[int]
    NUM_TPOT_MET_FIELD_NUMBER: _ClassVar[int]
    NUM_MET_FIELD_NUMBER: _ClassVar[int]
    slo_class: str
    limits: str
    num_sequences: int
    num_ttft_met: int
    num_tpot_met: int
    num_met: int
    def __init__(self, slo_class: _Optional[str] = ..., limits: _Optional[str] = ..., num_sequences: _Optional[int] = ..., num_ttft_met: _Optional[int] = ..., num_tpot_met: _Optional[int] = ..., num_met: _Optional[int] = ...) -> None: ...

class Shape(_message.Message):
    __slots__ = ("prompt_tokens", "slots", "accepts_transfers")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTS_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    slots: int
    accepts_transfers: bool
    def __init__(self, prompt_tokens: _Optional[int] = ..., slots: _Optional[int] = ..., accepts_transfers: _Optional[bool] = ...) -> None: ...

class NodeLoad(_message.Message):
    __slots__ = ("name", "role", "state", "num_running", "num_waiting", "num_waiting_tokens", "num_blocks", "num_blocks_free", "num_steps", "step_s", "rss_bytes", "num_preemptions", "num_blocks_cached", "num_prompt_tokens", "num_cached_tokens", "num_prefill_tokens", "num_kv_bytes", "num_transfers_failed", "ranks", "prefill_tokens_per_s", "shape", "lone_step_s", "step_weights", "decode_margin", "num_blocks_leaked", "step_tokens", "num_step_tokens", "tier", "num_remote_kv_blocks", "num_remote_kvs", "num_remote_kvs_revoked", "num_losses", "longest_heartbeat_gap_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_TRANSFERS_FAILED_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    LONE_STEP_S_FIELD_NUMBER: _ClassVar[int]
    STEP_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    DECODE_MARGIN_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_LEAKED_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    NUM_REMOTE_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_REMOTE_KVS_FIELD_NUMBER: _ClassVar[int]
    NUM_REMOTE_KVS_REVOKED_FIELD_NUMBER: _ClassVar[int]
    NUM_LOSSES_FIELD_NUMBER: _ClassVar[int]
    LONGEST_HEARTBEAT_GAP_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: str
    state: str
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_blocks: int
    num_blocks_free: int
    num_steps: int
    step_s: float
    rss_bytes: int
    num_preemptions: int
    num_blocks_cached: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_prefill_tokens: int
    num_kv_bytes: int
    num_transfers_failed: int
    ranks: _containers.RepeatedCompositeFieldContainer[RankLoad]
    prefill_tokens_per_s: float
    shape: Shape
    lone_step_s: float
    step_weights: _containers.RepeatedScalarFieldContainer[float]
    decode_margin: float
    num_blocks_leaked: int
    step_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_step_tokens: int
    tier: TierLoad
    num_remote_kv_blocks: int
    num_remote_kvs: int
    num_remote_kvs_revoked: int
    num_losses: int
    longest_heartbeat_gap_s: float
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., state: _Optional[str] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_waiting_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_blocks_free: _Optional[int] = ..., num_steps: _Optional[int] = ..., step_s: _Optional[float] = ..., rss_bytes: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_blocks_cached: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_prefill_tokens: _Optional[int] = ..., num_kv_bytes: _Optional[int] = ..., num_transfers_failed: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[RankLoad, _Mapping]]] = ..., prefill_tokens_per_s: _Optional[float] = ..., shape: _Optional[_Union[Shape, _Mapping]] = ..., lone_step_s: _Optional[float] = ..., step_weights: _Optional[_Iterable[float]] = ..., decode_margin: _Optional[float] = ..., num_blocks_leaked: _Optional[int] = ..., step_tokens: _Optional[_Iterable[int]] = ..., num_step_tokens: _Optional[int] = ..., tier: _Optional[_Union[TierLoad, _Mapping]] = ..., num_remote_kv_blocks: _Optional[int] = ..., num_remote_kvs: _Optional[int] = ..., num_remote_kvs_revoked: _Optional[int] = ..., num_losses: _Optional[int] = ..., longest_heartbeat_gap_s: _Optional[float] = ...) -> None: ...

class TierLoad(_message.Message):
    __slots__ = ("host_bytes", "disk_bytes", "num_hits", "num_misses", "num_damaged", "num_late", "read_bytes", "read_s", "written_bytes", "write_s", "num_unwritten", "saved_s")
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_MISSES_FIELD_NUMBER: _ClassVar[int]
    NUM_DAMAGED_FIELD_NUMBER: _ClassVar[int]
    NUM_LATE_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    READ_S_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_UNWRITTEN_FIELD_NUMBER: _ClassVar[int]
    SAVED_S_FIELD_NUMBER: _ClassVar[int]
    host_bytes: int
    disk_bytes: int
    num_hits: int
    num_misses: int
    num_damaged: int
    num_late: int
    read_bytes: int
    read_s: float
    written_bytes: int
    write_s: float
    num_unwritten: int
    saved_s: float
    def __init__(self, host_bytes: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., num_hits: _Optional[int] = ..., num_misses: _Optional[int] = ..., num_damaged: _Optional[int] = ..., num_late: _Optional[int] = ..., read_bytes: _Optional[int] = ..., read_s: _Optional[float] = ..., written_bytes: _Optional[int] = ..., write_s: _Optional[float] = ..., num_unwritten: _Optional[int] = ..., saved_s: _Optional[float] = ...) -> None: ...

class RankLoad(_message.Message):
    __slots__ = ("rank", "rss_bytes", "kv_pool_bytes", "weight_bytes")
    RANK_FIELD_NUMBER: _ClassVar[int]
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    rank: int
    rss_bytes: int
    kv_pool_bytes: int
    weight_bytes: int
    def __init__(self, rank: _Optional[int] = ..., rss_bytes: _Optional[int] = ..., kv_pool_bytes: _Optional[int] = ..., weight_bytes: _Optional[int] = ...) -> None: ...
