"""A decode scheduler with requests that have nothing to share unless they are told to."""

from decode_node.scheduler import DecodeScheduler
from serving_core.blocks import BlockAllocator
from serving_core.layout import KVLayout
from serving_core.requests import Request, SampledToken, SamplingParams
from tests.toy_kv import FINGERPRINT

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32")
EOS = 1000


def make_request(name: str, num_tokens: int, max_tokens: int = 8, salt: str | None = None) -> Request:
    """All begin alike, and have nothing to share unless they are given the same salt."""
    salt = name if salt is None else salt
    return Request(name, 1, list(range(num_tokens)), num_tokens, SamplingParams(max_tokens=max_tokens), salt)


def make_scheduler(num_blocks=16, max_num_seqs=8, budget=64, max_num_queued=100, caching=True):
    allocator = BlockAllocator(num_blocks, caching=caching)
    scheduler = DecodeScheduler(
        allocator,
        LAYOUT,
        (EOS,),
        fingerprint=FINGERPRINT,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_num_queued=max_num_queued,
    )
    return scheduler, allocator


def names(reservations):
    return [each.request.request_id for each in reservations]


def shares(works):
    return [(work.request.request_id, work.start, work.num_tokens) for work in works]


def run_step(scheduler, token_id=7, check=lambda works: None):
    works = scheduler.plan()
    check(works)
    return works, scheduler.apply(works, [SampledToken(token_id) for work in works if work.samples])


def start(scheduler, request):
    """Reserves, grants and commits one request whose turn it is."""
    reservation = scheduler.reserve(request, now=0.0)
    assert scheduler.grant() == [reservation]
    scheduler.commit(reservation, first_token_id=5)
    return reservation
