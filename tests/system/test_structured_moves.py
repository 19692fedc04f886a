"""Answers that are kept to a form while they move from node to node, or give way: token for token as in peace."""

import asyncio
import json

import pytest

from splitserve import AsyncClient
from tests.schemas import LINK, WORD, check, closed
from tests.system.answers import ask, request, stream
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.nightly

CLOSERS = {ord(each): 6.0 for each in '"]}'}  # a random model would rarely end a text by itself
DEADLINE_S = 600.0
TREE = {"anyOf": [{"type": "null"}, closed(["v"], v=WORD, under={"$ref": "#/$defs/tree"})]}
KINDS = (
    WORD,
    {"type": "integer", "minimum": -5000, "maximum": 5000},
    LINK,
    {"type": "string", "format": "uuid"},
    {"enum": ["日本", "größe", 'a"b\\c', 2.5]},
    {"$ref": "#/$defs/tree"},
)


def _schemas(length):
    """Lists of so many of each kind: long answers."""
    lists = [{"type": "array", "items": each, "minItems": length, "maxItems": length} for each in KINDS]
    return [{**closed(kept=each), "$defs": {"tree": TREE}} for each in lists]


def _questions(schemas, max_tokens):
    fields = {"max_tokens": max_tokens, "temperature": 1, "logit_bias": CLOSERS, "disable_any_whitespace": True}
    return [
        {"prompt": [index], "seed": index, "json_schema": json.dumps(schema), **fields}
        for index, schema in enumerate(schemas)
    ]


def _check(schemas, answers, in_peace):
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in in_peace]
    assert check(schemas, [answer.text for answer in answers]) == len(schemas)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=4096)


async def test_answers_that_move(start_cluster, model):
    node = {"num_kv_blocks": 3000, "max_num_seqs": 8}
    options = {"num_prefill": 0, "num_decode": 0, "num_mixed": 2, "coordinator": {"heartbeat_s": 0.05}}
    cluster = start_cluster(model, node=node, **options)
    schemas = _schemas(70)
    questions = _questions(schemas, 3500)
    async with cluster.connect() as stub, AsyncClient(cluster.target) as client, asyncio.timeout(DEADLINE_S):
        in_peace = await asyncio.gather(*[ask(stub, **question) for question in questions])
        streams = [stream(stub, request(**question)) for question in questions]
        for answering in streams:
            await answering.tokens(5)
        from_node, to_node = cluster.names
        while not all(answering.has_ended for answering in streams):
            await client.set_role(to_node, "mixed")
            await client.set_role(from_node, "prefill")
            while cluster.loads()[from_node].num_running:
                await asyncio.sleep(0.02)
            from_node, to_node = to_node, from_node
        answers = [await answering.complete() for answering in streams]
    assert sum(answer.complete.timeline.num_migrations for answer in answers) >= len(answers)
    assert not any(answer.complete.timeline.num_restarts for answer in answers)
    _check(schemas, answers, in_peace)
    cluster.wait_all_free()


async def test_answers_that_give_way(start_cluster, model):
    cluster = start_cluster(model, node={"num_kv_blocks": 180, "max_num_seqs": 16})
    schemas = 2 * _schemas(25)
    questions = _questions(schemas, 1400)
    async with cluster.connect() as stub, asyncio.timeout(DEADLINE_S):
        in_peace = [await ask(stub, **question) for question in questions]
        before = _num_preemptions(cluster)
        answers = await asyncio.gather(*[ask(stub, **question) for question in questions])
    assert _num_preemptions(cluster) > before, "there was room for all"
    _check(schemas, answers, in_peace)
    cluster.wait_all_free()


def _num_preemptions(cluster):
    return sum(load.num_preemptions for load in cluster.loads().values())
