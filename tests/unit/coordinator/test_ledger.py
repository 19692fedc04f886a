"""The ledger: one account of what nodes have, against a plain list of what they were given."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.control.load import Account, Ledger, Prompt
from coordinator.control.nodes import Registry
from serving_core.slo import Due
from tests import fleet_events as events


@pytest.fixture
def ledger():
    return Ledger()


@pytest.fixture
def nodes():
    return make_nodes()


def make_nodes():
    """Of 100 blocks of 16 tokens; all have told of some block."""
    registry = Registry({}, node_timeout_s=1e9, step_timeout_s=1e9)
    nodes = [registry.admit(events.hello(name, "decode").hello, 0.0) for name in "abc"]
    for node in nodes:
        registry.cache_changed(node, events.cache_changed([1]).cache_changed)
    return nodes


def accounts(ledger, nodes):
    ledger.check_integrity()
    return [ledger.of(node) for node in nodes]


def test_a_prompt_is_the_prefill_nodes_until_its_first_token_and_the_answer_grows_where_it_is_decoded(ledger, nodes):
    prefill_node, decode_node, _ = nodes
    ledger.prefill("r", prefill_node, 70)
    ledger.decode("r", decode_node, 100)
    assert accounts(ledger, nodes) == [Account(70, 0, 0, 0), Account(0, 100, 1, 1), Account()]
    ledger.first_token("r", 0.0)
    ledger.tokens_came(["r"], decode_node, 3)
    assert accounts(ledger, nodes) == [Account(tokens_outgoing=100), Account(0, 103, 1, 0), Account()]
    assert ledger.running() == (1, 103, 103)
    ledger.release("r", prefill_node)
    assert accounts(ledger, nodes) == [Account(), Account(0, 103, 1, 0), Account()]
    ledger.end("r")
    assert accounts(ledger, nodes) == [Account()] * 3


def test_unread_are_answers_whose_prompts_the_node_that_writes_them_has_to_read(ledger, nodes):
    both, other, _ = nodes
    for name, prefill_node in (("own", both), ("elsewhere", other)):
        ledger.prefill(name, prefill_node, 70)
        ledger.decode(name, both, 100)
    assert (ledger.of(both).num_unprefilled, ledger.of(other).num_unprefilled) == (1, 0)
    ledger.first_token("own", 0.0)
    assert ledger.of(both).num_unprefilled == 0


def test_what_an_answer_will_have_is_guessed_again_when_it_has_that(ledger, nodes):
    """Of a hundred answers 85 had 20 tokens and the others 2,000: three of four have no more than 20, but one that has
    more is one of the long ones. What is allowed is the most."""
    decode_node = nodes[0]
    for length in [20] * 85 + [2000] * 15:
        ledger.lengths.ended(length)
    ledger.set_due("r", Due(1.0, 0.1), 0, 500)
    ledger.decode("r", decode_node, 100)
    assert not ledger.most_left(0.0), "it does not decode yet"
    ledger.first_token("r", 0.0)
    assert ledger.most_left(0.0)[decode_node] == 20
    ledger.tokens_came(["r"], decode_node, 19)
    assert ledger.most_left(1.0)[decode_node] == 1
    ledger.tokens_came(["r"], decode_node, 1)
    assert ledger.most_left(2.0)[decode_node] == 20  # fewer than 16 came as far: as many again
    ledger.lengths.ended(2000)
    ledger.tokens_came(["r"], decode_node, 20)
    assert ledger.most_left(3.0)[decode_node] == 460
    ledger.end("r")
    assert not ledger.most_left(3.0), "at once"


def test_a_node_that_reads_and_writes_the_same_request_counts_both(ledger, nodes):
    node = nodes[0]
    ledger.prefill("r", node, 70)
    ledger.decode("r", node, 100)
    ledger.prefill("s", node, 5)  # for another node
    assert ledger.of(node) == Account(75, 100, 1, num_unprefilled=1)
    ledger.first_token("r", 0.0)
    assert ledger.of(node) == Account(5, 100, 1, 0)
    ledger.check_integrity()


def test_an_answer_that_is_to_be_written_elsewhere_counts_on_both_nodes_until_one_lets_go(ledger, nodes):
    source, target, _ = nodes
    ledger.prefill("r", source, 10)
    ledger.decode("r", source, 10)
    ledger.first_token("r", 0.0)
    ledger.decode("r", target, 12)
    assert accounts(ledger, nodes) == [Account(0, 10, 1, 0), Account(0, 12, 1, 0), Account()]
    ledger.release("r", source)
    ledger.release("r", source)
    ledger.tokens_came(["r"], target, 1)
    assert accounts(ledger, nodes) == [Account(), Account(0, 13, 1, 0), Account()]


def test_a_prompt_that_is_answered_where_it_was_read_is_not_held_for_another_node(ledger, nodes):
    prefill_node, decode_node, _ = nodes
    ledger.prefill("r", prefill_node, 70)
    ledger.decode("r", decode_node, 100)
    ledger.first_token("r", 0.0)
    ledger.release("r", decode_node)
    ledger.decode("r", prefill_node, 101)
    assert accounts(ledger, nodes) == [Account(0, 101, 1, 0), Account(), Account()]


def test_of_a_pool_what_goes_to_other_nodes_takes_half_at_most(ledger, nodes):
    node, decode_node, _ = nodes
    assert node.pool_tokens == 1600
    for request_id, num_tokens, num_taken in (("r", 500, 500), ("s", 290, 790), ("t", 100, 800)):
        ledger.prefill(request_id, node, num_tokens)
        ledger.decode(request_id, decode_node, num_tokens)
        ledger.first_token(request_id, 0.0)
        assert ledger.tokens_taken(node) == num_taken
    ledger.decode("own", node, 10)
    assert ledger.tokens_taken(node) == 810


def alike(number, num_common=320):
    """A prompt that begins with so many tokens as the others do, and has 40 of its own."""
    return Prompt([*range(num_common), *[1000 + number] * 40])


def write_alike(ledger, node, count):
    for number in range(count):
        prompt = alike(number)
        ledger.decode(f"{number}", node, len(prompt), prompt.block_hashes(node.block_size))


def test_what_answers_begin_with_alike_the_pool_holds_once(ledger, nodes):
    node = nodes[0]
    write_alike(ledger, node, 5)
    ledger.check_integrity()
    assert ledger.of(node).tokens_held == 5 * 360, "attention reads all of each"
    assert ledger.tokens_taken(node) == 360 + 4 * 40
    assert ledger.tokens_shared(node, alike(5)) == 320
    assert ledger.tokens_shared(node, alike(5, num_common=170)) == 160
    assert ledger.tokens_shared(node, Prompt([7, *alike(5).token_ids])) == 0
    assert ledger.tokens_shared(nodes[1], alike(5)) == 0
    for number in range(4):
        ledger.end(f"{number}")
    ledger.check_integrity()
    assert ledger.tokens_taken(node) == 360


def test_what_is_read_for_another_node_shares_with_the_answers_beside_it(ledger, nodes):
    node, decode_node, _ = nodes
    write_alike(ledger, node, 2)
    prompt = alike(7)
    ledger.prefill("r", node, 40, prompt.block_hashes(16))
    ledger.decode("r", decode_node, len(prompt), prompt.block_hashes(16))
    assert ledger.tokens_taken(node) == 400
    ledger.first_token("r", 0.0)
    assert ledger.tokens_taken(node) == 440
    ledger.release("r", node)
    assert ledger.tokens_taken(node) == 400
    ledger.check_integrity()


def test_an_answer_that_comes_whole_holds_all_its_blocks_by_itself(ledger, nodes):
    """Also where it was read before."""
    node, other, _ = nodes
    write_alike(ledger, node, 3)
    assert ledger.tokens_taken(node) == 360 + 2 * 40
    ledger.first_token("0", 0.0)
    ledger.decode("0", other, 370)
    ledger.release("0", node)
    assert [ledger.tokens_taken(each) for each in (node, other)] == [400, 370]
    ledger.decode("0", node, 380)
    assert ledger.tokens_taken(node) == 780
    ledger.decode("1", node, 390)
    assert ledger.tokens_taken(node) == 380 + 390 + 360
    ledger.check_integrity()


def test_a_node_that_has_not_reported_its_cache_may_keep_none(ledger, nodes):
    node = nodes[0]
    for number in range(2):
        ledger.set_due(f"{number}", Due(1.0, 0.1), 0, 10)
    write_alike(ledger, node, 2)
    assert [ledger.tokens_alone(node, part) for part, *_ in ledger.limited_parts(node)] == [40, 40]
    node.hints.clear()
    assert [ledger.tokens_alone(node, part) for part, *_ in ledger.limited_parts(node)] == [40, 40]
    node.numerics_ids.clear()
    assert [ledger.tokens_alone(node, part) for part, *_ in ledger.limited_parts(node)] == [360, 360]
    assert ledger.tokens_taken(node) == 2 * 360
    assert ledger.tokens_shared(node, alike(2)) == 0
    assert ledger.tokens_spared("0") == 0.0
    for number in range(2):
        ledger.first_token(f"{number}", 0.0)
    assert ledger.running() == (2, 720, 720)


def test_what_is_unknown_is_over_already(ledger, nodes):
    ledger.release("r", nodes[0])
    ledger.end("r")
    assert accounts(ledger, nodes) == [Account()] * 3


def marks_of(number):
    """Of a prompt of four full blocks and some tokens; who has one of them has those before it."""
    digits = [number // 3**place % 3 + 1 for place in range(4)]
    return [int("".join(map(str, digits[: place + 1]))) for place in range(4)]


def num_repeated(many):
    """Tokens of the blocks of these prompts beyond the first of each."""
    return 16 * (sum(map(len, many)) - len({mark for marks in many for mark in marks}))


class Plain:
    """What was told, as tables by request and node."""

    def __init__(self):
        self.reads, self.writes, self.outgoing, self.begun = {}, {}, {}, set()
        self.read_marks, self.held_marks, self.dues = {}, {}, {}

    def has(self, request_id):
        return any(key[0] == request_id for key in (*self.reads, *self.writes, *self.outgoing))

    def begin(self, ledger, request_id, node, other, number):
        if self.has(request_id):
            return
        self.reads[request_id, node], self.writes[request_id, other] = number, number + 64
        self.read_marks[request_id, node] = self.held_marks[request_id, other] = marks_of(number)
        self.dues[request_id] = Due(1.0, 0.1)
        ledger.set_due(request_id, self.dues[request_id], 0, 10)
        ledger.prefill(request_id, node, number, marks_of(number))
        ledger.decode(request_id, other, number + 64, marks_of(number))

    def migration(self, ledger, request_id, node, _, number):
        if self.has(request_id) and request_id in self.begun:
            self.writes[request_id, node] = number
            for table in (self.outgoing, self.held_marks):
                table.pop((request_id, node), None)
            ledger.decode(request_id, node, number)

    def first_token(self, ledger, request_id, *_):
        if not self.has(request_id) or request_id in self.begun:
            return
        written = [key for key in self.writes if key[0] == request_id]
        for key in [key for key in self.reads if key[0] == request_id and key not in written]:
            self.outgoing[key] = sum(self.writes[each] for each in written)
            self.held_marks[key] = [mark for each in written for mark in self.held_marks[each]]
        self.reads = {key: number for key, number in self.reads.items() if key[0] != request_id}
        self.begun.add(request_id)
        ledger.first_token(request_id, 0.0)
        if not written:
            self.end(ledger, request_id)

    def tokens_came(self, ledger, request_id, node, _, number):
        if (request_id, node) in self.writes:
            self.writes[request_id, node] += number
            ledger.tokens_came([request_id], node, number)

    def let_go(self, ledger, request_id, node, *_):
        for table in (self.reads, self.writes, self.outgoing, self.read_marks, self.held_marks):
            table.pop((request_id, node), None)
        ledger.release(request_id, node)
        if not self.has(request_id):
            self.end(ledger, request_id)

    def end(self, ledger, request_id, *_):
        for table in (self.reads, self.writes, self.outgoing, self.read_marks, self.held_marks):
            for key in [key for key in table if key[0] == request_id]:
                del table[key]
        self.begun.discard(request_id)
        ledger.end(request_id)

    def account(self, node):
        reads = [number for (_, prefill_node), number in self.reads.items() if prefill_node is node]
        writes = {key: number for key, number in self.writes.items() if key[1] is node}
        num_to_come = sum(key[0] not in self.begun and key not in self.reads for key in writes)
        num_unread = sum(self.reads.get(key, 0) > 0 for key in writes)
        return Account(sum(reads), sum(writes.values()), len(writes), num_to_come, self.sent(node), num_unread)

    def sent(self, node):
        return sum(number for (_, prefill_node), number in self.outgoing.items() if prefill_node is node)

    def held(self, node):
        """The marks of those that hold blocks of a node, by request."""
        return {request_id: marks for (request_id, holder), marks in self.held_marks.items() if holder is node}

    def taken(self, node):
        num_written = sum(number for (_, decode_node), number in self.writes.items() if decode_node is node)
        return num_written + min(self.sent(node) - num_repeated([*self.held(node).values()]), 800)

    def alone(self, node):
        """By due: tokens that no other request holds there."""
        held = self.held(node)
        for (request_id, decode_node), number in self.writes.items():
            if decode_node is node:
                others = {mark for other, marks in held.items() if other != request_id for mark in marks}
                yield self.dues[request_id], number - 16 * len(others.intersection(held.get(request_id, ())))

    def spared(self, request_id, node):
        """Block by block."""
        held = self.held(node)
        holders = [sum(mark in marks for marks in held.values()) for mark in held.get(request_id, ())]
        return 16 * sum(1 - 1 / num_holders for num_holders in holders)

    def running(self, nodes):
        pairs = {key: number for key, number in self.writes.items() if key[0] in self.begun}
        held = [[self.held_marks.get(key, []) for key in pairs if key[1] is node] for node in nodes]
        num_tokens = sum(pairs.values())
        return len(pairs), num_tokens, num_tokens - sum(map(num_repeated, held))


ACTIONS = st.tuples(
    st.sampled_from(["begin", "begin", "first_token", "tokens_came", "migration", "let_go", "end"]),
    st.sampled_from("rstuv"),
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(1, 50),
)


@given(actions=st.lists(ACTIONS, max_size=40))
def test_accounts_are_the_sums_of_what_was_told(actions):
    ledger, nodes, plain = Ledger(), make_nodes(), Plain()
    for action, request_id, one, two, number in actions:
        getattr(plain, action)(ledger, request_id, nodes[one], nodes[two], number)
        assert accounts(ledger, nodes) == [plain.account(node) for node in nodes]
        assert ledger.running() == plain.running(nodes)
        spared = max(plain.spared(request_id, node) for node in nodes)
        assert ledger.tokens_spared(request_id) == pytest.approx(spared)
        for node in nodes:
            assert ledger.tokens_taken(node) == plain.taken(node)
            alone = [
                (due, ledger.tokens_alone(node, part)) for part, _, due in ledger.limited_parts(node) if part.is_decoded
            ]
            assert sorted(alone, key=id_of_due) == sorted(plain.alone(node), key=id_of_due)
            read = [marks for (_, prefill_node), marks in plain.read_marks.items() if prefill_node is node]
            assert all(
                (mark in ledger.prefill_hashes(node)) == any(mark in each for each in read) for mark in range(1, 4)
            )


def id_of_due(pair):
    return id(pair[0])
