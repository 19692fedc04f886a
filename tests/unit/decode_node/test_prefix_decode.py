"""Shared prefixes under the decode scheduler: whatever happens, every request reads the KV of its own tokens."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from decode_node.reservation import State
from decode_node.scheduler import DecodeScheduler
from serving_core.blocks import BlockAllocator
from serving_core.layout import KVLayout
from serving_core.requests import Request, SampledToken, SamplingParams
from tests.toy_kv import FINGERPRINT, Chaos, ToyKV, answer_of

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32")
NEVER = 1000

requests = st.builds(
    lambda salt, turn, length, rest, max_tokens: (salt, (turn * 20)[:length] + rest, max_tokens),
    salt=st.sampled_from(["", "salt"]),
    turn=st.sampled_from([[0], [0, 1]]),
    length=st.integers(0, 17),
    rest=st.lists(st.integers(0, 2), min_size=1, max_size=3),
    max_tokens=st.integers(2, 24),
)


class Node(Chaos):
    """Steps of a decode node during which transfers commit or fail, and requests are cancelled, at random moments.
    Some of the prompts are local."""

    def __init__(self, requests, num_blocks, budget, caching, seed, failing=True, local_share=0.0):
        self.allocator = BlockAllocator(num_blocks, caching=caching)
        self.scheduler = DecodeScheduler(
            self.allocator,
            LAYOUT,
            (NEVER,),
            fingerprint=FINGERPRINT,
            max_num_seqs=4,
            max_num_batched_tokens=budget,
            max_num_queued=100,
        )
        self.kv = ToyKV(num_blocks, LAYOUT.block_size)
        self.random = Random(seed)
        self.failing = failing
        self.local_share = local_share
        self.to_come = [
            Request(str(i), 1, list(tokens), len(tokens), SamplingParams(max_tokens=max_tokens), salt)
            for i, (salt, tokens, max_tokens) in enumerate(requests)
        ]
        self.granted = []
        self.answers = {}
        self.lost = set()
        self.known = set()

    def run(self):
        for _ in range(5000):
            self.between_steps()
            works = self.scheduler.plan()
            self.step(works)
            self.check()
            if not self.to_come and not self.scheduler.num_requests:
                return
        raise AssertionError("the scheduler is stuck")

    def between_steps(self):
        """What may happen at any time, also while a step runs."""
        while self.to_come and self.random.random() < 0.5:
            self.scheduler.reserve(self.to_come.pop(0), now=0.0, local_prefill=self.random.random() < self.local_share)
        for reservation in self.scheduler.grant():
            if reservation.state is State.GRANTED:
                self.granted.append(reservation)
            start = reservation.num_cached_blocks * LAYOUT.block_size
            num_tokens = len(reservation.request.token_ids)
            self.kv.spoil(reservation.lease.block_ids, range(start, num_tokens))  # it begins to arrive, or is to come
        if self.granted and (self.random.random() < 0.5 or not self.scheduler.count(State.RUNNING)):
            reservation = self.granted.pop(self.random.randrange(len(self.granted)))
            if self.fails(1 / 8):
                self.leave(reservation)
            else:
                self.commit(reservation)
        for reservation in list(self.scheduler._reservations):
            if not reservation.in_step and reservation not in self.granted and self.fails(1 / 200):
                self.leave(reservation)

    def commit(self, reservation):
        request = reservation.request
        self.kv.receive(request, reservation.lease.block_ids, reservation.num_cached_blocks)
        self.scheduler.commit(reservation, answer_of(request.token_ids, 1)[0])

    def step(self, works):
        running = {reservation.request: reservation for reservation in self.scheduler._reservations}
        self.between_steps()
        if works and self.fails(1 / 41):  # the step fails
            self.fail_step(works, running)
            return
        tokens = self.kv.step(works)
        for answer in self.scheduler.apply(works, [SampledToken(token_id) for token_id in tokens]):
            request = answer.reservation.request
            assert answer.is_first == (answer.reservation.local_prefill and request.num_output_tokens == 1)
            if answer.finish_reason is not None:
                self.answers[request.request_id] = request.token_ids[request.num_prompt_tokens :]
                self.scheduler.remove(answer.reservation)
            elif self.fails(1 / 31):
                self.leave(answer.reservation)


@settings(max_examples=300, deadline=None)
@given(
    requests=st.lists(requests, min_size=1, max_size=10),
    num_blocks=st.integers(11, 14),  # the largest request alone needs 11
    budget=st.integers(4, 24),
    caching=st.booleans(),
    seed=st.integers(0, 2**32),
    failing=st.booleans(),
    local_share=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_everyone_gets_their_own_answer(requests, num_blocks, budget, caching, seed, failing, local_share):
    node = Node(requests, num_blocks, budget, caching, seed, failing, local_share)
    node.run()
    expected = {str(i): answer_of(tokens, max_tokens) for i, (_, tokens, max_tokens) in enumerate(requests)}
    assert node.answers == {name: answer for name, answer in expected.items() if name not in node.lost}
    assert node.allocator.num_free == num_blocks
    assert caching or node.allocator.num_cached == 0
    assert failing or node.scheduler.num_prompt_tokens == sum(len(tokens) for _, tokens, _ in requests)
    assert node.scheduler.num_waiting_tokens == 0


@settings(max_examples=200, deadline=None)
@given(requests=st.lists(requests, min_size=2, max_size=10), num_blocks=st.integers(11, 14), seed=st.integers(0, 2**32))
def test_credit_leaves_a_block_for_each_that_holds_some(requests, num_blocks, seed):
    """Also when blocks are shared, and when cached ones are no longer to be had."""
    node = Node(requests, num_blocks, 64, True, seed)
    scheduler, allocator = node.scheduler, node.allocator
    while node.to_come:
        scheduler.reserve(node.to_come.pop(0), now=0.0)
        num_holding = scheduler.count(State.GRANTED) + scheduler.count(State.RUNNING)
        for reservation in scheduler.grant():
            num_holding += 1
            assert allocator.num_free >= num_holding - 1
            node.commit(reservation)
        if not num_holding or node.random.random() < 0.5:
            running = list(scheduler._in_state(State.RUNNING))
            scheduler.remove(node.random.choice(running))
        allocator.check_integrity()
