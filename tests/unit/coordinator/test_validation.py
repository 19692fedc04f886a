"""Every way to ask for something impossible, what a good request becomes, and what is left of prompts that are cut."""

import dataclasses
import math

import pytest

from coordinator.api.prompts import MAX_UNCUT_TOKENS, check_truncation, cut, uncut_limit
from coordinator.api.validation import Limits, check_input, plan_request, prompt_limit
from protos import inference_pb2
from protos.inference_pb2 import GenerateRequest, TokenizedInput
from serving_core.errors import RequestError
from serving_core.requests import SamplingParams

LIMITS = Limits(
    served_model_names=("tiny", "small"),
    vocab_size=260,
    max_model_len=100,
    max_logprobs=20,
    prefill_pool_tokens=90,
    decode_pool_tokens=200,
    eos_token_ids=(259,),
)
Wire = inference_pb2.SamplingParams


def request(params=None, **fields):
    fields = {"request_id": "r-1", "text": "hello", **fields}
    return inference_pb2.GenerateRequest(sampling_params=params or Wire(), **fields)


def plan(params=None, num_prompt_tokens=10, limits=LIMITS, spelled=(), **defaults):
    asked = request(params)
    check_input(asked, limits)
    return plan_request(asked, [1] * num_prompt_tokens, limits, Wire(**defaults), spelled=spelled)


def refusal(function, *arguments):
    with pytest.raises(RequestError) as error:
        function(*arguments)
    return error.value


@pytest.mark.parametrize(
    ("field", "message", "changes"),
    [
        ("request_id", "must match", {"request_id": "a/b"}),
        ("request_id", "must match", {"request_id": "x" * 129}),
        ("request_id", "must match", {"request_id": "é"}),
        ("cache_salt", "has 257 characters, the limit is 256", {"cache_salt": "é" * 257}),
        ("text", "is empty", {"text": ""}),
        ("tokenized.input_ids", "is empty", {"tokenized": inference_pb2.TokenizedInput()}),
        ("chat.messages", "is empty", {"chat": inference_pb2.ChatInput()}),
        (
            "chat.messages",
            "has 1025 entries, the limit is 1024",
            {"chat": inference_pb2.ChatInput(messages=[inference_pb2.ChatMessage()] * 1025)},
        ),
    ],
)
def test_bad_input_is_refused(field, message, changes):
    if "tokenized" in changes or "chat" in changes:
        changes["text"] = None
    error = refusal(check_input, request(**changes), LIMITS)
    assert (error.reason, error.metadata["field"]) == ("BAD_PARAM", field)
    assert message in str(error)


def test_a_salt_is_part_of_the_plan():
    salted = request(cache_salt="é" * 256)
    check_input(salted, LIMITS)
    assert plan_request(salted, [1], LIMITS, Wire()).cache_salt == "é" * 256
    assert not plan_request(salted, [1], LIMITS, Wire()).is_read_whole


def test_prompts_that_are_scored_are_read_whole():
    assert plan_request(request(Wire(prompt_logprobs=0)), [1, 2], LIMITS, Wire()).is_read_whole
    assert plan().cache_salt == ""


def test_a_request_without_input_is_refused():
    error = refusal(check_input, inference_pb2.GenerateRequest(request_id="r"), LIMITS)
    assert (error.reason, error.metadata["field"]) == ("BAD_PARAM", "input")


def test_another_model_is_not_found_and_its_name_is_not_echoed_at_length():
    error = refusal(check_input, request(model="m" * 5000), LIMITS)
    assert error.reason == "MODEL_NOT_FOUND"
    assert len(str(error)) < 200
    check_input(request(model="tiny"), LIMITS)


def test_an_adapter_is_asked_for_as_a_model():
    limits = dataclasses.replace(LIMITS, adapters=["org/sql"])
    for model, adapter in (("", ""), ("tiny", ""), ("org/sql", "org/sql")):
        asked = request(model=model)
        check_input(asked, limits)
        assert plan_request(asked, [1], limits, Wire()).adapter == adapter
    assert refusal(check_input, request(model="sql"), limits).reason == "MODEL_NOT_FOUND"


def test_before_any_node_has_come_nobody_knows_of_adapters():
    """Such as when the coordinator was started again: then a client that knows better is to ask again."""
    limits = dataclasses.replace(LIMITS, adapters=None)
    assert refusal(check_input, request(model="sql"), limits).reason == "NO_PREFILL_WORKER"
    check_input(request(model="tiny"), limits)


def test_too_many_input_ids_are_refused_before_they_are_copied():
    tokenized = inference_pb2.TokenizedInput(input_ids=[1] * 100)
    error = refusal(check_input, request(text=None, tokenized=tokenized), LIMITS)
    assert error.reason == "PROMPT_TOO_LONG"


NAN, INF = math.nan, math.inf


BAD_PARAMETERS = [
    *[("temperature", Wire(temperature=value)) for value in (NAN, -0.1, INF, 101.0)],
    *[("top_p", Wire(top_p=value)) for value in (NAN, 0.0, -1.0, 1.01)],
    *[("min_p", Wire(min_p=value)) for value in (NAN, -0.1, 1.1)],
    *[("top_k", Wire(top_k=value)) for value in (-2, -(2**31))],
    *[("frequency_penalty", Wire(frequency_penalty=value)) for value in (NAN, -2.1, 2.1)],
    *[("presence_penalty", Wire(presence_penalty=value)) for value in (NAN, -2.1, 2.1)],
    *[("repetition_penalty", Wire(repetition_penalty=value)) for value in (NAN, 0.0, -1.0, INF)],
    *[("max_tokens", Wire(max_tokens=value)) for value in (0, -1)],
    *[("min_tokens", Wire(max_tokens=5, min_tokens=value)) for value in (-1, 6)],
    *[("n", Wire(n=value)) for value in (0, -1, 129, 2**31 - 1)],
    *[("logprobs", Wire(logprobs=value)) for value in (-1, 21)],
    ("stop", Wire(stop=["x"] * 10_000)),
    ("stop", Wire(stop=[""])),
    ("stop", Wire(stop=["x" * 257])),
    ("stop_token_ids", Wire(stop_token_ids=[260])),
    ("stop_token_ids", Wire(stop_token_ids=[1] * 257)),
    ("logit_bias", Wire(logit_bias={260: 1.0})),
    ("logit_bias", Wire(logit_bias={1: NAN})),
    ("logit_bias", Wire(logit_bias={1: 100.5})),
    ("logit_bias", Wire(logit_bias=dict.fromkeys(range(1025), 1.0))),
    ("allowed_token_ids", Wire(allowed_token_ids=[1, 260])),
    ("allowed_token_ids", Wire(allowed_token_ids=[1] * 1025)),
    ("allowed_token_ids", Wire(allowed_token_ids=[1], choice=inference_pb2.Choice(choices=["a"]))),
    ("allowed_token_ids", Wire(allowed_token_ids=[5, 259], stop_token_ids=[5, 6], min_tokens=1)),
    ("bad_words", Wire(bad_words=["x"] * 129)),
    ("bad_words", Wire(bad_words=["x", ""])),
    ("bad_words", Wire(bad_words=["x" * 257])),
    ("bad_words", Wire(bad_words=["x"], regex="a")),
    ("bad_words", Wire(bad_words=["x"], allowed_token_ids=[1])),
    ("bad_tokens", Wire(bad_tokens=[{"input_ids": [1, 260]}])),
    ("bad_tokens", Wire(bad_tokens=[{"input_ids": []}])),
    ("bad_tokens", Wire(bad_tokens=[{"input_ids": [1] * 257}])),
    ("bad_tokens", Wire(bad_tokens=[{"input_ids": [1]}] * 129)),
    ("logprob_token_ids", Wire(logprobs=0, logprob_token_ids=[1, 260])),
    ("logprob_token_ids", Wire(logprobs=0, logprob_token_ids=[1] * 129)),
    ("logprob_token_ids", Wire(logprob_token_ids=[1])),
    ("ignore_eos", Wire(json_object=True, ignore_eos=True)),
    ("min_tokens", Wire(regex="a", min_tokens=1)),
    ("regex", Wire(regex="a" * (2**17 + 1))),
    ("json_schema", Wire(json_schema="{}", whitespace_pattern=" " * 2**17)),
    ("choice", Wire(choice=inference_pb2.Choice())),
    ("choice", Wire(choice=inference_pb2.Choice(choices=["a", ""]))),
    ("choice", Wire(choice=inference_pb2.Choice(choices=["a"] * 1025))),
]


def test_a_bad_parameter_is_refused_by_name():
    for field, params in BAD_PARAMETERS:
        error = refusal(plan, params)
        assert (error.reason, error.metadata["field"]) == ("BAD_PARAM", field)
        assert str(error).startswith(field)
        assert len(str(error)) < 200


def test_a_grammar_is_part_of_the_plan_and_no_object_is_no_constraint():
    check_input(request(Wire(json_object=False, ignore_eos=True, min_tokens=1)), LIMITS)
    made = plan_request(request(Wire(regex="a", n=2)), [1], LIMITS, Wire(), "the grammar")
    assert [sampling.grammar for sampling in made.samplings] == ["the grammar"] * 2


@pytest.mark.parametrize("max_tokens", [91, 2**31 - 1])
def test_more_tokens_than_the_context_has_left_are_an_overflow_too(max_tokens):
    error = refusal(plan, Wire(max_tokens=max_tokens))
    assert (error.reason, error.metadata["field"]) == ("PROMPT_TOO_LONG", "max_tokens")
    assert str(error).startswith(f"max_tokens ({max_tokens}) and the prompt (10 tokens) make {max_tokens + 10} tokens")


@pytest.mark.parametrize(
    ("num_prompt_tokens", "changes", "named"),
    [
        (100, {}, "max_model_len (100)"),
        (99, {}, "prefill node (90)"),
        (60, {"decode_pool_tokens": 60}, "decode node (60)"),
    ],
)
def test_a_prompt_that_can_never_be_served_is_refused(num_prompt_tokens, changes, named):
    error = refusal(plan, None, num_prompt_tokens, dataclasses.replace(LIMITS, **changes))
    assert error.reason == "PROMPT_TOO_LONG"
    assert f"{num_prompt_tokens} tokens" in str(error)
    assert named in str(error)


@pytest.mark.parametrize(
    ("changes", "most", "named"),
    [
        ({}, 90, "at least 91 tokens, over the KV cache of the largest prefill node (90)"),
        ({"prefill_pool_tokens": None}, 99, "at least 100 tokens; with one output token that is over max_model_len"),
        ({"decode_pool_tokens": 60}, 59, "over the KV cache of the largest decode node (60)"),
    ],
)
def test_how_long_a_prompt_may_be_is_known_before_it_is_tokenized(changes, most, named):
    limits = dataclasses.replace(LIMITS, **changes)
    limit = prompt_limit(limits)
    assert limit.most == most
    refused = limit.refusal(most + 1)
    assert (refused.reason, refused.metadata["field"]) == ("PROMPT_TOO_LONG", "input")
    assert named in str(refused)
    plan(num_prompt_tokens=most, limits=limits)
    assert refusal(plan, None, most + 1, limits).reason == "PROMPT_TOO_LONG"


def test_an_empty_or_foreign_prompt_is_refused():
    assert refusal(plan, None, 0).reason == "BAD_PARAM"
    assert "token id 260" in str(refusal(plan_request, request(), [1, 260], LIMITS, Wire()))


def test_an_open_request_gets_the_defaults_and_what_the_context_still_holds():
    [sampling] = plan().samplings
    assert sampling == SamplingParams(max_tokens=90, seed=sampling.seed)
    assert plan(limits=dataclasses.replace(LIMITS, decode_pool_tokens=50)).samplings[0].max_tokens == 40
    assert plan().samplings[0].seed != sampling.seed  # drawn anew
    longer_than_a_pool = dataclasses.replace(LIMITS, decode_pool_tokens=100, own_pool_tokens=30)
    assert plan(limits=longer_than_a_pool).samplings[0].max_tokens == 20  # one that asks for more gets it
    assert plan(Wire(max_tokens=70), limits=longer_than_a_pool).samplings[0].max_tokens == 70
    assert plan(num_prompt_tokens=40, limits=longer_than_a_pool).samplings[0].max_tokens == 60
    no_nodes = dataclasses.replace(LIMITS, prefill_pool_tokens=None, decode_pool_tokens=None)
    assert plan(num_prompt_tokens=99, limits=no_nodes).samplings[0].max_tokens == 1


def test_everything_asked_for_reaches_the_engine():
    params = Wire(
        temperature=0.0, top_p=0.5, top_k=7, min_p=0.1, frequency_penalty=-2.0, presence_penalty=2.0,
        repetition_penalty=1.5, max_tokens=90, min_tokens=3, stop=["a", "b"], stop_token_ids=[5, 6, 5],
        skip_special_tokens=False, ignore_eos=True, n=3, logprobs=0, seed=2**63 - 2,
        include_stop_str_in_output=True, logit_bias={9: -100.0, 3: 1.5}, allowed_token_ids=[5, 9, 5],
        logprob_token_ids=[8, 2, 8],
    )  # fmt: skip
    answers = plan(params)
    assert [sampling.seed for sampling in answers.samplings] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert answers.samplings[0] == SamplingParams(
        max_tokens=90, temperature=0.0, top_p=0.5, top_k=7, min_p=0.1, repetition_penalty=1.5,
        frequency_penalty=-2.0, presence_penalty=2.0, logit_bias=((3, 1.5), (9, -100.0)), seed=2**63 - 2,
        min_tokens=3, stop_token_ids=(5, 6), ignore_eos=True, logprobs=0, allowed_token_ids=(5, 9),
        logprob_token_ids=(8, 2),
    )  # fmt: skip
    assert answers.text.stop == ("a", "b")
    assert answers.text.include_stop_str_in_output
    assert not answers.text.skip_special_tokens
    assert answers.text.min_tokens == 3


def test_bad_tokens_reach_the_engine_once_with_those_of_bad_words():
    runs = [{"input_ids": run} for run in ([4], [3, 1], [4])]
    [sampling] = plan(Wire(bad_tokens=runs), spelled=[(9, 9), (3, 1)]).samplings
    assert sampling.bad_tokens == ((4,), (3, 1), (9, 9))
    everything = [(token,) for token in range(259)]
    with pytest.raises(RequestError, match="bad_words leave no token that may come"):
        plan(Wire(bad_words=["x"]), spelled=everything)
    assert plan(Wire(bad_words=["x"]), spelled=everything[1:]).samplings[0].bad_tokens == tuple(everything[1:])


@pytest.mark.parametrize(("asked", "taken"), [(0.0, 0.0), (1e-40, 0.0), (9.9e-7, 0.0), (1e-6, 1e-6), (1e-3, 1e-3)])
def test_a_temperature_that_leaves_nothing_to_chance_is_greedy(asked, taken):
    assert plan(Wire(temperature=asked)).samplings[0].temperature == taken
    assert plan(temperature=asked).samplings[0].temperature == taken  # as a default


@pytest.mark.parametrize("top_k", [-1, 0, 260, 10_000])
def test_a_top_k_that_keeps_everything_is_off(top_k):
    assert plan(Wire(top_k=top_k)).samplings[0].top_k == 0


def test_what_a_request_leaves_open_takes_the_defaults_and_what_it_names_wins_even_as_a_zero():
    defaults = {"temperature": 0.5, "top_p": 0.8, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
    [sampling] = plan(**defaults).samplings
    assert {name: getattr(sampling, name) for name in defaults} == defaults
    named = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    [sampling] = plan(Wire(**named), **defaults).samplings
    assert {name: getattr(sampling, name) for name in named} == named


@pytest.mark.parametrize(
    ("params", "num_prompt_tokens", "max_tokens"),
    [({}, 10, 30), ({"max_tokens": 60}, 10, 60), ({}, 80, 20), ({"min_tokens": 40}, 10, 40)],
    ids=["left open", "named", "less room", "more wanted"],
)
def test_a_default_of_max_tokens_gives_way(params, num_prompt_tokens, max_tokens):
    [sampling] = plan(Wire(**params), num_prompt_tokens, max_tokens=30).samplings
    assert sampling.max_tokens == max_tokens


def test_a_default_of_max_tokens_lets_nobody_ask_for_more_than_there_is_room_for():
    error = refusal(lambda: plan(Wire(min_tokens=95), max_tokens=30))
    assert error.metadata["field"] == "min_tokens"


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_logprobs_of_the_whole_vocabulary_are_told_within_the_limit(name):
    enough = dataclasses.replace(LIMITS, max_logprobs=260)
    assert getattr(plan(Wire(**{name: -1}), limits=enough).samplings[0], name) == 260
    error = refusal(lambda: plan(Wire(**{name: -1})))
    assert str(error) == f"{name} (-1) are those of 260 tokens, the limit is 20"
    assert str(refusal(lambda: plan(Wire(**{name: -2}), limits=enough))) == f"{name} must be within [0, 260], not -2"


# ---- prompts that their clients let the server cut ----

CUT_LIMITS = Limits(
    "tiny", vocab_size=260, max_model_len=100, max_logprobs=20, prefill_pool_tokens=90, decode_pool_tokens=200
)
LONG_PROMPT = list(range(150))


def request_to_cut(most, **fields):
    return GenerateRequest(request_id="r", text="t", truncate_prompt_tokens=most, **fields)


@pytest.mark.parametrize(
    ("most", "max_tokens", "first"),
    [(None, 5, 0), (20, 5, 130), (149, 5, 1), (150, 5, 0), (151, 5, 0), (-1, 30, 80), (-1, None, 60), (-1, 5, 60)],
)
def test_the_last_tokens_are_kept(most, max_tokens, first):
    """-1: what fits beside the answer, 100 - 30; and into the pool of the node that reads, 90."""
    asked = request_to_cut(most, sampling_params=Wire(max_tokens=max_tokens))
    check_truncation(asked, CUT_LIMITS)
    assert cut(LONG_PROMPT, asked, CUT_LIMITS) == LONG_PROMPT[first:]
    assert cut(LONG_PROMPT, asked, CUT_LIMITS, keeps_first=True) == LONG_PROMPT[: len(LONG_PROMPT) - first]


def test_what_fits_is_taken_and_what_leaves_no_room_is_refused():
    asked = request_to_cut(-1, sampling_params=Wire(max_tokens=30))
    check_input(asked, CUT_LIMITS)
    plan = plan_request(asked, cut(LONG_PROMPT, asked, CUT_LIMITS), CUT_LIMITS, Wire())
    assert (len(plan.prompt), plan.samplings[0].max_tokens) == (70, 30)
    asked = request_to_cut(-1, sampling_params=Wire(max_tokens=100))
    with pytest.raises(RequestError) as caught:
        plan_request(asked, cut(LONG_PROMPT, asked, CUT_LIMITS), CUT_LIMITS, Wire())
    assert caught.value.reason == "PROMPT_TOO_LONG"


@pytest.mark.parametrize("most", [0, -2])
def test_how_many_are_kept_has_to_be_said(most):
    with pytest.raises(RequestError, match=f"^truncate_prompt_tokens must be -1 or at least 1, not {most}$"):
        check_truncation(request_to_cut(most), CUT_LIMITS)


def test_before_it_is_cut_a_prompt_may_be_longer_but_not_without_end():
    assert uncut_limit(request_to_cut(None), CUT_LIMITS).most == 90
    limit = uncut_limit(request_to_cut(5), CUT_LIMITS)
    assert limit.most == MAX_UNCUT_TOKENS
    assert str(limit.refusal(10**6)) == "input has at least 1000000 tokens, the limit is 131072 before it is cut"
    check_ids(150)
    with pytest.raises(RequestError, match=r"^tokenized.input_ids has 131073 entries, the limit is 131072$"):
        check_ids(MAX_UNCUT_TOKENS + 1)


def check_ids(num_tokens):
    tokenized = TokenizedInput(input_ids=[1] * num_tokens)
    asked = GenerateRequest(request_id="r", tokenized=tokenized, truncate_prompt_tokens=5)
    check_input(asked, CUT_LIMITS)
    check_truncation(asked, CUT_LIMITS)
