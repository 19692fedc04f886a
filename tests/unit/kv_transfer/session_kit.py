"""What the tests of the two session machines share."""

from dataclasses import replace

from kv_transfer.descriptor import Channel
from kv_transfer.results import Received, TransferFailed
from kv_transfer.sessions import receiver_session as receiving
from kv_transfer.sessions import sender_session as sending
from kv_transfer.sessions.receiver_session import Reply, Verified, Verify
from kv_transfer.sessions.sender_session import Released, SendMessage, Turn
from kv_transfer.wire import Abort, BlockRange, Committed, Data, Finish, Missing, Refused, Segment
from serving_core import reasons
from serving_core.layout import KVLayout

LAYOUT = KVLayout.uniform(num_layers=2, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32")
CHANNEL = Channel(bytes(range(16)), 7, "nowhere", LAYOUT, num_blocks=5, num_cached_blocks=0, ttl_s=100.0)
LATER_LAYERS = Channel(CHANNEL.transfer_id, CHANNEL.epoch, "nowhere", replace(LAYOUT, first_layer=5), 5, 0, ttl_s=100.0)
NAMES = (CHANNEL.transfer_id, CHANNEL.epoch)


def make_sender(channel=CHANNEL, blocks_per_message=100, deadline_s=10.0):
    return sending.SenderSession(channel, blocks_per_message, deadline_s, now=0.0)


def drain(session, now=0.0):
    """Everything the session sends while the transport lets go of each message at once."""
    actions = []
    while session.wants_turn:
        actions += session.handle(Turn(), now)
        session.handle(Released(), now)
    return actions


def ranges(*triples):
    return tuple(BlockRange(*triple) for triple in triples)


def finish(round_=0, num_blocks=5, tail=b"t"):
    return SendMessage(Finish(*NAMES, round_, num_blocks, tail))


def failed(message, reason=reasons.TRANSFER_FAILED):
    return [SendMessage(Abort(*NAMES)), sending.Conclude(TransferFailed(reason, message))]


def make_receiver(channel=CHANNEL):
    return receiving.ReceiverSession(channel, now=0.0)


def data(*segments):
    """Data of (layer, first, number of blocks)."""
    return Data(*NAMES, tuple(Segment(layer, first, count, 0) for layer, first, count in segments))


def deliver(session, *segments, corrupt=()):
    """Feeds Data whose segments are intact but for `corrupt`, given by their numbers."""
    (verify,) = session.handle(data(*segments), 0.0)
    assert isinstance(verify, Verify)
    intact = [number not in corrupt for number in range(len(segments))]
    return session.handle(Verified(verify.segments, intact), 0.0)


COMMIT = [
    Reply(Committed(*NAMES)),
    receiving.Conclude(Received(b"t", 5 * LAYOUT.block_bytes)),
]


def missing(round_, num_corrupt, *triples):
    return [Reply(Missing(*NAMES, round_, num_corrupt, ranges(*triples)))]


def refused(refusal, epoch=CHANNEL.epoch):
    return [Reply(Refused(CHANNEL.transfer_id, epoch, refusal))]
