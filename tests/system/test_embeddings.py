"""Embeddings of a whole fleet, by prefill nodes alone, for the official client: equal to transformers'."""

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openai
import pytest
import torch
from transformers import AutoModel

from splitserve import Client
from splitserve.client.errors import Refused
from tests.tiny_models import write_tiny_embedder

HIDDEN_SIZE = 48
TEXTS = ["a", "The quick brown fox jumps over the lazy dog", "x" * 100, "and again " * 30]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "mean": write_tiny_embedder(folder / "mean", "qwen3", pooling="mean_tokens", matryoshka_dimensions=[8, 16]),
        "last": write_tiny_embedder(folder / "last", "mistral", pooling="lasttoken", normalizes=False),
    }


def by_hand(folder, kind, prompts):
    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        states = [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]
    vectors = [(each.mean(0) if kind == "mean" else each[-1]).numpy() for each in states]
    return [each / np.linalg.norm(each) for each in vectors] if kind == "mean" else vectors


def openai_client(cluster):
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)


GRIDS = [
    pytest.param("mean", 1, 1, id="mean"),
    pytest.param("last", 2, 1, id="last, 2 ranks"),
    pytest.param("mean", 1, 2, id="mean, 2 stages"),
    pytest.param("mean", 2, 2, id="mean, 2 stages of 2 ranks"),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "tp_size", "pp_size"), GRIDS)
def test_embeddings_are_those_of_transformers(start_cluster, models, kind, tp_size, pp_size):
    cluster = start_cluster(
        models[kind],
        num_decode=0,
        http=True,
        node={"num_kv_blocks": 200, "max_num_batched_tokens": 24},
        prefill={"tensor_parallel_size": tp_size, "pipeline_parallel_size": pp_size},
        start_deadline_s=600.0,
    )
    with openai_client(cluster) as client:
        name = client.models.list().data[0].id
        expected = by_hand(models[kind], kind, [list(text.encode()) for text in TEXTS])
        for options in ({}, {"encoding_format": "float"}):  # the client's own way is base64
            reply = client.embeddings.create(model=name, input=TEXTS, **options)
            assert [each.index for each in reply.data] == [0, 1, 2, 3]
            for item, vector in zip(reply.data, expected, strict=True):
                assert item.embedding == pytest.approx(vector, abs=1e-5)
            assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(map(len, TEXTS))
            assert reply.model == name
        _check_load(client, name, models[kind], kind)
    cluster.wait_all_free()
    cluster.stop()


def _check_load(client, name, folder, kind):
    """Many calls at once, of token ids of all lengths, some with beginnings that are cached."""
    rng = random.Random(0)
    beginning = [rng.randrange(256) for _ in range(40)]
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 60))] for _ in range(30)]
    prompts += [beginning[: rng.randint(1, 40)] + prompt for prompt in prompts[:10]]
    with ThreadPoolExecutor(8) as threads:
        inputs = [prompts[start : start + 5] for start in range(0, len(prompts), 5)]
        replies = threads.map(lambda each: client.embeddings.create(model=name, input=each), inputs)
        found = [item.embedding for reply in replies for item in reply.data]
    for embedding, vector in zip(found, by_hand(folder, kind, prompts), strict=True):
        assert embedding == pytest.approx(vector, abs=1e-5)


@pytest.fixture(scope="module")
def cluster(start_cluster, models):
    cluster = start_cluster(models["mean"], num_decode=0, num_mixed=1, http=True, node={"num_kv_blocks": 200})
    yield cluster
    cluster.wait_all_free()


def test_dimensions_and_one_input_of_every_kind(cluster, models):
    [plain] = by_hand(models["mean"], "mean", [list(b"hello")])
    kept = plain[:16] / np.linalg.norm(plain[:16])
    with openai_client(cluster) as client:
        for given in ("hello", list(b"hello"), ["hello"], [list(b"hello")]):
            reply = client.embeddings.create(model="", input=given, dimensions=16)
            assert reply.data[0].embedding == pytest.approx(kept, abs=1e-5)


def test_over_grpc(cluster, models):
    [expected, cut] = by_hand(models["mean"], "mean", [list(b"hello"), list(b"hel")])
    with Client(f"127.0.0.1:{cluster.port}") as client:
        assert client.model_info().embedding_size == HIDDEN_SIZE
        for given in ("hello", list(b"hello")):
            found = client.embed(given)
            assert found.vector == pytest.approx(expected, abs=1e-5)
            assert (found.prompt_tokens, found.cached_tokens) == (5, 0)
            assert found.timeline.prefill_node
            assert not found.timeline.decode_node
        assert client.embed("hello", truncate_prompt_tokens=3).vector == pytest.approx(cut, abs=1e-5)
        assert np.linalg.norm(client.embed("hello", normalize=False).vector) != pytest.approx(1.0, abs=1e-3)
        with pytest.raises(Refused, match="the model makes embeddings, and generates no text"):
            list(client.generate("hello", max_tokens=1))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"input": []}, "input is empty"),
        ({"input": ""}, "is empty"),
        ({"input": ["a", ""]}, "input[1] is empty"),
        ({"input": [1, 260]}, "input has token id 260; the vocabulary ends at 259"),
        ({"input": ["a", [1]]}, "input[1] must be a string of valid Unicode, not a list"),
        ({"input": "a", "dimensions": 12}, "dimensions must be one of 8, 16, not 12"),
        ({"input": "a", "dimensions": 49}, "dimensions must be within [1, 48], not 49"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format must be 'float' or 'base64', not \"hex\""),
        ({"input": "a" * 1025}, "the prompt has 1025 tokens, over max_model_len (1024)"),
        ({"input": "a", "model": "other"}, "there is no model 'other'"),
        ({"input": "a", "extra_body": {"truncation_side": "left"}}, "truncation_side"),
    ],
)
def test_what_is_refused(cluster, given, message):
    with openai_client(cluster) as client, pytest.raises(openai.APIStatusError) as caught:
        client.embeddings.create(**{"model": "", **given})
    assert message in caught.value.message


def test_the_longest_input_has_room(cluster):
    with openai_client(cluster) as client:
        assert client.embeddings.create(model="", input="a" * 1024).usage.prompt_tokens == 1024
        cut = client.embeddings.create(model="", input="a" * 2000, extra_body={"truncate_prompt_tokens": -1})
        assert cut.usage.prompt_tokens == 1024


def test_answers_are_refused(cluster):
    with openai_client(cluster) as client, pytest.raises(openai.BadRequestError, match="generates no text"):
        client.completions.create(model="", prompt="a")
