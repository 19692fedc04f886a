"""LoRA adapters through a split cluster: answers are those of transformers with the adapters in its weights, requests
of all adapters share steps, and no prefix is found but of the same adapter."""

import random

import httpx2
import pytest

from tests.lora_adapters import write_adapter, write_merged
from tests.system.answers import request, stream
from tests.system.cluster import CALL_DEADLINE_S
from tests.system.oracle import Reference
from tests.tiny_models import write_tiny_model

BASE, ALL, SOME = "tiny", "all", "org/some.v1"
NAMES = (BASE, ALL, SOME)
NUM_TOKENS = 24
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": NUM_TOKENS}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The model and its adapters."""
    root = tmp_path_factory.mktemp("models")
    model = write_tiny_model(root / "model", "qwen2", intermediate_size=77)
    some = ("q_proj", "v_proj", "down_proj")
    return {
        BASE: model,
        ALL: write_adapter(root / "all", model, seed=1),
        SOME: write_adapter(root / "some", model, seed=2, targets=some, r=3, use_rslora=True),
    }


@pytest.fixture(scope="module")
def references(folders, tmp_path_factory):
    root, model = tmp_path_factory.mktemp("merged"), folders[BASE]
    merged = {name: write_merged(root / folders[name].name, model, folders[name]) for name in (ALL, SOME)}
    return {name: Reference(folder) for name, folder in {BASE: model, **merged}.items()}


@pytest.fixture(scope="module")
def cluster(start_cluster, folders, num_api_servers):
    """A reader of one rank and a writer of two."""
    lora = tuple(f"{name}={folders[name]}" for name in (ALL, SOME))
    return start_cluster(
        folders[BASE],
        ipc=True,
        http=True,
        coordinator={"served_model_name": BASE, "api_server_count": num_api_servers},
        node={"num_kv_blocks": 400, "lora": lora},
        prefill={"max_num_batched_tokens": 64},
        decode={"tensor_parallel_size": 2},
    )


def _prompt(seed, length):
    return [random.Random(seed).randrange(256) for _ in range(length)]


async def test_a_mixed_batch(cluster, references):
    prompts = [_prompt(seed, length) for seed, length in enumerate((1, 9, 40, 150))]
    asked = [(name, prompt) for prompt in prompts for name in NAMES]
    async with cluster.connect() as stub:
        streams = [stream(stub, request(prompt, model=name, **GREEDY)) for name, prompt in asked]
        answers = [await answering.complete() for answering in streams]
    expected = [references[name].greedy(prompt, NUM_TOKENS, eos_token_id=-1) for name, prompt in asked]
    assert [answer.token_ids for answer in answers] == expected
    assert len({tuple(answer) for answer in expected}) == len(asked)
    cluster.wait_all_free()


async def test_a_prefix_is_found_by_requests_of_its_own_adapter_alone(cluster, references):
    prompt = _prompt(9, 80)
    found = []
    async with cluster.connect() as stub:
        for name in NAMES * 2:
            answer = await stream(stub, request(prompt, model=name, **GREEDY)).complete()
            assert answer.token_ids == references[name].greedy(prompt, NUM_TOKENS, eos_token_id=-1)
            found.append((answer.complete.cached_tokens, answer.complete.kv_bytes_saved > 0))
    assert found == [(0, False)] * len(NAMES) + [(72, True)] * len(NAMES)
    cluster.wait_all_free()


async def test_the_http_api_server(cluster, references):
    prompt = _prompt(10, 20)
    async with httpx2.AsyncClient(base_url=cluster.url, timeout=CALL_DEADLINE_S) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [(each["id"], each["parent"]) for each in listed] == [(BASE, None), (ALL, BASE), (SOME, BASE)]
        assert (await client.get(f"/v1/models/{SOME}")).json()["root"] == BASE
        body = {"prompt": prompt, "return_token_ids": True, **GREEDY}
        for name in NAMES:
            reply = (await client.post("/v1/completions", json={**body, "model": name})).json()
            expected = references[name].greedy(prompt, NUM_TOKENS, eos_token_id=-1)
            assert (reply["model"], reply["choices"][0]["token_ids"]) == (name, expected)
        unknown = await client.post("/v1/completions", json={**body, "model": "some.v1"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.nightly
def test_a_node_without_the_adapters_of_the_others_is_refused(cluster, folders):
    intruder = cluster.start_intruder(folders[BASE], "decode-1", lora=(f"{ALL}={folders[ALL]}",))
    assert intruder.wait(CALL_DEADLINE_S) != 0
    assert f"lora:{SOME} is missing and " in intruder.output()
