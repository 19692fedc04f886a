"""Which pair of nodes serves a request: by hand, and against all pairs."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.control.load import Ledger, Prompt
from coordinator.control.nodes import Registry
from coordinator.control.placement.costs import Costs, TransferEstimates, Wanted
from coordinator.control.placement.policy import POLICIES
from serving_core.errors import RequestError
from serving_core.shapes import Shape
from tests import fleet_events as events

TOKENS = list(range(1, 101))
HINTS = events.block_hints(TOKENS)  # six full blocks of 16
FREE = TransferEstimates()


@pytest.fixture
def ledger():
    return Ledger()


@pytest.fixture
def registry():
    return Registry({}, node_timeout_s=1e9, step_timeout_s=1e9)


def admit(registry, name, rate=1000.0, step_s=0.0, state="ready", **hello):
    node = registry.admit(events.hello(name, **hello).hello, 0.0)
    registry.heartbeat(node, events.heartbeat(state, prefill_tokens_per_s=rate, step_s=step_s).heartbeat, 0.0)
    return node


def assign(ledger, node, num_to_compute, num_held=0):
    """One more request: the node is still to read its prompt, or has the answer's first token."""
    request_id = f"{random.random()}"
    ledger.prefill(request_id, node, num_to_compute)
    if num_held:
        ledger.decode(request_id, node, num_held)
    if not num_to_compute:
        ledger.first_token(request_id, 0.0)


def placed(registry, ledger, transfers=FREE, avoid=(), num_tokens=110, policy="auto", tokens=TOKENS):
    placed = place(registry, ledger, Wanted(Prompt(tokens), num_tokens, avoid), transfers, policy)
    return f"{placed.prefill_node.name} {placed.decode_node.name}"


def place(registry, ledger, wanted, transfers=FREE, policy="auto"):
    return POLICIES[policy].place(registry.nodes, ledger, wanted, transfers, now=0.0)


# ---- who may ----


@pytest.mark.parametrize(("names", "pair"), [(["p0", "d0"], "p0 d0"), (["b0"], "b0 b0"), (["b0", "p0"], "p0 b0")])
def test_a_pair_needs_no_figures(registry, ledger, names, pair):
    for name in names:
        admit(registry, name, rate=0.0)
    assert placed(registry, ledger) == pair


@pytest.mark.parametrize(
    ("names", "reason", "message"),
    [
        (["d0"], "NO_PREFILL_WORKER", "no node that prefills prompts is ready"),
        (["p0"], "NO_DECODE_WORKER", "no node that decodes sequences is ready"),
    ],
)
def test_a_part_that_nobody_does_is_an_error(registry, ledger, names, reason, message):
    for name in names:
        admit(registry, name)
    with pytest.raises(RequestError, match=message) as error:
        placed(registry, ledger)
    assert error.value.reason == reason


def test_a_node_that_accepts_no_transfers_decodes_only_what_it_reads(registry, ledger):
    admit(registry, "p0")
    admit(registry, "d0", shape=Shape(0, 64, accepts_transfers=False))
    with pytest.raises(RequestError, match="no node that decodes sequences takes the KV transfers") as error:
        placed(registry, ledger)
    assert error.value.reason == "NO_DECODE_WORKER"
    admit(registry, "b0", rate=1.0, shape=Shape(512, 64, accepts_transfers=False))
    assert placed(registry, ledger) == "b0 b0"
    admit(registry, "d1")
    assert placed(registry, ledger) == "p0 d1"


def test_a_change_that_was_asked_for_counts_at_once_where_it_takes_work_away(registry, ledger):
    b0, d0 = admit(registry, "b0"), admit(registry, "d0")
    b0.set_shape(b0.shape, Shape(512, 0, accepts_transfers=False))
    d0.set_shape(d0.shape, Shape(512, 64, accepts_transfers=True))
    assert placed(registry, ledger) == "b0 d0"
    beat = events.heartbeat(prefill_tokens_per_s=1e6, shape=events.shape(512, 64, accepts_transfers=True))
    registry.heartbeat(d0, beat.heartbeat, 1.0)
    assert placed(registry, ledger) == "d0 d0"


def test_where_no_other_node_can_read_a_prompt_its_decode_node_does(registry, ledger):
    admit(registry, "b0")
    assert placed(registry, ledger) == "b0 b0"
    p0 = admit(registry, "p0", state="draining", rate=1e6)
    assert placed(registry, ledger) == "b0 b0"
    registry.lose(p0)
    admit(registry, "p0", rate=1e6, num_blocks=6)  # 96 tokens
    assert placed(registry, ledger) == "b0 b0"


# ---- what it costs ----


def test_a_prompt_goes_where_it_is_read_first(registry, ledger):
    b0, b1 = admit(registry, "b0"), admit(registry, "b1", rate=500.0)
    slow = TransferEstimates(transfer_s=10.0)
    assert placed(registry, ledger, slow) == "b0 b0"  # 0.1 s against 0.2 s
    assign(ledger, b0, 90, 90)  # 0.19 s, and 0.1 s for the other: in all 0.29 s
    assert placed(registry, ledger, slow) == "b1 b1"
    assign(ledger, b1, 0, 1)  # writes: 0.2 s, and 0.2 s for the other
    assert placed(registry, ledger, slow) == "b0 b0"


def test_without_any_rate_tokens_are_compared(registry, ledger):
    b0, _ = admit(registry, "b0", rate=0.0), admit(registry, "b1", rate=0.0)
    assert placed(registry, ledger) == "b0 b0"
    assign(ledger, b0, 10, 10)
    assert placed(registry, ledger) == "b1 b1"


@pytest.mark.parametrize(
    ("queued", "waiting", "writing", "transfer_s", "chosen"),
    [
        (0, 0, 0, 0.01, "b0 b0"),  # 0.11 s against 0.1 s
        (0, 0, 1, 0.09, "p0 b0"),  # 0.19 s against 0.11 s with the step of the other, which waits 0.1 s
        (0, 0, 1, 0.12, "b0 b0"),
        (150, 0, 2, 0.0, "p0 b0"),  # 0.25 s against 0.11 s + 0.2 s
        (250, 0, 2, 0.0, "b0 b0"),
        (240, 150, 0, 0.0, "p0 b0"),  # 0.34 s against 0.26 s; the one before writes by then and waits 0.1 s
        (300, 150, 0, 0.0, "b0 b0"),
    ],
)
def test_a_pair_or_one_node_whatever_adds_the_fewest_seconds(
    registry, ledger, queued, waiting, writing, transfer_s, chosen
):
    """The prompt has 100 tokens, both nodes compute 1000 a second, and a step takes 0.01 s."""
    p0, b0 = admit(registry, "p0"), admit(registry, "b0", step_s=0.01)
    if queued:
        assign(ledger, p0, queued)
    if waiting:
        assign(ledger, b0, waiting, waiting)
    for _ in range(writing):
        assign(ledger, b0, 0, 10)
    assert placed(registry, ledger, transfers=TransferEstimates(transfer_s=transfer_s)) == chosen


def test_a_node_that_writes_reads_for_another_one_where_that_disturbs_less(registry, ledger):
    """b0 is full of prompts of its own, b1 writes one answer, b2 nothing but has no running slot left."""
    b0, b1, b2 = admit(registry, "b0"), admit(registry, "b1"), admit(registry, "b2", max_num_seqs=1)
    assign(ledger, b0, 900, 900)
    assign(ledger, b2, 0, 10)
    for _ in range(5):
        assign(ledger, b1, 0, 10)
    # b1 alone 0.1 s + 0.5 s; b2 for b1 0.1 s + 0.1 s
    assert placed(registry, ledger, TransferEstimates(transfer_s=0.01)) == "b2 b1"
    assert placed(registry, ledger, TransferEstimates(transfer_s=0.5)) == "b1 b1"


def test_fewer_tokens_a_step_cost_more_steps_of_the_answers(registry, ledger):
    b0 = admit(registry, "b0", step_s=0.01, shape=Shape(10, 64, accepts_transfers=True))
    b1 = admit(registry, "b1", step_s=0.01)
    for node in (b0, b1):
        assign(ledger, node, 0, 10)
    assert placed(registry, ledger, TransferEstimates(transfer_s=10.0)) == "b1 b1"  # one step more, not ten


@pytest.mark.parametrize(("num_queued", "chosen"), [(8, "b0 b0"), (10, "p0 b0")])
def test_of_the_answers_to_come_those_count_that_come_in_the_meantime(registry, ledger, num_queued, chosen):
    """In the 0.1 s that the prompt takes, a third of the queue of 0.3 s is handed over: 0.4 s against 0.1 s a head."""
    p0, b0 = admit(registry, "p0"), admit(registry, "b0")
    for number in range(num_queued):
        ledger.prefill(f"{number}", p0, 300 / num_queued)
        ledger.decode(f"{number}", b0, 10)
    assert placed(registry, ledger) == chosen


@pytest.mark.parametrize(
    ("num_held_p", "num_held_b", "transfer_s", "chosen"),
    [(6, 0, 0.115, "p0 b0"), (6, 0, 0.116, "b0 b0"), (6, 6, 0.01, "b0 b0"), (3, 6, 0.0, "b0 b0")],
)
def test_what_a_node_holds_it_need_not_compute(registry, ledger, num_held_p, num_held_b, transfer_s, chosen):
    """With all six blocks there are 4 tokens to compute: 0.004 s; and whoever computes the other 96 again pays for a
    fifth of them once more."""
    for name, num_held in (("p0", num_held_p), ("b0", num_held_b)):
        registry.cache_changed(admit(registry, name), events.cache_changed(HINTS[:num_held]).cache_changed)
    assert placed(registry, ledger, transfers=TransferEstimates(transfer_s=transfer_s)) == chosen


# ---- turns of sessions ----

LONG = list(range(1, 801))  # 50 full blocks


def decoding(registry, num_held, **hello):
    """A prefill node, and a decode node that holds so many blocks of a long prompt."""
    p0, d0 = admit(registry, "p0"), admit(registry, "d0", **hello)
    registry.cache_changed(d0, events.cache_changed(events.block_hints(LONG)[:num_held]).cache_changed)
    return p0, d0


@pytest.mark.parametrize(
    ("num_held", "num_running", "queued", "chosen"),
    [
        (49, 0, 0, "d0 d0"),  # 16 tokens are left: 0.016 s against 0.8 s
        (32, 0, 0, "d0 d0"),  # 512 are held
        (31, 0, 0, "p0 d0"),
        (49, 40, 0, "d0 d0"),  # 0.016 s, and as long for each of 40: 0.656 s
        (49, 60, 0, "p0 d0"),  # 0.976 s
        (49, 60, 200, "d0 d0"),  # against 1 s
    ],
)
def test_a_decode_node_appends_to_what_it_holds_where_that_is_cheaper(
    registry, ledger, num_held, num_running, queued, chosen
):
    p0, d0 = decoding(registry, num_held)
    for _ in range(num_running):
        assign(ledger, d0, 0, 10)
    if queued:
        assign(ledger, p0, queued)
    assert placed(registry, ledger, num_tokens=810, tokens=LONG) == chosen


def test_a_decode_node_appends_to_no_prompt_of_which_it_holds_little(registry, ledger):
    """Of 1,200 tokens it holds 512."""
    _, d0 = admit(registry, "p0", max_model_len=4000), admit(registry, "d0", max_model_len=4000)
    tokens = [*LONG, *range(400)]
    registry.cache_changed(d0, events.cache_changed(events.block_hints(tokens)[:32]).cache_changed)
    assert placed(registry, ledger, num_tokens=1210, tokens=tokens) == "p0 d0"
    registry.cache_changed(d0, events.cache_changed(events.block_hints(tokens)[:38]).cache_changed)
    assert placed(registry, ledger, num_tokens=1210, tokens=tokens) == "d0 d0"


def test_a_decode_node_appends_nothing_that_it_may_not_decode(registry, ledger):
    _, d0 = decoding(registry, 49, num_blocks=51)
    assert placed(registry, ledger, num_tokens=810, tokens=LONG) == "d0 d0"
    admit(registry, "d1")
    assert placed(registry, ledger, num_tokens=830, tokens=LONG) == "p0 d1"  # longer than d0's pool
    registry.drain(d0)
    assert placed(registry, ledger, num_tokens=810, tokens=LONG) == "p0 d1"


def test_two_nodes_for_every_request_means_that_none_is_appended(registry, ledger):
    decoding(registry, 49)
    assert placed(registry, ledger, num_tokens=810, policy="always", tokens=LONG) == "p0 d0"


def test_an_unknown_rate_is_that_of_the_others_and_without_any_nodes_that_only_read_come_first(registry, ledger):
    admit(registry, "p0", rate=0.0)
    b0 = admit(registry, "b0", rate=0.0)
    assert placed(registry, ledger, transfers=TransferEstimates(transfer_s=100.0)) == "p0 b0"
    registry.heartbeat(b0, events.heartbeat(prefill_tokens_per_s=1000.0).heartbeat, 0.0)
    assign(ledger, b0, 0, 1)
    assert placed(registry, ledger, transfers=TransferEstimates(transfer_s=0.09)) == "p0 b0"  # 0.19 s against 0.2 s
    assert placed(registry, ledger, transfers=TransferEstimates(transfer_s=0.11)) == "b0 b0"


@pytest.mark.parametrize(("queued", "chosen"), [(0, "p0 b0"), (500, "p0 b0"), (550, "p0 b0"), (700, "b0 b0")])
def test_a_prompt_of_another_node_is_read_while_it_waits_for_credit(registry, ledger, queued, chosen):
    """max(0.1 s + queue, 0.5 s) against 0.5 s + 0.1 s, and 0.1 s for the other."""
    p0, b0 = admit(registry, "p0"), admit(registry, "b0", max_num_seqs=1)
    assign(ledger, p0, queued)
    assign(ledger, b0, 0, 10)
    assert placed(registry, ledger, transfers=TransferEstimates(credit_s=0.5)) == chosen


def test_prompts_that_wait_for_other_nodes_fill_a_pool_too(registry, ledger):
    """Of 1600 tokens, answers hold 750 and this prompt needs 100."""
    b0, d0 = admit(registry, "b0"), admit(registry, "d0")

    def is_full():
        return Costs(registry.nodes, ledger, Prompt(TOKENS), FREE).decode[b0].is_full

    assign(ledger, b0, 0, 750)
    ledger.prefill("other", b0, 751)
    ledger.decode("other", d0, 751)
    assert not is_full()
    ledger.first_token("other", 0.0)
    assert is_full()
    ledger.release("other", b0)
    assert not is_full()


def test_a_prompt_fills_a_pool_by_what_is_not_held_there_for_others(registry, ledger):
    """Of 1600 tokens one answer holds these 100, another one 1496: there is room for four more, and those are all that
    this prompt has behind its full blocks."""
    b0 = admit(registry, "b0")
    registry.cache_changed(b0, events.cache_changed([1]).cache_changed)

    def is_full(prompt):
        return Costs(registry.nodes, ledger, prompt, FREE).decode[b0].is_full

    ledger.decode("first", b0, 100, Prompt(TOKENS).block_hashes(16))
    ledger.decode("other", b0, 1496)
    assert not is_full(Prompt(TOKENS))
    assert is_full(Prompt([*TOKENS, 7]))
    assert is_full(Prompt([7, *range(1, 5)]))
    ledger.decode("second", b0, 100, Prompt(TOKENS).block_hashes(16))
    assert is_full(Prompt(TOKENS))
    b0.hints.clear()  # or it may keep none
    ledger.end("second")
    assert is_full(Prompt(TOKENS))


def test_of_decode_nodes_that_cost_the_same_one_is_taken_that_holds_the_beginning_for_others(registry, ledger):
    """Whether it has said so yet or not; what it has said is not counted once more."""
    for name in ("p0", "d0", "d1"):
        registry.cache_changed(admit(registry, name), events.cache_changed([1]).cache_changed)
    ledger.decode("other", registry.find("d0"), 100)
    ledger.decode("alike", registry.find("d1"), 190, Prompt(TOKENS).block_hashes(16))
    assert placed(registry, ledger) == "p0 d1"  # 194 of 1600 against 200
    registry.cache_changed(registry.find("d1"), events.cache_changed(HINTS).cache_changed)
    ledger.decode("more", registry.find("d1"), 10)
    assert placed(registry, ledger) == "p0 d0"


def test_a_full_node_is_the_last_choice(registry, ledger):
    b0, _ = admit(registry, "b0"), admit(registry, "b1", rate=1.0)
    slow = TransferEstimates(transfer_s=1000.0)
    assert placed(registry, ledger, slow) == "b0 b0"
    assign(ledger, b0, 0, b0.pool_tokens - len(TOKENS))
    assert placed(registry, ledger, slow) == "b0 b0"
    assign(ledger, b0, 0, 1)
    assert placed(registry, ledger, slow) == "b1 b1"


def test_nodes_that_failed_the_request_are_the_last_choice(registry, ledger):
    p0, b0 = admit(registry, "p0", rate=1e6), admit(registry, "b0")
    assert placed(registry, ledger) == "p0 b0"
    assert placed(registry, ledger, avoid=[p0]) == "b0 b0"
    assert placed(registry, ledger, avoid=[p0, b0]) == "b0 b0"
    admit(registry, "b1")
    assert placed(registry, ledger, avoid=[b0]) == "p0 b1"
    assert placed(registry, ledger, avoid=[p0, b0]) == "b1 b1"


# ---- against all pairs ----

NODES = st.fixed_dictionaries(
    {
        "role": st.sampled_from("pdb"),
        "rate": st.sampled_from([0.0, 100.0, 1000.0]),
        "num_blocks": st.integers(4, 40),
        "state": st.sampled_from(["ready", "ready", "draining"]),
        "to_read": st.integers(0, 200),
        "written": st.lists(st.integers(1, 100), max_size=3),
        "step_s": st.sampled_from([0.0, 0.05]),
        "avoided": st.booleans(),
    }
)


@given(
    described=st.lists(NODES, max_size=6),
    num_tokens=st.integers(100, 180),
    transfer_s=st.floats(0, 1),
    credit_s=st.sampled_from([0.0, 0.5, 5.0]),
)
def test_the_choice_is_as_good_as_the_best_of_all_pairs(described, num_tokens, transfer_s, credit_s):
    registry, ledger = Registry({}, node_timeout_s=1e9, step_timeout_s=1e9), Ledger()
    avoid = []
    for index, node in enumerate(described):
        name, options = f"{node['role']}{index}", {"state": node["state"], "num_blocks": node["num_blocks"]}
        admitted = admit(registry, name, node["rate"], node["step_s"], **options)
        if node["to_read"] and admitted.shape.prefills:
            ledger.prefill(f"read {index}", admitted, node["to_read"])
        for tokens in node["written"] if admitted.shape.decodes else []:
            assign(ledger, admitted, 0, tokens)
        avoid += [admitted] if node["avoided"] else []
    able = [node for node in registry.nodes if node.is_ready]
    pairs = [
        (prefill_node, decode_node)
        for prefill_node in able
        for decode_node in able
        if prefill_node.shape.prefills and decode_node.shape.decodes
        if len(TOKENS) <= prefill_node.max_request_tokens and num_tokens <= decode_node.max_request_tokens
    ]
    transfers, wanted = TransferEstimates(credit_s, transfer_s), Wanted(Prompt(TOKENS), num_tokens, avoid)
    if not pairs:
        with pytest.raises(RequestError):
            place(registry, ledger, wanted, transfers)
        return
    placed = place(registry, ledger, wanted, transfers)
    chosen = placed.prefill_node, placed.decode_node
    assert chosen in pairs
    costs = Costs(registry.nodes, ledger, Prompt(TOKENS), transfers)

    def order(pair):
        return len({*pair} & {*avoid}), costs.decode[pair[1]].is_full, costs.seconds(*pair)

    if costs.are_known:
        best = min(map(order, pairs))
        assert order(chosen)[:2] == best[:2]
        assert order(chosen)[2] <= best[2] * 1.000001
