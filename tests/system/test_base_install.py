"""The base installation, without torch and without any other extra: it coordinates, asks and measures, and says what
the rest would need. The nodes of its cluster run where everything is installed."""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import click
import pytest

from serving_core.process.extras import BASE_MODULES, MODULES
from serving_core.version import VERSION
from splitserve.cli import main
from tests.effort import few
from tests.gguf_files import write_gguf
from tests.system.base_environment import make_environment
from tests.system.cluster import Child, free_port, wait_until
from tests.tiny_models import write_fake_model, write_tiny_llama

ROOT = Path(__file__).parents[2]
DEADLINE_S = 240.0
NO_NODE = (
    "this needs torch, gguf, numpy, safetensors, xxhash, zmq, which are not installed: pip install 'splitserve[node]'\n"
)
IN_BASE = {
    "certs",
    "coordinator",
    "generate",
    "chat",
    "run-batch",
    "status",
    "top",
    "role",
    "drain",
    "simulate",
    "bench serve",
    "plan profile",
}
FEW = ("--num-prompts", "6", "--random-input-len", "20", "--random-output-len", "4", "--vocab-size", "250")


def leaves(group, path=()):
    """Every command that the command line has, by its words."""
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            yield from leaves(command, (*path, name))
        else:
            yield " ".join((*path, name))


@pytest.fixture(scope="module")
def base_python(tmp_path_factory):
    return make_environment(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_fake_model(tmp_path_factory.mktemp("model") / "fake")


@pytest.fixture(scope="module")
def cluster(start_cluster, model, base_python):
    cluster = start_cluster(model, http=True, coordinator={"served_model_name": "fake"}, coordinator_python=base_python)
    yield cluster
    cluster.wait_all_free()


@pytest.fixture
def run(base_python, tmp_path):
    def run(module, *words, **environment):
        return subprocess.run(
            [base_python, "-m", module, *map(str, words)],
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path), **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )

    return run


def test_the_environment_has_nothing_of_an_extra(base_python):
    modules = [module for names in MODULES.values() for module in names]
    installed = f"[name for name in {modules} if is_installed(name)]"
    code = f"from serving_core.process.extras import is_installed; print({installed})"
    assert subprocess.check_output([base_python, "-c", code], text=True) == "[]\n"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == f"{modules}\n"


def test_it_asks(cluster, run):
    done = run(
        "splitserve",
        "generate",
        "hello",
        "--raw",
        "--max-tokens",
        5,
        "--ignore-eos",
        "--json",
        "--server",
        cluster.target,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["completion"]["completion_tokens"] == 5
    done = run("splitserve", "status", "--server", cluster.target)
    assert done.returncode == 0, done.stderr
    assert "prefill-0" in done.stdout


def test_it_asks_for_all_of_a_file(cluster, run, tmp_path):
    line = {
        "custom_id": "a",
        "url": "/v1/completions",
        "body": {"prompt": "hello", "max_tokens": 3, "ignore_eos": True},
    }
    (tmp_path / "in.jsonl").write_text(json.dumps(line))
    files = ("-i", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl")
    done = run("splitserve", "run-batch", *files, "--server", cluster.url)
    assert done.returncode == 0, done.stderr
    [told] = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert told["response"]["body"]["usage"]["completion_tokens"] == 3


def test_it_makes_certificates_and_reads_them(run, model, tmp_path):
    done = run("splitserve", "certs", "--out", tmp_path / "certs")
    assert done.returncode == 0, done.stderr
    files = [f"--tls-{kind}={tmp_path}/certs/coordinator.{end}" for kind, end in (("cert", "crt"), ("key", "crt"))]
    done = run("coordinator", model, *files)
    assert (done.returncode, "holds no private key" in done.stderr) == (2, True)


@pytest.mark.parametrize("backend", ["splitserve", "openai"])
def test_it_measures(cluster, run, backend):
    where = ("--target", cluster.target) if backend == "splitserve" else ("--base-url", cluster.url)
    done = run("splitserve", "bench", "serve", "--backend", backend, *where, *FEW, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["completed"] == 6


def test_pictures_are_refused_before_the_load(cluster, run):
    done = run("splitserve", "bench", "serve", "--target", cluster.target, *FEW, "--plots", "pictures")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("Error: this needs matplotlib, which is not installed: pip install 'splitserve[bench]'\n")


@pytest.mark.parametrize("command", few(sorted(set(leaves(main)) - IN_BASE - {"demo"}), "up", "bench engine"))
def test_what_needs_a_node_says_how_to_get_it(run, model, command):
    done = run("splitserve", *command.split(), model)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"Error: {NO_NODE}"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_so_does_a_node_that_is_started_without_the_command_line(run, model, role):
    done = run(f"{role}_node", model, "--name", "n0", "--log-level", "error")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"n0: {NO_NODE}"


def test_so_does_a_coordinator_that_is_to_send_traces(run, model):
    done = run("coordinator", model, "--otlp-endpoint", "http://localhost:4317")
    assert (done.returncode, done.stdout) == (2, "")
    missing = "this needs opentelemetry.exporter.otlp.proto.grpc, opentelemetry.sdk, which are not installed"
    assert done.stderr == f"coordinator: {missing}: pip install 'splitserve[otel]'\n"


def test_the_demo_needs_a_node(run):
    done = run("splitserve", "demo")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"Error: {NO_NODE}"


@pytest.mark.parametrize("kind", few(["folder", "gguf"]))
def test_the_command_starts_a_coordinator(base_python, model, tmp_path, kind):
    model = model if kind == "folder" else write_gguf(tmp_path / "tiny.gguf")
    flags = {"grpc_port": free_port(), "fleet_port": free_port(), "http_port": -1}
    log = tmp_path / "log"
    child = Child(
        "coordinator",
        "splitserve",
        "coordinator",
        str(model),
        flags=flags,
        log=log,
        env={"XDG_CACHE_HOME": str(tmp_path)},
        python=base_python,
    )
    try:
        wait_until(lambda: "clients may dial" in child.output() or not child.is_running, "it listens", DEADLINE_S)
        assert child.stop() == 0, child.output()
    finally:
        child.kill()


@pytest.mark.parametrize("module", ["splitserve", "splitserve_bench", "coordinator", "prefill_node", "serving_node"])
def test_without_any_package_one_sentence_names_them(module):
    done = subprocess.run(
        [sys.executable, "-S", "-m", module], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == f"Error: this needs {', '.join(BASE_MODULES)}, which are not installed: pip install splitserve\n"
    )


def test_a_checkout_that_is_not_installed_serves(tmp_path):
    python = make_environment(tmp_path / "environment", "node", has_splitserve=False)
    port = free_port()
    child = Child(
        "up",
        "splitserve",
        "up",
        str(write_tiny_llama(tmp_path / "model")),
        flags={"grpc_port": free_port(), "http_port": port, "num_kv_blocks": 64, "device": "cpu"},
        log=tmp_path / "log",
        env={"PYTHONPATH": ROOT, "XDG_CACHE_HOME": tmp_path},
        python=python,
    )
    try:
        wait_until(lambda: "Ready" in child.output() or not child.is_running, "it serves", DEADLINE_S)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/version", timeout=DEADLINE_S) as answer:
            assert json.load(answer) == {"version": VERSION}
        assert child.stop() == 0, child.output()
    finally:
        child.kill()
