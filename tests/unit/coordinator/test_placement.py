"""Where a prompt is computed: the policies by hand, and that `auto` is as good as the better of the other two."""

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.control.handover import HandoverCosts
from coordinator.control.ledger import Ledger
from coordinator.control.placement import place
from coordinator.control.prompts import Prompt
from coordinator.control.registry import Registry
from serving_core.errors import RequestError
from tests import fleet_events as events
from tests.unit.coordinator.fleet_simulation import Fleet

TOKENS = list(range(1, 101))
HINTS = events.block_hints(TOKENS)  # six full blocks of 16
FREE = HandoverCosts()


@pytest.fixture
def ledger():
    return Ledger()


@pytest.fixture
def registry():
    return Registry({}, node_timeout_s=1e9, step_timeout_s=1e9)


def admit(registry, name, rate=1000.0, step_s=0.0, state="ready", **hello):
    node = registry.admit(events.hello(name, {"p": "prefill", "d": "decode"}[name[0]], **hello).hello, 0.0)
    registry.heartbeat(node, events.heartbeat(state, prefill_tokens_per_s=rate, step_s=step_s).heartbeat, 0.0)
    return node


def assign(ledger, node, num_to_compute, num_held=0):
    """One more request: the node is still to read its prompt, or has the answer's first token."""
    request_id = f"{random.random()}"
    ledger.read(request_id, node, num_to_compute)
    if num_held:
        ledger.write(request_id, node, num_held)
    if not num_to_compute:
        ledger.first_token(request_id)


def placed(registry, ledger, policy="auto", handover=FREE, avoid=(), num_tokens=110):
    pair = place(registry.nodes, ledger, Prompt(TOKENS), num_tokens, avoid, policy=policy, handover=handover)
    return " ".join(node.name for node in pair)


# ---- never, always ----


def test_never_and_always_need_no_figures(registry, ledger):
    for name in ("p0", "d0"):
        admit(registry, name, rate=0.0)
    assert placed(registry, ledger, "never") == "p0 d0"
    assert placed(registry, ledger, "always") == "d0 d0"


@pytest.mark.parametrize(
    ("names", "policy", "reason"),
    [
        (["d0"], "never", "NO_PREFILL_WORKER"),
        (["p0"], "never", "NO_DECODE_WORKER"),
        (["p0"], "always", "NO_DECODE_WORKER"),
        (["p0"], "auto", "NO_DECODE_WORKER"),
    ],
)
def test_a_role_that_is_needed_and_missing_is_an_error(registry, ledger, names, policy, reason):
    for name in names:
        admit(registry, name)
    with pytest.raises(RequestError) as error:
        placed(registry, ledger, policy)
    assert error.value.reason == reason


def test_always_goes_where_the_prompt_is_computed_first(registry, ledger):
    d0, d1 = admit(registry, "d0"), admit(registry, "d1", rate=500.0)
    assert placed(registry, ledger, "always") == "d0 d0"  # 0.1 s against 0.2 s
    assign(ledger, d0, 90, 90)  # 0.19 s, and 0.1 s for the other: in all 0.29 s
    assert placed(registry, ledger, "always") == "d1 d1"
    assign(ledger, d1, 0, 1)  # decodes: 0.2 s, and 0.2 s for the other
    assert placed(registry, ledger, "always") == "d0 d0"


def test_without_any_rate_always_compares_tokens(registry, ledger):
    d0, _ = admit(registry, "d0", rate=0.0), admit(registry, "d1", rate=0.0)
    assert placed(registry, ledger, "always") == "d0 d0"
    assign(ledger, d0, 10, 10)
    assert placed(registry, ledger, "always") == "d1 d1"


# ---- auto ----


def test_auto_computes_every_prompt_locally_where_no_prefill_node_can(registry, ledger):
    admit(registry, "d0")
    assert placed(registry, ledger) == "d0 d0"
    p0 = admit(registry, "p0", state="draining")
    assert placed(registry, ledger) == "d0 d0"
    registry.lose(p0)
    admit(registry, "p0", rate=1e6, num_blocks=6)  # 96 tokens
    assert placed(registry, ledger, handover=HandoverCosts(move_s=0.0)) == "d0 d0"


@pytest.mark.parametrize(
    ("queued", "waiting", "decoding", "move_s", "chosen"),
    [
        (0, 0, 0, 0.01, "d0 d0"),  # 0.11 s against 0.1 s
        (0, 0, 1, 0.09, "p0 d0"),  # 0.19 s against 0.11 s with the step of the other, which waits 0.1 s
        (0, 0, 1, 0.12, "d0 d0"),
        (150, 0, 2, 0.0, "p0 d0"),  # 0.25 s against 0.11 s + 0.2 s
        (250, 0, 2, 0.0, "d0 d0"),
        (240, 150, 0, 0.0, "p0 d0"),  # 0.34 s against 0.26 s; the one before decodes by then and waits 0.1 s
        (300, 150, 0, 0.0, "d0 d0"),
    ],
)
def test_auto_takes_what_adds_the_fewest_seconds(registry, ledger, queued, waiting, decoding, move_s, chosen):
    """The prompt has 100 tokens, both nodes compute 1000 a second, and a step takes 0.01 s."""
    p0, d0 = admit(registry, "p0"), admit(registry, "d0", step_s=0.01)
    if queued:
        assign(ledger, p0, queued)
    if waiting:
        assign(ledger, d0, waiting, waiting)
    for _ in range(decoding):
        assign(ledger, d0, 0, 10)
    assert placed(registry, ledger, handover=HandoverCosts(move_s=move_s)) == chosen


@pytest.mark.parametrize(("num_queued", "chosen"), [(8, "d0 d0"), (9, "p0 d0")])
def test_of_the_answers_to_come_those_count_that_come_in_the_meantime(registry, ledger, num_queued, chosen):
    """In the 0.1 s that the prompt takes, a third of the queue of 0.3 s is handed over: 0.4 s against 0.1 s a head."""
    p0, d0 = admit(registry, "p0"), admit(registry, "d0")
    for number in range(num_queued):
        ledger.read(f"{number}", p0, 300 / num_queued)
        ledger.write(f"{number}", d0, 10)
    assert placed(registry, ledger) == chosen


@pytest.mark.parametrize(
    ("num_held_p", "num_held_d", "move_s", "chosen"),
    [(6, 0, 0.09, "p0 d0"), (6, 0, 0.1, "d0 d0"), (6, 6, 0.01, "d0 d0"), (3, 6, 0.0, "d0 d0")],
)
def test_what_a_node_holds_it_need_not_compute(registry, ledger, num_held_p, num_held_d, move_s, chosen):
    """With all six blocks there are 4 tokens to compute: 0.004 s."""
    for name, num_held in (("p0", num_held_p), ("d0", num_held_d)):
        registry.cache_changed(admit(registry, name), events.cache_changed(HINTS[:num_held]).cache_changed)
    assert placed(registry, ledger, handover=HandoverCosts(move_s=move_s)) == chosen


def test_an_unknown_rate_is_that_of_the_others_and_without_any_prefill_nodes_compute(registry, ledger):
    admit(registry, "p0", rate=0.0)
    d0 = admit(registry, "d0", rate=0.0)
    assert placed(registry, ledger, handover=HandoverCosts(move_s=100.0)) == "p0 d0"
    registry.heartbeat(d0, events.heartbeat(prefill_tokens_per_s=1000.0).heartbeat, 0.0)
    assign(ledger, d0, 0, 1)
    assert placed(registry, ledger, handover=HandoverCosts(move_s=0.09)) == "p0 d0"  # 0.19 s against 0.2 s
    assert placed(registry, ledger, handover=HandoverCosts(move_s=0.11)) == "d0 d0"


@pytest.mark.parametrize(("queued", "chosen"), [(0, "p0 d0"), (500, "p0 d0"), (700, "d0 d0")])
def test_a_remote_prompt_is_computed_while_it_waits_for_credit(registry, ledger, queued, chosen):
    """max(0.1 s + queue, 0.5 s) against 0.5 s + 0.1 s, and 0.1 s for the other."""
    p0, d0 = admit(registry, "p0"), admit(registry, "d0", max_num_seqs=1)
    assign(ledger, p0, queued)
    assign(ledger, d0, 0, 10)
    assert placed(registry, ledger, handover=HandoverCosts(credit_s=0.5)) == chosen


def test_a_full_decode_node_is_the_last_choice(registry, ledger):
    d0, _ = admit(registry, "d0"), admit(registry, "d1", rate=1.0)
    assert placed(registry, ledger) == "d0 d0"
    assign(ledger, d0, 0, d0.pool_tokens - len(TOKENS))
    assert placed(registry, ledger, "always") == "d0 d0"
    assign(ledger, d0, 0, 1)
    assert placed(registry, ledger, "always") == "d1 d1"


def test_nodes_that_failed_the_request_are_the_last_choice(registry, ledger):
    p0, d0 = admit(registry, "p0", rate=1e6), admit(registry, "d0")
    assert placed(registry, ledger) == "p0 d0"
    assert placed(registry, ledger, avoid=[p0]) == "d0 d0"
    assert placed(registry, ledger, avoid=[p0, d0]) == "d0 d0"
    admit(registry, "d1")
    assert placed(registry, ledger, avoid=[d0]) == "p0 d1"
    assert placed(registry, ledger, avoid=[p0, d0]) == "d1 d1"


NODES = st.fixed_dictionaries(
    {
        "role": st.sampled_from("pd"),
        "rate": st.sampled_from([0.0, 1.0, 1000.0]),
        "num_blocks": st.integers(4, 12),
        "state": st.sampled_from(["ready", "draining"]),
        "num_assigned": st.integers(0, 200),
        "avoided": st.booleans(),
    }
)


@settings(max_examples=200, deadline=None)
@given(described=st.lists(NODES, max_size=5), num_tokens=st.integers(100, 180), move_s=st.floats(0, 10))
def test_auto_chooses_among_what_the_others_could_and_fails_only_where_always_fails(described, num_tokens, move_s):
    registry, ledger = Registry({}, node_timeout_s=1e9, step_timeout_s=1e9), Ledger()
    avoid = []
    for index, node in enumerate(described):
        admitted = admit(
            registry, f"{node['role']}{index}", node["rate"], state=node["state"], num_blocks=node["num_blocks"]
        )
        give = ledger.read if node["role"] == "p" else ledger.write
        give(f"on {index}", admitted, node["num_assigned"])
        avoid += [admitted] if node["avoided"] else []

    def outcome(policy):
        try:
            return placed(registry, ledger, policy, HandoverCosts(move_s=move_s), avoid, num_tokens)
        except RequestError as error:
            return error.reason

    auto, never, always = map(outcome, ("auto", "never", "always"))
    if " " in never and " " in always:
        able = [node for node in registry.nodes if node.is_ready and node.max_request_tokens >= num_tokens]
        assert auto in {never, *(f"{node.name} {node.name}" for node in able if node.role == "decode")}
        assert not all(registry.find(name) in avoid for name in auto.split()) or registry.find(always[:2]) in avoid
    else:
        assert auto == always


# ---- auto against the others, in a fleet under virtual time ----


@dataclass(frozen=True)
class Load:
    """Requests a second, in bursts, with the shortest and the longest prompt and answer."""

    per_s: float
    prompt: tuple[int, int]
    answer: tuple[int, int]
    burst: int = 1

    def requests(self, rng, count=120):
        now, requests = 0.0, []
        while len(requests) < count:
            now += rng.expovariate(self.per_s / self.burst)
            requests += [(now, rng.randint(*self.prompt), rng.randint(*self.answer)) for _ in range(self.burst)]
        return requests


LOADS = {
    "prefill-heavy": Load(5.0, (500, 1500), (4, 16)),
    "decode-heavy": Load(5.0, (20, 100), (50, 150)),
    "mixed": Load(3.0, (20, 1500), (10, 100)),
    "light": Load(0.5, (200, 800), (20, 60)),
    "bursty": Load(3.0, (200, 800), (20, 60), burst=15),
}
FLEETS = {
    "equal nodes": {"p0": 4000.0, "d0": 4000.0},
    "a slow decode node": {"p0": 8000.0, "d0": 2000.0},
    "a slow prefill node": {"p0": 2000.0, "d0": 8000.0},
    "two decode nodes": {"p0": 4000.0, "d0": 4000.0, "d1": 4000.0},
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("rates", FLEETS.values(), ids=FLEETS)
def test_auto_is_as_good_as_the_better_of_never_and_always(load, rates):
    requests = load.requests(random.Random(7))
    mean_s = {policy: Fleet(policy, rates).mean_request_s(requests) for policy in ("never", "always", "auto")}
    assert mean_s["auto"] <= 1.03 * min(mean_s["never"], mean_s["always"])


@pytest.mark.parametrize("load", ["mixed", "light", "bursty"])
def test_auto_is_as_good_where_requests_wait_for_credit(load):
    requests, rates = LOADS[load].requests(random.Random(7)), FLEETS["equal nodes"]
    mean_s = {policy: Fleet(policy, rates, 4).mean_request_s(requests) for policy in ("never", "always", "auto")}
    assert mean_s["auto"] <= 1.03 * min(mean_s["never"], mean_s["always"])


def test_auto_shares_the_work_where_neither_node_alone_keeps_up():
    requests = LOADS["prefill-heavy"].requests(random.Random(7))
    rates = FLEETS["equal nodes"]
    mean_s = {policy: Fleet(policy, rates).mean_request_s(requests) for policy in ("never", "always", "auto")}
    assert mean_s["auto"] < 0.5 * min(mean_s["never"], mean_s["always"])


def test_the_simulation_takes_the_time_that_a_lone_request_must():
    """1000 tokens at 4000 a second, and 3 steps of 21 ms after the first token; KV travels for 30 ms."""
    requests, rates = [(0.0, 1000, 4)], FLEETS["equal nodes"]
    assert Fleet("always", rates).mean_request_s(requests) == pytest.approx(0.25 + 3 * 0.021)
    assert Fleet("never", rates).mean_request_s(requests) == pytest.approx(0.25 + 0.03 + 3 * 0.021)
