"""Shared prefixes under the prefill scheduler: whatever happens, every prompt reads the KV of its own tokens."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from prefill_node.scheduler import PrefillScheduler
from serving_core.blocks import BlockAllocator
from serving_core.layout import KVLayout
from serving_core.requests import Request, SampledToken, SamplingParams
from tests.toy_kv import FINGERPRINT, Chaos, ToyKV, answer_of

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32")
NUM_BLOCKS = 9

prompts = st.builds(
    lambda salt, turn, length, rest: (salt, (turn * 30)[:length] + rest),
    salt=st.sampled_from(["", "salt"]),
    turn=st.sampled_from([[0], [0, 1]]),
    length=st.integers(0, 28),
    rest=st.lists(st.integers(0, 2), min_size=1, max_size=6),
)


class Node(Chaos):
    """Steps of a prefill node in which prompts come, are cancelled, fail and leave at random moments."""

    def __init__(self, prompts, budget, caching, seed, failing=True):
        self.allocator = BlockAllocator(NUM_BLOCKS, caching=caching)
        self.scheduler = PrefillScheduler(
            self.allocator, LAYOUT, fingerprint=FINGERPRINT, max_num_batched_tokens=budget, max_num_queued=100
        )
        self.kv = ToyKV(NUM_BLOCKS, LAYOUT.block_size)
        self.random = Random(seed)
        self.failing = failing
        self.to_come = [
            Request(str(i), 1, list(tokens), len(tokens), SamplingParams(max_tokens=8), salt)
            for i, (salt, tokens) in enumerate(prompts)
        ]
        self.computed = []  # and sending their KV
        self.answers = {}
        self.lost = set()
        self.num_computed_tokens = 0
        self.known = set()

    def run(self):
        for _ in range(1000):
            while self.to_come and self.random.random() < 0.5:
                self.scheduler.add(self.to_come.pop(0))
            works = self.scheduler.plan()
            self.step(works)
            if self.computed and (not works or self.random.random() < 0.5):
                self.scheduler.remove(self.computed.pop(self.random.randrange(len(self.computed))))
            self.check()
            if not self.to_come and not self.scheduler.num_waiting + self.scheduler.num_running:
                return
        raise AssertionError("the scheduler is stuck")

    def step(self, works):
        running = {prompt.request: prompt for prompt in self.scheduler._prompts}
        if works and self.fails(1 / 16):  # the step fails
            self.fail_step(works, running)
            return
        tokens = self.kv.step(works)
        for prompt, token in self.scheduler.apply(works, [SampledToken(token_id) for token_id in tokens]):
            if token is not None:
                self.answers[prompt.request.request_id] = token.token_id
                self.computed.append(prompt)
            elif self.fails(1 / 16):
                self.leave(prompt)
        self.num_computed_tokens += sum(work.num_tokens for work in works)


@settings(max_examples=300, deadline=None)
@given(
    prompts=st.lists(prompts, min_size=1, max_size=10),
    budget=st.integers(1, 20),
    caching=st.booleans(),
    seed=st.integers(0, 2**32),
    failing=st.booleans(),
)
def test_every_prompt_gets_its_own_answer(prompts, budget, caching, seed, failing):
    node = Node(prompts, budget, caching, seed, failing)
    node.run()
    expected = {str(i): answer_of(tokens, 1)[0] for i, (_, tokens) in enumerate(prompts)}
    assert node.answers == {name: answer for name, answer in expected.items() if name not in node.lost}
    assert node.allocator.num_free == NUM_BLOCKS
    scheduler = node.scheduler
    if not node.lost:
        assert scheduler.num_prompt_tokens == sum(len(tokens) for _, tokens in prompts)
        assert node.num_computed_tokens == scheduler.num_prompt_tokens - scheduler.num_cached_tokens
    if not caching:
        assert scheduler.num_cached_tokens == node.allocator.num_cached == 0


def test_the_same_prompt_again_and_again_is_computed_once():
    node = Node([("", [0] * 30)] * 5, 100, True, seed=0, failing=False)
    while node.to_come:
        node.scheduler.add(node.to_come.pop(0))
        node.step(node.scheduler.plan())
        node.scheduler.remove(node.computed.pop())
        node.check()
    assert node.scheduler.num_cached_tokens == 4 * 28
    assert node.num_computed_tokens == 30 + 4 * 2
