"""What generation_config.json makes of a request that leaves its sampling open, from the file to the node."""

import asyncio
import json
import logging

import pytest

from coordinator.served_model import neutral_defaults, read_sampling_defaults
from protos import inference_pb2
from serving_core.errors import ModelError
from tests.scripted_nodes import begin, cluster, run
from tests.unit.coordinator.http_kit import plain_client, url_of

pytestmark = pytest.mark.usefixtures("programs_here")

QWEN = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def write(folder, **values):
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def as_dict(message):
    return {field.name: value for field, value in message.ListFields()}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {}),
        ({"eos_token_id": [2, 3], "max_length": 20, "typical_p": 0.5, "top_p": None}, {}),
        (QWEN, {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}),
        ({"temperature": 1, "top_k": -1, "min_p": 0.05}, {"top_k": -1, "min_p": 0.05}),
        ({"max_new_tokens": 2048}, {"max_tokens": 2048}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0, "top_p": 0.9}),
        ({"do_sample": True}, {}),
    ],
)
def test_what_the_file_says(tmp_path, values, expected):
    defaults, problems = read_sampling_defaults(write(tmp_path, **values))
    assert as_dict(defaults) == {**NEUTRAL, **expected}
    assert problems == []


def test_a_folder_without_the_file_has_neutral_defaults(tmp_path):
    assert read_sampling_defaults(tmp_path) == (neutral_defaults(), [])
    assert as_dict(neutral_defaults()) == NEUTRAL


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("temperature", -0.5, "at least 0.0, not -0.5"),
        ("temperature", 101, "must be within [0, 100], not 101"),
        ("temperature", True, "must be a number, not True"),
        ("top_p", 0, "must be within [1e-06, 1], not 0"),
        ("top_p", "0.9", "must be a number, not '0.9'"),
        ("top_k", 2.5, "must be an integer of at least -1, not 2.5"),
        ("min_p", 1.5, "must be within [0, 1], not 1.5"),
        ("repetition_penalty", 0, "must be within [0.01, 100], not 0"),
        ("max_new_tokens", 0, "must be an integer of at least 1, not 0"),
        ("do_sample", "no", "must be true or false, not 'no'"),
    ],
)
def test_a_value_that_cannot_be_used_is_named_and_the_others_hold(tmp_path, name, value, problem):
    defaults, [told] = read_sampling_defaults(write(tmp_path, **{"top_k": 7, "min_p": 0.25, name: value}))
    others = {"top_k": 7, "min_p": 0.25}
    others.pop(name, None)
    assert as_dict(defaults) == {**NEUTRAL, **others}
    assert told.startswith(name)
    assert problem in told


def test_a_broken_file_is_a_sentence(tmp_path):
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match="is not JSON"):
        read_sampling_defaults(tmp_path)


async def told_defaults(c):
    return as_dict((await c.stub.GetModelInfo(inference_pb2.GetModelInfoRequest())).default_sampling_params)


async def sampling_at_node(c):
    """What a node is told of the sampling of the next request."""
    _, job = await begin(c)
    return {name: getattr(job.sampling_params, name) for name in NEUTRAL}


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("auto", {**NEUTRAL, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}),
        ("none", NEUTRAL),
    ],
)
def test_both_api_servers_sample_as_the_folder_says_unless_it_is_not_asked(tmp_path, setting, expected):
    write(tmp_path, **QWEN)

    async def scenario():
        async with cluster(tmp_path, http_port=0, generation_config=setting) as c:
            assert await told_defaults(c) == expected
            calls = [c.generate(request_id="grpc")]
            assert await sampling_at_node(c) == expected
            calls.append(c.generate(request_id="named", temperature=0, top_k=3))
            assert await sampling_at_node(c) == {**expected, "temperature": 0, "top_k": 3}
            async with plain_client(base_url=url_of(c)) as client:
                body = {"messages": [{"role": "user", "content": "hi"}], "top_p": 0.5}
                asked = asyncio.create_task(client.post("/v1/chat/completions", json=body))
                assert await sampling_at_node(c) == {**expected, "top_p": 0.5}
                asked.cancel()

    run(scenario())


def test_a_limit_of_the_folder_holds_for_requests_that_name_none(tmp_path):
    write(tmp_path, max_new_tokens=33)

    async def scenario():
        async with cluster(tmp_path) as c:
            assert await told_defaults(c) == {**NEUTRAL, "max_tokens": 33}
            asked = [c.generate(request_id="open"), c.generate(request_id="named", max_tokens=40)]
            jobs = [(await begin(c))[1] for _ in asked]
            assert {job.attempt.request_id: job.sampling_params.max_tokens for job in jobs} == {
                "open/0": 33,
                "named/0": 40,
            }

    run(scenario())


def test_a_start_names_what_it_takes_and_what_it_does_not(tmp_path, caplog):
    write(tmp_path, temperature=0.2, top_p=7)

    async def scenario():
        with caplog.at_level(logging.INFO, logger="coordinator.served_model"):
            async with cluster(tmp_path, nodes=()):
                pass

    run(scenario())
    assert "ignored in generation_config.json: top_p must be within [1e-06, 1], not 7" in caplog.messages
    assert any("temperature 0.2" in line for line in caplog.messages)
