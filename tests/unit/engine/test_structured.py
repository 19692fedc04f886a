"""Answers that a tiny model of random weights is made to give: each meets its schema, as jsonschema sees it."""

import json

import pytest

from coordinator.text.constraints import to_grammar
from coordinator.text.structures import WHITESPACE
from engine.build import build_engine
from serving_core.requests import FinishReason, Request, SamplingParams, Work, finish_reason
from serving_core.settings import EngineSettings
from tests.schemas import SCHEMAS, check, many_schemas
from tests.tiny_models import EOS, write_tiny_model

MAX_TOKENS = 900
BLOCK_SIZE = 16
BLOCKS = 60  # of one answer
BATCH = 32
CLOSERS = tuple((ord(each), 6.0) for each in '"]}')  # text of a random model would rarely end by itself
TAKEN_OVER_EVERY = 7  # tokens: by a node that knows the grammar and the tokens alone


@pytest.fixture(scope="module")
def engine(written):
    folder = written(write_tiny_model, num_hidden_layers=1)
    return build_engine(
        EngineSettings(model=str(folder), num_kv_blocks=BATCH * BLOCKS, block_size=BLOCK_SIZE, device="cpu")
    )


def answers(engine, schemas, **sampling):
    """The answers to one batch of schemas after the other: their tokens, and how each ended."""
    requests = []
    for index, schema in enumerate(schemas):
        grammar = to_grammar("json_schema", json.dumps(schema), WHITESPACE)
        fields = {"max_tokens": MAX_TOKENS, "seed": index, "logit_bias": CLOSERS, **sampling}
        requests.append(Request(str(index), 0, [index % 256], 1, SamplingParams(grammar=grammar, **fields)))
    for start in range(0, len(requests), BATCH):
        run(engine, requests[start : start + BATCH])
    return [(request.output, finish_reason(request, (EOS,))) for request in requests]


def run(engine, requests):
    blocks = [range(index * BLOCKS, (index + 1) * BLOCKS) for index in range(len(requests))]
    live = list(zip(requests, blocks, strict=True))
    while live:
        for request, _ in live:
            if request.sampling.grammar and request.num_output_tokens % TAKEN_OVER_EVERY == 0:
                request.guide = engine.grammars.guide(request.sampling.grammar)
        works = [Work(request, len(request.token_ids) - 1, 1, block_ids) for request, block_ids in live]
        for (request, _), token in zip(live, engine.step(works), strict=True):
            assert token.error is None
            request.token_ids.append(token.token_id)
        live = [each for each in live if finish_reason(each[0], (EOS,)) is None]


def texts(answered):
    """What was said; None where it was cut short."""
    ended = [output if reason is FinishReason.STOP else None for output, reason in answered]
    assert all(output[-1] == EOS for output in ended if output)
    return [bytes(output[:-1]).decode() if output else None for output in ended]


def test_each_answer_meets_its_schema(engine):
    check(SCHEMAS, texts(answers(engine, SCHEMAS)))


def test_greedy_answers_meet_their_schemas_too(engine):
    short = [schema for schema in SCHEMAS if "integer" in json.dumps(schema)]
    check(short, texts(answers(engine, short, temperature=0.0)))


@pytest.mark.nightly
def test_200_schemas(engine):
    schemas = many_schemas(240)
    assert check(schemas, texts(answers(engine, schemas))) >= 200


def test_answers_without_a_grammar_are_what_they_are_beside_others(engine):
    plain = [Request(str(index), 0, [index], 1, SamplingParams(max_tokens=9, seed=index)) for index in range(2)]
    run(engine, plain)
    alone = [request.output for request in plain]
    mixed = [Request(str(index), 0, [index], 1, SamplingParams(max_tokens=9, seed=index)) for index in range(2)]
    grammar = to_grammar("regex", "[ab]*", None)
    mixed.append(Request("c", 0, [1], 1, SamplingParams(max_tokens=9, grammar=grammar)))
    run(engine, mixed)
    assert [request.output for request in mixed[:2]] == alone
    assert {*mixed[2].output} <= {*b"ab", EOS}
