"""Who is chosen for a part of a request, what cached blocks are worth against load, and that they never decide more."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.control.load import Ledger, Prompt
from coordinator.control.nodes import Registry, does, has_path
from coordinator.control.placement.costs import TransferEstimates, Wanted
from coordinator.control.placement.policy import POLICIES
from serving_core.errors import RequestError
from serving_core.node.blocks import BlockAllocator
from serving_core.node.prefix import MIXED_NUMERICS, BlockNames, hint_of, root_name
from serving_core.shapes import Shape
from serving_node.outputs import CacheReport
from tests import fleet_events as events

TOKENS = list(range(1, 69))  # four full blocks of 16 and four tokens
HINTS = events.block_hints(TOKENS)


def admit(registry, name, **hello):
    return registry.admit(events.hello(name, **{"num_blocks": 10, **hello}).hello, 0.0)


def choose(nodes, ledger, role, prompt, num_tokens, avoid=()):
    """The node for this part, where another one that anything fits on does the other part."""
    others = Registry({}, node_timeout_s=1.0, step_timeout_s=1.0)
    other = admit(others, "d" if role == "prefill" else "p", num_blocks=1000)
    wanted = Wanted(prompt, num_tokens, avoid)
    placed = POLICIES["auto"].place([*nodes, other], ledger, wanted, TransferEstimates(), now=0.0)
    return placed.prefill_node if role == "prefill" else placed.decode_node


def report(registry, node, hints):
    assert registry.cache_changed(node, events.cache_changed(hints).cache_changed) == 0


@pytest.fixture
def ledger():
    return Ledger()


@pytest.fixture
def registry():
    return Registry(events.MODEL, node_timeout_s=3.0, step_timeout_s=60.0)


def assign(ledger, node, num_tokens):
    give = ledger.prefill if does(node, "prefill") else ledger.decode
    give(f"on {node.name}", node, num_tokens)


def fleet(registry, ledger, **loads):
    """Nodes by name with (assigned tokens, pool blocks, leading blocks of TOKENS that they hold)."""
    for name, (num_tokens, num_blocks, num_held) in loads.items():
        node = admit(registry, name, num_blocks=num_blocks)
        assign(ledger, node, num_tokens)
        report(registry, node, HINTS[:num_held])
    return registry.nodes


# ---- without caches ----


@pytest.mark.parametrize(
    ("loads", "num_tokens", "chosen"),
    [
        ({"d0": (10, 10, 0), "d1": (5, 10, 0)}, 1, "d1"),
        ({"d0": (10, 10, 0), "d1": (10, 10, 0)}, 1, "d0"),  # a tie goes by name
        ({"d0": (10, 10, 0), "d1": (15, 100, 0)}, 1, "d1"),  # relative to the pool
        ({"d0": (0, 10, 0), "d1": (160, 100, 0)}, 161, "d1"),  # only one is large enough
    ],
)
def test_the_least_loaded_fitting_node_is_chosen(registry, ledger, loads, num_tokens, chosen):
    assert choose(fleet(registry, ledger, **loads), ledger, "decode", Prompt([1]), num_tokens).name == chosen


def test_prefill_nodes_compare_by_tokens_alone(registry, ledger):
    nodes = fleet(registry, ledger, p0=(40, 100, 0), p1=(30, 10, 0))
    assert choose(nodes, ledger, "prefill", Prompt([1]), 1).name == "p1"


def test_avoided_nodes_come_last_and_draining_ones_not_at_all(registry, ledger):
    a, b = fleet(registry, ledger, d0=(0, 10, 4), d1=(100, 10, 0))
    prompt = Prompt(TOKENS)
    assert choose([a, b], ledger, "decode", prompt, 1, avoid=(a,)) is b
    assert choose([a], ledger, "decode", prompt, 1, avoid=(a,)) is a
    registry.heartbeat(b, events.heartbeat("draining").heartbeat, 1.0)
    assert choose([a, b], ledger, "decode", prompt, 1, avoid=(a,)) is a


@pytest.mark.parametrize(
    ("role", "reason", "message"),
    [
        ("prefill", "NO_PREFILL_WORKER", "no node that prefills prompts is ready"),
        ("decode", "NO_DECODE_WORKER", "no node that decodes sequences can hold 161 tokens"),
    ],
)
def test_no_node_is_an_error_of_its_own(registry, ledger, role, reason, message):
    with pytest.raises(RequestError, match=message) as error:
        choose(fleet(registry, ledger, d0=(0, 10, 0)), ledger, role, Prompt([1]), 161)
    assert error.value.reason == reason


def test_a_request_longer_than_a_node_allows_does_not_fit(registry, ledger):
    admit(registry, "d0", max_model_len=100)
    with pytest.raises(RequestError, match="can hold 101"):
        choose(registry.nodes, ledger, "decode", Prompt([1]), 101)


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([], False),
        ([Shape(1, 0, False)], False),
        ([Shape(0, 1, True)], False),
        ([Shape(1, 1, False)], True),
        ([Shape(1, 0, False), Shape(0, 1, True)], True),
        ([Shape(1, 0, False), Shape(0, 1, False)], False),
        ([Shape(0, 1, False), Shape(1, 1, False)], True),
    ],
)
def test_a_path_is_a_node_that_does_both_or_one_that_takes_what_another_reads(registry, shapes, expected):
    for index, shape in enumerate(shapes):
        admit(registry, f"n{index}", role="mixed", shape=shape)
    assert has_path(registry.nodes) is expected
    for node in registry.nodes:
        registry.drain(node)
    assert not has_path(registry.nodes)


def test_what_a_node_does_is_a_matter_of_its_shape(registry):
    nodes = [admit(registry, name) for name in ("p0", "d0", "b0")]
    assert [does(node, "prefill") for node in nodes] == [True, False, True]
    assert [does(node, "decode") for node in nodes] == [False, True, True]


# ---- with caches ----


@pytest.mark.parametrize(
    ("loads", "chosen"),
    [
        ({"p0": (0, 10, 0), "p1": (0, 10, 1)}, "p1"),  # idle: where the beginning is
        ({"p0": (0, 10, 3), "p1": (0, 10, 2)}, "p0"),
        ({"p0": (0, 10, 0), "p1": (76, 10, 4)}, "p1"),  # 68 and a fifth of 64 that are computed again, against 76 + 4
        ({"p0": (0, 10, 0), "p1": (77, 10, 4)}, "p0"),  # the queue costs more than the cache saves
        ({"p0": (20, 10, 2), "p1": (0, 10, 1)}, "p1"),  # 20 + 36 against 52 and a fifth of 16
        ({"p0": (19, 10, 2), "p1": (0, 10, 1)}, "p0"),  # 19 + 36 against that
        ({"d0": (0, 10, 0), "d1": (63, 10, 4)}, "d1"),
        ({"d0": (0, 10, 0), "d1": (65, 10, 4)}, "d0"),
        ({"d0": (0, 20, 0), "d1": (0, 10, 1)}, "d0"),  # 68/320 against 52/160: as if 104 were against 68
        ({"d0": (0, 20, 0), "d1": (0, 10, 3)}, "d1"),  # 68/320 against 20/160
    ],
)
def test_what_a_node_holds_is_worth_as_many_tokens_of_load(registry, ledger, loads, chosen):
    role = "prefill" if chosen.startswith("p") else "decode"
    assert choose(fleet(registry, ledger, **loads), ledger, role, Prompt(TOKENS), len(TOKENS)).name == chosen


def test_the_last_token_is_always_computed_and_its_block_with_it(registry, ledger):
    [node] = fleet(registry, ledger, p0=(0, 10, 4))
    for num_tokens, held, computed in ((64, 64, 16), (65, 64, 1), (68, 64, 4), (48, 48, 16), (16, 16, 16), (15, 0, 15)):
        prompt = Prompt(TOKENS[:num_tokens])
        assert (prompt.tokens_cached(node), prompt.tokens_to_compute(node)) == (held, computed)


def test_only_blocks_without_a_gap_before_them_count(registry):
    node = admit(registry, "p0")
    report(registry, node, [HINTS[0], HINTS[2], HINTS[3]])
    assert Prompt(TOKENS).tokens_cached(node) == 16
    assert Prompt([9, *TOKENS[1:]]).tokens_cached(node) == 0  # a name stands for all tokens before it too


def test_what_was_answered_so_far_extends_the_prompt(registry):
    node = admit(registry, "p0")
    report(registry, node, HINTS)
    prompt = Prompt(TOKENS[:40])
    assert prompt.tokens_cached(node) == 32
    assert prompt.followed_by(TOKENS[40:]).tokens_cached(node) == 64
    assert prompt.followed_by([0] * 28).tokens_cached(node) == 32
    assert prompt.followed_by([]).token_ids == TOKENS[:40]


def test_blocks_count_whoever_made_them_in_chunks_or_in_steps(registry):
    node = admit(registry, "p0")
    report(registry, node, events.block_hints(TOKENS, made="ccss"))
    assert Prompt(TOKENS).tokens_cached(node) == 64
    registry.cache_changed(node, events.cache_changed(numerics_ids=events.NUMERICS_IDS[:1]).cache_changed)
    assert Prompt(TOKENS).tokens_cached(node) == 32  # of no other numerics id can it be
    other = admit(registry, "p1")
    report(registry, other, events.block_hints(TOKENS, made="csc"))
    assert Prompt(TOKENS).tokens_cached(other) == 64


def test_a_salt_keeps_caches_apart(registry):
    node = admit(registry, "p0")
    report(registry, node, events.block_hints(TOKENS, "é"))
    held = {salt: Prompt(TOKENS, salt).tokens_cached(node) for salt in ("", "é", "e")}
    assert held == {"": 0, "é": 64, "e": 0}


def test_an_adapter_keeps_caches_apart_by_its_content(registry):
    adapters = {"lora:a": "digest", "lora:b": "other", "lora:also-a": "digest"}
    node = admit(registry, "p0", **adapters)
    report(registry, node, events.block_hints(TOKENS, **{"lora:": "digest"}))
    held = {
        adapter: Prompt(TOKENS, adapter=adapter).tokens_cached(node) for adapter in ("", "a", "b", "also-a", "gone")
    }
    assert held == {"": 0, "a": 64, "b": 0, "also-a": 64, "gone": 0}
    later = Prompt(TOKENS[:-1], adapter="a").followed_by(TOKENS[-1:])
    assert (later.adapter, later.tokens_cached(node)) == ("a", 64)


def test_the_model_keeps_caches_apart_but_the_protocol_version_does_not(registry):
    node = admit(registry, "p0", dtype="bfloat16")
    assert "protocol_version" in node.hello.node.fingerprint
    report(registry, node, events.block_hints(TOKENS, dtype="float32"))
    assert Prompt(TOKENS).tokens_cached(node) == 0
    report(registry, node, events.block_hints(TOKENS, dtype="bfloat16"))
    assert Prompt(TOKENS).tokens_cached(node) == 64


@given(
    rounds=st.lists(
        st.tuples(
            st.integers(16, 68),
            st.integers(0, 3),
            st.sampled_from(["", "tenant"]),
            st.lists(st.integers(0, 2), min_size=4, max_size=4),
            st.booleans(),
        ),
        max_size=30,
    )
)
def test_coordinator_and_node_agree_on_what_a_real_allocator_holds(rounds):
    registry = Registry({}, node_timeout_s=1.0, step_timeout_s=1.0)
    node = admit(registry, "p0", num_blocks=6)
    allocator = BlockAllocator(6)
    numerics_ids = [*events.NUMERICS_IDS, MIXED_NUMERICS]
    left_out = []

    def hear(cache_changed):
        left_out.append(registry.cache_changed(node, cache_changed))

    report = CacheReport(allocator, None, numerics_ids, hear)
    for length, first, salt, made, is_told in rounds:
        token_ids = TOKENS[first:length]
        names = BlockNames(root_name(events.MODEL, salt), events.BLOCK_SIZE)
        for numerics_id in made[: len(token_ids) // events.BLOCK_SIZE]:
            names.add(token_ids, numerics_ids[numerics_id])
        lease = allocator.allocate(len(names.names), names.names)
        lease.publish(names.names)
        lease.release()
        if is_told:
            report.report()
            held, _ = names.find(token_ids, len(names.names), numerics_ids, allocator.blocks_by_name.__contains__)
            assert Prompt(token_ids, salt).tokens_cached(node) == len(held) * events.BLOCK_SIZE
    report.report()
    assert node.hints == {hint_of(name) for name in allocator.take_names()}
    assert not any(left_out)


NODES = st.fixed_dictionaries(
    {
        "num_tokens": st.integers(0, 300),
        "num_blocks": st.integers(4, 12),
        # A node evicts no block before those behind it: it holds a beginning of a prompt, and blocks of others.
        "hints": st.tuples(st.integers(0, len(HINTS)), st.sets(st.sampled_from([1, 2]))).map(
            lambda held: [*HINTS[: held[0]], *sorted(held[1])][:4]
        ),
        "state": st.sampled_from(["ready", "draining"]),
        "avoided": st.booleans(),
    }
)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@given(described=st.lists(NODES, min_size=1, max_size=4), length=st.integers(1, 68), more_tokens=st.integers(0, 130))
def test_hints_change_the_cost_and_never_who_may_be_chosen(role, described, length, more_tokens):
    registry, ledger = Registry({}, node_timeout_s=1.0, step_timeout_s=1.0), Ledger()
    nodes, avoid = [], []
    for index, node in enumerate(described):
        nodes.append(admit(registry, f"{role[0]}{index}", num_blocks=node["num_blocks"]))
        assign(ledger, nodes[-1], node["num_tokens"])
        nodes[-1].load.state = node["state"]
        avoid += [nodes[-1]] if node["avoided"] else []

    def eligible():
        """Who is left when every chosen node is taken out, one after the other; and the first of them."""
        left, chosen = list(nodes), []
        while True:
            try:
                chosen.append(choose(left, ledger, role, Prompt(TOKENS[:length]), length + more_tokens, avoid))
            except RequestError as error:
                return chosen, str(error)
            left.remove(chosen[-1])

    without, why_without = eligible()
    for node, fields in zip(nodes, described, strict=True):
        report(registry, node, fields["hints"])
    chosen, why = eligible()
    assert set(chosen) == set(without)
    assert why == why_without
    assert [node in avoid for node in chosen] == sorted(node in avoid for node in chosen)
    if chosen:
        assert chosen[0] is cheapest_by_hand(chosen, ledger, avoid, length, role)


def cheapest_by_hand(nodes, ledger, avoid, length, role):
    """A second implementation, by the description of the cost."""
    costs = {}
    for node in nodes:
        num_held = next((i for i, hint in enumerate(HINTS) if hint not in node.hints), len(HINTS))
        if role == "prefill":
            num_held = min(num_held, (length - 1) // 16)
            cost = ledger.of(node).tokens_to_compute + length - 16 * num_held
        else:
            num_held = min(num_held, length // 16)
            cost = (ledger.of(node).tokens_held + length - 16 * num_held) / (16 * node.hello.num_blocks)
        costs[node] = (node in avoid, cost, node.name)
    return min(costs, key=costs.get)
