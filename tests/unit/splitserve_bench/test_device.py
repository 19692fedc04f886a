"""`splitserve bench device`: how steps are run and noted, its arithmetic by hand, and the command in tiny sizes."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest
from click.testing import CliRunner

from serving_core.errors import SettingsError
from splitserve.cli import main
from splitserve_bench.device.device_command import go_through, look, with_model
from splitserve_bench.device.device_report import markdown
from splitserve_bench.device.facts import nominal_of
from splitserve_bench.device.record import JSON_FILE, MARKDOWN_FILE, Record
from splitserve_bench.device.rows import rows_of
from splitserve_bench.device.running import (
    DONE,
    FAILED,
    NOT_REACHED,
    SKIPPED,
    TIMED_OUT,
    end,
    read_junit,
    run_step,
)
from splitserve_bench.device.steps import (
    JUNIT_FILE,
    MODEL,
    NOTHING,
    PEER_FILE,
    TESTS,
    Machine,
    Step,
    full_sizes,
    steps_of,
    trial_sizes,
)
from tests.effort import few

LIMIT_S = 1200.0
H100 = "NVIDIA H100 80GB HBM3"
NOTE = "import sys; print('beside', file=sys.stderr); "


def step(name, code, limit_s=60.0, kind=NOTHING, why_not="", **environment):
    return Step(name, kind, ("-c", code), limit_s, f"python {name}", why_not, environment)


def run(tmp_path, *arguments):
    log = tmp_path / "log.txt"
    return run_step(step(*arguments), 60.0, tmp_path, log), log.read_text()


# ---- one step ----


def test_a_step_gives_its_last_line_and_logs_the_rest(tmp_path):
    code = NOTE + "import json, os; print('noise'); print(json.dumps([os.environ['GIVEN']]))"
    outcome = run_step(step("one", code, GIVEN="x"), 60.0, tmp_path, tmp_path / "log.txt")
    assert (outcome.state, outcome.result, outcome.why) == (DONE, ["x"], "")
    assert outcome.last_lines[-1] == "beside"
    assert "==== one: python one\nbeside" in (tmp_path / "log.txt").read_text()


@pytest.mark.nightly
def test_tests_that_are_ended_tell_of_those_that_are_over(tmp_path):
    tests, begun = tmp_path / "test_some.py", tmp_path / "begun"
    tests.write_text(
        "import pathlib, time\n"
        "def test_a_good_one(): pass\n"
        "def test_a_bad_one(): assert False\n"
        f"def test_an_endless_one(): pathlib.Path({str(begun)!r}).touch(); time.sleep(600)\n"
        "def test_another_one(): pass\n"
    )
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={tmp_path / JUNIT_FILE}"]
    process = subprocess.Popen(
        [*argv, str(tests)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, process_group=0
    )
    while not begun.exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    end(process)
    result = read_junit(tmp_path)
    assert (result["tests"], result["failures"]) == (2, 1)
    assert [name.rpartition("::")[2] for name in result["failed"]] == ["test_a_bad_one"]


def test_a_step_that_breaks_tells_its_last_lines(tmp_path):
    outcome, log = run(tmp_path, "bad", "print('{}', flush=True); raise SystemError('no such kernel')")
    assert (outcome.state, outcome.why) == (FAILED, "exit code 1")
    assert outcome.last_lines[-1] == "SystemError: no such kernel"
    assert "no such kernel" in log


@pytest.mark.parametrize("code", ["pass", "print('not JSON')"])
def test_a_step_without_a_result_has_failed(tmp_path, code):
    outcome, _ = run(tmp_path, "mute", code)
    assert outcome.state == FAILED
    assert "no result" in outcome.why


def test_a_step_out_of_time_ends_with_its_children(tmp_path):
    child = tmp_path / "child"
    code = f"""if True:
        import pathlib, subprocess, sys, time
        process = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
        pathlib.Path({str(child)!r}).write_text(str(process.pid))
        time.sleep(600)
    """
    outcome = run_step(step("long", code), 1.0, tmp_path, tmp_path / "log.txt")
    assert (outcome.state, outcome.why) == (TIMED_OUT, "not over after 1 s")
    give_up_at = time.monotonic() + 60
    while child.exists() and runs(child.read_text()):
        assert time.monotonic() < give_up_at
        time.sleep(0.05)


def runs(pid):
    """Whether there is such a process, which may be gone any moment; "" is none yet."""
    try:
        return pid != "" and psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


JUNIT = """<testsuites><testsuite tests="4" failures="1" errors="1" skipped="1">
<testcase classname="tests.gpu.a" name="good"/>
<testcase classname="tests.gpu.a" name="bad"><failure message="x"/></testcase>
<testcase classname="tests.gpu.b" name="broken"><error message="y"/></testcase>
<testcase classname="tests.gpu.b" name="left"><skipped/></testcase></testsuite></testsuites>"""


@pytest.mark.parametrize(("code", "state"), [(0, DONE), (1, DONE), (2, FAILED)])
def test_failed_tests_are_counted_and_named(tmp_path, code, state):
    program = (
        f"import pathlib; pathlib.Path({str(tmp_path / JUNIT_FILE)!r}).write_text({JUNIT!r}); raise SystemExit({code})"
    )
    outcome = run_step(step("tests", program, kind=TESTS), 60.0, tmp_path, tmp_path / "log.txt")
    assert outcome.state == state
    assert outcome.result == {
        "tests": 4,
        "failures": 1,
        "errors": 1,
        "skipped": 1,
        "failed": ["tests.gpu.a::bad", "tests.gpu.b::broken"],
    }
    rows = rows_of({"tests": {"kind": TESTS, "result": outcome.result}})
    assert [(row.value, row.unit, row.is_met) for row in rows] == [(2, "of 4", False), (1, "of 4", None)]


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("raise SystemExit(1)", "exit code 1, and no result"),  # as of a Python that has no pytest
        ("raise SystemExit(139)", "exit code 139, and no result"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "exit code -9, and no result"),
        ("pass", "exit code 0, and no result"),
    ],
)
@pytest.mark.parametrize("is_second_run", few([False, True], True))
def test_tests_that_tell_nothing_have_failed_whatever_an_earlier_run_told(tmp_path, program, why, is_second_run):
    if is_second_run:
        (tmp_path / JUNIT_FILE).write_text(JUNIT)
    outcome = run_step(step("tests", program, kind=TESTS), 60.0, tmp_path, tmp_path / "log.txt")
    assert (outcome.state, outcome.result) == (FAILED, None)
    assert outcome.why.startswith(why)


def test_what_tests_told_stays_there_for_people(tmp_path):
    (tmp_path / JUNIT_FILE).write_text(JUNIT)
    assert run(tmp_path, "next", "print('{}')")[0].state == DONE
    assert (tmp_path / JUNIT_FILE).read_text() == JUNIT


def test_figures_of_a_peer_are_passed_on_where_they_are_there_when_the_step_runs(tmp_path):
    peer = tmp_path / PEER_FILE
    engine = replace(step("engine", "import json, sys; print(json.dumps(sys.argv[1:]))"), peer=peer)
    vllm = step("vllm", f"import pathlib; pathlib.Path({str(peer)!r}).write_text(''); print('{{}}')")
    steps = [engine, vllm, replace(engine, name="again")]
    go_through(steps, steps, Record(tmp_path, "x"), tmp_path, 60.0)
    told = json.loads((tmp_path / JSON_FILE).read_text())["steps"]
    assert told["engine"]["result"] == []
    assert told["again"]["result"] == ["--peer-json", str(peer)]


# ---- all of them ----


def test_what_failed_stops_nothing_and_a_second_run_goes_on(tmp_path):
    marker = tmp_path / "mended"
    steps = [
        step("good", "print('{\"seconds\": 1}')"),
        step("bad", f"import os; assert os.path.exists({str(marker)!r}); print('{{}}')"),
        step("absent", "", why_not="there is none here"),
        step("last", "print('{}')"),
    ]

    def states():
        return {name: each["state"] for name, each in json.loads((tmp_path / JSON_FILE).read_text())["steps"].items()}

    go_through(steps, steps[:3], Record(tmp_path, "x"), tmp_path, 60.0)
    assert states() == {"good": DONE, "bad": FAILED, "absent": SKIPPED}
    shown = (tmp_path / MARKDOWN_FILE).read_text()
    assert "`bad` was failed: exit code 1" in shown
    assert "AssertionError" in shown
    assert "`absent` was skipped: there is none here" in shown

    record = Record(tmp_path, "x")
    assert [each.name for each in steps if not record.is_done(each.name)] == ["bad", "absent", "last"]
    go_through(steps, [steps[3]], record, tmp_path, 0.0)
    assert states()["last"] == NOT_REACHED
    marker.touch()
    go_through(steps, [steps[1], steps[3]], record, tmp_path, 60.0)
    assert list(states().values()) == [DONE, DONE, SKIPPED, DONE]


def test_a_folder_with_another_report_is_refused(tmp_path):
    record = Record(tmp_path, "llama")
    go_through([], [], record, tmp_path, 1.0)
    steps = [step("absent", "", why_not="no")]
    go_through(steps, steps, record, tmp_path, 1.0)
    with pytest.raises(SettingsError, match="the report there is of llama, and this is qwen"):
        Record(tmp_path, "qwen")
    (tmp_path / JSON_FILE).write_text("{")
    with pytest.raises(SettingsError, match="no report of this command"):
        Record(tmp_path, "llama")


@pytest.mark.parametrize(
    ("to_do", "done"),
    [
        (["eager"], [MODEL, "eager"]),
        (["tests", "split-1"], [MODEL, "tests", "split-1"]),
        ([MODEL, "eager"], [MODEL, "eager"]),
        ([MODEL], [MODEL]),
        (["device", "tests"], ["device", "tests"]),  # neither reads it
        (["vllm", "split-2"], ["vllm", "split-2"]),  # neither can be done here
    ],
)
def test_the_model_is_written_before_what_reads_it(tmp_path, to_do, done):
    model = tmp_path / "model"
    steps = steps_of(full_sizes("llama-3.1-8b", 0), Machine(1, "0", H100, False, True), model, tmp_path)
    chosen = [each for each in steps if each.name in to_do]
    assert [each.name for each in with_model(chosen, steps, str(model))] == done


def test_the_steps_of_one_device_and_of_two(tmp_path):
    one, two = (
        {each.name: each for each in steps_of(full_sizes("llama-3.1-8b", 0), machine, tmp_path, tmp_path)}
        for machine in (Machine(1, "0", H100, False, False), Machine(2, "5", H100, True, True))
    )
    assert list(one) == list(two)
    assert {name for name, each in one.items() if each.why_not} == {"vllm", "tests", "split-2"}
    assert not any(each.why_not for each in two.values())
    assert "torch_dist-nccl" in two["transfer-device"].arguments
    assert "torch_dist-ipc" in one["transfer-device"].arguments
    assert two["split-1"].environment == {"CUDA_VISIBLE_DEVICES": "5"}
    assert two["vllm"].arguments[-1] == str(two["engine"].peer) == str(tmp_path / PEER_FILE)
    assert "--shape llama-3.1-8b --prompts 1x1024,16x128,1x4096 --batches 1,16,64" in one["engine"].shown


# ---- rows, by hand ----

MACHINE = {"gemm_dtype": "bfloat16", "gemm_flops_per_s": 500e12, "read_bytes_per_s": 3e12}
FACTS = {
    "machine": MACHINE,
    "nominal": {"flops_per_s": 1000e12, "bytes_per_s": 4e12},
    "copy_bytes_per_s": 2e12,
    "host_to_device_bytes_per_s": 50e9,
    "device_to_host_bytes_per_s": 0.0,
    "name": H100,
}
FIGURES = {
    "prefill": [
        {"prompts": {"count": 1, "num_tokens": 1024}, "tokens_per_s": 10240.0, "flops": 66e12, "gemm_share": 1.32},
        {"prompts": {"count": 4, "num_tokens": 256}, "tokens_per_s": 1024.0, "flops": 66e12, "gemm_share": 0.132},
    ],
    "decode": [
        {
            "batch": batch,
            "context_tokens": 512,
            "step_s": 0.005,
            "weight_bytes": 12e9,
            "kv_bytes": 1e9,
            "bandwidth_share": 0.5,
        }
        for batch in (1, 64)
    ],
    "ratios": [
        {"kind": "load", "key": "", "ratio": 9.0, "peer": "vllm"},
        {"kind": "decode", "key": "b64_ctx512", "ratio": 0.8, "peer": "vllm"},
        {"kind": "decode", "key": "b1_ctx512", "ratio": 2.0, "peer": "vllm"},
        {"kind": "prefill", "key": "1x1024", "ratio": 1.5, "peer": "vllm"},
    ],
    "offload": {"where": "in host memory", "bytes_per_s": 40e9, "alone_bytes_per_s": 50e9},
}


def test_shares_and_aims_of_the_data_sheet():
    steps = {
        "device": {"kind": "device", "result": FACTS},
        "engine": {"kind": "engine", "result": FIGURES},
        "eager": {"kind": "engine", "result": {**FIGURES, "ratios": []}},
        "split-1": {"kind": "split", "result": None},
    }
    rows = {(row.step, row.figure): row for row in rows_of(steps)}
    assert rows["device", "products of bfloat16"].of_nominal == 0.5
    assert rows["device", "copying host to device, pinned"].value == 50.0
    assert ("device", "copying device to host, pinned") not in rows
    prefill = rows["engine", "prefill, 1x1024"]  # 66e12 operations in a tenth of a second
    assert (prefill.of_measured, prefill.of_nominal) == (1.32, pytest.approx(0.66))
    assert (prefill.aim, prefill.is_met) == ("≥ 65% of the data sheet's", True)
    assert rows["engine", "prefill, 4x256"].is_met is None
    decode = rows["engine", "decode step, batch 1, context 512"]  # 13e9 bytes in 5 ms
    assert (decode.value, decode.of_nominal, decode.is_met) == (5.0, pytest.approx(0.65), False)
    assert rows["engine", "decode step, batch 64, context 512"].is_met is None
    assert rows["eager", "decode step, batch 1, context 512"].is_met is None
    offload = rows["engine", "weights in host memory, read by decode steps"]
    assert (offload.value, offload.unit, offload.of_measured) == (40.0, "GB/s", 0.8)
    rates = {name: (row.value, row.is_met) for (_, name), row in rows.items() if "rate over" in name}
    assert rates == {
        "decode b64_ctx512, rate over that of vllm": (1.25, True),
        "decode b1_ctx512, rate over that of vllm": (0.5, None),
        "prefill 1x1024, rate over that of vllm": (1.5, None),
    }
    of_unknown = rows_of({"engine": steps["engine"]})  # no data sheet
    assert not any(row.aim for row in of_unknown if row.unit != "times")


def test_attention_reads_keys_and_values():
    alone = {"backend": "b", "batch": 4, "context_tokens": 512, "chunk_tokens": 0, "seconds": 1e-4, "bytes_per_s": 2e12}
    attention = [alone, alone | {"chunk_tokens": 64}]
    steps = {
        "device": {"kind": "device", "result": FACTS},
        "attention": {"kind": "attention", "result": attention},
    }
    row, mixed = (row for row in rows_of(steps) if row.step == "attention")
    assert (row.figure, row.value, row.unit) == ("b, batch 4, context 512", 2000.0, "GB/s")
    assert row.of_nominal == 0.5
    assert (mixed.figure, mixed.value, mixed.unit) == ("b, batch 4, context 512, beside 64 of a prompt", 0.1, "ms")


def test_split_and_corridor():
    times = {"ttft_s": 0.1, "tpot_s": 0.01, "handoff_s": 0.002}
    split = {"num_answers": 8, "num_equal": 7, "one_node": times, "split": times}
    transfers = [{"transfers": [{"transport": "zmq-shm", "prompt_tokens": 2048, "bytes_per_s": 4e9}]}]
    steps = {"split-1": {"kind": "split", "result": split}, "transfer": {"kind": "transfer", "result": transfers}}
    rows = rows_of(steps)
    assert (rows[0].value, rows[0].unit, rows[0].is_met) == (7, "of 8", False)
    assert [(row.value, row.unit) for row in rows[1:]] == [(100.0, "ms"), (10.0, "ms")] * 2 + [
        (2.0, "ms"),
        (4.0, "GB/s"),
    ]
    done = {"state": DONE, "wall_s": 1.0, "why": "", "last_lines": (), "command": "python -c 1"}
    shown = markdown("x", {name: {**each, **done} for name, each in steps.items()}, rows)
    assert "| split-1 | answers equal to those of one node | 7 of 8 |  |  | all | **missed** |" in shown
    assert "| transfer | done | 1 | `python -c 1` |" in shown


@pytest.mark.parametrize(
    ("name", "known"),
    [
        (H100, "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", None),
        ("cpu", None),
    ],
)
def test_what_torch_calls_a_device(name, known):
    device = nominal_of(name)
    assert (device and device.name) == known


# ---- the command ----


def bench(*arguments):
    return CliRunner().invoke(main, ["bench", "device", *map(str, arguments)])


def test_it_refuses_what_it_cannot_do(tmp_path):
    if not look().num_devices:
        refused = bench("--out", tmp_path / "out")
        assert (refused.exit_code, "there is no CUDA device here; --trial" in refused.output) == (2, True)
        assert not (tmp_path / "out").exists()
    refused = bench("--trial", "--steps", "device,dance", "--out", tmp_path / "out")
    assert (refused.exit_code, "there is no step 'dance'" in refused.output) == (2, True)


def test_a_report_of_another_device_is_refused(tmp_path, monkeypatch):
    """Of tests alone, which are skipped where they are not."""

    def bench_on(device_name):
        machine = Machine(1, "0", device_name, has_vllm=False, has_tests=False)
        monkeypatch.setattr("splitserve_bench.device.device_command.look", lambda: machine)
        return bench("--steps", "tests", "--out", tmp_path)

    for _ in range(2):
        assert bench_on(H100).exit_code == 0
    assert (tmp_path / MARKDOWN_FILE).read_text().startswith(f"# One device: llama-3.1-8b on {H100}\n")
    refused = bench_on("NVIDIA H200")
    said = f"the report there is of llama-3.1-8b on {H100}, and this is llama-3.1-8b on NVIDIA H200"
    assert (refused.exit_code, said in " ".join(refused.output.split())) == (2, True)


def test_a_step_that_is_done_again_has_its_model_written_again(tmp_path, monkeypatch):
    """It is removed once all is done."""
    write = "import pathlib, sys; pathlib.Path(sys.argv[1]).mkdir(); print('{}')"
    read = "import os, sys; assert os.path.isdir(sys.argv[1]); print('{}')"

    def made(sizes, machine, model, out):
        programs = {MODEL: write, "reader": read}
        return [replace(step(name, ""), arguments=("-c", code, str(model))) for name, code in programs.items()]

    monkeypatch.setattr("splitserve_bench.device.device_command.steps_of", made)
    for more in ((), ("--steps", "reader")):
        result = bench("--trial", "--out", tmp_path / "out", "--scratch", tmp_path, *more)
        assert result.exit_code == 0, result.output
        steps = json.loads((tmp_path / "out" / JSON_FILE).read_text())["steps"]
        assert {name: each["state"] for name, each in steps.items()} == {MODEL: DONE, "reader": DONE}
        assert os.listdir(tmp_path) == ["out"]


@pytest.fixture
def patience(monkeypatch):
    """Each step may take as long as all of them: its own limit is for a machine with a device."""
    made = "splitserve_bench.device.device_command.steps_of"
    monkeypatch.setattr(made, lambda *given: [replace(each, limit_s=LIMIT_S) for each in steps_of(*given)])


@pytest.mark.nightly
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.usefixtures("patience")
def test_every_step_can_be_done_in_tiny_sizes(tmp_path):
    names = "device,model,engine,split-1,attention,drawing,long-context,transfer,weights-int4"
    trial = ("--trial", "--shape", "smollm2-135m", "--layers", "1", "--out", tmp_path / "out", "--scratch", tmp_path)
    result = bench(*trial, "--steps", names, "--limit-s", str(LIMIT_S))
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out" / JSON_FILE).read_text())
    assert {name: each["state"] for name, each in report["steps"].items()} == dict.fromkeys(
        sorted(names.split(","), key=list(report["steps"]).index), DONE
    ), (tmp_path / "out" / "log.txt").read_text()
    figures = {(row["step"], row["figure"]): row for row in report["rows"]}
    if not look().num_devices:
        assert figures["split-1", "answers equal to those of one node"]["is_met"]
    assert {step for step, _ in figures} == set(names.split(",")) - {"model"}
    assert {JSON_FILE, MARKDOWN_FILE} <= set(os.listdir(tmp_path / "out"))
    assert (tmp_path / "splitserve-device-smollm2-135m-1" / "config.json").exists()  # for the steps that are left
    assert (
        trial_sizes("smollm2-135m", 1).split_prompts
        == figures["split-1", "answers equal to those of one node"]["value"]
    )
