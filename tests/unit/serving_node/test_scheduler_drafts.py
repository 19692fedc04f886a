"""Which answers a draft model writes ahead for, and what its pool holds of them. The toy here keeps each token where a
draft model keeps its KV, and what it writes is right but where a test wants it wrong."""

import pytest

from decode_node import speculation
from decode_node.speculation import BUDGET_S, LEAST_STEPS, DraftModel
from serving_core.node.requests import Distributed, HolderEndpoint
from tests.toy_kv import NUM_TOKEN_IDS, answer_of
from tests.unit.serving_node.scheduler_kit import Node, prompt_of

BLOCK_SIZE = 8  # another than the node's own
MOST = 3
MOST_READ = 24  # tokens of texts between two steps: less than the product reads, so that long texts are short
PROMPT = prompt_of(6)
LONG = prompt_of(2 * MOST_READ + 10)
NUM_TOKENS = 24


@pytest.fixture(autouse=True)
def reads_little(monkeypatch):
    monkeypatch.setattr(speculation, "MOST_READ", MOST_READ)


class DraftingNode(Node):
    """A node with a draft model, which computes behind each step."""

    def __init__(self, num_blocks=200, *, num_draft_blocks=40, max_model_len=1000, draft_s=0.0, **options):
        model = DraftModel(num_draft_blocks, BLOCK_SIZE, max_model_len, draft_s)
        super().__init__(
            num_blocks,
            **{"draft_tokens": MOST, "is_batch_invariant": True, "budget": 256, "draft_model": model, **options},
        )
        self.drafts = self.scheduler.speculation.drafts
        self.draft_s = draft_s
        self.wrong = set()  # lengths of texts behind which a wrong token is written
        self.rounds = []  # of each time it computed, (tokens, draft tokens) of each answer
        self.held = {}  # (block, place in it): token

    def end(self):
        super().end()
        works = self.drafts.plan()
        if works:
            self.rounds.append([(work.share.num_tokens, work.num_draft_tokens) for work in works])
            self.drafts.drafted(works, [self._written(work) for work in works], self.draft_s)
        self.drafts.check_integrity()

    def _written(self, work):
        share = work.share
        self._store(share.block_ids, share.start, share.token_ids)
        end = share.start + share.num_tokens
        text = [self.held[self._place(share.block_ids, at)] for at in range(end)]
        known = {tuple(each.request.token_ids[:end]) for each in self.scheduler.node_requests}
        assert tuple(text) in known, "it has read what nobody says"
        written = []
        for _ in range(work.num_draft_tokens):
            (token,) = answer_of(text, 1)
            text.append((token + (len(text) in self.wrong)) % NUM_TOKEN_IDS)
            written.append(text[-1])
        self._store(share.block_ids, end, written[:-1])
        return written

    def _store(self, block_ids, start, token_ids):
        for at, token in enumerate(token_ids, start):
            self.held[self._place(block_ids, at)] = token

    @staticmethod
    def _place(block_ids, at):
        return block_ids[at // BLOCK_SIZE], at % BLOCK_SIZE


def begun(*names, node=None, prompt=PROMPT, max_tokens=NUM_TOKENS, **options):
    """A node whose answers have been written for long enough to know what a step takes."""
    node = node or DraftingNode(**options)
    for name in names:
        node.writes(name, prompt, max_tokens=max_tokens)
    for _ in range(LEAST_STEPS):
        node.step()
    return node


def is_right(node, *names, prompt=PROMPT, max_tokens=NUM_TOKENS):
    node.steps()
    node.end()
    assert all(node.tokens(name) == answer_of(prompt, max_tokens)[1:] for name in names)
    node.check_empty()
    return True


def test_a_text_is_read_and_then_written_ahead_of():
    node = begun("a")
    assert node.rounds == [[(len(PROMPT) + 1 + LEAST_STEPS, 1)]]  # one draft token: nothing is known of what they take
    num_told = len(node.tokens("a"))
    node.step()
    assert len(node.tokens("a")) == num_told + 2
    assert node.rounds[-1] == [(2, MOST)]  # the draft token has no KV yet, and what came behind it has none
    node.step()
    assert len(node.tokens("a")) == num_told + 2 + 1 + MOST
    assert is_right(node, "a")
    counts = node.scheduler.speculation.counts
    assert counts.num_accepted == counts.num_proposed > NUM_TOKENS / 2


def test_a_long_text_is_read_in_chunks_and_has_no_draft_tokens_before():
    node = begun("a", prompt=LONG)
    assert node.rounds == [[(MOST_READ, 0)]]
    node.step()
    node.step()
    assert [each for (each,) in node.rounds[1:]] == [
        (MOST_READ, 0),
        (len(LONG) + 1 + LEAST_STEPS + 2 - 2 * MOST_READ, 1),
    ]
    assert node.scheduler.speculation.counts.num_proposed == 0
    assert is_right(node, "a", prompt=LONG)
    assert node.scheduler.speculation.counts.num_accepted > 0


def test_wrong_ones_are_written_over():
    node = DraftingNode()
    node.wrong = {len(PROMPT) + at for at in range(0, 60, 3)}
    begun("a", "b", node=node, max_tokens=60)
    assert is_right(node, "a", "b", max_tokens=60)
    counts = node.scheduler.speculation.counts
    assert 0 < counts.num_accepted < counts.num_proposed


def test_answers_without_room_in_its_pool_go_without():
    """A text of 6 + 1 + 4 tokens, and one ahead, takes 2 blocks of 8: there is room for two."""
    node = begun("a", "b", "c", num_draft_blocks=5)
    assert len(node.rounds[0]) == 2
    assert is_right(node, "a", "b", "c")
    assert node.drafts.num_blocks == 0


def test_one_that_outgrows_the_pool_gives_its_blocks_back():
    node = begun("a", num_draft_blocks=3, max_tokens=60)
    node.writes("b", PROMPT, max_tokens=4)
    while node.drafts.num_blocks:
        node.step()
    num_rounds = len(node.rounds)
    assert is_right(node, "a", max_tokens=60)
    assert len(node.rounds) == num_rounds


def test_texts_are_no_longer_than_it_reads():
    node = begun("a", max_model_len=20)
    assert is_right(node, "a")
    assert node.rounds
    assert not begun("a", prompt=LONG, max_model_len=20).rounds


def test_one_that_moves_or_ends_leaves_nothing():
    node = begun("a", "b")
    request = next(iter(node.scheduler.node_requests)).request
    node.migrate(request, num_known=len(PROMPT))
    assert node.drafts.num_blocks > 0
    node.step()
    node.caught_up(request)
    node.cancel(request)
    node.sent(request)
    assert is_right(node, "b")
    assert node.drafts.num_blocks == 0


def test_nothing_is_written_ahead_of_one_that_may_have_blocks_elsewhere():
    """It would have no draft_tokens."""
    node = DraftingNode(tile_tokens=4 * BLOCK_SIZE)
    node.writes("a", PROMPT, max_tokens=NUM_TOKENS)
    (node_request,) = node.scheduler.node_requests
    node_request.distributed = Distributed((HolderEndpoint("host:1", b""),))
    begun(node=node)
    assert is_right(node, "a")
    assert not node.rounds


def test_one_that_was_put_back_goes_on_where_its_text_was():
    """Blocks run out, the younger answer is read again, and both end as they would have."""
    node = DraftingNode(14, caching=False)
    begun("a", "b", node=node)
    assert is_right(node, "a", "b")
    assert node.load.num_preemptions


def test_while_a_prompt_is_read_there_is_no_drafting():
    node = begun("a", budget=8)
    num_rounds = len(node.rounds)
    node.local("b", 30, max_tokens=2)
    node.step()
    node.step()
    assert len(node.rounds) == num_rounds
    assert is_right(node, "a")


def test_where_it_takes_as_long_as_the_model_there_is_none():
    node = begun("a", draft_s=0.5)
    assert is_right(node, "a")
    assert not node.rounds


def test_where_nothing_comes_little_is_lost():
    """All that it writes is wrong, and each answer has to be read first: it takes what it may lose at once and 2 % of
    the time of steps, no more."""
    node = DraftingNode(draft_s=0.2)
    node.wrong = set(range(1000))
    for name in "abcd":
        begun(name, node=node, prompt=LONG, max_tokens=30)
        assert is_right(node, name, prompt=LONG, max_tokens=30)
    num_s = sum(node.draft_s for _ in node.rounds)
    assert node.draft_s < num_s <= BUDGET_S + node.draft_s + 0.02 * node.now


def test_what_it_gains_lets_it_read_more():
    """The same where all that it writes is right: each answer is read, and then written in fewer steps."""
    node = DraftingNode(draft_s=0.1)
    for name in "abcd":
        begun(name, node=node, prompt=LONG, max_tokens=60)
        assert is_right(node, name, prompt=LONG, max_tokens=60)
    assert sum(node.draft_s for _ in node.rounds) > BUDGET_S + 0.02 * node.now
    assert node.scheduler.speculation.counts.num_accepted > 4 * 60 / 4


def test_a_model_that_fails_is_asked_no_more():
    node = begun("a")
    node.drafts.failed()
    num_rounds = len(node.rounds)
    assert is_right(node, "a")
    assert len(node.rounds) == num_rounds
