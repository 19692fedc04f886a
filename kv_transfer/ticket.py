"""The right to write one request's KV blocks into one decode node's pool, as it travels through the control plane."""

from dataclasses import astuple, dataclass

from engine.layout import DTYPE_BYTES, KVLayout
from kv_transfer.errors import TransferError
from kv_transfer.packing import check_bytes, check_int, check_seconds, check_text, pack, unpack

VERSION = 1
TRANSFER_ID_BYTES = 16
MAX_EPOCH = 2**32 - 1
MAX_LAYERS = 1024
MAX_BLOCKS = 2**20  # of one transfer
MAX_TTL_S = 86400.0
MAX_ADDRESS_CHARS = 256
MAX_TICKET_BYTES = 512
MAX_DIMENSION = 2**16  # heads, head_dim and block_size, each


@dataclass(frozen=True, slots=True)
class Ticket:
    """Names a grant and not the blocks themselves: block ids stay with the receiver. Raises TransferError when odd."""

    transfer_id: bytes  # random, so that nobody can guess another's
    epoch: int
    address: str  # of the receiver, for a Dialer of the same transport
    layout: KVLayout
    num_blocks: int
    num_cached_blocks: int  # leading blocks that the receiver holds already and that are not to be sent
    ttl_s: float  # from the grant; afterwards the receiver refuses everything

    def __post_init__(self) -> None:
        check_bytes("transfer_id", self.transfer_id, TRANSFER_ID_BYTES, TRANSFER_ID_BYTES)
        check_int("epoch", self.epoch, 0, MAX_EPOCH)
        check_text("address", self.address, MAX_ADDRESS_CHARS)
        _check_layout(self.layout)
        check_int("num_blocks", self.num_blocks, 1, MAX_BLOCKS)
        check_int("num_cached_blocks", self.num_cached_blocks, 0, self.num_blocks)
        check_seconds("ttl_s", self.ttl_s, MAX_TTL_S)

    def encode(self) -> bytes:
        """The ticket as bytes."""
        return pack([VERSION, *astuple(self)])

    @classmethod
    def decode(cls, packed: bytes) -> "Ticket":
        """The inverse of encode. Raises TransferError on anything else."""
        match unpack(packed, MAX_TICKET_BYTES):
            case [1, transfer_id, epoch, address, [_, _, _, _, _] as layout, num_blocks, num_cached_blocks, ttl_s]:
                return cls(transfer_id, epoch, address, KVLayout(*layout), num_blocks, num_cached_blocks, ttl_s)
            case _:
                raise TransferError(f"not a transfer ticket of version {VERSION}")


def _check_layout(layout: KVLayout) -> None:
    check_int("num_layers", layout.num_layers, 1, MAX_LAYERS)
    check_int("num_kv_heads", layout.num_kv_heads, 1, MAX_DIMENSION)
    check_int("head_dim", layout.head_dim, 1, MAX_DIMENSION)
    check_int("block_size", layout.block_size, 1, MAX_DIMENSION)
    if type(layout.dtype) is not str or layout.dtype not in DTYPE_BYTES:
        raise TransferError(f"the KV dtype must be one of {', '.join(DTYPE_BYTES)}")
