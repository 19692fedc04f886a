"""The commands, against a real gRPC server whose answers the test writes, and as real processes."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading

import click
import grpc
import pytest
from click.testing import CliRunner

from protos import inference_pb2
from splitserve.cli import COMMANDS, main
from splitserve.commands.terminal import duration_of
from splitserve.commands.variables import unknown_variables
from tests.scripted_server import Script, chunk, complete, refusal, serving

DEADLINE_S = 240.0
TIMELINE = inference_pb2.Timeline(
    prefill_queue_s=0.001,
    prefill_s=0.5,
    transfer_s=0.1,
    decode_s=0.4,
    e2e_s=1.001,
    ttft_s=0.51,
    prefill_node="p0",
    decode_node="d0",
)


@pytest.fixture
def script():
    script = Script()
    script.replies = [
        chunk("Par", 0, [7]),
        chunk("is", 1, [8]),
        complete(prompt_tokens=5, completion_tokens=2, timeline=TIMELINE),
    ]
    return script


@pytest.fixture
def run(script):
    with serving(script) as target:
        yield lambda *arguments, **options: CliRunner().invoke(
            main, [*arguments], env={"SPLITSERVE_SERVER": target}, **options
        )


def test_generate_prints_the_answer_alone_on_stdout(run):
    result = run("generate", "Capital of France?")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "Paris\n", "")


def test_generate_asks_with_the_chat_template_unless_told_otherwise(run, script):
    run("generate", "hi")
    run("generate", "hi", "--raw")
    assert [request.WhichOneof("input") for request in script.requests] == ["chat", "text"]


def test_every_sampling_flag_reaches_the_server(run, script):
    flags = "--temperature 0 --top-p 0.5 --top-k 3 --min-p 0.1 --frequency-penalty 1 --presence-penalty -1"
    flags += (
        " --repetition-penalty 1.5 --max-tokens 9 --min-tokens 2 --stop a --stop b --stop-token-ids 4 --no-ignore-eos"
    )
    flags += " --skip-special-tokens --n 1 --logprobs 0 --seed 11 --include-stop-str-in-output --logit-bias 3=-1.5"
    flags += " --bad-words no --bad-words never --bad-tokens 4 --bad-tokens 5,6 --logprob-token-ids 7"
    assert run("generate", "hi", *flags.split()).exit_code == 0
    expected = inference_pb2.SamplingParams(
        temperature=0,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        frequency_penalty=1,
        presence_penalty=-1,
        repetition_penalty=1.5,
        max_tokens=9,
        min_tokens=2,
        stop=["a", "b"],
        stop_token_ids=[4],
        skip_special_tokens=True,
        ignore_eos=False,
        n=1,
        logprobs=0,
        seed=11,
        include_stop_str_in_output=True,
        logit_bias={3: -1.5},
        bad_words=["no", "never"],
        bad_tokens=[{"input_ids": [4]}, {"input_ids": [5, 6]}],
        logprob_token_ids=[7],
    )
    assert script.requests[0].sampling_params == expected


@pytest.mark.parametrize(
    ("command", "flags", "max_tokens"),
    [
        (["generate", "hi"], [], 256),
        (["generate", "hi"], ["--max-tokens", "9"], 9),
        (["generate", "hi"], ["--min-tokens", "300"], 300),
        (["generate", "hi", "--json"], [], 256),
        (["chat"], [], 512),
        (["chat"], ["--max-tokens", "9"], 9),
    ],
)
def test_answers_have_a_limit(run, script, command, flags, max_tokens):
    run(*command, *flags, input="hi")
    assert [request.sampling_params.max_tokens for request in script.requests] == [max_tokens]


@pytest.mark.parametrize("command", [["generate", "hi"], ["chat"]])
def test_an_answer_may_take_as_long_as_its_user_says(run, script, command):
    for flags in ([], ["--deadline", "100000"]):
        assert run(*command, *flags, input="hi\n").exit_code == 0
    unless_told, told = script.left_s
    assert unless_told < 1000 < told
    assert "[default: 600.0; x>0]" in " ".join(run(command[0], "--help").output.split())


def too_long(field):
    return refusal(grpc.StatusCode.INVALID_ARGUMENT, f"{field} is too large", "BAD_PARAM", field=field)


def test_the_commands_own_limit_gives_way_to_the_context(run, script):
    script.failures = [too_long("max_tokens")]
    result = run("generate", "hi")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "Paris\n", "")
    assert [request.sampling_params.HasField("max_tokens") for request in script.requests] == [True, False]


@pytest.mark.parametrize(("flags", "field"), [(["--max-tokens", "256"], "max_tokens"), ([], "temperature")])
def test_a_refusal_of_what_the_user_asked_for_is_told(run, script, flags, field):
    script.failures = [too_long(field)]
    result = run("generate", "hi", *flags)
    assert (result.exit_code, result.stderr) == (1, f"Error: {field} is too large\n")
    assert len(script.requests) == 1


LENGTH, ABORT = inference_pb2.FINISH_REASON_LENGTH, inference_pb2.FINISH_REASON_ABORT
CUT = "The answer is cut off after "
ENDINGS = {
    "its own end": ({"matched_token_id": 3}, None),
    "no reason told": ({}, None),
    "a stop string": ({"matched_stop_str": "\n"}, "Stopped at the stop string '\\n' (--stop)."),
    "a stop token": ({"matched_token_id": 7}, "Stopped at token 7 (--stop-token-ids)."),
    "the limit": (
        {"finish_reason": LENGTH, "prompt_tokens": 5, "completion_tokens": 20},
        f"{CUT}20 tokens: --max-tokens raises this limit.",
    ),
    "the context": (
        {"finish_reason": LENGTH, "prompt_tokens": 2030, "completion_tokens": 18},
        f"{CUT}18 tokens: with the prompt's 2030 tokens it fills the context of 2048 (--max-model-len of the server).",
    ),
    "the nodes": (
        {"finish_reason": LENGTH, "prompt_tokens": 99, "completion_tokens": 1},
        f"{CUT}1 token: with the prompt's 99 tokens it fills the KV cache of the server's nodes "
        "(their --kv-cache-memory-bytes).",
    ),
    "an abort": (
        {"finish_reason": ABORT, "completion_tokens": 4},
        "The answer was ended after 4 tokens: its request was aborted.",
    ),
}


@pytest.mark.parametrize(("fields", "said"), ENDINGS.values(), ids=ENDINGS.keys())
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_why_an_answer_stopped_is_told_beside_it(run, script, command, fields, said):
    script.replies[-1] = complete(**fields)
    result = run(command, *(["hi"] if command == "generate" else []), "--max-tokens", "20", input="hi\n")
    told = [line for line in result.stderr.splitlines() if "Ctrl-C" not in line]
    assert told == ([said] if said else [])
    assert "Paris\n" in result.stdout
    assert CUT not in result.stdout


def test_of_several_answers_each_tells_why_it_stopped(run, script):
    script.replies = [complete(), complete(index=1, finish_reason=LENGTH, completion_tokens=20)]
    result = run("generate", "hi", "--n", "2", "--max-tokens", "20")
    assert result.stderr == f"Answer 2: {CUT}20 tokens: --max-tokens raises this limit.\n"


def test_several_answers_tell_why_in_their_order_whichever_ended_first(run, script):
    script.replies = [complete(index=index, finish_reason=LENGTH, completion_tokens=20) for index in (1, 0)]
    lines = run("generate", "hi", "--n", "2", "--max-tokens", "20").stderr.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["Answer 1", "Answer 2"]


def test_with_json_the_reason_is_in_the_object_alone(run, script):
    script.replies[-1] = complete(finish_reason=LENGTH, completion_tokens=20)
    result = run("generate", "hi", "--json", "--max-tokens", "20")
    assert json.loads(result.stdout.splitlines()[-1])["completion"]["finish_reason"] == "length"
    assert result.stderr == ""


@pytest.mark.parametrize("newline", ["", "\n"])
def test_a_dash_reads_the_prompt_from_stdin(run, script, newline):
    assert run("generate", "-", "--raw", input=f"Größe:\n\tx\n{newline}").exit_code == 0
    assert [request.text for request in script.requests] == [f"Größe:\n\tx{newline}"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (b"", "stdin is empty"),
        (b"\n", "stdin is empty"),
        (b"abc\xff", "stdin is no UTF-8 text: invalid start byte at byte 3"),
        (b"x" * 4 * 2**20, "stdin has more than 3.9 MiB, the most that a prompt may have"),
    ],
)
def test_what_is_no_prompt_on_stdin(run, script, given, message):
    result = run("generate", "-", input=given)
    assert result.exit_code == 2
    assert message in result.stderr
    assert script.requests == []


def test_generate_json_is_one_object_a_line_with_usage_and_timeline_last(run):
    result = run("generate", "hi", "--json")
    first, second, last = (json.loads(line) for line in result.stdout.splitlines())
    assert (first["text"], first["token_ids"], first["completion"]) == ("Par", [7], None)
    assert (second["text"], second["first_token_index"]) == ("is", 1)
    assert last["completion"]["completion_tokens"] == 2
    assert last["completion"]["finish_reason"] == "stop"
    assert last["completion"]["timeline"]["transfer_s"] == 0.1


def test_the_timeline_is_a_table_and_a_bar_in_proportion(run):
    shown = run("generate", "hi", "--timeline").stderr
    rows = {re.sub(r"^\W*", "", line).split("  ")[0]: line.split() for line in shown.splitlines()}
    assert rows["prefill"][-3:] == ["500.0", "50%", "p0"]
    assert rows["transfer"][-5:] == ["100.0", "10%", "p0", "→", "d0"]
    assert rows["decode"][-3:] == ["400.0", "40%", "d0"]
    assert "1001.0" in rows["end to end"]
    assert "first after 510.0 ms" in shown
    bar = shown.splitlines()[-1]
    assert [bar.count(mark) for mark in "█▓▒"] == [30, 6, 24]


@pytest.mark.parametrize(
    ("figures", "line"),
    [
        ({}, None),
        ({"cached_tokens": 32}, "44 prompt tokens, 32 of them cached"),
        ({"kv_bytes": 1023}, "1023 B of KV sent"),
        ({"kv_bytes_saved": 3 * 2**30}, "0 B of KV sent, 3.0 GiB saved"),
        (
            {"cached_tokens": 32, "kv_bytes": 1258291, "kv_bytes_saved": 838861},
            "44 prompt tokens, 32 of them cached · 1.2 MiB of KV sent, 819.2 KiB saved",
        ),
        ({"kv_bytes": 512, "proposed_tokens": 9, "accepted_tokens": 4}, "512 B of KV sent · 4 of 9 candidates came"),
    ],
)
def test_a_line_tells_what_was_cached_and_sent_if_anything_was(run, script, figures, line):
    script.replies = [complete(prompt_tokens=44, timeline=TIMELINE, **figures)]
    shown = [line.strip() for line in run("generate", "hi", "--timeline").stderr.splitlines()]
    assert [text for text in shown if "cached" in text or "KV" in text] == ([line] if line else [])


def test_the_timeline_tells_of_moves_if_there_were_any(run, script):
    timeline = inference_pb2.Timeline(e2e_s=1.0, num_moves=2, move_pause_s=0.0125)
    script.replies = [complete(timeline=timeline, kv_bytes=3 * 2**20, moved_kv_bytes=2**20)]
    shown = run("generate", "hi", "--timeline").stderr
    assert "  3.0 MiB of KV sent · moved 2 times (1.0 MiB of it, paused for 12.5 ms)\n" in shown
    script.replies = [complete(timeline=TIMELINE, kv_bytes=3 * 2**20)]
    assert "moved" not in run("generate", "hi", "--timeline").stderr


def test_the_timeline_tells_of_calls_that_broke_off(run, script):
    gone = refusal(grpc.StatusCode.UNAVAILABLE, "the server has stopped", "DRAINING")
    script.replies, script.broken_off = [chunk("Par", 0, [7])], gone
    shown = run("generate", "hi", "--timeline", "--no-resume").stderr
    assert shown.splitlines()[-1] == "Error: the server has stopped"
    whole = [chunk("is", 1, [8]), complete(timeline=TIMELINE, completion_tokens=2, resumed_tokens=1)]
    script.replies, script.broken_off, script.later = [chunk("Par", 0, [7])], gone, whole
    result = run("generate", "hi", "--timeline")
    assert result.stdout == "Paris\n"
    assert "2 tokens, call 2 after 1 tokens" in result.stderr


def test_drain_tells_what_is_left_and_ends_with_one_line(run, script):
    script.drained = [2, 1, 1, 0]
    result = run("drain", "decode-0")
    assert (result.exit_code, result.stdout) == (0, "decode-0 is drained: it has no part in any answer\n")
    assert result.stderr.splitlines() == [
        "Asking decode-0 to drain",
        "decode-0 drains: 2 answers left",
        "decode-0 drains: 1 answer left",
        "decode-0 drains: 0 answers left",
    ]
    assert script.requests[-1] == inference_pb2.DrainRequest(node="decode-0")


def test_a_drain_that_is_refused_is_one_sentence(run, script):
    sentence = "node decode-0 cannot drain: no other node writes answers"
    script.failures = [refusal(grpc.StatusCode.FAILED_PRECONDITION, sentence, "NO_OTHER_NODE")]
    result = run("drain", "decode-0")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.splitlines() == ["Asking decode-0 to drain", f"Error: {sentence}"]


@pytest.mark.parametrize("command", [("drain", "decode-0"), ("role", "decode-0", "decode")])
def test_what_operators_ask_brings_their_key_before_any_other(run, script, monkeypatch, tmp_path, command):
    def key_with(*flags):
        run(*command, "--api-key", "client", *flags)
        return dict(script.metadata[-1])["authorization"].removeprefix("Bearer ")

    file = tmp_path / "key"
    file.write_text("in-file\n")
    assert key_with() == "client"
    assert key_with("--admin-key", "admin") == "admin"
    assert key_with("--admin-key-file", str(file)) == "in-file"
    monkeypatch.setenv("SPLITSERVE_ADMIN_KEY", "in-environment")
    assert key_with() == "in-environment"


def test_a_salt_reaches_the_server(run, script):
    run("generate", "hi", "--cache-salt", "tenant")
    run("generate", "hi")
    assert [request.cache_salt for request in script.requests] == ["tenant", ""]


def test_an_adapter_is_asked_for_as_a_model(run, script):
    run("generate", "hi", "--model", "org/sql")
    run("generate", "hi")
    run("chat", "--model", "org/sql", input="hello\n")
    assert [request.model for request in script.requests] == ["org/sql", "", "org/sql"]


def test_several_answers_are_shown_one_after_the_other(run, script):
    other = chunk("Lyon", 0, [9])
    other.index = 1
    script.replies = [chunk("Par"), other, chunk("is"), complete()]
    assert run("generate", "hi", "--n", "2").stdout == "Paris\n--- answer 2\nLyon\n"


def test_a_refusal_is_one_sentence(run, script):
    script.failures = [refusal(grpc.StatusCode.INVALID_ARGUMENT, "temperature must be at least 0", "BAD_PARAM")]
    result = run("generate", "hi", "--temperature", "-1")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "Error: temperature must be at least 0\n"


@pytest.mark.parametrize("command", [["generate", "hi"], ["status"], ["chat"]])
def test_no_server_is_one_sentence(command):
    result = CliRunner().invoke(main, [*command, "--server", "127.0.0.1:1"])
    assert result.exit_code == 1
    assert result.stderr == "Error: no server answers at 127.0.0.1:1; start one with: splitserve up\n"


def test_status_shows_nodes_and_load(run):
    result = run("status")
    assert result.exit_code == 0
    assert "1 live request," in result.stdout
    titles = [re.split(" {2,}", line.rstrip()) for line in result.stdout.splitlines() if line.startswith("node")]
    assert titles == [
        ["node", "role", "state", "running", "waiting", "step ms", "prefill tok/s", "TP", "MiB", "shape", "attention"],
        ["node", "blocks used", "blocks cached", "tokens cached", "KV moved", "failed"],
    ]
    rows = [line.split() for line in result.stdout.splitlines()]
    assert [row for row in rows if row[:1] == ["p0"]] == [
        ["p0", "prefill", "ready", "0", "0", "500.0", "1234", "2", "17", "512", "tokens"],
        ["p0", "1/8", "5", "25%", "1.5", "MiB", "4"],
    ]
    assert [row for row in rows if row[:1] == ["d0"]] == [
        ["d0", "decode", "draining", "0", "0", "-", "-", "1", "0", "64", "seats"],
        ["d0", "0/6", "0", "-", "0", "B", "0"],
    ]


def test_status_shows_how_limits_are_kept(run):
    rows = [line.split() for line in run("status").stdout.splitlines()]
    assert [row for row in rows if row[:1] == ["chat"]] == [["chat", "ttft:500", "8", "62.5%", "87.5%", "75.0%"]]


def test_limits_reach_the_server_and_the_timeline_tells_what_became_of_them(run, script):
    attainment = inference_pb2.Attainment(ttft_ms=500, tpot_ms=7.5, ttft_met=True, tpot_met=False)
    script.replies = [complete(timeline=TIMELINE, attainment=attainment)]
    result = run("generate", "hi", "--ttft-ms", "500", "--tpot-ms", "7.5", "--slo-class", "chat", "--timeline")
    (request,) = script.requests
    assert (request.ttft_ms, request.tpot_ms, request.slo_class) == (500.0, 7.5, "chat")
    assert "  TTFT within 500 ms: kept · TPOT within 7.5 ms: missed\n" in result.stderr


def test_a_priority_reaches_the_server(run, script):
    for words in (["--priority", "-3"], ["--priority=0"], []):
        assert run("generate", "hi", *words).exit_code == 0
    found = [(request.priority, request.HasField("priority")) for request in script.requests]
    assert found == [(-3, True), (0, True), (0, False)]


def test_status_shows_the_memory_of_each_rank_where_there_are_several(run):
    ranks = [line.split() for line in run("status").stdout.splitlines() if "rank" in line]
    assert [" ".join(words) for words in ranks] == [
        "rank 0 9 KV pool 1.0 MiB, weights 3.0 MiB",
        "rank 1 8 KV pool 0 B, weights 0 B",
    ]


def test_status_tells_of_nodes_whose_answers_may_differ_in_bits(run, script):
    [p0] = script.nodes
    script.nodes.append(inference_pb2.NodeInfo(name="p1", traits=p0.traits))
    assert "unlike" not in run("status").stdout
    script.nodes.append(inference_pb2.NodeInfo(name="d0", traits={"cpu": "avx512_f"}))
    assert "unlike nodes, whose answers may differ in bits: p0, p1 | d0\n" in run("status").stdout


def test_status_tells_the_sampling_defaults_in_force(run):
    lines = run("status").stdout.splitlines()
    assert lines[1] == "defaults: temperature 0.2, top_p 0.9, top_k 0"


@pytest.mark.parametrize(
    ("arguments", "asked", "said"),
    [
        ("both", {"role": "both"}, "d0 is both now: 512 tokens + 64 seats"),
        ("prefill --prompt-tokens 9", {"shape": {"prompt_tokens": 9}}, "d0 is prefill now: 9 tokens"),
        (
            "both --prompt-tokens 9 --seats 3",
            {"shape": {"prompt_tokens": 9, "seats": 3, "takes_handovers": True}},
            "d0 is both now: 9 tokens + 3 seats",
        ),
        ("decode --seats 3 --no-takes-handovers", {"shape": {"seats": 3}}, "d0 is decode now: 3 seats, no hand-overs"),
    ],
)
def test_role_asks_for_a_role_or_for_a_shape(run, script, arguments, asked, said):
    result = run("role", "d0", *arguments.split(), "--api-key", "k")
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{said}\n", "")
    shape = inference_pb2.Shape(**asked.pop("shape")) if "shape" in asked else None
    assert script.requests == [inference_pb2.SetRoleRequest(node="d0", shape=shape, **asked)]
    assert script.metadata[0]["authorization"] == "Bearer k"


def test_the_key_may_be_in_a_file(run, script, tmp_path):
    file = tmp_path / "key"
    file.write_text("k\n")
    assert run("role", "d0", "both", "--api-key-file", str(file)).exit_code == 0
    assert script.metadata[0]["authorization"] == "Bearer k"
    result = run("role", "d0", "both", "--api-key-file", str(file), "--api-key", "k")
    assert result.stderr.endswith("Error: --api-key and --api-key-file are both given: one is enough\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("both --seats 3", "--prompt-tokens must be given too for the role both"),
        ("both --no-takes-handovers", "--prompt-tokens must be given too for the role both"),
        ("decode --prompt-tokens 3", "--prompt-tokens must not be given for the role decode"),
        ("prefill --prompt-tokens 3 --seats 3", "--seats must not be given for the role prefill"),
    ],
)
def test_a_shape_that_is_not_all_there_is_one_sentence(run, script, arguments, message):
    result = run("role", "d0", *arguments.split())
    assert (result.exit_code, result.stderr) == (2, f"Error: {message}\n")
    assert script.requests == []


def test_what_the_server_says_of_a_role_that_cannot_be_is_what_the_command_says(run, script):
    message = "node d0 is the last one that writes answers"
    script.failures = [refusal(grpc.StatusCode.FAILED_PRECONDITION, message, "NO_OTHER_NODE")]
    result = run("role", "d0", "prefill")
    assert (result.exit_code, result.stderr) == (1, f"Error: {message}\n")


WIRE = {
    "model": inference_pb2.GetModelInfoResponse,
    "server": inference_pb2.GetServerInfoResponse,
    "loads": inference_pb2.GetLoadsResponse,
}


def check_status(line):
    """The keys are those of the wire, which are never changed."""
    shown = json.loads(line)
    assert list(shown) == list(WIRE)
    for part, message in WIRE.items():
        assert set(shown[part]) == {field.name for field in message.DESCRIPTOR.fields}
    for node, message in ((shown["server"], inference_pb2.NodeInfo), (shown["loads"], inference_pb2.NodeLoad)):
        assert set(node["nodes"][0]) == {field.name for field in message.DESCRIPTOR.fields}
    assert shown["model"]["default_sampling_params"] == {"temperature": 0.2, "top_p": 0.9, "top_k": 0}
    assert shown["loads"]["nodes"][0]["rss_bytes"] == 17 * 2**20


def test_status_json_is_one_object_with_the_keys_of_the_wire(run):
    [line] = run("status", "--json").stdout.splitlines()
    check_status(line)


@pytest.fixture
def watching():
    """Starts a `status` that watches; it does not outlive the deadline, so a test that waits for it ends."""
    started = []

    def start(target, *flags):
        command = [sys.executable, "-m", "splitserve", "status", "--server", target, *flags]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        timer = threading.Timer(DEADLINE_S, process.kill)
        timer.start()
        started.append((process, timer))
        return process

    yield start
    for process, timer in started:
        timer.cancel()
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("flags", "mark"), [(["--json"], '"loads"'), ([], "defaults: temperature")])
def test_status_watch_shows_it_again_and_outlives_the_server(script, watching, flags, mark):
    with serving(script) as target:
        process = watching(target, "--watch", "0.1", *flags)
        views = (line for line in process.stdout if mark in line)
        assert all(mark in next(views) for _ in range(3))
    output = process.stderr if flags else process.stdout
    assert any("no server answers" in line or "was lost" in line for line in output)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE_S) != 0


@pytest.mark.parametrize("value", ["0", "soon"])
def test_status_watch_takes_seconds(run, value):
    result = run("status", "--watch", value)
    assert result.exit_code == 2
    assert "--watch" in result.stderr


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.4, "0 s"), (59.0, "59 s"), (61.9, "1 min 1 s"), (7500, "2 h 5 min"), (90_000.0, "1 d 1 h")],
)
def test_durations_are_in_units_that_people_read(seconds, shown):
    assert duration_of(seconds) == shown


def test_chat_keeps_the_conversation(run, script):
    result = run("chat", "--system", "Be brief.", input="Hello?\n\nAnd?\n")
    assert result.exit_code == 0
    assert result.stdout.count("Paris") == 2
    first, second = ([(m.role, m.content) for m in request.chat.messages] for request in script.requests)
    assert first == [("system", "Be brief."), ("user", "Hello?")]
    assert second == [*first, ("assistant", "Paris"), ("user", "And?")]


def test_chat_goes_on_after_a_refusal(run, script):
    script.failures = [refusal(grpc.StatusCode.INVALID_ARGUMENT, "the prompt is too long", "PROMPT_TOO_LONG")]
    result = run("chat", input="One\nTwo\n")
    assert "the prompt is too long" in result.stderr
    assert [message.content for message in script.requests[1].chat.messages] == ["Two"]


@pytest.fixture
def terminal():
    """Starts a command on a pseudo-terminal of its own."""
    master, slave = pty.openpty()
    started = []

    def start(*arguments):
        command = [sys.executable, "-m", "splitserve", *arguments]
        started.append(subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave))
        return started[0], master

    yield start
    for process in started:
        process.kill()
        process.wait()
    os.close(master)
    os.close(slave)


def read_until(master: int, text: bytes) -> bytes:
    shown = b""
    while text not in shown:
        assert select.select([master], [], [], DEADLINE_S)[0], f"{text!r} never came after {shown!r}"
        shown += os.read(master, 4096)
    return shown


def test_ctrl_c_stops_the_answer_and_the_chat_goes_on(script, terminal):
    script.replies = []
    script.endless = True
    with serving(script) as target:
        chat, master = terminal("chat", "--server", target)
        read_until(master, b"> ")
        os.write(master, b"Hello?\n")
        shown = read_until(master, b"xxx")
        chat.send_signal(signal.SIGINT)
        shown += read_until(master, b"(stopped)\r\n> ")
        assert script.cancelled.wait(DEADLINE_S)
        os.write(master, b"\x04")
        assert chat.wait(DEADLINE_S) == 0
    assert b"Traceback" not in shown


VARIABLES = {"SPLITSERVE_BLOK_SIZE": "8", "SPLITSERVE_XYZZY": "secret", "SPLITSERVE_BLOCK_SIZE": "8", "OTHER": "1"}
WARNING = "Warning: nothing reads SPLITSERVE_BLOK_SIZE (did you mean SPLITSERVE_BLOCK_SIZE?), SPLITSERVE_XYZZY"


@pytest.mark.parametrize("command", ["up", "coordinator", "prefill", "decode", "status", "generate hi", "chat"])
def test_variables_that_nothing_reads_are_named(command):
    arguments = (
        ["--server", "127.0.0.1:1"] if command.split()[0] in ("status", "generate", "chat") else ["no/such/folder"]
    )
    done = CliRunner().invoke(main, [*command.split(), *arguments], env=VARIABLES)
    assert done.stderr.splitlines()[0] == WARNING
    assert "secret" not in done.output


def test_variables_of_flags_are_known():
    """Every flag of every command that has a variable, and the one of the kernels."""
    names = {parameter.envvar for command in walk(main, []) for parameter in command.params if parameter.envvar}
    assert {"SPLITSERVE_SERVER", "SPLITSERVE_API_KEY", "SPLITSERVE_GRPC_PORT", "SPLITSERVE_KV_BIND"} < names
    assert unknown_variables(dict.fromkeys([*names, "SPLITSERVE_NATIVE", "PATH"], "x")) == ""


def walk(command, found):
    found.append(command)
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            walk(command.get_command(context, name), found)
    return found


def test_unknown_flags_and_keys_are_refused(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("block-size: 8\nblok-size: 8\n")
    for arguments in (["up", "--blok-size", "8"], ["up", "--config", str(config)], ["nosuch"]):
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 2
        assert "Traceback" not in result.output


def test_help_answers_without_torch():
    """Of each command, in one process: what none of them imports, none imports alone."""
    code = """
import io, sys
from contextlib import redirect_stdout
from splitserve.cli import main
for command in sys.argv[1:]:
    with redirect_stdout(io.StringIO()) as said:
        main([*command.split(), "--help"], standalone_mode=False)
    print(command, "Usage:" in said.getvalue(), not {"torch", "transformers"} & set(sys.modules))
"""
    words = ["", *COMMANDS]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{word} True True" for word in words]
