"""Answers with draft tokens, right and wrong ones, against the same answers without: tokens and logprobs to the bit."""

import random
from functools import partial

import pytest
import torch

from coordinator.text.constraints import to_grammar
from coordinator.text.structures import WHITESPACE
from engine.build import build_engine
from engine.native_decode import NativeDecode
from serving_core.requests import Request, SampledToken, SamplingParams, Work, finish_reason, would_end
from serving_core.settings import EngineSettings
from tests.effort import few
from tests.lora_adapters import write_adapter
from tests.tiny_models import EOS, VOCAB_SIZE, write_tiny_model
from tests.unit.engine.rank_process import rank_case, run_ranks

BLOCK_SIZE, BLOCKS_OF_ONE = 4, 40
MAX_TOKENS = 36
SCHEMA = '{"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]}'
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2}
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "greedy, ends": {"temperature": 0.0, "stop_token_ids": tuple(range(40, 60))},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "seed": 7},
    "sampled, cut": {"temperature": 1.5, "top_k": 20, "min_p": 0.01, "seed": 8, "logprobs": 3},
    "penalised": {"temperature": 0.0, "logprobs": 2, **PENALTIES},
    "penalised, sampled": {"seed": 9, "logit_bias": ((11, 4.0), (12, -4.0)), "min_tokens": 30, **PENALTIES},
    "structured": {"temperature": 0.0, "grammar": to_grammar("json_schema", SCHEMA, WHITESPACE), "logprobs": 1},
    "structured, sampled": {"seed": 10, "grammar": to_grammar("regex", "[ab]{4,9}(c|d)*", None)},
    "some runs are bad": {"temperature": 0.0, "bad_tokens": ((5,), (6, 7), *((token, token) for token in range(100)))},
    "some tokens alone": {"seed": 11, "allowed_token_ids": (5, 6, 7, EOS), "logprobs": 0},
}
KINDS = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32", "batch_invariant": True},
    "int8 weights": {"dtype": "bfloat16", "quantization": "int8"},
}


def requests_of(engine):
    """Each way to choose tokens twice: of the model alone and with an adapter."""
    requests = []
    for index, (name, fields) in enumerate(SAMPLINGS.items()):
        for adapter in ("", "sql"):
            sampling = SamplingParams(max_tokens=MAX_TOKENS, **fields)
            prompt = [(7 * index + 3 * at) % 200 for at in range(5 + 3 * index)]
            request = Request(f"{name} {adapter}", 0, prompt, len(prompt), sampling, adapter=adapter)
            request.guide = engine.grammars.guide(sampling.grammar) if sampling.grammar else None
            requests.append(request)
    return requests


def answers(engine, requests, propose):
    """What each was given, all served together; propose(request, most) gives draft tokens."""
    blocks = {id(request): range(n * BLOCKS_OF_ONE, (n + 1) * BLOCKS_OF_ONE) for n, request in enumerate(requests)}
    given: dict[str, list[SampledToken]] = {request.request_id: [] for request in requests}
    computed, live, num_steps = dict.fromkeys(given, 0), list(requests), 0
    while live:
        works = []
        for request in live:
            start, num_tokens = computed[request.request_id], len(request.token_ids)
            most = request.sampling.max_tokens - request.num_output_tokens - 1
            draft_tokens = propose(request, most) if start == num_tokens - 1 else ()
            works.append(Work(request, start, num_tokens - start, blocks[id(request)], draft_tokens))
        sampled = iter(engine.step(works))
        for request, work in zip(list(live), works, strict=True):
            taken = work.take(sampled)
            given[request.request_id] += taken
            computed[request.request_id] = len(request.token_ids) + len(taken) - 1
            request.token_ids += [token.token_id for token in taken]
            assert not any(token.error for token in taken)
            if finish_reason(request, engine.eos_token_ids):
                live.remove(request)
        assert next(sampled, None) is None
        num_steps += 1
    return given, num_steps


def answers_ahead(engine, requests):
    """The same, where each step that ends no answer is followed by one that was built before its tokens were known."""
    blocks = {id(request): range(n * BLOCKS_OF_ONE, (n + 1) * BLOCKS_OF_ONE) for n, request in enumerate(requests)}
    given: dict[str, list[SampledToken]] = {request.request_id: [] for request in requests}
    computed, live, num_behind, told = dict.fromkeys(given, 0), list(requests), 0, []

    def works_of(tokens_of):
        return [Work(each, computed[each.request_id], tokens_of(each), blocks[id(each)]) for each in live]

    def num_left(request):
        return len(request.token_ids) - computed[request.request_id]

    def ends(tokens):
        return [would_end(each, token, engine.eos_token_ids) for each, token in zip(live, tokens, strict=True)]

    def take_in(tokens):
        for request, token in zip(live, tokens, strict=True):
            given[request.request_id].append(token)
            computed[request.request_id] = len(request.token_ids)
            request.token_ids.append(token.token_id)

    while live:
        tokens, prepared = engine.step(works_of(num_left)), None
        while not any(ends(tokens)):
            computed |= {each.request_id: len(each.token_ids) for each in live}
            works, until_known = works_of(lambda each: 1), partial(take_in, tokens)
            prepared = engine.prepare(works, prepared)
            tokens = engine.step_prepared(works, prepared, tokens, lambda: told.append("begun"), until_known)
            num_behind += 1
        ended = ends(tokens)
        take_in(tokens)
        live = [each for each, has_ended in zip(live, ended, strict=True) if not has_ended]
    assert len(told) == num_behind
    return given, num_behind


def oracle(engine, expected, seed):
    """Candidates that are right up to a random place, none of which may end the answer."""
    draw = random.Random(seed)

    def propose(request, most):
        ends = {*engine.eos_token_ids, *request.sampling.stop_token_ids}
        after = [token.token_id for token in expected[request.request_id][request.num_output_tokens :]]
        draft_tokens = after[: draw.randint(0, 5)] + [draw.randrange(VOCAB_SIZE)] * draw.randint(0, 1)
        cut = next((at for at, token in enumerate(draft_tokens) if token in ends), len(draft_tokens))
        return draft_tokens[: min(cut, most)]

    return propose


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    model = write_tiny_model(root / "model")
    return model, write_adapter(root / "sql", model, seed=5)


@pytest.mark.parametrize("kind", few(KINDS, "bfloat16"))
def test_draft_tokens_change_nothing_but_the_number_of_steps(kind, folders):
    model, adapter = folders
    num_blocks = 2 * len(SAMPLINGS) * BLOCKS_OF_ONE
    fields = {"block_size": BLOCK_SIZE, "num_kv_blocks": num_blocks, "lora": (f"sql={adapter}",), "device": "cpu"}
    engine = build_engine(EngineSettings(model=str(model), **fields, **KINDS[kind]))
    if not engine.is_batch_invariant:
        pytest.skip("bits depend on the batch here, so nothing is promised")
    expected, num_steps = answers(engine, requests_of(engine), lambda request, most: ())
    assert len({str(tokens) for tokens in expected.values()}) > len(SAMPLINGS)
    for seed in range(2):
        given, num_fewer = answers(engine, requests_of(engine), oracle(engine, expected, seed))
        assert given == expected
        assert num_fewer < num_steps / 2


@pytest.mark.parametrize("kind", few(KINDS, "float32"))
def test_steps_that_are_built_ahead_change_nothing(kind, folders):
    model, adapter = folders
    num_blocks = 2 * len(SAMPLINGS) * BLOCKS_OF_ONE
    fields = {"block_size": BLOCK_SIZE, "num_kv_blocks": num_blocks, "lora": (f"sql={adapter}",), "device": "cpu"}
    engine = build_engine(EngineSettings(model=str(model), **fields, **KINDS[kind]))
    for only in ("", "sql"):  # of the model alone there is a program

        def wanted(only=only):
            return [request for request in requests_of(engine) if request.adapter in ("", only)]

        expected, num_steps = answers(engine, wanted(), lambda request, most: ())
        given, num_behind = answers_ahead(engine, wanted())
        assert given == expected
        assert num_behind > num_steps / 2


def test_steps_with_draft_tokens_run_as_one_program(folders, monkeypatch):
    """Of the model alone, to the bit what modules give; and their keys and values too."""
    fields = {"block_size": BLOCK_SIZE, "num_kv_blocks": 60, "dtype": "bfloat16", "device": "cpu"}
    engine = build_engine(EngineSettings(model=str(folders[0]), **fields))
    if not isinstance(engine.program, NativeDecode):
        pytest.skip("there is no native program here")
    runs = []
    run = engine.program.run
    monkeypatch.setattr(
        engine.program, "run", lambda batch, *rest: runs.append(len(batch.token_ids)) or run(batch, *rest)
    )
    sampling = SamplingParams(max_tokens=20, temperature=0, logprobs=5, ignore_eos=True)
    tokens, caches = {}, {}
    for name in ("program", "modules"):
        if name == "modules":
            engine.program = None
        request = Request("r", 0, list(range(9)), 9, sampling)
        engine.step([Work(request, 0, 9, range(10))])
        tokens[name] = engine.step([Work(request, 8, 1, range(10), (1, 2, 3))])
        caches[name] = [engine.pool.keys(0)[:3].clone(), engine.pool.values(1)[:3].clone()]
    assert runs == [4]
    assert tokens["program"] == tokens["modules"]
    assert all(map(torch.equal, caches["program"], caches["modules"]))


@pytest.mark.nightly
@pytest.mark.parametrize("settings", [{}, {"pipeline_parallel_size": 2}], ids=["tensor parallel", "stages"])
def test_draft_tokens_of_a_node_of_two_ranks(settings, folders, tmp_path):
    prompts = [[(7 * index + 3 * at) % 200 for at in range(5 + 30 * index)] for index in range(3)]
    case = rank_case(folders[0], prompts, 12, 40, dtype="bfloat16", block_size=BLOCK_SIZE, **settings)
    sampled, _ = run_ranks(tmp_path, 2, {"without": case, "with": {**case, "foretells": True}})
    assert sampled["with"] == sampled["without"]
