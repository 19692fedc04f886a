"""The OpenAI-compatible API server with the official client, beside the gRPC API."""

import asyncio
import signal

import httpx2
import openai
import pytest

from tests.system.answers import ask, request, stream
from tests.system.cluster import CALL_DEADLINE_S, STOP_DEADLINE_S
from tests.system.oracle import fake_answer
from tests.tiny_models import EOS, SPECIAL_TOKENS, write_fake_model, write_tiny_model

PROMPT = list(b"The quick brown fox jumps over the lazy dog, and")
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is ½ + ½?"}]
KEY = "key-of-the-test"
JSON = {"content-type": "application/json"}
MAX_MODEL_LEN = 4096
LONG = {"max_tokens": 3900, "extra_body": {"ignore_eos": True}}  # more than there is time for


@pytest.fixture(scope="module")
def cluster(start_cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    model = write_tiny_model(folder, "llama", seed=5, max_position_embeddings=MAX_MODEL_LEN)
    flags = {"served_model_name": "tiny-test"}
    cluster = start_cluster(model, http=True, coordinator=flags, node={"num_kv_blocks": 1000})
    yield cluster
    cluster.wait_all_free()


@pytest.fixture
def client(cluster):
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def http(cluster):
    with httpx2.Client(base_url=cluster.url, timeout=CALL_DEADLINE_S) as client:
        yield client


async def _grpc(cluster, *prompt, **fields):
    async with cluster.connect() as stub:
        return await ask(stub, *prompt, **fields)


def _complete(client, prompt=PROMPT, **fields):
    return client.completions.create(model="tiny-test", prompt=prompt, **fields)


def _chat(client, messages=TURNS, **fields):
    return client.chat.completions.create(model="tiny-test", messages=messages, **fields)


def _bytes_of(token):
    """A token of the tests' vocabulary is one byte, or a special token that stands for its own text."""
    if token < 256:
        return [token]
    return list(next(text for text, token_id in SPECIAL_TOKENS.items() if token_id == token).encode())


# ---- the same answers as at the gRPC API ----


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.1, "seed": 7}, {"top_p": 0.7, "seed": -3}])
async def test_completions_are_those_of_grpc(cluster, client, sampling):
    expected = await _grpc(cluster, PROMPT, max_tokens=30, **sampling)
    whole = await asyncio.to_thread(_complete, client, max_tokens=30, **sampling)
    assert whole.object == "text_completion"
    assert whole.model == "tiny-test"
    [choice] = whole.choices
    assert (choice.text, choice.finish_reason) == (expected.text, expected.finish_reason.lower())
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(PROMPT), len(expected.token_ids))
    assert whole.usage.total_tokens == len(PROMPT) + len(expected.token_ids)
    events = await asyncio.to_thread(lambda: list(_complete(client, max_tokens=30, stream=True, **sampling)))
    assert "".join(event.choices[0].text for event in events) == expected.text
    assert [event.choices[0].finish_reason for event in events][-1] == expected.finish_reason.lower()
    assert len({event.id for event in events}) == 1


async def test_chat_is_that_of_grpc(cluster, client):
    sampling = {"temperature": 0.9, "seed": 11, "max_tokens": 25}
    expected = await _grpc(cluster, TURNS, **sampling)
    whole = await asyncio.to_thread(_chat, client, **sampling)
    assert whole.object == "chat.completion"
    assert whole.choices[0].message.content == expected.text
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage.prompt_tokens == expected.complete.prompt_tokens
    parts = [{"role": turn["role"], "content": [{"type": "text", "text": turn["content"]}]} for turn in TURNS]
    sampling["max_completion_tokens"] = sampling.pop("max_tokens")
    in_parts = await asyncio.to_thread(_chat, client, parts, **sampling)
    assert in_parts.choices[0].message.content == expected.text


async def test_chat_events(cluster):
    expected = await _grpc(cluster, TURNS, temperature=0, max_tokens=12, ignore_eos=True)
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        call = await client.chat.completions.create(
            model="tiny-test", messages=TURNS, temperature=0, max_tokens=12, stream=True,
            stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
        )  # fmt: skip
        events = [event async for event in call]
    first, *middle, last, usage = events
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(event.choices[0].delta.content for event in middle) == expected.text
    assert {event.choices[0].finish_reason for event in (first, *middle)} == {None}
    assert (last.choices[0].finish_reason, last.choices[0].delta.content) == ("length", None)
    assert {event.usage for event in (first, *middle, last)} == {None}
    assert usage.choices == []
    assert (usage.usage.prompt_tokens, usage.usage.completion_tokens) == (expected.complete.prompt_tokens, 12)


async def test_several_answers_of_several_prompts(cluster, client):
    prompts = ["One fine day ", "Another "]
    sampling = {"max_tokens": 15, "seed": 3, "temperature": 1.2, "n": 2}
    async with cluster.connect() as stub:
        ended = [await stream(stub, request(prompt, **sampling)).end() for prompt in prompts]
    expected = [each.answers[index].text for each in ended for index in (0, 1)]
    whole = await asyncio.to_thread(_complete, client, prompts, **sampling)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in whole.choices] == expected
    assert whole.usage.prompt_tokens == sum(map(len, prompts))
    texts = [""] * 4
    for event in await asyncio.to_thread(lambda: list(_complete(client, prompts, stream=True, **sampling))):
        texts[event.choices[0].index] += event.choices[0].text
    assert texts == expected
    as_tokens = [list(prompt.encode()) for prompt in prompts]
    assert [choice.text for choice in _complete(client, as_tokens, **sampling).choices] == expected


def test_max_tokens_of_completions_is_16_unless_given(client):
    assert _complete(client, extra_body={"ignore_eos": True}).usage.completion_tokens == 16


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(client, include):
    ascii_only = {str(token): -100 for token in range(260) if not 32 <= token < 127}
    fields = {"max_tokens": 40, "logit_bias": ascii_only, "temperature": 0}
    undisturbed = _complete(client, extra_body={"repetition_penalty": 1.5}, **fields).choices[0].text
    stop = undisturbed[11:16]
    extra = {"repetition_penalty": 1.5, "include_stop_str_in_output": include}
    choice = _complete(client, stop=["never comes", stop], extra_body=extra, **fields).choices[0]
    assert choice.text == undisturbed[: undisturbed.index(stop) + (len(stop) if include else 0)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)


async def test_logprobs_of_completions(cluster, client):
    expected = await _grpc(cluster, PROMPT, temperature=0, max_tokens=10, logprobs=3, ignore_eos=True)
    fields = {"temperature": 0, "max_tokens": 10, "logprobs": 3, "extra_body": {"ignore_eos": True}}
    [choice] = (await asyncio.to_thread(_complete, client, **fields)).choices
    assert choice.logprobs.token_logprobs == pytest.approx([item.logprob for item in expected.logprobs])
    for token, top, item in zip(choice.logprobs.tokens, choice.logprobs.top_logprobs, expected.logprobs, strict=True):
        assert token in top
        assert list(top.values()) == pytest.approx([each.logprob for each in item.top])
    events = await asyncio.to_thread(lambda: list(_complete(client, stream=True, **fields)))
    pieces = [event.choices[0].logprobs for event in events if event.choices[0].logprobs]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for piece in pieces for value in getattr(piece, name)] == getattr(choice.logprobs, name)


async def test_logprobs_of_chat(cluster, client):
    expected = await _grpc(cluster, TURNS, temperature=0, max_tokens=10, logprobs=2, ignore_eos=True)
    fields = {"temperature": 0, "max_tokens": 10, "logprobs": True, "top_logprobs": 2}
    [choice] = (await asyncio.to_thread(_chat, client, extra_body={"ignore_eos": True}, **fields)).choices
    content = choice.logprobs.content
    assert [entry.logprob for entry in content] == pytest.approx([item.logprob for item in expected.logprobs])
    assert [entry.bytes for entry in content] == [_bytes_of(token) for token in expected.token_ids]
    assert [[top.bytes for top in entry.top_logprobs] for entry in content] == [
        [_bytes_of(top.token_id) for top in item.top] for item in expected.logprobs
    ]
    assert [entry.token for entry in content] == [bytes(entry.bytes).decode(errors="replace") for entry in content]


def test_token_ids_and_timeline_on_request(client):
    extra = {"ignore_eos": True, "return_token_ids": True, "include_timeline": True, "continuous_usage_stats": True}
    whole = _complete(client, max_tokens=5, temperature=0, extra_body=extra)
    [choice] = whole.choices
    assert choice.prompt_token_ids == PROMPT
    assert len(choice.token_ids) == 5
    assert choice.timeline["prefill_node"] == "prefill-0"
    phases = ("prefill_queue", "prefill", "kv_alloc", "kv_transfer", "decode_queue", "decode")
    assert sum(choice.timeline[f"{name}_s"] for name in phases) == pytest.approx(choice.timeline["e2e_s"])
    events = list(_chat(client, max_tokens=5, temperature=0, stream=True, extra_body=extra))
    assert events[0].prompt_token_ids
    assert sum(len(event.choices[0].token_ids) for event in events[1:-1]) == 5
    assert events[-1].choices[0].timeline["decode_node"] == "decode-0"


def test_usage_in_every_event(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = list(_complete(client, stream=True, stream_options=options, **LONG | {"max_tokens": 5}))
    counts = [event.usage.completion_tokens for event in events]
    assert counts == sorted(counts)
    assert counts[-2:] == [5, 5]


def test_a_batch_is_answered_as_its_conversations_are(client, http):
    questions = [[{"role": "user", "content": text}] for text in ("one", "two", "three")]
    fields = {"max_tokens": 8, "temperature": 0}
    reply = http.post("/v1/chat/completions/batch", json={"messages": questions, **fields}).json()
    alone = [http.post("/v1/chat/completions", json={"messages": each, **fields}).json() for each in questions]
    assert [each["message"] for each in reply["choices"]] == [each["choices"][0]["message"] for each in alone]
    assert reply["usage"]["completion_tokens"] == sum(each["usage"]["completion_tokens"] for each in alone)


def test_cached_tokens_are_told(client):
    prompt = list(b"This is a beginning that nobody else has, long enough for some blocks.")
    assert _complete(client, prompt).usage.prompt_tokens_details.cached_tokens == 0
    assert _complete(client, prompt).usage.prompt_tokens_details.cached_tokens >= 8


# ---- other endpoints ----


def test_models(client):
    [model] = client.models.list().data
    assert (model.id, model.object, model.max_model_len) == ("tiny-test", "model", MAX_MODEL_LEN)
    assert (model.vocab_size, model.owned_by) == (260, "splitserve")
    assert client.models.retrieve("tiny-test") == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_tokenize_and_back(http):
    reply = http.post("/tokenize", json={"prompt": "ab½"}).json()
    told = {"count": 4, "max_model_len": MAX_MODEL_LEN, "tokens": [97, 98, 194, 189]}
    assert reply == {**told, "token_strs": None}
    assert http.post("/detokenize", json={"tokens": [*reply["tokens"], EOS]}).json() == {"prompt": "ab½<|eos|>"}
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]}).json()
    assert chat["tokens"] == [256, 258, 97, EOS, 259]


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_health(http, path):
    assert http.get(path).status_code == 200


def test_version(http):
    assert http.get("/version").json()["version"]


# ---- ids ----


def test_request_ids_come_back_and_are_refused_while_live(client, cluster):
    with _complete(client, stream=True, extra_headers={"X-Request-Id": "mine"}, **LONG) as events:
        assert next(iter(events)).id == "cmpl-mine"
        assert events.response.headers["x-request-id"] == "mine"
        with pytest.raises(openai.ConflictError) as caught:
            _complete(client, extra_headers={"X-Request-Id": "mine"})
        assert caught.value.code == "DUPLICATE_REQUEST_ID"
    cluster.wait_all_free()
    with pytest.raises(openai.BadRequestError) as caught:
        _complete(client, extra_headers={"X-Request-Id": "not a valid id"})
    assert caught.value.param == "x-request-id"


# ---- refusals ----


def test_errors_are_of_the_clients_classes(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="other", prompt="a")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as caught:
        _complete(client, "x" * 5000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    assert str(caught.value.body["message"]).startswith(
        "This model's maximum context length is exceeded: the prompt has"
    )
    with pytest.raises(openai.BadRequestError) as caught:
        _complete(client, max_tokens=5000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "max_tokens")
    assert "this model's maximum context length is" in str(caught.value).lower()  # what litellm looks for
    with pytest.raises(openai.BadRequestError) as caught:
        _chat(client, temperature=-1)
    assert caught.value.body == {
        "message": "temperature must be at least 0, not -1",
        "type": "invalid_request_error",
        "param": "temperature",
        "code": "BAD_PARAM",
        "reason": "BAD_PARAM",
    }
    with pytest.raises(openai.BadRequestError) as caught:
        _chat(client, tools=[{"type": "custom", "custom": {"name": "f"}}])
    assert caught.value.param == "tools[0].type"


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/completions", b"{", 400),
        ("POST", "/v1/completions", b"", 400),
        ("POST", "/v1/completions", b"[" * 100_000, 400),
        ("POST", "/v1/completions", b"[1]", 400),
        ("POST", "/v1/completions", b'{"prompt": "a", "max_tokens": true}', 400),
        ("POST", "/v1/completions", b'{"prompt": "\xff"}', 400),
        ("POST", "/v1/completions", b'{"prompt": "a", "temperature": NaN}', 400),
        ("GET", "/v1/completions", b"", 405),
        ("DELETE", "/v1/models", b"", 405),
        ("GET", "/v1/nothing", b"", 404),
        ("GET", "/", b"", 404),
        ("POST", "/v1/chat/completions", b" " * (4 * 2**20 + 1), 413),
    ],
)
def test_abuse_is_refused_in_openais_words(http, method, path, body, status):
    reply = http.request(method, path, content=body, headers=JSON)
    assert reply.status_code == status
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code", "reason"}
    assert error["type"] == "invalid_request_error"
    assert reply.headers["x-request-id"]


def test_a_body_without_a_length_is_bounded_too(http):
    parts = (b" " * 2**16 for _ in range(100))
    assert http.post("/v1/completions", content=parts, headers=JSON).status_code == 413


# ---- clients that leave ----


def test_closing_a_stream_frees_its_request(client, cluster):
    with _complete(client, stream=True, **LONG) as events:
        next(iter(events))
    cluster.wait_all_free()


async def test_leaving_before_the_answer_frees_its_request(cluster):
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.APITimeoutError):
            await client.completions.create(model="tiny-test", prompt=PROMPT, timeout=0.1, **LONG)
    await asyncio.to_thread(cluster.wait_all_free)


# ---- a key, and the end of the coordinator ----


@pytest.mark.nightly
def test_with_a_key_and_to_the_end(start_cluster, tmp_path_factory):
    model = write_fake_model(tmp_path_factory.mktemp("fake"), step_s=0.01)
    cluster = start_cluster(model, http=True, env={"SPLITSERVE_API_KEY": KEY})
    stranger = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError) as caught:
        stranger.models.list()
    assert (caught.value.code, caught.value.type) == ("invalid_api_key", "invalid_request_error")
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key=KEY, max_retries=0) as client:
        prompt = [1, 2, 3]
        fields = {"model": "", "prompt": prompt, "max_tokens": 600, "temperature": 0}
        extra = {"ignore_eos": True, "return_token_ids": True}
        token_ids, refusals = [], []
        for event in client.completions.create(stream=True, extra_body=extra, **fields):
            token_ids += event.choices[0].token_ids if "token_ids" in event.choices[0].model_extra else []
            if len(token_ids) >= 5 and not refusals:
                cluster.children["coordinator"].send(signal.SIGTERM)
                refusals.append(_refusal_while_draining(client, fields))
        assert token_ids == fake_answer(prompt, 600)
        assert refusals == [(503, "DRAINING", "1")]
    assert cluster.children["coordinator"].wait(STOP_DEADLINE_S) == 0
    assert KEY not in cluster.children["coordinator"].output()


def _refusal_while_draining(client, fields):
    """The first refusal; the signal may take a moment to be heard."""
    for _ in range(1000):
        try:
            client.completions.create(**fields | {"max_tokens": 1})
        except openai.InternalServerError as error:
            return error.status_code, error.code, error.response.headers["retry-after"]
    raise AssertionError("no call was refused")
