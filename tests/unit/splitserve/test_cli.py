"""The commands but `generate`, against a real gRPC server whose answers the test writes, and as real processes."""

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
from splitserve.commands.ask import Conversation
from splitserve.commands.terminal import duration_of
from splitserve.commands.variables import unknown_variables
from tests import forked
from tests.scripted_server import Script, chunk, complete, refusal, serving

DEADLINE_S = 240.0


@pytest.fixture
def script():
    script = Script()
    script.replies = [chunk("Par", 0, [7]), chunk("is", 1, [8]), complete(prompt_tokens=5, completion_tokens=2)]
    return script


def test_drain_tells_what_is_left_and_ends_with_one_line(run, script):
    script.drained = [2, 1, 1, 0]
    result = run("drain", "decode-0")
    assert (result.exit_code, result.stdout) == (0, "decode-0 is drained: it has no part in any request\n")
    assert result.stderr.splitlines() == [
        "Asking decode-0 to drain",
        "decode-0 is draining: 2 requests left",
        "decode-0 is draining: 1 request left",
        "decode-0 is draining: 0 requests left",
    ]
    assert script.requests[-1] == inference_pb2.DrainRequest(node="decode-0")


def test_drain_of_the_whole_fleet(run, script):
    script.drained = [1, 0]
    result = run("drain", "--all")
    told = "the fleet is drained: no request is left, and new calls are refused until a restart\n"
    assert (result.exit_code, result.stdout) == (0, told)
    assert script.requests[-1] == inference_pb2.DrainRequest(all=True)


@pytest.mark.parametrize("words", [(), ("decode-0", "--all")])
def test_drain_wants_one_node_or_all(run, words):
    result = run("drain", *words)
    assert result.exit_code == 2
    assert "give either a NODE or --all" in result.stderr


def test_a_drain_that_is_refused_is_one_sentence(run, script):
    sentence = "node decode-0 cannot drain: no other node decodes sequences"
    script.failures = [refusal(grpc.StatusCode.FAILED_PRECONDITION, sentence, "NO_OTHER_NODE")]
    result = run("drain", "decode-0")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.splitlines() == ["Asking decode-0 to drain", f"Error: {sentence} (NO_OTHER_NODE)"]


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
        [
            "node",
            "role",
            "state",
            "running",
            "waiting",
            "step ms",
            "prefill tok/s",
            "TP",
            "MiB",
            "shape",
            "attention backend",
        ],
        ["node", "blocks used", "blocks cached", "tokens cached", "KV moved", "failed"],
    ]
    rows = [line.split() for line in result.stdout.splitlines()]
    assert [row for row in rows if row[:1] == ["p0"]] == [
        ["p0", "prefill", "ready", "0", "0", "500.0", "1234", "2", "17", "512", "tokens"],
        ["p0", "1/8", "5", "25%", "1.5", "MiB", "4"],
    ]
    assert [row for row in rows if row[:1] == ["d0"]] == [
        ["d0", "decode", "draining", "0", "0", "-", "-", "1", "0", "64", "slots"],
        ["d0", "0/6", "0", "-", "0", "B", "0"],
    ]


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ({"device": "NVIDIA H200", "attention": "triton", "program": "modules"}, "triton, no CUDA graphs"),
        ({"device": "NVIDIA H200", "attention": "triton", "program": "CUDA graphs"}, "triton"),
        (
            {"device": "cpu", "attention": "native", "program": "modules", "batch_invariant": "yes"},
            "native, batch-invariant",
        ),
    ],
)
def test_status_shows_a_gpu_that_does_without_graphs(run, script, engine, told):
    script.nodes[0].engine.clear()
    script.nodes[0].engine.update(engine)
    [row] = [line for line in run("status").stdout.splitlines() if line.startswith("p0 ") and "prefill" in line]
    assert re.split(" {2,}", row.rstrip())[-1] == told


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        ({"tp_size": "2", "sequence_parallel_min_tokens": "512"}, "2, SP"),
        ({"tp_size": "2", "pp_size": "3", "sequence_parallel_min_tokens": "512"}, "2, PP 3, SP"),
        ({"tp_size": "2", "pp_size": "1", "sequence_parallel_min_tokens": "0"}, "2"),
    ],
)
def test_status_shows_the_ranks_of_a_node_and_how_they_divide_prompts(run, script, engine, told):
    script.nodes[0].engine.clear()
    script.nodes[0].engine.update(engine)
    [row] = [line for line in run("status").stdout.splitlines() if line.startswith("p0 ") and "prefill" in line]
    assert re.split(" {2,}", row)[7] == told


def test_status_tells_of_nodes_that_flap_or_are_slow(run, script):
    assert not re.search("flaps|slow", run("status").stdout)
    script.num_losses, script.heartbeat_gap_s = 3, 2.5
    lines = run("status").stdout.splitlines()
    assert "p0 flaps: lost 3 times in the last 10 minutes" in lines
    assert "d0 is slow: up to 2.5 s lately between two heartbeats" in lines


def test_status_shows_attainment_by_class(run):
    lines = run("status").stdout.splitlines()
    [titles] = [re.split(" {2,}", line.rstrip()) for line in lines if line.startswith("class")]
    assert titles == ["class", "limits", "requests", "attained", "TTFT attained", "TPOT attained"]
    rows = [line.split() for line in lines]
    assert [row for row in rows if row[:1] == ["chat"]] == [["chat", "ttft:500", "8", "62.5%", "87.5%", "75.0%"]]


def test_status_shows_the_memory_of_each_rank_where_there_are_several(run):
    ranks = [line.split() for line in run("status").stdout.splitlines() if "rank" in line]
    assert [" ".join(words) for words in ranks] == [
        "rank 0 9 KV pool 1.0 MiB, weights 3.0 MiB",
        "rank 1 8 KV pool 0 B, weights 0 B",
    ]


def test_status_tells_of_nodes_whose_answers_may_differ_in_bits(run, script):
    [p0] = script.nodes
    script.nodes.append(inference_pb2.NodeInfo(name="p1", numerics=p0.numerics))
    assert "unlike" not in run("status").stdout
    script.nodes.append(inference_pb2.NodeInfo(name="d0", numerics={"cpu": "avx512_f"}))
    assert "nodes whose outputs may differ in bits: p0, p1 | d0\n" in run("status").stdout


def test_status_tells_the_sampling_defaults_in_force(run):
    lines = run("status").stdout.splitlines()
    assert lines[1] == "defaults: temperature 0.2, top_p 0.9, top_k 0"


@pytest.mark.parametrize(
    ("arguments", "asked", "said"),
    [
        ("mixed", {"role": "mixed"}, "d0 is mixed now: 512 tokens + 64 slots"),
        ("prefill --prompt-tokens 9", {"shape": {"prompt_tokens": 9}}, "d0 is prefill now: 9 tokens"),
        (
            "mixed --prompt-tokens 9 --slots 3",
            {"shape": {"prompt_tokens": 9, "slots": 3, "accepts_transfers": True}},
            "d0 is mixed now: 9 tokens + 3 slots",
        ),
        (
            "decode --slots 3 --no-accepts-transfers",
            {"shape": {"slots": 3}},
            "d0 is decode now: 3 slots, no KV transfers",
        ),
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
    assert run("role", "d0", "mixed", "--api-key-file", str(file)).exit_code == 0
    assert script.metadata[0]["authorization"] == "Bearer k"
    result = run("role", "d0", "mixed", "--api-key-file", str(file), "--api-key", "k")
    assert result.stderr.endswith("Error: --api-key and --api-key-file are both given: one is enough\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("mixed --slots 3", "--prompt-tokens must be given too for the role mixed"),
        ("mixed --no-accepts-transfers", "--prompt-tokens must be given too for the role mixed"),
        ("decode --prompt-tokens 3", "--prompt-tokens must not be given for the role decode"),
        ("prefill --prompt-tokens 3 --slots 3", "--slots must not be given for the role prefill"),
    ],
)
def test_a_shape_that_is_not_all_there_is_one_sentence(run, script, arguments, message):
    result = run("role", "d0", *arguments.split())
    assert (result.exit_code, result.stderr) == (2, f"Error: {message}\n")
    assert script.requests == []


def test_what_the_server_says_of_a_role_that_cannot_be_is_what_the_command_says(run, script):
    message = "node d0 is the last one that decodes sequences"
    script.failures = [refusal(grpc.StatusCode.FAILED_PRECONDITION, message, "NO_OTHER_NODE")]
    result = run("role", "d0", "prefill")
    assert (result.exit_code, result.stderr) == (1, f"Error: {message} (NO_OTHER_NODE)\n")


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
        pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        process = forked.popen("splitserve", "status", "--server", target, *flags, **pipes, text=True)
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


def said_in(request):
    return [(message.role, message.content) for message in request.chat.messages]


def test_chat_has_commands(run, script, tmp_path):
    file = tmp_path / "talk.json"
    lines = ["Hello?", "/reset", "And?", f"/save {file}", "/system Be brief.", "Who?", "/etc/passwd?", "/exit", "/save"]
    result = run("chat", "--system", "Be kind.", input="\n".join([*lines, f"/save {file}", ""]))
    assert result.exit_code == 0
    kind, brief = ("system", "Be kind."), ("system", "Be brief.")
    turn = [("user", "Who?"), ("assistant", "Paris")]
    assert list(map(said_in, script.requests)) == [
        [kind, ("user", "Hello?")],
        [kind, ("user", "And?")],
        [brief, ("user", "Who?")],
        [brief, *turn, ("user", "/etc/passwd?")],
    ]
    saved = [(message["role"], message["content"]) for message in json.loads(file.read_text())]
    assert saved == [kind, ("user", "And?"), ("assistant", "Paris")]
    assert [line for line in result.stderr.splitlines() if "Ctrl-C" not in line] == [
        "The conversation begins anew.",
        f"Saved 3 messages to {file}",
        "The conversation begins anew; the model is told: Be brief.",
        "There is no command /exit; there are /reset, /system TEXT and /save FILE",
        "Nothing is saved: /save FILE names the file",
        f"Nothing is saved: {file}: File exists",
    ]


@pytest.mark.parametrize("file", ["~nobody-of-this-name/talk.json", "a\0b"])
def test_a_conversation_that_cannot_be_saved_goes_on(file):
    said = Conversation("Be kind.").obey(f"/save {file}")
    assert said is not None
    assert said.startswith(f"Nothing is saved: {file}: ")


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
        started.append(forked.popen("splitserve", *arguments, **dict.fromkeys(("stdin", "stdout", "stderr"), slave)))
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


@pytest.mark.nightly
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
