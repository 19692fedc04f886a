"""Sessions: what is sent once other requests have ended, by hand and in simulated fleets, which check every output."""

import json
from dataclasses import replace
from random import Random

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from splitserve.cli import main
from splitserve_bench.errors import BenchError
from splitserve_bench.serve.backends import open_backend, take_event
from splitserve_bench.serve.command import serve_command
from splitserve_bench.serve.datasets import TracedRequest
from splitserve_bench.serve.drawn import parse_drawn
from splitserve_bench.serve.metrics import Limits, summarize
from splitserve_bench.serve.records import PlannedRequest, Reply, Target, pack_request, unpack_request
from splitserve_bench.serve.session_figures import session_figures
from splitserve_bench.serve.sessions import (
    Conversation,
    SessionShape,
    Turn,
    drawn_sessions,
    fit_sessions,
    planned_sessions,
    read_sessions,
    sessions_of_trace,
)
from splitserve_bench.serve.turns import Ended, Turns, longest_s
from splitserve_bench.simulate.events import Agenda, ToyModel
from splitserve_bench.simulate.fleet import Fleet, FleetSize, LoadClients, simulate, start_nodes
from tests.unit.splitserve_bench.bench_serve_kit import answered, failed, serve_options
from tests.unit.splitserve_bench.load_servers import Script, grpc_server, http_server
from tests.unit.splitserve_bench.simulate_kit import BLOCK_SIZE, PROFILE, VOCAB_SIZE, abort
from tests.unit.splitserve_bench.stand_ins import run_load_here
from tests.unit.splitserve_bench.test_load import sender

send_here = sender(run_load_here)


def turn(*tokens, output_tokens=2, gap_s=0.0, text=""):
    return Turn(tokens, output_tokens, gap_s, text)


def shape(**changes):
    given = dict.fromkeys(("num_turns", "input_len", "turn_input_len", "output_len"), parse_drawn("3"))
    return SessionShape(**{**given, "think_time_s": parse_drawn("1"), **changes})


def played(planned, output_of=lambda request: [request.index] * request.output_tokens, fails=()):
    """Send what may be sent until nothing is left, one after the other. Returns what was sent and dropped, by index."""
    turns = Turns(planned)
    ready, sent, dropped, now_s = list(turns.first), {}, {}, 0.0
    while ready:
        request = ready.pop(0)
        sent[request.index] = request
        now_s = max(now_s, request.send_at_s) + 1.0
        output = None if request.index in fails else output_of(request)
        more, never = turns.ended(Ended(request, output, f"text {request.index}"), now_s)
        ready += more
        dropped |= {each.index: each for each in never}
    return sent, dropped


def test_a_turn_has_the_prompt_and_the_output_before_it_and_comes_after_its_gap():
    planned = planned_sessions([Conversation((turn(1, 2), turn(3, gap_s=0.5), turn(4)))], [7.0])
    sent, dropped = played(planned)
    assert [tuple(sent[index].prompt) for index in range(3)] == [(1, 2), (1, 2, 0, 0, 3), (1, 2, 0, 0, 3, 1, 1, 4)]
    assert [sent[index].send_at_s for index in range(3)] == [7.0, 8.5, 9.5]
    assert not dropped


def test_sub_agents_continue_the_first_turn_and_the_second_waits_for_all_of_them():
    session = Conversation((turn(1), turn(5)), (turn(2), turn(3)))
    planned = planned_sessions([session], [0.0])
    assert [(each.turn, each.after, each.continues) for each in planned] == [
        (0, (), None),
        (1, (0,), 0),
        (1, (0,), 0),
        (2, (0, 1, 2), 0),
    ]
    sent, _ = played(planned)
    assert [tuple(sent[index].prompt) for index in (1, 2, 3)] == [(1, 0, 0, 2), (1, 0, 0, 3), (1, 0, 0, 5)]
    assert sent[3].send_at_s == 3.0  # the second sub-agent ends then


@pytest.mark.parametrize("fails", [0, 1])
def test_after_a_failed_turn_those_that_wait_for_it_are_not_sent(fails):
    sessions = [Conversation((turn(1), turn(5), turn(6)), (turn(2),)), Conversation((turn(9), turn(9)))]
    planned = planned_sessions(sessions, [0.0, 0.0], num_users=1)
    sent, dropped = played(planned, fails=[fails])
    assert set(dropped) == ({1, 2, 3} if fails == 0 else {2, 3})
    assert {4, 5} <= set(sent)  # the user's next session


def test_users_have_one_session_after_the_other():
    planned = planned_sessions(
        [Conversation((turn(number), turn(number))) for number in range(5)], [0.0] * 5, num_users=2
    )
    assert [each.after for each in planned if not each.turn] == [(), (), (1,), (3,), (5,)]
    assert longest_s(planned, 10.0) == 60.0  # three sessions of two turns, one after the other


@given(st.integers(0, 10**6), st.sampled_from([None, 1, 3]), st.integers(0, 3))
def test_every_turn_is_sent_or_dropped_once(seed, num_users, num_agents):
    rng = Random(seed)
    sessions = drawn_sessions(4, shape(num_turns=parse_drawn("1-4"), num_agents=num_agents), 50, rng)
    planned = planned_sessions(sessions, [rng.random() for _ in sessions], num_users=num_users)
    fails = {each.index for each in planned if rng.random() < 0.2}
    sent, dropped = played(planned, fails=fails)
    assert sorted([*sent, *dropped]) == list(range(len(planned)))
    for index, request in sent.items():
        before = planned[index].continues
        if before is not None:
            assert before not in fails
            assert tuple(request.prompt) == (
                *sent[before].prompt,
                *[before] * sent[before].output_tokens,
                *planned[index].prompt,
            )


def test_sessions_of_one_seed_are_the_same_and_begin_alike():
    given = shape(num_turns=parse_drawn("2-5"), prefix_len=8, num_agents=2, agent_prefix_len=3)
    sessions = drawn_sessions(6, given, 200, Random(3))
    assert sessions == drawn_sessions(6, given, 200, Random(3)) != drawn_sessions(6, given, 200, Random(4))
    assert len({each.turns[0].prompt[:8] for each in sessions}) == 1
    assert len({each.turns[0].prompt[8:] for each in sessions}) == 6
    for each in sessions:
        one, other = each.agents
        assert one.prompt[:3] == other.prompt[:3]
        assert one.prompt[3:] != other.prompt[3:]


@pytest.mark.parametrize(
    ("text", "least", "mean", "most"),
    [("7", 7, 7, 7), ("2-4", 2, 3, 4), ("exp:5", 0, 5, 100), ("lognormal:10:0.5", 0, 11.33, 200)],
)
def test_distributions(text, least, mean, most):
    rng = Random(1)
    drawn = [parse_drawn(text).draw(rng) for _ in range(20_000)]
    assert least <= min(drawn)
    assert max(drawn) <= most
    assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.03)


@pytest.mark.parametrize("text", ["", "4-2", "-1", "exp:", "normal:3", "1e3", "lognormal:5"])
def test_a_distribution_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match=r"none of N|below its beginning"):
        parse_drawn(text)


def test_what_makes_a_session_too_long_is_left_out():
    session = Conversation((turn(1, 1, 1), turn(2, 2, 2), turn(3)), (turn(4), turn(5, 5, 5, 5, 5)))
    (fitted,), num_clipped = fit_sessions([session], 10)
    assert fitted == Conversation((turn(1, 1, 1), turn(2, 2, 2)), (turn(4),))
    assert num_clipped == 2
    (fitted,), num_clipped = fit_sessions([Conversation((turn(*range(20)), turn(1)))], 10)
    assert (len(fitted.turns[0].prompt), len(fitted.turns), num_clipped) == (8, 1, 2)


# ---- files ----


def words(text):
    return [len(word) for word in text.split()]


def read(path, lines, encode=words):
    path.write_text("".join(f"{json.dumps(each)}\n" for each in lines) if isinstance(lines, list) else lines)
    return read_sessions(path, 9, 100, 0, encode)


def test_conversations_of_vllm(tmp_path):
    said = [("system", "be brief"), ("user", "hi there"), ("assistant", "good day to you"), ("user", "bye")]
    entry = {"id": "a", "messages": [{"role": role, "content": content} for role, content in said]}
    (session,) = read(tmp_path / "it.json", json.dumps([entry]))
    assert session.turns == (Turn((2, 5, 2, 5), 4, 0.0, "be brief\nhi there"), Turn((3,), 9, 0.0, "bye"))


def test_sessions_and_turns_a_line(tmp_path):
    turns = [{"text": "one two", "output_length": 3}, {"input_length": 5, "delay": 1500}]
    as_sessions = read(
        tmp_path / "sessions", [{"session_id": "a", "turns": turns}, {"session_id": "b", "turns": turns}]
    )
    a_line = [{"session_id": name, **each} for each in turns for name in "ab"]
    as_turns = read(tmp_path / "turns", a_line)
    assert as_sessions == as_turns
    first, second = as_sessions[0].turns
    assert first == Turn((3, 3), 3, 0.0, "one two")
    assert (len(second.prompt), second.output_tokens, second.gap_s) == (5, 9, 1.5)


def test_times_of_turns_are_gaps_when_there_is_no_delay(tmp_path):
    lines = [{"session_id": "a", "input_length": 1, "timestamp": at_ms} for at_ms in (5000, 5250, 7250)]
    (session,) = read(tmp_path / "it", lines)
    assert [each.gap_s for each in session.turns] == [0.0, 0.25, 2.0]


def test_a_trace_goes_on_where_its_blocks_do():
    """512 tokens a block; the third request continues the first one, the last one the second."""
    traced = [
        TracedRequest(0.0, 1100, 50, (1, 2, 3)),
        TracedRequest(1.0, 1100, 50, (1, 7, 8)),
        TracedRequest(5.0, 1400, 20, (1, 2, 4)),
        TracedRequest(9.0, 1151, 20, (1, 7, 9)),
    ]
    sessions = sessions_of_trace(traced, 1000, 0)
    assert [[len(each.prompt) for each in session.turns] for session in sessions] == [[1100, 250], [1100, 1]]
    assert [session.turns[1].gap_s for session in sessions] == [5.0, 8.0]
    assert sessions[0].turns[0].prompt[:512] == sessions[1].turns[0].prompt[:512]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([{"session_id": "a"}], "line 1: turn cannot be"),
        ([{"session_id": "a", "input_length": 4, "delay": -1}], "line 1: turn cannot be"),
        ([{"session_id": "a", "turns": 3}], "line 1: turns cannot be"),
        ([{"input_length": 4}], "line 1: a turn has a session_id"),
        ("[3]", "entry 1: messages cannot be"),
        ('[{"messages": [{"role": "user"}]}]', "entry 1: content cannot be"),
        ("[", "no JSON"),
        ("", "a turn has a session_id"),
    ],
)
def test_a_file_that_has_no_sessions_is_refused(tmp_path, lines, said):
    with pytest.raises(BenchError, match=said):
        read(tmp_path / "it", lines)


def test_texts_need_a_tokenizer(tmp_path):
    with pytest.raises(BenchError, match="--tokenizer"):
        read(tmp_path / "it", [{"session_id": "a", "text": "hi"}], None)


# ---- servers ----


def two_turns():
    return planned_sessions([Conversation((turn(1, 2, output_tokens=3), turn(4)))], [0.0])


async def test_what_a_server_has_sent_is_sent_back_over_grpc():
    script = Script()
    async with grpc_server(script) as target:
        outcomes = await send_here(target, two_turns())
    assert [each["prompt"] for each in script.asked] == [[1, 2], [1, 2, 7, 7, 7, 4]]
    assert [(each.session, each.turn, each.decode_node, each.error) for each in outcomes] == [
        (0, 0, "d", ""),
        (0, 1, "d", ""),
    ]


@pytest.mark.parametrize("with_token_ids", [True, False])
async def test_what_a_server_has_sent_is_sent_back_over_http(with_token_ids):
    script = Script()
    async with http_server(script, with_token_ids=with_token_ids) as target:
        outcomes = await send_here(target, two_turns())
    assert script.asked[0]["return_token_ids"] is True
    if with_token_ids:
        assert [each["prompt"] for each in script.asked] == [[1, 2], [1, 2, 7, 7, 7, 4]]
        assert [each.error for each in outcomes] == ["", ""]
    else:
        assert "return_token_ids" in outcomes[0].error
        assert "not sent" in outcomes[1].error


def test_chats_send_the_messages_before():
    target = Target("openai", "http://127.0.0.1:1", "/v1/chat/completions")
    before = PlannedRequest(0, 0.0, (1,), 4, text="hi", session=0)
    reply = Reply(before, lambda: 0.0)
    for content in ("go", "od"):
        take_event(json.dumps({"choices": [{"delta": {"content": content}, "finish_reason": None}]}), 0.0, reply)
    later = PlannedRequest(1, 0.0, (2,), 4, text="bye", session=0, turn=1, after=(0,), continues=0)
    (ready,), _ = Turns([before, later]).ended(Ended(before, [], reply.text), 0.0)
    body = json.loads(open_backend(target).prepare(ready))
    assert body["messages"] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "good"},
        {"role": "user", "content": "bye"},
    ]


def test_a_turn_is_the_same_after_it_was_written_and_read():
    request = planned_sessions([Conversation((turn(1), turn(5)), (turn(2),))], [1.0])[-1]
    assert replace(unpack_request(pack_request(request)), prompt=request.prompt) == request


# ---- simulated fleets ----


def simulated(size, sessions, starts_s=None, **options):
    planned = planned_sessions(sessions, starts_s or [0.0] * len(sessions))
    return simulate(PROFILE, size, planned, max_concurrency=None, request_timeout_s=200.0, **options).outcomes


@pytest.mark.parametrize("size", [FleetSize(1, 1), FleetSize(0, 0, 2), FleetSize(2, 2)], ids=str)
def test_later_turns_find_the_blocks_of_those_before(size):
    given = shape(
        num_turns=parse_drawn("3"), input_len=parse_drawn("200"), turn_input_len=parse_drawn("40"), num_agents=2
    )
    sessions = drawn_sessions(3, given, VOCAB_SIZE, Random(0))
    outcomes = simulated(size, sessions, [0.0, 1.0, 2.0])
    assert not any(each.error for each in outcomes)
    for each in outcomes:
        if each.turn:
            assert each.num_cached_tokens >= 200 // BLOCK_SIZE * BLOCK_SIZE
    figures = session_figures(summarize(outcomes, Limits()))
    assert [each.num for each in figures.turns] == [3, 6, 3, 3]
    assert figures.num_good == 3
    assert 0 < figures.later.cached_share < 1


def test_the_turns_of_a_refused_one_are_not_sent():
    tiny = replace(PROFILE, node=replace(PROFILE.node, max_model_len=30))
    planned = planned_sessions([Conversation((turn(*range(1, 21)), turn(*range(1, 21)), turn(1)))], [0.0])
    outcomes = simulate(tiny, FleetSize(1, 1), planned, max_concurrency=None, request_timeout_s=9.0).outcomes
    assert [bool(each.error) for each in outcomes] == [False, True, True]
    assert "not sent" in outcomes[2].error


# ---- figures and commands ----


def test_figures_of_two_sessions_by_hand():
    common = {"num_prompt_tokens": 10, "session": 0, "decode_node": "a"}
    outcomes = [
        answered(0, 0.0, (1.0, 2.0), num_cached_tokens=0, **common),
        answered(1, 5.0, (5.5, 6.0), num_cached_tokens=6, turn=1, **common),
        answered(2, 0.0, (0.5, 1.0), num_cached_tokens=0, **common | {"session": 1}),
        answered(3, 5.0, (8.0, 9.0), num_cached_tokens=4, turn=1, **common | {"session": 1, "decode_node": "b"}),
        failed(4, 1.0, 2.0, session=2),
    ]
    figures = session_figures(summarize(outcomes, Limits(ttft_s=1.0)))
    assert (figures.num, figures.num_complete, figures.num_good) == (3, 2, 1)
    assert figures.completion_s.values == (6.0, 9.0)
    assert figures.goodput_per_s == pytest.approx(1 / 9)
    assert [(each.num, each.num_good) for each in figures.turns] == [(3, 2), (2, 1)]
    assert (figures.later.cached_share, figures.later.same_node_share) == (0.5, 0.5)
    assert figures.later.ttft_s.median == 1.75
    assert session_figures(summarize(outcomes[:0], Limits())) is None


async def test_bench_serve_with_sessions(serve_here):
    async with grpc_server(Script()) as target:
        sizes = ["--random-input-len", "9", "--random-output-len", "2", "--turn-input-len", "3"]
        asked = ["--dataset-name", "sessions", "--num-prompts", "4", "--num-turns", "2", "--think-time-s", "0"]
        out, _ = await serve_here(target, *asked, *sizes, "--num-users", "2", "--goodput", "ttft:60000", "--json")
        shown, _ = await serve_here(target, *asked, *sizes, "--num-users", "2", "--goodput", "ttft:60000")
    figures = json.loads(out)["sessions"]
    assert (figures["num"], figures["good"], len(figures["turns"])) == (4, 4, 2)
    assert "4 sessions, 4 complete, 4 good in all turns" in shown
    assert "after the first" in shown


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--num-agents", "2"], "--num-agents is of --dataset-name sessions"),
        (
            ["--dataset-name", "sessions", "--stages", "1x2", "--goodput", "ttft:5"],
            "--dataset-name sessions does not go",
        ),
    ],
)
def test_flags_that_do_not_go_with_sessions(flags, said):
    ended = CliRunner().invoke(main, ["bench", "serve", *flags])
    assert ended.exit_code
    assert said in str(ended.output)


def test_a_wrong_distribution_is_refused_by_its_flag():
    ended = CliRunner().invoke(serve_command, ["--num-turns", "some"])
    assert ended.exit_code == 2
    assert "none of N, LOW-HIGH" in ended.output
    assert serve_options(num_turns="2").dataset.num_turns == "2"


# ---- requests that begin alike ----


def alike(count, gap_s, num_shared=1600, num_own=32, start_s=30.0):
    """`count` requests with a long common beginning, after others that have had every node report blocks."""
    rng = Random(2)

    def draw(num):
        return tuple(rng.randrange(VOCAB_SIZE) for _ in range(num))

    others = [PlannedRequest(index, 0.0, draw(200), 8) for index in range(12)]
    common = draw(num_shared)
    together = [
        PlannedRequest(len(others) + index, start_s + index * gap_s, (*common, *draw(num_own)), 8)
        for index in range(count)
    ]
    return others, together


def num_computed(outcomes):
    assert not any(each.error for each in outcomes)
    return sum(each.num_prompt_tokens - each.num_cached_tokens for each in outcomes)


@pytest.mark.parametrize("gap_s", [0.0, 0.2])
@pytest.mark.parametrize(("size", "most_times"), [(FleetSize(3, 3), 1), (FleetSize(4, 1), 1), (FleetSize(0, 0, 4), 2)])
def test_what_several_have_in_common_is_computed_once(size, most_times, gap_s):
    """By one prefill node; of mixed nodes, which decode meanwhile, a second may compute it too."""
    others, together = alike(8, gap_s)
    planned = [*others, *together]
    outcomes = simulate(PROFILE, size, planned, max_concurrency=None, request_timeout_s=99.0).outcomes[len(others) :]
    assert num_computed(outcomes) <= most_times * 1600 + 8 * (32 + BLOCK_SIZE)


@pytest.mark.parametrize("size", [FleetSize(3, 3), FleetSize(0, 0, 2)], ids=str)
@pytest.mark.parametrize("after_s", [0.01, 0.7, 1.5])
def test_one_that_is_cancelled_hurts_none_of_those_that_share_its_beginning(size, after_s):
    """It is the one that computes the beginning: what it has computed is not computed again."""
    others, together = alike(6, 0.0)
    agenda, model = Agenda(), ToyModel(VOCAB_SIZE)
    options = {"api_server_s": 0.0, "max_concurrency": None, "request_timeout_s": 99.0}
    clients = LoadClients(agenda, [*others, *together], model=model, **options)
    fleet = Fleet(agenda, clients, PROFILE.node, model, size.settings)
    start_nodes(fleet, [(*node, PROFILE) for node in size.nodes()])
    clients.start(fleet.coordinator)
    first = together[0].index
    agenda.at(30.0 + after_s, lambda: abort(fleet.coordinator, f"{first}/0", agenda.now))
    agenda.run(lambda: clients.is_over)
    outcomes = clients.outcomes[first + 1 :]
    assert [each.num_output_tokens for each in outcomes] == [8] * 5
    chunk_tokens = PROFILE.node.max_num_batched_tokens
    assert num_computed(outcomes) <= (1600 + chunk_tokens) * (1 + (size.mixed > 0)) + 5 * (32 + BLOCK_SIZE)
