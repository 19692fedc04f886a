"""A GGUF file through the whole split: answers equal those of transformers, which reads the same file, for any sizes of
the nodes; `up` and the roles take the file as MODEL; both halves must have the same one."""

import random
import sys

import pytest

from splitserve.gguf.folder import gguf_folder
from tests.gguf_files import write_gguf
from tests.system.answers import ask, ask_all, request
from tests.system.cluster import Child, free_port, wait_until
from tests.system.oracle import Reference

GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 24}
DEADLINE_S = 240.0
LENGTHS = (3, 40, 130)


def folder_of(path, **options):
    return gguf_folder(write_gguf(path / "tiny.gguf", **options), path / "cache")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "stored", "prefill_tp", "decode_tp"),
    [
        ("llama", "Q4_1", 1, 1),
        ("llama", "Q8_0", 2, 1),
        ("qwen2", "Q5_0", 1, 2),
        ("qwen3_moe", "Q8_0", 2, 1),
        ("phi3", "Q8_0", 1, 2),
        ("qwen3_5", "F32", 1, 1),
    ],
)
async def test_answers_equal_transformers(start_cluster, tmp_path, family, stored, prefill_tp, decode_tp):
    folder = folder_of(tmp_path, family=family, stored=stored, num_key_value_heads=2 if prefill_tp == 1 else 1)
    cluster = start_cluster(
        folder,
        node={"dtype": "float32"},
        prefill={"tensor_parallel_size": prefill_tp, "max_num_batched_tokens": 64},
        decode={"tensor_parallel_size": decode_tp},
    )
    rng = random.Random(stored)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in LENGTHS]
    async with cluster.connect() as stub:
        answers = await ask_all(stub, [request(prompt, **GREEDY) for prompt in prompts])
    # Of most files transformers does not read all that they say, so it reads the model that they were made of.
    reference = Reference(folder if family in ("llama", "qwen2") else tmp_path / "tiny")
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == reference.greedy(prompt, GREEDY["max_tokens"], eos_token_id=-1)
    cluster.wait_all_free()
    cluster.stop()


@pytest.mark.nightly
async def test_a_node_with_another_file_of_the_same_kind_is_not_taken(start_cluster, tmp_path):
    (tmp_path / "tuned").mkdir()
    cluster = start_cluster(folder_of(tmp_path))
    intruder = cluster.start_intruder(folder_of(tmp_path / "tuned", seed=1), "decode-9")
    wait_until(lambda: not intruder.is_running, "it gives up", DEADLINE_S)
    assert "weights" in intruder.output()
    async with cluster.connect() as stub:
        assert len((await ask(stub, [1, 2, 3], **GREEDY)).token_ids) == GREEDY["max_tokens"]
    cluster.wait_all_free()
    cluster.stop()


@pytest.mark.nightly
def test_up_serves_a_file(tmp_path):
    file, port = write_gguf(tmp_path / "tiny.gguf", stored="Q8_0"), free_port()
    flags = {"grpc_port": port, "http_port": -1, "num_kv_blocks": 64}
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    up = Child("up", "splitserve", "up", str(file), flags=flags, log=tmp_path / "log", env=env)
    try:
        wait_until(lambda: "Ready" in up.output() or not up.is_running, "it serves", DEADLINE_S)
        ask = {"server": f"127.0.0.1:{port}", "max_tokens": 4, "temperature": 0}
        asking = Child("ask", "splitserve", "generate", "the", flags=ask, log=tmp_path / "answer", env=env)
        wait_until(lambda: not asking.is_running, "an answer", DEADLINE_S)
        assert asking.process.returncode == 0, asking.output() + up.output()
        assert "Serving tiny: 1 prefill, 1 decode" in up.output()
        assert up.stop() == 0, up.output()
    finally:
        up.kill()


def test_a_damaged_file_is_one_sentence(tmp_path):
    file = write_gguf(tmp_path / "tiny.gguf")
    file.write_bytes(file.read_bytes()[:-500])
    log, env = tmp_path / "log", {"XDG_CACHE_HOME": str(tmp_path)}
    up = Child(
        "up", "splitserve", "up", str(file), flags={"grpc_port": free_port()}, log=log, env=env, python=sys.executable
    )
    wait_until(lambda: not up.is_running, "it refuses", DEADLINE_S)
    assert up.process.returncode == 2
    [line] = up.output().strip().splitlines()
    assert line.startswith("Error: tiny.gguf is not a GGUF file that can be served: ")
    assert line.endswith("it was cut short")
