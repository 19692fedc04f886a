"""Decisions, System One, scores and rankings: their odds by hand, and served with nodes that the test speaks for."""

import asyncio
import contextlib
import math
import struct

import pytest

from coordinator.api.http.decisions import choice_of, odds_of, parse_decisions, parse_systemone
from coordinator.api.http.decisions_models import DecisionsRequest, RerankRequest, ScorePairsRequest, SystemOneRequest
from coordinator.api.http.rankings import parse_pairs, parse_rerank
from protos.inference_pb2 import AbortRequest, ScoreItem, ScoreRequest
from serving_core.errors import RequestError
from serving_core.requests import LOGPROBS
from tests import fleet_events as events
from tests.scripted_nodes import refusal_of, run
from tests.unit.coordinator.http_kit import error_of, http_cluster
from tests.unit.coordinator.later import openai

pytestmark = pytest.mark.usefixtures("programs_here")

PREDICATE = {"type": "predicate", "name": "refund", "instructions": "A refund is asked for."}
CHOICE = {
    "type": "choice",
    "instructions": "Which team?",
    "choices": [{"value": "billing"}, {"value": "technical", "description": "outages"}, {"value": True}],
}
SCORE = {"type": "score", "instructions": "How angry?", "levels": [{"label": "calm"}, {"label": "furious"}]}


# ---- odds ----


def test_odds_on_paper():
    odds = odds_of([math.log(0.3), math.log(0.1)])
    assert odds.probabilities == pytest.approx([0.75, 0.25])
    assert (odds.mass, odds.best, odds.confidence) == (pytest.approx(0.4), 0, pytest.approx(0.3))
    odds = odds_of([-math.inf, math.log(0.2), math.log(0.6)])
    assert odds.probabilities == pytest.approx([0, 0.25, 0.75])
    assert (odds.expected, odds.best) == (pytest.approx(1.75), 2)
    assert odds_of([-2000.0, -2000.0]).probabilities == [0.5, 0.5]
    assert odds_of([-math.inf, -math.inf]) is None


@pytest.mark.parametrize(("num", "first", "last"), [(26, "A", "Z"), (27, "01", "27"), (255, "001", "255")])
def test_no_label_of_a_choice_begins_another(num, first, last):
    labels = [each.label for each in choice_of("?", [(f"{index}", "") for index in range(num)]).options]
    assert (labels[0], labels[-1], len({*labels}), {len(each) for each in labels}) == (first, last, num, {len(first)})


# ---- what the model is asked ----


def asked(**fields):
    [request] = parse_decisions(DecisionsRequest.read({"input": "", "questions": [PREDICATE], **fields}), "r")
    return request


def said(request):
    return [(message.role, message.content) for message in request.chat.messages]


def test_questions_end_the_users_message():
    request = asked(input="I was charged twice.", questions=[PREDICATE, CHOICE, SCORE], model="m", cache_salt="s")
    assert (request.request_id, request.model, request.cache_salt) == ("r", "m", "s")
    assert said(request) == [("user", "I was charged twice.\n\n")]
    assert request.chat.template_kwargs_json == '{"enable_thinking": false}'
    assert [list(item.labels) for item in request.items] == [["yes", "no"], ["A", "B", "C"], ["0", "1"]]
    assert [item.text for item in request.items] == [
        "A refund is asked for.\n\nyes\nno\n\nAnswer with yes or no alone.",
        "Which team?\n\nA. billing\nB. technical: outages\nC. true\n\n"
        "Answer with the letter of the option that fits best alone.",
        "How angry?\n\n0. calm\n1. furious\n\nAnswer with the number of the level that fits best alone.",
    ]


def test_an_input_may_be_a_conversation_with_calls_and_json():
    call = {"type": "custom_tool_call", "call_id": "c", "name": "look", "input": "up"}
    items = [
        {"role": "developer", "content": "Be strict."},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "See"}, {"type": "input_json", "data": {"a": [1]}}],
        },
        call,
        {"type": "custom_tool_call_output", "call_id": "c", "output": "found"},
    ]
    request = asked(input=items)
    roles = ["system", "user", "assistant", "tool", "user"]
    assert [message.role for message in request.chat.messages] == roles
    assert list(request.chat.messages[1].content_parts) == ["See", '{"a": [1]}']
    assert '"name": "look", "arguments": {"input": "up"}' in request.chat.messages[2].extra_json
    assert request.chat.messages[3].content == "found"
    assert request.chat.messages[4].content == ""
    question = {**PREDICATE, "instructions": [{"type": "input_text", "text": "a"}, {"type": "input_json", "data": []}]}
    request = asked(input=items[:2], questions=[question])
    assert said(request)[-1] == ("user", 'See\n{"a": [1]}\n\n')
    assert request.items[0].text.startswith("a\n[]\n\n")


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"questions": []}, "questions", "has 0 entries, at least 1 is needed"),
        ({"questions": [PREDICATE] * 401}, "questions", "has 401 entries, the limit is 400"),
        ({"questions": [{**CHOICE, "choices": [{"value": "a"}]}]}, "questions[0].choices", "has 1 entries, at least 2"),
        (
            {"questions": [{**CHOICE, "choices": [{"value": "a"}, {"value": "a"}]}]},
            "questions[0].choices",
            "has a value twice",
        ),
        (
            {"questions": [{**CHOICE, "choices": [{"value": str(n)} for n in range(256)]}]},
            "questions[0].choices",
            "has 256 entries, the limit is 255",
        ),
        (
            {"questions": [{**SCORE, "levels": [{"label": str(n)} for n in range(11)]}]},
            "questions[0].levels",
            "has 11 entries, the limit is 10",
        ),
        ({"questions": [{**PREDICATE, "type": "box"}]}, "questions[0].type", '"box" is not supported'),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
            '"input_image" is not supported',
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_json", "data": 1}]}]},
            "input[0]",
            "must have data: an object or a list of objects",
        ),
    ],
)
def test_what_cannot_be_asked_is_named(fields, field, message):
    with pytest.raises(RequestError) as caught:
        asked(**fields)
    assert caught.value.metadata["field"] == field
    assert str(caught.value).startswith(f"{field} {message}")


def test_a_choice_may_have_a_boolean_and_its_text():
    choices = [{"value": True}, {"value": "true"}]
    assert list(asked(questions=[{**CHOICE, "choices": choices}]).items[0].labels) == ["A", "B"]


def test_system_one():
    questions = {
        "x": {"type": "noul", "instructions": {"is": "it"}, "criteria": {"true": "so", "false": None}},
        "y": {"type": "choice", "criteria": {"low": "later", "high": None}},
        "z": {"type": "score", "instructions": "?", "criteria": ["a", {"b": 1}]},
    }
    body = {"state": {"a": "ä"}, "instructions": "Be fair.", "questions": questions}
    [request] = parse_systemone(SystemOneRequest.read(body), "r")
    assert said(request) == [("system", "Be fair."), ("user", '{"a": "ä"}\n\n')]
    x, y, z = [item.text for item in request.items]
    assert x == '{"is": "it"}\n\nyes: so\nno\n\nAnswer with yes or no alone.'
    assert y.startswith("\n\nA. low: later\nB. high\n\n")
    assert z.startswith('?\n\n0. a\n1. {"b": 1}\n\n')


def test_a_ranking_asks_for_each_document_by_the_frame_of_tags_or_the_templates_roles():
    request = RerankRequest.read({"query": "q", "documents": ["d", "e"], "instruction": "i"})
    [framed] = parse_rerank(request, "r", "{{ role }}")
    assert said(framed)[1] == ("user", "<Instruct>: i\n<Query>: q\n<Document>: ")
    assert [(item.text, list(item.labels)) for item in framed.items] == [("d", ["yes", "no"]), ("e", ["yes", "no"])]
    [own] = parse_rerank(request, "r", """{% if role == "query" %}{% elif role == 'document' %}""")
    assert said(own) == [("system", "i"), ("query", "q"), ("document", "")]


def test_scores_are_of_one_query_or_of_pairs():
    def requests(**fields):
        return parse_pairs(ScorePairsRequest.read(fields), "r", "")

    [one] = requests(text_1="q", text_2=["d", "e"])
    assert [item.text for item in one.items] == ["d", "e"]
    pairs = requests(queries=["p", "q"], documents=["d", "e"])
    assert [(each.request_id, said(each)[1][1].split("<Query>")[1], each.items[0].text) for each in pairs] == [
        ("r-0", ": p\n<Document>: ", "d"),
        ("r-1", ": q\n<Document>: ", "e"),
    ]
    for fields, message in (
        ({"text_1": "q"}, "text_2 is missing: send it, or documents"),
        ({"text_1": "q", "queries": "q", "text_2": "d"}, "text_1 cannot be had beside queries: send one of them"),
        ({"text_1": ["p", "q"], "text_2": "d"}, "text_1 has 2 entries and text_2 1: send one, or as many"),
    ):
        with pytest.raises(RequestError) as caught:
            requests(**fields)
        assert str(caught.value) == message


# ---- served ----


@contextlib.asynccontextmanager
async def served(folder, **settings):
    async with http_cluster(folder, **settings) as (c, client):
        yield c, client


def post(client, path="/v1/decisions", headers=(), **fields):
    body = {"input": "Hi.", "questions": [PREDICATE]} if path == "/v1/decisions" else {}
    return asyncio.create_task(client.post(path, json=body | fields, headers={"x-request-id": "r", **dict(headers)}))


async def jobs_of(c, num):
    return [(await c.nodes["p0"].command("prefill")).job for _ in range(num)]


def text_of(job):
    return bytes(token_id for token_id in job.token_ids if token_id < 256)


async def tell(c, job, *probabilities):
    told = struct.pack(f"<{len(probabilities)}f", *(math.log(each) if each else -math.inf for each in probabilities))
    await c.nodes["p0"].send(events.embedded(job.attempt, told))


def test_answers_keep_the_order_of_the_questions_whichever_comes_first(tmp_path):
    async def scenario():
        async with served(tmp_path) as (c, client):
            call = post(client, questions=[{**CHOICE, "name": "a"}, CHOICE, SCORE])
            first, second, third = await jobs_of(c, 3)
            assert {job.pooling.kind for job in (first, second, third)} == {LOGPROBS}
            assert text_of(first).startswith(b"Hi.\n\nWhich team?")
            assert text_of(third).startswith(b"Hi.\n\nHow angry?")
            assert bytes(first.sampling_params.logprob_token_ids) == b"ABC"
            await tell(c, third, 0.125, 0.375)
            await tell(c, second, 0.0, 0.0, 0.0)
            await tell(c, first, 0.25, 0.125, 0.125)
            reply = await call
            assert reply.json()["answers"] == [
                {
                    "type": "choice",
                    "name": "a",
                    "choice": "billing",
                    "probabilities": [
                        {"value": "billing", "probability": pytest.approx(0.5)},
                        {"value": "technical", "probability": pytest.approx(0.25)},
                        {"value": True, "probability": pytest.approx(0.25)},
                    ],
                    "confidence": pytest.approx(0.25),
                },
                {"type": "refusal", "name": None},
                {
                    "type": "score",
                    "name": None,
                    "score": pytest.approx(0.75),
                    "probabilities": [
                        {"value": 0, "label": "calm", "probability": pytest.approx(0.25)},
                        {"value": 1, "label": "furious", "probability": pytest.approx(0.75)},
                    ],
                    "confidence": pytest.approx(0.375),
                },
            ]
            assert openai.types.Decision.model_validate(reply.json(), strict=True).model == "m"
            assert reply.json()["usage"]["output_tokens"] == 0

    run(scenario())


def test_a_label_of_several_tokens_is_the_product_of_theirs(tmp_path):
    async def scenario():
        async with served(tmp_path) as (c, client):
            call = post(client)
            jobs = await jobs_of(c, 1 + 2 + 1)  # of y, e, s and n, o
            by_ending = {job.token_ids[-1]: job for job in jobs}
            asked = {end: bytes(sorted(job.sampling_params.logprob_token_ids)) for end, job in by_ending.items()}
            assert sorted(asked.values()) == [b"e", b"ny", b"o", b"s"]
            for job in jobs:
                wanted = bytes(job.sampling_params.logprob_token_ids)
                await tell(
                    c, job, *({b"y": 0.5, b"e": 0.5, b"s": 1.0, b"n": 0.25, b"o": 1.0}[bytes([t])] for t in wanted)
                )
            [answer] = (await call).json()["answers"]
            assert answer == {"type": "predicate", "name": "refund", "probability": pytest.approx(0.5)}

    run(scenario())


def test_system_one_and_rankings(tmp_path):
    async def scenario():
        async with served(tmp_path) as (c, client):
            questions = {
                "z": {"type": "score", "criteria": ["a", "b"]},
                "y": {"type": "choice", "criteria": {"l": 1, "h": 2}},
            }
            call = post(client, "/v1/systemone", state="s", questions=questions)
            z, y = await jobs_of(c, 2)
            await tell(c, z, 0.5, 0.5)
            await tell(c, y, 0.125, 0.375)
            reply = (await call).json()
            assert reply["answers"] == {
                "z": {"type": "score", "score": 0.5, "legend": {"0": "a", "1": "b"}, "confidence": pytest.approx(0.5)}
                | {"probabilities": {"0": 0.5, "1": 0.5}},
                "y": {"type": "choice", "choice": "h", "confidence": pytest.approx(0.375)}
                | {"probabilities": {"l": pytest.approx(0.25), "h": pytest.approx(0.75)}},
            }
            call = post(client, "/v1/rerank", query="q", documents=["d", "e"], top_n=1)
            for job in await jobs_of(c, 8):
                is_first = b"<Document>: d" in text_of(job)
                odds = {b"y": 0.25 if is_first else 0.5, b"n": 0.5}
                await tell(c, job, *(odds.get(bytes([t]), 1.0) for t in job.sampling_params.logprob_token_ids))
            reply = (await call).json()
            assert reply["results"] == [{"index": 1, "document": {"text": "e"}, "relevance_score": pytest.approx(0.5)}]

    run(scenario())


def test_over_grpc(tmp_path):
    async def scenario():
        async with served(tmp_path) as (c, _):
            items = [ScoreItem(text=" b", labels=["c", "d"]), ScoreItem(text="", labels=["d"])]
            call = c.stub.Score(ScoreRequest(text="a", items=items, priority=3))
            first, second = await jobs_of(c, 2)
            assert (bytes(first.token_ids), bytes(second.token_ids), first.priority) == (b"a b", b"a", 3)
            await tell(c, second, 1.0)
            await tell(c, first, 0.5, 0.0)
            reply = await call
            assert [list(item.logprobs) for item in reply.items] == [[pytest.approx(math.log(0.5)), -math.inf], [0.0]]
            assert (reply.prompt_tokens, reply.timeline.prefill_node, reply.timeline.decode_node) == (3, "p0", "")

    run(scenario())


def test_a_call_is_aborted_as_one_and_a_client_that_leaves_ends_it(tmp_path):
    async def scenario():
        async with served(tmp_path) as (c, client):
            call = post(client, questions=[CHOICE, SCORE])
            jobs = await jobs_of(c, 2)
            assert list((await c.stub.Abort(AbortRequest(request_ids=["r"]))).aborted) == ["r"]
            assert error_of(await call)[0] == 409
            for job in jobs:
                await c.nodes["p0"].answer_cancel(job.attempt)
            call = post(client, questions=[CHOICE, SCORE])
            jobs = await jobs_of(c, 2)
            call.cancel()
            for job in jobs:
                await c.nodes["p0"].answer_cancel(job.attempt)
            await c.until_loads(lambda loads: loads.num_live_requests == 0)

    run(scenario())


def test_a_question_that_fails_fails_the_call_and_gives_the_others_up(tmp_path):
    async def scenario():
        async with served(tmp_path) as (c, client):
            call = post(client, questions=[CHOICE, SCORE])
            first, second = await jobs_of(c, 2)
            await c.nodes["p0"].send(events.failed(second.attempt, "ENGINE_ERROR"))
            assert error_of(await call)[0] == 500
            await c.nodes["p0"].answer_cancel(first.attempt)

    run(scenario())


def test_the_slo_on_ttft_is_that_of_the_whole_call(tmp_path):
    async def scenario():
        async with served(tmp_path, slo_class=("soon=ttft:60000",)) as (c, client):
            for options in ({"ttft_ms": 60_000}, {"slo_class": "soon"}, {"headers": {"x-slo-ttft-ms": "60000"}}):
                call = post(client, questions=[CHOICE, SCORE], **options)
                for job in await jobs_of(c, 2):
                    assert 0 < job.due.ttft_left_s <= 60
                    await tell(c, job, *[0.25] * len(job.sampling_params.logprob_token_ids))
                assert (await call).status_code == 200

    run(scenario())


def test_more_prompts_than_may_be_in_flight_are_refused(tmp_path):
    async def scenario():
        async with served(tmp_path, max_num_queued_reqs=3) as (c, client):
            reply = await post(client)
            message = "questions take at least 4 prompts with the beginnings of their labels, the limit is 3 in flight"
            assert (reply.status_code, reply.json()["error"]["message"]) == (400, message)
            call = post(client, questions=[CHOICE, SCORE])
            jobs = await jobs_of(c, 2)
            assert (await post(client, questions=[CHOICE, SCORE], headers={"x-request-id": "s"})).status_code == 429
            for job in jobs:
                await tell(c, job, *[0.25] * len(job.sampling_params.logprob_token_ids))
            assert (await call).status_code == 200
            _, info, message = await refusal_of(c.stub.Score(ScoreRequest(text="a")))
            assert (info.metadata["field"], message) == ("items", "items is empty: at least one is needed")

    run(scenario())
