"""LoRA adapters that come and go while a split cluster serves: the tokens are always those of transformers with the
adapter that a request began with, and errors say what is not there."""

import asyncio
import random

import httpx2
import pytest

from tests.lora_adapters import write_adapter, write_merged
from tests.system.answers import request, stream
from tests.system.cluster import CALL_DEADLINE_S
from tests.system.oracle import Reference
from tests.tiny_models import write_tiny_model

KEY = "operators-of-the-test"
OPERATOR = {"authorization": f"Bearer {KEY}"}
NUM_TOKENS = 24
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def model(root):
    return write_tiny_model(root / "model", "qwen2", intermediate_size=77)


@pytest.fixture(scope="module")
def references(root, model):
    """What each adapter's tokens are, by its folder within the root of adapters."""
    adapters = {
        "one": write_adapter(root / "adapters" / "one", model, seed=1),
        "two": write_adapter(root / "adapters" / "two", model, seed=2, targets=("q_proj", "down_proj"), r=3),
    }
    merged = {name: write_merged(root / f"merged-{name}", model, folder) for name, folder in adapters.items()}
    return {name: Reference(folder) for name, folder in merged.items()}


@pytest.fixture(scope="module")
def cluster(start_cluster, root, model, references, num_api_servers):
    """A reader of one rank and a writer of two."""
    return start_cluster(
        model,
        ipc=True,
        http=True,
        env={"SPLITSERVE_ADMIN_KEY": KEY},
        coordinator={"served_model_name": "tiny", "api_server_count": num_api_servers},
        node={"num_kv_blocks": 400, "lora_root": root / "adapters"},
        prefill={"max_num_batched_tokens": 64},
        decode={"tensor_parallel_size": 2},
    )


def _prompt(seed, length=20):
    return [random.Random(seed).randrange(256) for _ in range(length)]


def _client(cluster):
    return httpx2.AsyncClient(base_url=cluster.url, timeout=CALL_DEADLINE_S)


async def _load(client, name, path):
    body = {"lora_name": name, "lora_path": str(path)}
    return await client.post("/v1/load_lora_adapter", json=body, headers=OPERATOR)


async def _unload(client, name):
    return await client.post("/v1/unload_lora_adapter", json={"lora_name": name}, headers=OPERATOR)


async def _tokens(client, name, prompt, num_tokens=NUM_TOKENS):
    body = {"model": name, "prompt": prompt, "return_token_ids": True, "max_tokens": num_tokens, **GREEDY}
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["token_ids"]


async def _loaded_again(client, name, path):
    """Load an adapter under a name that nodes may still be unloading."""
    async with asyncio.timeout(CALL_DEADLINE_S):
        while (reply := await _load(client, name, path)).status_code != 200:
            assert "unload" in reply.json()["error"]["message"], reply.text
            await asyncio.sleep(0.05)


async def test_a_name_has_the_weights_that_were_loaded_last(cluster, references):
    prompt = _prompt(1)
    async with _client(cluster) as client:
        for content in ("one", "two", "one"):  # each time under the same name
            await _loaded_again(client, "mine", content)
            for each in (prompt, prompt):  # the second time with a cached prefix
                expected = references[content].greedy(each, NUM_TOKENS, eos_token_id=-1)
                assert await _tokens(client, "mine", each) == expected
            models = [each["id"] for each in (await client.get("/v1/models")).json()["data"]]
            assert models == ["tiny", "mine"]
            assert (await _unload(client, "mine")).status_code == 200
            body = {"model": "mine", "prompt": prompt, "max_tokens": 1}
            reply = await client.post("/v1/completions", json=body)
            assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    cluster.wait_all_free()


async def test_a_request_finishes_with_the_adapter_that_is_unloaded_meanwhile(cluster, references):
    prompt, num_tokens = _prompt(2), 200
    async with _client(cluster) as client, cluster.connect() as stub:
        await _loaded_again(client, "leaving", "one")
        asked = request(prompt, model="leaving", max_tokens=num_tokens, **GREEDY)
        running = stream(stub, asked)
        await running.tokens(3)
        assert (await _unload(client, "leaving")).status_code == 200
        reply = await _load(client, "leaving", "two")
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "lora_name"
        answer = await running.complete()
        assert answer.token_ids == references["one"].greedy(prompt, num_tokens, eos_token_id=-1)
        await _loaded_again(client, "leaving", "two")
        expected = references["two"].greedy(prompt, NUM_TOKENS, eos_token_id=-1)
        assert await _tokens(client, "leaving", prompt) == expected
        assert (await _unload(client, "leaving")).status_code == 200
    cluster.wait_all_free()


async def test_a_node_that_starts_again_loads_what_the_others_have(cluster, references):
    prompt = _prompt(3)
    async with _client(cluster) as client:
        await _loaded_again(client, "kept", "two")
        cluster.kill("prefill-0")
        cluster.heal()
        expected = references["two"].greedy(prompt, NUM_TOKENS, eos_token_id=-1)
        assert await _tokens(client, "kept", prompt) == expected
        assert (await _unload(client, "kept")).status_code == 200


async def test_what_cannot_be_loaded_is_refused_and_changes_nothing(cluster, root, model, references):
    other = write_tiny_model(root / "other", "qwen2", intermediate_size=55)
    write_adapter(root / "adapters" / "misfit", other, seed=3)
    cases = [
        (("x", "no-such-folder"), "lora_path", "cannot be loaded on node"),
        (("x", "misfit"), "lora_path", "cannot be loaded on node"),
        (("x", model), "lora_path", "outside of --lora-root"),
        (("x", "../model"), "lora_path", "outside of --lora-root"),
        (("x y", "one"), "lora_name", "must match"),
        (("tiny", "one"), "lora_name", "served or being loaded already"),
    ]
    async with _client(cluster) as client:
        for (name, path), param, message in cases:
            reply = await _load(client, name, path)
            error = reply.json()["error"]
            assert (reply.status_code, error["param"]) == (400, param), error
            assert message in error["message"]
            assert str(root) not in error["message"]
        assert (await _unload(client, "x")).status_code == 404
        body = {"lora_name": "x", "lora_path": "one"}
        assert (await client.post("/v1/load_lora_adapter", json=body)).status_code == 401
        await _loaded_again(client, "x", "one")  # after all that, it works
        assert (await _unload(client, "x")).status_code == 200


async def test_many_requests_beside_an_adapter_that_comes_and_goes_have_their_own_tokens(cluster, references):
    prompts = [_prompt(seed, 30) for seed in range(10, 16)]
    async with _client(cluster) as client:
        await _loaded_again(client, "steady", "one")
        expected = [references["one"].greedy(each, 60, eos_token_id=-1) for each in prompts]

        async def change():
            for content in ("two", "one"):
                await _loaded_again(client, "changing", content)
                await _unload(client, "changing")

        changing = asyncio.create_task(change())
        tokens = await asyncio.gather(*(_tokens(client, "steady", each, 60) for each in prompts))
        await changing
        assert tokens == expected
        assert (await _unload(client, "steady")).status_code == 200
    cluster.wait_all_free()
