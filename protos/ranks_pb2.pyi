from protos import fleet_pb2 as _fleet_pb2
from protos import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RankCommand(_message.Message):
    __slots__ = ("step", "credit", "send", "finish_send", "cancel_transfer", "stop", "send_more", "admit", "offload", "load_blocks", "cancel_load", "load_adapter", "unload_adapter")
    STEP_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    SEND_FIELD_NUMBER: _ClassVar[int]
    FINISH_SEND_FIELD_NUMBER: _ClassVar[int]
    CANCEL_TRANSFER_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    SEND_MORE_FIELD_NUMBER: _ClassVar[int]
    ADMIT_FIELD_NUMBER: _ClassVar[int]
    OFFLOAD_FIELD_NUMBER: _ClassVar[int]
    LOAD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CANCEL_LOAD_FIELD_NUMBER: _ClassVar[int]
    LOAD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    UNLOAD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    step: StepPlan
    credit: Credit
    send: Send
    finish_send: FinishSend
    cancel_transfer: CancelTransfer
    stop: Stop
    send_more: SendMore
    admit: Admit
    offload: Offload
    load_blocks: LoadBlocks
    cancel_load: CancelLoad
    load_adapter: _fleet_pb2.LoadAdapter
    unload_adapter: _fleet_pb2.UnloadAdapter
    def __init__(self, step: _Optional[_Union[StepPlan, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., send: _Optional[_Union[Send, _Mapping]] = ..., finish_send: _Optional[_Union[FinishSend, _Mapping]] = ..., cancel_transfer: _Optional[_Union[CancelTransfer, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., send_more: _Optional[_Union[SendMore, _Mapping]] = ..., admit: _Optional[_Union[Admit, _Mapping]] = ..., offload: _Optional[_Union[Offload, _Mapping]] = ..., load_blocks: _Optional[_Union[LoadBlocks, _Mapping]] = ..., cancel_load: _Optional[_Union[CancelLoad, _Mapping]] = ..., load_adapter: _Optional[_Union[_fleet_pb2.LoadAdapter, _Mapping]] = ..., unload_adapter: _Optional[_Union[_fleet_pb2.UnloadAdapter, _Mapping]] = ...) -> None: ...

class RankEvent(_message.Message):
    __slots__ = ("hello", "load", "credited", "transfer_ended", "caught_up", "loaded", "adapter_changed")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CREDITED_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ENDED_FIELD_NUMBER: _ClassVar[int]
    CAUGHT_UP_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_CHANGED_FIELD_NUMBER: _ClassVar[int]
    hello: RankHello
    load: _inference_pb2.RankLoad
    credited: Credited
    transfer_ended: TransferEnded
    caught_up: CaughtUp
    loaded: Loaded
    adapter_changed: _fleet_pb2.AdapterChanged
    def __init__(self, hello: _Optional[_Union[RankHello, _Mapping]] = ..., load: _Optional[_Union[_inference_pb2.RankLoad, _Mapping]] = ..., credited: _Optional[_Union[Credited, _Mapping]] = ..., transfer_ended: _Optional[_Union[TransferEnded, _Mapping]] = ..., caught_up: _Optional[_Union[CaughtUp, _Mapping]] = ..., loaded: _Optional[_Union[Loaded, _Mapping]] = ..., adapter_changed: _Optional[_Union[_fleet_pb2.AdapterChanged, _Mapping]] = ...) -> None: ...

class StepPlan(_message.Message):
    __slots__ = ("shares",)
    SHARES_FIELD_NUMBER: _ClassVar[int]
    shares: _containers.RepeatedCompositeFieldContainer[Share]
    def __init__(self, shares: _Optional[_Iterable[_Union[Share, _Mapping]]] = ...) -> None: ...

class Share(_message.Message):
    __slots__ = ("epoch", "token_ids", "start", "block_ids", "samples", "num_scored", "adapter", "state_ids")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NUM_SCORED_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    STATE_IDS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    start: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    samples: bool
    num_scored: int
    adapter: str
    state_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., start: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., samples: _Optional[bool] = ..., num_scored: _Optional[int] = ..., adapter: _Optional[str] = ..., state_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("epoch", "descriptor", "block_ids")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    descriptor: bytes
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., descriptor: _Optional[bytes] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Admit(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Send(_message.Message):
    __slots__ = ("epoch", "descriptor", "block_ids")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    descriptor: bytes
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., descriptor: _Optional[bytes] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SendMore(_message.Message):
    __slots__ = ("epoch", "block_ids")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class FinishSend(_message.Message):
    __slots__ = ("epoch", "block_ids", "tail")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    tail: bytes
    def __init__(self, epoch: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., tail: _Optional[bytes] = ...) -> None: ...

class CancelTransfer(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Offload(_message.Message):
    __slots__ = ("demoted_from", "demoted_to", "block_ids", "slots")
    DEMOTED_FROM_FIELD_NUMBER: _ClassVar[int]
    DEMOTED_TO_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    demoted_from: _containers.RepeatedScalarFieldContainer[int]
    demoted_to: _containers.RepeatedScalarFieldContainer[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, demoted_from: _Optional[_Iterable[int]] = ..., demoted_to: _Optional[_Iterable[int]] = ..., block_ids: _Optional[_Iterable[int]] = ..., slots: _Optional[_Iterable[int]] = ...) -> None: ...

class LoadBlocks(_message.Message):
    __slots__ = ("load_id", "slots", "block_ids")
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    load_id: int
    slots: _containers.RepeatedScalarFieldContainer[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, load_id: _Optional[int] = ..., slots: _Optional[_Iterable[int]] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class CancelLoad(_message.Message):
    __slots__ = ("load_id",)
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    load_id: int
    def __init__(self, load_id: _Optional[int] = ...) -> None: ...

class RankHello(_message.Message):
    __slots__ = ("rank", "secret", "kv_address", "kv_key")
    RANK_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    KV_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    KV_KEY_FIELD_NUMBER: _ClassVar[int]
    rank: int
    secret: bytes
    kv_address: str
    kv_key: bytes
    def __init__(self, rank: _Optional[int] = ..., secret: _Optional[bytes] = ..., kv_address: _Optional[str] = ..., kv_key: _Optional[bytes] = ...) -> None: ...

class Credited(_message.Message):
    __slots__ = ("epoch", "descriptor")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    descriptor: bytes
    def __init__(self, epoch: _Optional[int] = ..., descriptor: _Optional[bytes] = ...) -> None: ...

class CaughtUp(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class TransferEnded(_message.Message):
    __slots__ = ("epoch", "ok", "num_bytes", "tail", "reason", "message")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    ok: bool
    num_bytes: int
    tail: bytes
    reason: str
    message: str
    def __init__(self, epoch: _Optional[int] = ..., ok: _Optional[bool] = ..., num_bytes: _Optional[int] = ..., tail: _Optional[bytes] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Loaded(_message.Message):
    __slots__ = ("load_id", "num_good")
    LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_GOOD_FIELD_NUMBER: _ClassVar[int]
    load_id: int
    num_good: int
    def __init__(self, load_id: _Optional[int] = ..., num_good: _Optional[int] = ...) -> None: ...
