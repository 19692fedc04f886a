"""The ledger: one account of what nodes have, against a plain list of what they were given."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.control.ledger import Account, Ledger
from coordinator.control.registry import Registry
from serving_core.due import Due
from tests import fleet_events as events


@pytest.fixture
def ledger():
    return Ledger()


@pytest.fixture
def nodes():
    return make_nodes()


def make_nodes():
    registry = Registry({}, node_timeout_s=1e9, step_timeout_s=1e9)
    return [registry.admit(events.hello(name, "decode").hello, 0.0) for name in "abc"]


def accounts(ledger, nodes):
    ledger.check_integrity()
    return [ledger.of(node) for node in nodes]


def test_a_prompt_is_the_readers_until_its_first_token_and_the_answer_grows_where_it_is_written(ledger, nodes):
    reader, writer, _ = nodes
    ledger.read("r", reader, 70)
    ledger.write("r", writer, 100)
    assert accounts(ledger, nodes) == [Account(70, 0, 0, 0), Account(0, 100, 1, 1), Account()]
    ledger.first_token("r", 0.0)
    ledger.tokens_came("r", writer, 3)
    assert accounts(ledger, nodes) == [Account(tokens_outgoing=100), Account(0, 103, 1, 0), Account()]
    assert ledger.running() == (1, 103)
    ledger.let_go("r", reader)
    assert accounts(ledger, nodes) == [Account(), Account(0, 103, 1, 0), Account()]
    ledger.end("r")
    assert accounts(ledger, nodes) == [Account()] * 3


def test_unread_are_answers_whose_prompts_the_node_that_writes_them_has_to_read(ledger, nodes):
    both, other, _ = nodes
    for name, reader in (("own", both), ("elsewhere", other)):
        ledger.read(name, reader, 70)
        ledger.write(name, both, 100)
    assert (ledger.of(both).num_unread, ledger.of(other).num_unread) == (1, 0)
    ledger.first_token("own", 0.0)
    assert ledger.of(both).num_unread == 0


def test_what_an_answer_will_have_is_guessed_again_when_it_has_that(ledger, nodes):
    """Of a hundred answers 85 had 20 tokens and the others 2,000: three of four have no more than 20, but one that has
    more is one of the long ones. What is allowed is the most."""
    writer = nodes[0]
    for length in [20] * 85 + [2000] * 15:
        ledger.lengths.ended(length)
    ledger.owe("r", Due(1.0, 0.1), 0, 500)
    ledger.write("r", writer, 100)
    assert ledger.most_left(writer) == 20
    ledger.tokens_came("r", writer, 19)
    assert ledger.most_left(writer) == 1
    ledger.tokens_came("r", writer, 1)
    assert ledger.most_left(writer) == 20  # fewer than 16 came as far: as many again
    ledger.lengths.ended(2000)
    ledger.tokens_came("r", writer, 20)
    assert ledger.most_left(writer) == 460


def test_a_node_that_reads_and_writes_the_same_request_counts_both(ledger, nodes):
    node = nodes[0]
    ledger.read("r", node, 70)
    ledger.write("r", node, 100)
    ledger.read("s", node, 5)  # for another node
    assert ledger.of(node) == Account(75, 100, 1, num_unread=1)
    ledger.first_token("r", 0.0)
    assert ledger.of(node) == Account(5, 100, 1, 0)
    ledger.check_integrity()


def test_an_answer_that_is_to_be_written_elsewhere_counts_on_both_nodes_until_one_lets_go(ledger, nodes):
    source, target, _ = nodes
    ledger.read("r", source, 10)
    ledger.write("r", source, 10)
    ledger.first_token("r", 0.0)
    ledger.write("r", target, 12)
    assert accounts(ledger, nodes) == [Account(0, 10, 1, 0), Account(0, 12, 1, 0), Account()]
    ledger.let_go("r", source)
    ledger.let_go("r", source)
    ledger.tokens_came("r", target, 1)
    assert accounts(ledger, nodes) == [Account(), Account(0, 13, 1, 0), Account()]


def test_a_prompt_that_is_answered_where_it_was_read_is_not_held_for_another_node(ledger, nodes):
    reader, writer, _ = nodes
    ledger.read("r", reader, 70)
    ledger.write("r", writer, 100)
    ledger.first_token("r", 0.0)
    ledger.let_go("r", writer)
    ledger.write("r", reader, 101)
    assert accounts(ledger, nodes) == [Account(0, 101, 1, 0), Account(), Account()]


def test_of_a_pool_what_goes_to_other_nodes_takes_half_at_most(ledger, nodes):
    node, writer, _ = nodes
    assert node.pool_tokens == 1600
    for request_id, num_tokens, num_taken in (("r", 500, 500), ("s", 290, 790), ("t", 100, 800)):
        ledger.read(request_id, node, num_tokens)
        ledger.write(request_id, writer, num_tokens)
        ledger.first_token(request_id, 0.0)
        assert ledger.tokens_taken(node) == num_taken
    ledger.write("own", node, 10)
    assert ledger.tokens_taken(node) == 810


def test_what_is_unknown_is_over_already(ledger, nodes):
    ledger.let_go("r", nodes[0])
    ledger.end("r")
    assert accounts(ledger, nodes) == [Account()] * 3


class Plain:
    """What was told, as two tables by request and node."""

    def __init__(self):
        self.reads, self.writes, self.outgoing, self.begun = {}, {}, {}, set()

    def has(self, request_id):
        return any(key[0] == request_id for key in (*self.reads, *self.writes, *self.outgoing))

    def begin(self, ledger, request_id, node, other, number):
        if not self.has(request_id):
            self.reads[request_id, node], self.writes[request_id, other] = number, number + 1
            ledger.read(request_id, node, number, (number, number + 1))
            ledger.write(request_id, other, number + 1)

    def first_token(self, ledger, request_id, *_):
        if self.has(request_id):
            written = sum(number for key, number in self.writes.items() if key[0] == request_id)
            for key in [key for key in (*self.reads, *self.outgoing) if key[0] == request_id]:
                self.outgoing[key] = 0 if key in self.writes else written
            self.reads = {key: number for key, number in self.reads.items() if key[0] != request_id}
            self.begun.add(request_id)
            ledger.first_token(request_id, 0.0)

    def tokens_came(self, ledger, request_id, node, _, number):
        if (request_id, node) in self.writes:
            self.writes[request_id, node] += number
            ledger.tokens_came(request_id, node, number)

    def let_go(self, ledger, request_id, node, *_):
        self.reads.pop((request_id, node), None)
        self.writes.pop((request_id, node), None)
        self.outgoing.pop((request_id, node), None)
        ledger.let_go(request_id, node)
        if not self.has(request_id):
            self.end(ledger, request_id)

    def end(self, ledger, request_id, *_):
        for table in (self.reads, self.writes, self.outgoing):
            for key in [key for key in table if key[0] == request_id]:
                del table[key]
        self.begun.discard(request_id)
        ledger.end(request_id)

    def account(self, node):
        reads = [number for (_, reader), number in self.reads.items() if reader is node]
        writes = {key: number for key, number in self.writes.items() if key[1] is node}
        num_to_come = sum(key[0] not in self.begun and key not in self.reads for key in writes)
        outgoing = sum(number for (_, reader), number in self.outgoing.items() if reader is node)
        num_unread = sum(self.reads.get(key, 0) > 0 for key in writes)
        return Account(sum(reads), sum(writes.values()), len(writes), num_to_come, outgoing, num_unread)


ACTIONS = st.tuples(
    st.sampled_from(["begin", "first_token", "tokens_came", "let_go", "end"]),
    st.sampled_from("rst"),
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(1, 50),
)


@settings(max_examples=300)
@given(actions=st.lists(ACTIONS, max_size=40))
def test_accounts_are_the_sums_of_what_was_told(actions):
    ledger, nodes, plain = Ledger(), make_nodes(), Plain()
    for action, request_id, one, two, number in actions:
        getattr(plain, action)(ledger, request_id, nodes[one], nodes[two], number)
        assert accounts(ledger, nodes) == [plain.account(node) for node in nodes]
