"""Structured output through whole clusters: over HTTP and gRPC, and when nodes are killed in the middle."""

import asyncio
import json

import grpc
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from protos.inference_pb2 import Choice
from tests.schemas import SCHEMAS, WORD, check, closed, many_schemas, product
from tests.system.answers import ask, refusal, request, stream
from tests.tiny_models import write_fake_model, write_tiny_model

CLOSERS = {ord(each): 6.0 for each in '"]}'}  # a random model would rarely end a text by itself
SCHEMA = closed(name=WORD, age={"type": "integer", "minimum": 0, "maximum": 120})


class Person(BaseModel):
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=120)


@pytest.fixture(scope="module")
def fake(start_cluster, tmp_path_factory):
    return start_cluster(write_fake_model(tmp_path_factory.mktemp("fake")), http=True)


@pytest.fixture
def client(fake):
    with openai.OpenAI(base_url=f"{fake.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def asked(**fields):
    """With a seed: what is free in an answer may take any number of tokens."""
    return {"model": "fake", "messages": [{"role": "user", "content": "who?"}], "max_tokens": 600, "seed": 1, **fields}


def test_openais_client_gets_what_it_asks_for(fake, client):
    model = client.models.list().data[0].id
    form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
    whole = client.chat.completions.create(**asked(model=model, response_format=form))
    jsonschema.validate(json.loads(whole.choices[0].message.content), SCHEMA)
    assert whole.choices[0].finish_reason == "stop"
    pieces = client.chat.completions.create(**asked(model=model, response_format=form, stream=True))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    jsonschema.validate(json.loads(text), SCHEMA)
    person = client.chat.completions.parse(**asked(model=model, response_format=Person)).choices[0].message.parsed
    assert isinstance(person, Person)
    colour = client.completions.create(
        model=model, prompt="p", extra_body={"structured_outputs": {"choice": ["red", "green"]}}
    )
    assert colour.choices[0].text in ("red", "green")


def test_what_cannot_be_enforced_is_a_400_that_names_it(fake, client):
    model = client.models.list().data[0].id
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {"type": "null"}}}}
    with pytest.raises(openai.BadRequestError, match="not") as error:
        client.chat.completions.create(**asked(model=model, response_format=form))
    assert error.value.body["param"] == "response_format.json_schema.schema"


def test_what_would_take_for_ever_is_a_400_and_the_next_is_served(fake, client):
    model = client.models.list().data[0].id
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": product(30, 20)}}
    with pytest.raises(openai.BadRequestError, match=r"json_schema\.schema cannot be enforced") as error:
        client.chat.completions.create(**asked(model=model, response_format=form))
    assert error.value.param == "response_format.json_schema.schema"
    reply = client.chat.completions.create(**asked(model=model, response_format={"type": "json_object"}))
    assert reply.choices[0].finish_reason in ("stop", "length")


async def test_over_grpc(fake):
    async with fake.connect() as stub:
        answer = await ask(stub, "p", regex="[0-9]{3}-[0-9]{2}", max_tokens=30, logprobs=5)
        assert len(answer.text) == 6
        assert answer.text.replace("-", "").isdigit()
        assert all(len(each.top) <= 10 for each in answer.logprobs)
        assert (await ask(stub, "p", choice=Choice(choices=["yes", "no"]), max_tokens=30)).text in ("yes", "no")
        error = await refusal(stub, request("p", regex="a", ignore_eos=True))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.details() == "ignore_eos cannot be had with regex, which says where the output ends"


@pytest.mark.nightly
async def test_200_answers_that_say_something_meet_their_schemas(start_cluster, tmp_path_factory):
    model = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=2048)
    cluster = start_cluster(model, http=True, node={"num_kv_blocks": 4000, "max_num_seqs": 32})
    schemas = [*SCHEMAS, *many_schemas(240 - len(SCHEMAS))]

    async def text(index, schema):
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        fields = {"seed": index, "max_tokens": 900, "logit_bias": CLOSERS, "temperature": 1, "response_format": form}
        reply = await client.chat.completions.create(**asked(model="tiny", **fields))
        return None if reply.choices[0].finish_reason == "length" else reply.choices[0].message.content

    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        texts = await asyncio.gather(*[text(index, schema) for index, schema in enumerate(schemas)])
    assert check(schemas, texts) >= 200


@pytest.mark.nightly
async def test_answers_keep_to_their_schemas_when_a_node_is_killed(start_cluster, tmp_path_factory):
    model = write_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)
    cluster = start_cluster(model, num_prefill=2, num_decode=2, node={"num_kv_blocks": 2000, "max_num_seqs": 16})
    schemas = [*SCHEMAS, *many_schemas(40)]
    fields = {"max_tokens": 900, "logit_bias": CLOSERS, "temperature": 1}
    questions = [
        request([index], json_schema=json.dumps(schema), seed=index, **fields) for index, schema in enumerate(schemas)
    ]
    answers = []
    async with cluster.connect() as stub:
        for name, some in (("decode-0", questions[::2]), ("prefill-1", questions[1::2])):  # nobody loses two nodes
            streams = [stream(stub, question) for question in some]
            await streams[0].tokens(1)
            cluster.kill(name)
            answers += [await answering.complete() for answering in streams]
    assert sum(answer.complete.timeline.num_restarts for answer in answers) > 0, "nothing was begun again"
    texts = [None if answer.finish_reason == "LENGTH" else answer.text for answer in answers]
    check(schemas[::2] + schemas[1::2], texts)
