"""`python -m splitserve_bench.device`: how steps are run and noted, and every step in tiny sizes."""

import json
import time
from pathlib import Path

import psutil
import pytest
import torch
from click.testing import CliRunner

from splitserve_bench import device
from splitserve_bench.device import DONE, FAILED, OUT_OF_TIME, run_step

LIMIT_S = 1200.0
GPU_TESTS = Path(__file__).parents[2] / "gpu"


def bench(*arguments):
    return CliRunner().invoke(device.main, list(map(str, arguments)))


def test_a_step_gives_what_it_printed(tmp_path):
    code = "import sys; print('seen'); print('logged', file=sys.stderr)"
    step = run_step(["-c", code], 60.0, tmp_path / "log")
    assert (step["state"], step["output"], step["log"]) == (DONE, "seen\n", [])
    assert (tmp_path / "log").read_text() == "logged\n"


def test_a_step_that_fails_keeps_what_it_printed_and_its_last_lines(tmp_path):
    step = run_step(["-c", "print('seen', flush=True); raise SystemError('no such kernel')"], 60.0, tmp_path / "log")
    assert (step["state"], step["output"], step["log"][-1]) == (FAILED, "seen\n", "SystemError: no such kernel")


def test_a_step_out_of_time_ends_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "STOP_S", 0.5)
    child = tmp_path / "child"
    code = f"""if True:
        import pathlib, signal, subprocess, sys, time
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        process = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
        pathlib.Path({str(child)!r}).write_text(str(process.pid))
        time.sleep(600)
    """
    assert run_step(["-c", code], 1.0, tmp_path / "log")["state"] == OUT_OF_TIME
    give_up_at = time.monotonic() + 60
    while child.exists() and runs(child.read_text()):
        assert time.monotonic() < give_up_at
        time.sleep(0.05)


@pytest.mark.nightly
def test_tests_out_of_time_tell_of_those_that_are_over(tmp_path):
    (tmp_path / "test_some.py").write_text(
        "import time\n"
        "def test_a_bad_one(): assert False\n"
        "def test_an_endless_one(): print('begun', flush=True); time.sleep(600)\n"
    )
    arguments = ["-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    step = run_step(arguments, 30.0, tmp_path / "log")
    assert step["state"] == OUT_OF_TIME
    assert "test_some.py::test_a_bad_one" in step["output"]


def runs(pid):
    """Whether there is such a process, which may be gone any moment; "" is none yet."""
    try:
        return pid != "" and psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_second_run_does_what_is_not_done(tmp_path, monkeypatch):
    marker = tmp_path / "mended"
    bad = f"import os; assert os.path.exists({str(marker)!r}); print('mended')"
    steps = {"good": (60.0, ["-c", "print(1)"]), "bad": (60.0, ["-c", bad]), "last": (60.0, ["-c", "print(2)"])}
    monkeypatch.setattr(device, "steps_of", lambda *_: steps)

    def done(*words):
        result = bench("--trial", "--out", tmp_path / "out", *words)
        assert result.exit_code == 0, result.output
        report = json.loads((tmp_path / "out" / "report.json").read_text())
        return {name: step["state"] for name, step in report["steps"].items()}, result.output

    states, _ = done("--steps", "good,bad")
    assert states == {"good": DONE, "bad": FAILED}
    shown = (tmp_path / "out" / "report.md").read_text()
    assert "## bad: failed" in shown
    assert "AssertionError" in shown
    marker.touch()
    states, said = done()
    assert states == dict.fromkeys(steps, DONE)
    assert "good" not in said
    _, said = done("--steps", "good")
    assert said.startswith("good: done")
    refused = bench("--trial", "--layers", 3, "--out", tmp_path / "out")
    assert (refused.exit_code, "the report there is of llama-3.1-8b, all layers" in refused.output) == (2, True)


def test_it_refuses_what_it_cannot_do(tmp_path):
    if not torch.cuda.is_available():
        refused = bench("--out", tmp_path / "out")
        assert (refused.exit_code, "there is no CUDA device here; --trial" in refused.output) == (2, True)
        assert not (tmp_path / "out").exists()
    refused = bench("--trial", "--steps", "device,dance", "--out", tmp_path / "out")
    assert (refused.exit_code, "there is no step 'dance'" in refused.output) == (2, True)


def test_what_tells_most_comes_first_within_the_limit_and_no_test_is_left_out(tmp_path):
    steps = device.steps_of(device.Sizes("llama-3.1-8b", 0), tmp_path, ["-m", "splitserve_bench.device"])
    assert sum(limit_s for limit_s, _ in [*steps.values()][: [*steps].index("eager")]) <= device.DEFAULT_LIMIT_S
    run = {argument for _, arguments in steps.values() for argument in arguments if argument.startswith("tests/gpu/")}
    present = {f"tests/gpu/{path.name}" for path in GPU_TESTS.glob("test_cuda_*.py")}
    assert present - run == {"tests/gpu/test_cuda_compiled.py"}, "which needs no device"
    assert run <= present


@pytest.mark.nightly
@pytest.mark.timeout(2 * LIMIT_S)
def test_every_step_can_be_done_in_tiny_sizes(tmp_path):
    names = ["device", "model", "attention", "split-1", "engine", "transfer-device", "weights-int4"]
    sizes = ("--trial", "--shape", "smollm2-135m", "--layers", "1", "--out", tmp_path / "out", "--scratch", tmp_path)
    result = bench(*sizes, "--steps", ",".join(names), "--limit-s", LIMIT_S)
    assert result.exit_code == 0, result.output
    steps = json.loads((tmp_path / "out" / "report.json").read_text())["steps"]
    assert {name: step["state"] for name, step in steps.items()} == dict.fromkeys(names, DONE), steps
    if not torch.cuda.is_available():
        assert "outputs equal to those of one node: 2 of 2" in steps["split-1"]["output"]
