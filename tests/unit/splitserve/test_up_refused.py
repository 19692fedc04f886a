"""What `splitserve up` cannot do is one sentence, told before anything starts."""

import errno
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from serving_core.errors import SettingsError
from splitserve.cli import main
from splitserve.launch.cluster import NO_HTTP, ClusterSettings
from splitserve.launch.launcher import Cluster, free_port
from splitserve.launch.models import LocalModel
from tests.effort import few
from tests.tiny_models import write_fake_model
from tests.tls_kit import authority, flags_of, for_servers_alone

ROOT = Path(__file__).parents[3]
DEADLINE_S = 240.0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_fake_model(tmp_path_factory.mktemp("model") / "fake")


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder for temporary files, in which nothing is left."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


@pytest.fixture
def refused(model, temporary):
    """Runs the command in this process. Returns its only sentence."""

    def refused(*flags, model=model, grpc_port=None):
        ports = ("--grpc-port", str(grpc_port or free_port()), "--http-port", "0")
        done = CliRunner().invoke(main, ["up", str(model), *ports, *flags])
        return sentence_of(done.exit_code, done.stderr)

    return refused


def sentence_of(exit_code, said):
    assert exit_code == 2, said
    [sentence] = said.splitlines()
    assert sentence.startswith("Error: ")
    assert sentence.count("rror") == 1
    return sentence


def test_a_process_that_refuses_says_one_sentence_and_leaves_nothing(model, temporary):
    command = [sys.executable, "-m", "splitserve", "up", str(model), "--http-port", str(NO_HTTP), "--prefill", "0"]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    told = sentence_of(done.returncode, done.stderr)
    assert "nobody would prefill: --prefill or --mixed must be above 0" in told
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--prefill 0", "nobody would prefill: --prefill or --mixed must be above 0"),
        ("--max-model-len 5000", "--max-model-len 5000 is more than the model's 4096"),
        ("--host 0.0.0.0", "SPLITSERVE_API_KEY"),
        ("--decode 3 --device cpu --kv-cache-memory-bytes 1099511627776", "4 nodes need 4096.0 GiB of memory"),
        ("--device cpu --kv-host-bytes 1099511627776", ", --kv-host-bytes 2048.0 GiB), and"),
        ("--kv-cache-memory-bytes 1", "--kv-cache-memory-bytes 1 holds no block of 2048 bytes"),
        ("--kv-disk-path .", "--kv-disk-path is the folder of a file whose size is --kv-disk-bytes, and that is 0"),
        ("--speculation draft", "--speculation draft needs the folder of a smaller model: --speculative-model"),
        ("--node-timeout-s 0.5", "node_timeout_s (0.5) must be above heartbeat_s (1)"),
    ],
)
def test_what_cannot_work_is_told_before_anything_starts(refused, flags, sentence):
    assert sentence in refused(*flags.split())


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--block-size 32 --decode-tp 2", "--decode-tp, --block-size: not for --engine vllm, whose own"),
        ("--ray", "--engine vllm starts nodes on this machine alone: --ray cannot be given too"),
        ("--vllm-python /no/such/python", "--vllm-python /no/such/python cannot be started: No such file"),
        ("", f"{sys.executable}: vLLM is not installed in this environment: pip install vllm=="),
        ("-- --model other", "--model is set by the node and cannot be among vLLM's flags"),
    ],
)
def test_what_nodes_with_vllm_cannot_do_is_told_before_anything_starts(refused, flags, sentence):
    assert sentence in refused("--engine", "vllm", *flags.split())


def test_flags_of_vllm_need_its_engine(refused):
    assert "--vllm-flag" in refused("--", "--enforce-eager")


def test_a_port_in_use_is_named_with_its_flag(refused):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert refused(grpc_port=port) == f"Error: --grpc-port {port} is in use on 127.0.0.1"
        assert refused("--http-port", str(port)) == f"Error: --http-port {port} is in use on 127.0.0.1"


@pytest.mark.parametrize(("role", "lacks"), [("coordinator", "clientAuth"), ("node", "serverAuth")])
def test_a_certificate_that_cannot_be_shown_at_both_ends_is_told(refused, tmp_path, role, lacks):
    folder = authority(tmp_path / "certs")
    for_servers_alone(folder)
    flags = [f"--{name.replace('_', '-')}={path}" for name, path in flags_of(folder, role).items()]
    assert f"its extended key usage lacks {lacks}" in refused(*flags)


def test_a_kernel_variant_that_is_none_is_told(refused, monkeypatch):
    monkeypatch.setenv("SPLITSERVE_NATIVE", "sse9")
    assert "SPLITSERVE_NATIVE=sse9 is none of" in refused()


BROKEN = {
    "no config.json": (lambda folder: (folder / "config.json").unlink(), "config.json cannot be read"),
    "an architecture of another kind": (
        lambda folder: rewrite(folder / "config.json", architectures=["BertForMaskedLM"]),
        "architecture 'BertForMaskedLM' is not supported: its attention goes both ways",
    ),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json; a tokenizer of another"),
    "no weights": (
        lambda folder: rewrite(folder / "config.json", architectures=["LlamaForCausalLM"], model_type="llama"),
        "neither model.safetensors nor model.safetensors.index.json",
    ),
}


def rewrite(path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(("damage", "sentence"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_model_is_one_sentence(refused, tmp_path, damage, sentence):
    folder = write_fake_model(tmp_path / "broken")
    damage(folder)
    assert sentence in refused(model=folder)


def test_a_folder_for_logs_that_cannot_be_written_is_refused(model, temporary, tmp_path, monkeypatch):
    """Before anything is made; its mode would not do, as root may write anywhere."""
    (tmp_path / "file").touch()
    for log_dir, why in ((tmp_path / "file", "File exists"), (tmp_path / "file" / "logs", "Not a directory")):
        assert log_dir_refused(model, log_dir) == f"--log-dir {log_dir} cannot be made, or written to: {why}"

    def refuse(**_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    assert log_dir_refused(model, tmp_path).endswith("cannot be made, or written to: Read-only file system")


def log_dir_refused(model, log_dir):
    settings = ClusterSettings(http_port=NO_HTTP, log_dir=str(log_dir))
    with pytest.raises(SettingsError) as refused:
        Cluster(settings, {}, LocalModel(model, "fake"), report=print)
    return str(refused.value)


@pytest.mark.parametrize("package", few(["splitserve up", "coordinator", "serving_node"]))
def test_nothing_starts_in_a_folder_that_is_gone(package, model, tmp_path):
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "gone").mkdir()
        script = f'cd "{folder}/gone" && rmdir ../gone && exec {sys.executable} -m {package} {model}'
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
        done = subprocess.run(
            ["sh", "-c", script], env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
    [line] = done.stderr.splitlines()
    assert "the folder that this was started in is gone" in line
    assert done.returncode == 2
