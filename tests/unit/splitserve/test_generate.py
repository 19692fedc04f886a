"""`splitserve generate`, against a real gRPC server whose answers the test writes."""

import json
import re

import grpc
import pytest

from protos import inference_pb2
from tests.scripted_server import Script, chunk, complete, refusal

TIMELINE = inference_pb2.Timeline(
    prefill_queue_s=0.001,
    prefill_s=0.5,
    kv_transfer_s=0.1,
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
    assert (result.exit_code, result.stderr) == (1, f"Error: {field} is too large (BAD_PARAM)\n")
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


def test_without_a_prompt_generate_says_what_it_needs(run, script):
    for words in ([], [""]):
        result = run("generate", *words)
        assert (result.exit_code, script.requests) == (2, [])
        assert 'there is no prompt: `splitserve generate "TEXT"`, or `splitserve generate -` for stdin' in result.stderr


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
    assert last["completion"]["timeline"]["kv_transfer_s"] == 0.1


def test_the_timeline_is_a_table_and_a_bar_in_proportion(run):
    shown = run("generate", "hi", "--timeline").stderr
    rows = {re.sub(r"^\W*", "", line).split("  ")[0]: line.split() for line in shown.splitlines()}
    assert rows["prefill"][-3:] == ["500.0", "50%", "p0"]
    assert rows["KV transfer"][-5:] == ["100.0", "10%", "p0", "→", "d0"]
    assert rows["decode"][-3:] == ["400.0", "40%", "d0"]
    assert "1001.0" in rows["end to end"]
    assert "first after 510.0 ms" in shown
    bar, last = shown.splitlines()[-2:]
    assert [bar.count(mark) for mark in "█▓▒"] == [30, 6, 24]
    assert last == "  request r1"


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
        ({"kv_bytes": 512, "proposed_tokens": 9, "accepted_tokens": 4}, "512 B of KV sent · 4 of 9 draft tokens came"),
    ],
)
def test_a_line_tells_what_was_cached_and_sent_if_anything_was(run, script, figures, line):
    script.replies = [complete(prompt_tokens=44, timeline=TIMELINE, **figures)]
    shown = [line.strip() for line in run("generate", "hi", "--timeline").stderr.splitlines()]
    assert [text for text in shown if "cached" in text or " of KV" in text] == ([line] if line else [])


def test_the_timeline_tells_of_moves_if_there_were_any(run, script):
    timeline = inference_pb2.Timeline(e2e_s=1.0, num_migrations=2, migration_pause_s=0.0125)
    script.replies = [complete(timeline=timeline, kv_bytes=3 * 2**20, migrated_kv_bytes=2**20)]
    shown = run("generate", "hi", "--timeline").stderr
    assert "  3.0 MiB of KV sent · moved 2 times (1.0 MiB of it, paused for 12.5 ms)\n" in shown
    script.replies = [complete(timeline=TIMELINE, kv_bytes=3 * 2**20)]
    assert "moved" not in run("generate", "hi", "--timeline").stderr


def test_the_timeline_tells_of_calls_that_broke_off(run, script):
    gone = refusal(grpc.StatusCode.UNAVAILABLE, "the server has stopped", "DRAINING")
    script.replies, script.broken_off = [chunk("Par", 0, [7])], gone
    shown = run("generate", "hi", "--timeline", "--no-resume").stderr
    assert shown.splitlines()[-1] == "Error: the server has stopped (DRAINING)"
    whole = [chunk("is", 1, [8]), complete(timeline=TIMELINE, completion_tokens=2, resumed_tokens=1)]
    script.replies, script.broken_off, script.later = [chunk("Par", 0, [7])], gone, whole
    result = run("generate", "hi", "--timeline")
    assert result.stdout == "Paris\n"
    assert "2 tokens, call 2 after 1 tokens" in result.stderr


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
    script.replies = [chunk("Par"), other, chunk("is"), complete(), complete(1)]
    assert run("generate", "hi", "--n", "2").stdout == "Paris\n--- answer 2\nLyon\n"


def test_a_refusal_is_one_sentence(run, script):
    script.failures = [refusal(grpc.StatusCode.INVALID_ARGUMENT, "temperature must be at least 0", "BAD_PARAM")]
    result = run("generate", "hi", "--temperature", "-1")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "Error: temperature must be at least 0 (BAD_PARAM)\n"


def test_limits_reach_the_server_and_the_timeline_tells_what_became_of_them(run, script):
    attainment = inference_pb2.Attainment(ttft_ms=500, tpot_ms=7.5, ttft_met=True, tpot_met=False)
    script.replies = [complete(timeline=TIMELINE, attainment=attainment)]
    result = run("generate", "hi", "--ttft-ms", "500", "--tpot-ms", "7.5", "--slo-class", "chat", "--timeline")
    (request,) = script.requests
    assert (request.ttft_ms, request.tpot_ms, request.slo_class) == (500.0, 7.5, "chat")
    assert "  TTFT within 500 ms: attained · TPOT within 7.5 ms: missed\n" in result.stderr


def test_a_priority_reaches_the_server(run, script):
    for words in (["--priority", "-3"], ["--priority=0"], []):
        assert run("generate", "hi", *words).exit_code == 0
    found = [(request.priority, request.HasField("priority")) for request in script.requests]
    assert found == [(-3, True), (0, True), (0, False)]
