"""Starting: what cannot work ends at once, with an exit code and one sentence; what does not belong is refused."""

import json
import socket

import pytest

from tests.effort import few
from tests.system.answers import ask
from tests.system.cluster import FLEET_SECRET, Child, free_port
from tests.system.oracle import fake_answer
from tests.tiny_models import write_fake_model, write_tokenizer

ROLES = {"coordinator": "coordinator", "prefill": "prefill_node", "decode": "decode_node"}
DEADLINE_S = 240.0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_fake_model(tmp_path_factory.mktemp("model") / "fake")


@pytest.fixture(scope="module")
def cluster(start_cluster, model):
    return start_cluster(model)


@pytest.fixture
def run(tmp_path):
    """Runs a role until it ends by itself, which it must; returns the last line of its output."""
    children = []

    def run(role, model, *, env=None, **flags):
        child = Child(role, ROLES[role], str(model), flags=flags, log=tmp_path / "log", env=env or {})
        children.append(child)
        assert child.wait(DEADLINE_S) != 0, child.output()
        assert "Traceback" not in child.output(), child.output()
        return child.output().splitlines()[-1]

    yield run
    for child in children:
        if child.is_running:
            child.kill()


@pytest.mark.parametrize("role", ROLES)
def test_missing_model_folder(run, role, tmp_path):
    assert "nowhere" in run(role, tmp_path / "nowhere")


@pytest.mark.parametrize("role", ROLES)
def test_no_model_at_all(run, role):
    assert run(role, "")


def _without(name):
    return lambda folder: (folder / name).unlink()


def _with_config(**fields):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))

    return change


def _broken(name, content=b"\xff{"):
    return lambda folder: (folder / name).write_bytes(content)


BROKEN_FOLDERS = {
    "no config": ("config.json", ROLES, _without("config.json")),
    "config that is not JSON": ("config.json", ["coordinator", "decode"], _broken("config.json")),
    "config without a size": ("vocab_size", ["coordinator", "decode"], _with_config(vocab_size=None)),
    "config with a negative size": ("num_hidden_layers", ["decode"], _with_config(num_hidden_layers=-1)),
    "unknown architecture": (
        "BertModel",
        ["coordinator", "decode"],
        _with_config(architectures=["BertModel"]),
    ),
    "no tokenizer": ("tokenizer", ["coordinator"], _without("tokenizer.json")),
    "broken tokenizer": ("tokenizer", ["coordinator"], _broken("tokenizer.json")),
}


@pytest.mark.parametrize(
    ("role", "word", "damage"),
    [
        pytest.param(role, word, damage, id=f"{role}, {name}", marks=() if role == "decode" else pytest.mark.nightly)
        for name, (word, roles, damage) in BROKEN_FOLDERS.items()
        for role in roles
    ],
)
def test_broken_model_folder(run, role, word, damage, tmp_path):
    folder = write_fake_model(tmp_path / "model")
    damage(folder)
    assert word in run(role, folder)


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 260,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
BROKEN_WEIGHTS = {
    "no weights": {},
    "weights that are no safetensors": {"model.safetensors": b"\xff" * 100},
    "empty weights": {"model.safetensors": b""},
    "an index that names a missing file": {
        "model.safetensors.index.json": json.dumps({"weight_map": {"lm_head.weight": "gone.safetensors"}}).encode()
    },
}


@pytest.mark.parametrize("files", BROKEN_WEIGHTS.values(), ids=BROKEN_WEIGHTS.keys())
def test_broken_weights(run, files, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    write_tokenizer(folder)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    assert "safetensors" in run("decode", folder)


def test_nothing_from_the_model_folder_is_executed(run, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    proof = tmp_path / "executed"
    auto_map = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M", "AutoTokenizer": ["code.T", "code.T"]}
    code = f"open({str(proof)!r}, 'w').close()\nC = M = T = object\n"
    (folder / "config.json").write_text(json.dumps(LLAMA | {"auto_map": auto_map}))
    write_tokenizer(folder)
    for name in ("code.py", "tokenizer.py", "conftest.py", "sitecustomize.py"):
        (folder / name).write_text(code)
    run("decode", folder)
    run("coordinator", folder, grpc_port=_taken_port(), fleet_port=free_port())
    assert not proof.exists()


_sockets = []


def _taken_port():
    _sockets.append(socket.create_server(("127.0.0.1", 0)))
    return _sockets[-1].getsockname()[1]


@pytest.fixture(autouse=True)
def _close_sockets():
    yield
    while _sockets:
        _sockets.pop().close()


@pytest.mark.parametrize("which", few(["grpc_port", "fleet_port"]))
def test_port_in_use(run, model, which):
    taken = _taken_port()
    ports = {"grpc_port": free_port(), "fleet_port": free_port()} | {which: taken}
    assert str(taken) in run("coordinator", model, **ports)


@pytest.mark.nightly
def test_second_coordinator_on_the_same_ports(run, cluster, model):
    ports = {"grpc_port": cluster.port, "fleet_port": cluster.fleet_port}
    sentence = run("coordinator", model, **ports, env={"SPLITSERVE_FLEET_SECRET": FLEET_SECRET})
    assert str(cluster.port) in sentence or str(cluster.fleet_port) in sentence
    assert cluster.is_serving()


@pytest.mark.nightly
def test_data_port_in_use(run, cluster, model):
    taken = _taken_port()
    flags = {"coordinator": f"127.0.0.1:{cluster.fleet_port}", "kv_bind": f"tcp://127.0.0.1:{taken}"}
    assert str(taken) in run("decode", model, env={"SPLITSERVE_FLEET_SECRET": FLEET_SECRET}, **flags)


OFF_LOOPBACK = {
    "public API": ("coordinator", {"host": "0.0.0.0"}, "API_KEY"),
    "fleet port": ("coordinator", {"fleet_host": "0.0.0.0"}, "FLEET_SECRET"),
    "public API, IPv6": ("coordinator", {"host": "::"}, "API_KEY"),
    "decode data": ("decode", {"kv_bind": "tcp://0.0.0.0:*"}, "FLEET_SECRET"),
    "decode data on all interfaces": ("decode", {"kv_bind": "tcp://*:*"}, "FLEET_SECRET"),
}


@pytest.mark.parametrize("name", few(OFF_LOOPBACK))
def test_off_loopback_without_a_secret(run, model, name):
    role, flags, secret = OFF_LOOPBACK[name]
    ports = {"grpc_port": free_port(), "fleet_port": free_port()} if role == "coordinator" else {}
    assert f"SPLITSERVE_{secret}" in run(role, model, **ports, **flags)


UNUSABLE_FLAGS = {
    "unknown flag": {"no_such_flag": 1},
    "not a number": {"block_size": "many"},
    "out of range": {"block_size": 0},
    "unknown choice": {"dtype": "int3"},
    "endpoint of no known kind": {"kv_bind": "http://127.0.0.1:1"},
    "a pool smaller than one block": {"kv_cache_memory_bytes": 1},
    "a context longer than the model's": {"max_model_len": 10**6},
}


@pytest.mark.parametrize("flags", UNUSABLE_FLAGS.values(), ids=UNUSABLE_FLAGS.keys())
def test_unusable_flags(run, model, flags):
    assert run("decode", model, **flags)


def test_unknown_key_in_the_configuration_file(run, model, tmp_path):
    (tmp_path / "config.yaml").write_text("block-size: 8\nblok_size: 9\n")
    assert "blok_size" in run("decode", model, config=tmp_path / "config.yaml")


# ---- nodes that do not belong ----


async def _serves(cluster):
    assert cluster.attached() == set(cluster.names)
    async with cluster.connect() as stub:
        answer = await ask(stub, [1, 2], max_tokens=5, temperature=0, ignore_eos=True)
    assert answer.token_ids == fake_answer([1, 2], 5)


@pytest.mark.parametrize(
    ("role", "secret"), [("prefill", "wrong"), pytest.param("decode", "", marks=pytest.mark.nightly)]
)
async def test_wrong_fleet_secret(run, cluster, model, role, secret):
    flags = {"coordinator": f"127.0.0.1:{cluster.fleet_port}", "name": f"{role}-9", "block_size": 8}
    sentence = run(role, model, env={"SPLITSERVE_FLEET_SECRET": secret}, **flags)
    assert "SPLITSERVE_FLEET_SECRET" in sentence
    assert FLEET_SECRET not in sentence
    await _serves(cluster)


MISMATCHES = {
    "another shape": ("decode", {"num_layers": 3}, {}, "layers"),
    "another block size": ("prefill", {}, {"block_size": 16}, "block_size"),
    "another dtype": ("decode", {}, {"dtype": "bfloat16"}, "dtype"),
}


@pytest.mark.parametrize("name", few(MISMATCHES))
async def test_a_node_that_does_not_match(run, cluster, name, tmp_path):
    role, shape, flags, word = MISMATCHES[name]
    other = write_fake_model(tmp_path / "other", **shape)
    link = {"coordinator": f"127.0.0.1:{cluster.fleet_port}", "name": f"{role}-9"}
    sentence = run(role, other, env={"SPLITSERVE_FLEET_SECRET": FLEET_SECRET}, **{"block_size": 8, **flags, **link})
    assert word in sentence
    await _serves(cluster)
