"""Clusters of real processes over TLS: who gets in at which port, encrypted KV between nodes that other machines could
reach, certificates that are exchanged while streams run."""

import ipaddress
import os
import shutil
import socket
import subprocess
import sys
import threading

import httpx2
import psutil
import pytest

from serving_core.net.tls import TlsFiles, client_context
from splitserve import Client
from tests.system.cluster import FLEET_SECRET, Child, free_port, wait_until
from tests.system.oracle import fake_answer
from tests.tiny_models import write_fake_model
from tests.tls_kit import authority, flags_of, for_one_host, serial_of, shown_at

DEADLINE_S = 240.0
PROMPT = list(range(40))
NUM_TOKENS = 12
GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3"  # how ZMTP 3 begins, up to the version


def outer_address():
    """An address of this machine that others could dial."""
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            if entry.family == socket.AF_INET and not ipaddress.ip_address(entry.address).is_loopback:
                return entry.address
    return None


OUTER = outer_address()
needs_outer_address = pytest.mark.skipif(OUTER is None, reason="this machine has no address beside the loopback's")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_fake_model(tmp_path_factory.mktemp("model") / "fake", step_s=0.01)


@pytest.fixture(scope="module")
def certs(tmp_path_factory):
    return authority(tmp_path_factory.mktemp("tls") / "certs")


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    return authority(tmp_path_factory.mktemp("tls") / "others")


@pytest.fixture(scope="module")
def cluster(start_cluster, model, certs):
    """KV goes over an address that others could dial, if there is one, to two ranks."""
    decode = {"tensor_parallel_size": 2} | ({"kv_bind": f"tcp://{OUTER}:*"} if OUTER else {})
    return start_cluster(model, http=True, certs=certs, coordinator={"served_model_name": "fake"}, decode=decode)


@pytest.fixture
def run(tmp_path):
    """Runs a command to its end."""

    def run(module, *words, **environment):
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SPLITSERVE_")}
        return subprocess.run(
            [sys.executable, "-m", module, *map(str, words)],
            env={**inherited, **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )

    return run


def flags(given):
    return [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)]


# ---- answers ----


def test_whole_answers_over_grpc_and_http(cluster, certs):
    expected = fake_answer(PROMPT, NUM_TOKENS)
    sampling = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    with Client(cluster.target, tls_ca=str(certs / "ca.crt")) as client:
        chunks = list(client.generate(PROMPT, **sampling))
    assert [token for chunk in chunks for token in chunk.token_ids] == expected
    assert chunks[-1].completion.timeline.decode_node == "decode-0"
    context = client_context(TlsFiles(ca=str(certs / "ca.crt")))
    body = {"prompt": PROMPT, "return_token_ids": True, **sampling}
    with httpx2.Client(base_url=cluster.url, verify=context, timeout=DEADLINE_S) as client:
        reply = client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["token_ids"] == expected


@needs_outer_address
def test_kv_arrives_encrypted(cluster):
    """What the data ports of both ranks say of themselves to whoever connects (ZMTP 3.0, 2.2)."""
    process = psutil.Process(cluster.children["decode-0"].process.pid)
    connections = [each for rank in (process, *process.children(True)) for each in rank.net_connections("tcp")]
    ports = {each.laddr.port for each in connections if each.status == "LISTEN" and each.laddr.ip == OUTER}
    assert len(ports) == 2
    for port in ports:
        with socket.create_connection((OUTER, port), timeout=DEADLINE_S) as connection:
            connection.sendall(GREETING)
            with connection.makefile("rb") as incoming:
                greeting = incoming.read(32)
        assert greeting[12:32].rstrip(b"\0") == b"CURVE"


@pytest.mark.nightly
def test_the_command_line_asks_over_tls(cluster, certs, run):
    where = ("--server", f"https://{cluster.target}", "--tls-ca", certs / "ca.crt")
    done = run("splitserve", "generate", "hi", "--raw", "--max-tokens", 2, *where)
    assert done.returncode == 0, done.stderr
    done = run("splitserve", "status", SPLITSERVE_SERVER=cluster.target, SPLITSERVE_TLS_CA=str(certs / "ca.crt"))
    assert "prefill-0" in done.stdout, done.stderr
    for target in (cluster.target, cluster.url):
        backend = "openai" if target == cluster.url else "splitserve"
        few = ("--num-prompts", 4, "--random-input-len", 20, "--random-output-len", 4, "--vocab-size", 250)
        server = ("--server", target, "--tls-ca", certs / "ca.crt", "--backend", backend)
        done = run("splitserve", "bench", "serve", *server, *few)
        assert done.returncode == 0, done.stderr


def test_health_checks(cluster, certs, others, run):
    def check(*words, **environment):
        return run("splitserve.healthcheck", cluster.target, *words, **environment)

    ca, cert, key = (str(certs / name) for name in ("ca.crt", "coordinator.crt", "coordinator.key"))
    for variables in ({"SPLITSERVE_TLS_CA": ca}, {"SPLITSERVE_TLS_CERT": cert, "SPLITSERVE_TLS_KEY": key}):
        assert check(**variables).returncode == 0
        assert check("splitserve.v1.Inference", **variables).returncode == 0
        assert "NOT_FOUND" in check("nobody", **variables).stderr
    assert "UNAVAILABLE" in check(SPLITSERVE_TLS_CA=str(others / "ca.crt")).stderr
    assert check(SPLITSERVE_TLS_CA="nowhere").stderr == "--tls-ca nowhere cannot be read: No such file or directory\n"
    assert check().returncode == 1


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")
@pytest.mark.parametrize("protocol", ["h2", "http/1.1"])
def test_openssl_takes_the_certificates(cluster, certs, protocol):
    port = cluster.port if protocol == "h2" else cluster.http_port
    ca = ("-CAfile", certs / "ca.crt", "-verify_return_error", "-verify_ip", "127.0.0.1")
    command = ["openssl", "s_client", "-connect", f"127.0.0.1:{port}", "-alpn", protocol, *ca]
    done = subprocess.run([*map(str, command)], stdin=subprocess.DEVNULL, capture_output=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert b"Verify return code: 0 (ok)" in done.stdout
    assert f"ALPN protocol: {protocol}".encode() in done.stdout


# ---- who does not get in ----


@pytest.mark.parametrize(
    ("who", "sentence"),
    [
        ("without TLS", "what listens there hangs up at once, as a TLS port does"),
        pytest.param(
            "without a certificate",
            "what listens there hangs up in the handshake: it may ask for a certificate",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "of another CA",
            "what listens there hangs up in the handshake: it may ask for a certificate",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "that trusts another CA",
            "the certificate that is shown there is of no CA that is known here: see --tls-ca",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_stranger_is_no_node_even_with_the_secret(cluster, certs, others, model, tmp_path, who, sentence):
    ours, theirs = flags_of(certs, "node"), flags_of(others, "node")
    given = {
        "without TLS": {},
        "without a certificate": {"tls_ca": ours["tls_ca"]},
        "of another CA": theirs | {"tls_ca": ours["tls_ca"]},
        "that trusts another CA": ours | {"tls_ca": theirs["tls_ca"]},
    }
    link = {"coordinator": f"127.0.0.1:{cluster.fleet_port}", "name": "stranger", "block_size": 8}
    child = Child(
        "stranger",
        "prefill_node",
        str(model),
        flags=link | given[who],
        log=tmp_path / "log",
        env={"SPLITSERVE_FLEET_SECRET": FLEET_SECRET},
    )
    try:
        wait_until(lambda: sentence in child.output(), f"{sentence}\n{child.output()}", DEADLINE_S)
        assert cluster.attached() == {"prefill-0", "decode-0"}
        assert child.stop() == 0
    finally:
        child.kill()


def test_http_without_tls_gets_nothing(cluster):
    with pytest.raises(httpx2.TransportError):
        httpx2.get(f"http://127.0.0.1:{cluster.http_port}/health", timeout=DEADLINE_S)


def test_a_certificate_alone_makes_no_node(cluster, certs, model, run):
    where = {"coordinator": f"127.0.0.1:{cluster.fleet_port}", "name": "stranger", "block-size": "8"}
    done = run("prefill_node", model, *flags(where | flags_of(certs, "node")), SPLITSERVE_FLEET_SECRET="wrong")
    assert (done.returncode, "SPLITSERVE_FLEET_SECRET is another one here" in done.stderr) == (2, True)


# ---- exchange ----


@pytest.mark.nightly
def test_certificates_are_exchanged_while_streams_run(cluster, certs):
    expected, got = fake_answer(PROMPT, 300), []
    is_running, may_end = threading.Event(), threading.Event()

    def read():
        with Client(cluster.target, tls_ca=str(certs / "ca.crt")) as client:
            for chunk in client.generate(PROMPT, max_tokens=300, temperature=0, ignore_eos=True):
                got.extend(chunk.token_ids)
                is_running.set()
                if len(got) > 290:
                    assert may_end.wait(DEADLINE_S)

    reader = threading.Thread(target=read)
    reader.start()
    assert is_running.wait(DEADLINE_S)
    ports = ((cluster.port, "h2"), (cluster.http_port, "http/1.1"))
    before = serial_of(certs / "coordinator.crt")
    assert [shown_at(port, certs, protocol=protocol) for port, protocol in ports] == [before] * 2
    authority(certs)
    after = serial_of(certs / "coordinator.crt")
    for port, protocol in ports:
        wait_until(lambda at=(port, certs, "", protocol): shown_at(*at) == after, "the new certificate", DEADLINE_S)
    may_end.set()
    reader.join(DEADLINE_S)
    assert got == expected
    assert cluster.attached() == {"prefill-0", "decode-0"}


# ---- start ----


@pytest.mark.nightly
def test_up_serves_over_tls_with_a_certificate_alone_and_with_a_ca(model, certs, run, tmp_path):
    """Without a CA its nodes attach in the open, on this machine; with one they show the certificate that it has."""
    for number, names in enumerate((("tls_cert", "tls_key"), ("tls_cert", "tls_key", "tls_ca"))):
        given = {name: flags_of(certs, "coordinator")[name] for name in names}
        port = free_port()
        up = Child(
            "up",
            "splitserve",
            "up",
            str(model),
            flags={"grpc_port": port, "http_port": -1, "block_size": 8, "mixed": 1, **given},
            log=tmp_path / f"log-{number}",
            env={},
        )
        try:
            ready = f"Ready: gRPC on https://127.0.0.1:{port}"
            wait_until(lambda up=up, ready=ready: ready in up.output() or not up.is_running, ready, DEADLINE_S)
            where = ("--server", f"https://127.0.0.1:{port}", "--tls-ca", certs / "ca.crt")
            done = run("splitserve", "generate", "hi", "--raw", "--max-tokens", 2, *where)
            assert done.returncode == 0, f"{done.stderr}\n{up.output()}"
            assert up.stop() == 0
        finally:
            up.kill()


UNUSABLE = {
    "a key of another certificate": ("coordinator", {"tls_key": "others"}, "is not the key of --tls-cert"),
    "a CA that is none": ("coordinator", {"tls_ca": "key"}, "holds no certificate in PEM"),
    "a node's key of another": ("prefill_node", {"tls_key": "others"}, "is not the key of --tls-cert"),
    "a node without a CA": ("prefill_node", {"tls_ca": ""}, "--tls-cert and --tls-key need --tls-ca"),
}


@pytest.mark.parametrize(("module", "changes", "sentence"), UNUSABLE.values(), ids=UNUSABLE.keys())
def test_files_that_do_not_fit_end_the_start_with_a_sentence(run, model, certs, others, module, changes, sentence):
    role = "coordinator" if module == "coordinator" else "node"
    values = {"others": str(others / f"{role}.key"), "key": str(certs / "ca.key"), "": ""}
    given = flags_of(certs, role) | {name: values[value] for name, value in changes.items()}
    done = run(module, model, *flags(given), *(("--grpc-port", free_port()) if role == "coordinator" else ()))
    assert (done.returncode, sentence in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr


def test_up_says_at_once_that_its_nodes_could_not_know_its_certificate(run, model, tmp_path):
    folder = authority(tmp_path / "certs")
    for_one_host(folder, "example.org")
    given = {**flags_of(folder, "coordinator"), "grpc_port": str(free_port()), "http_port": "-1"}
    done = run("splitserve", "up", model, *flags(given))
    assert done.returncode == 2
    assert f"--tls-cert {given['tls_cert']} is not for 127.0.0.1, where the nodes dial with --tls-ca" in done.stderr


@pytest.mark.parametrize(
    ("words", "environment", "sentence"),
    [
        (
            ("--kv-transport", "torch_dist", "--kv-bind", "dist://10.0.0.1:*"),
            {},
            "--kv-transport torch_dist is neither",
        ),
        (
            ("--tensor-parallel-size", 2),
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"},
            "what ranks say to each other is neither authenticated nor encrypted, and 10.0.0.1 is not a loopback",
        ),
    ],
    ids=["torch_dist", "ranks"],
)
def test_what_cannot_have_tls_needs_a_trusted_network(run, model, certs, words, environment, sentence):
    given = flags(flags_of(certs, "node"))
    done = run("decode_node", model, *given, *words, SPLITSERVE_FLEET_SECRET="s", **environment)
    assert (done.returncode, sentence in done.stderr) == (2, True), done.stderr
    assert "--trusted-network" in done.stderr
