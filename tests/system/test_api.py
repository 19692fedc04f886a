"""What the public service promises beyond tokens, on a real (tiny) model beside transformers."""

import asyncio
import time

import grpc
import pytest
import torch
import transformers
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos import inference_pb2
from protos.inference_pb2 import AbortRequest
from splitserve import Client
from tests.system.answers import ask, ask_all, outcome, request, stream
from tests.system.cluster import SERVICE, START_DEADLINE_S, wait_until
from tests.system.oracle import Reference
from tests.tiny_models import EOS, VOCAB_SIZE, write_tiny_model

PROMPT = list(b"The quick brown fox jumps over the lazy dog, and")
MAX_MODEL_LEN = 4096
LONG = {"max_tokens": 3900, "ignore_eos": True}  # more than there is time for
ONLY_ASCII = {token: -100.0 for token in range(VOCAB_SIZE) if not 32 <= token < 127}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return write_tiny_model(folder, "llama", seed=5, max_position_embeddings=MAX_MODEL_LEN)


@pytest.fixture(scope="module")
def cluster(start_cluster, model):
    cluster = start_cluster(model, coordinator={"served_model_name": "tiny-test"}, node={"num_kv_blocks": 1600})
    yield cluster
    cluster.wait_all_free()


@pytest.fixture(scope="module")
def reference(model):
    return Reference(model)


async def _ask(cluster, *prompt, **fields):
    async with cluster.connect() as stub:
        return await ask(stub, *prompt, **{"temperature": 0, **fields})


# ---- stock tools ----


@pytest.mark.parametrize("service", ["", SERVICE])
def test_health(cluster, service):
    message = health_pb2.HealthCheckRequest(service=service)
    with cluster.channel() as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(message, timeout=60).status == health_pb2.HealthCheckResponse.SERVING
        watch = health.Watch(message, timeout=60)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


def test_health_of_an_unknown_service(cluster):
    message = health_pb2.HealthCheckRequest(service="nobody")
    with cluster.channel() as channel:
        health = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.RpcError) as raised:
            health.Check(message, timeout=60)
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        watch = health.Watch(message, timeout=60)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        watch.cancel()


def test_reflection(cluster):
    listing = reflection_pb2.ServerReflectionRequest(list_services="")
    symbol = reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE)
    with cluster.channel() as channel:
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        listed, found = reflection.ServerReflectionInfo(iter([listing, symbol]), timeout=60)
    services = {service.name for service in listed.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= services
    assert "splitserve.v1.Fleet" not in services
    assert found.file_descriptor_response.file_descriptor_proto


# ---- information ----


def test_model_info(cluster, reference):
    with cluster.stub() as stub:
        info = stub.GetModelInfo(inference_pb2.GetModelInfoRequest(), timeout=60)
    config = reference.model.config
    assert info.served_model_name == "tiny-test"
    assert info.architecture == "LlamaForCausalLM"
    assert info.vocab_size == config.vocab_size
    assert info.max_model_len == config.max_position_embeddings
    assert list(info.eos_token_ids) == [EOS]
    assert info.has_chat_template


def test_server_info_and_loads(cluster):
    info = cluster.server_info()
    assert info.version
    assert info.protocol_version
    assert info.uptime_s > 0
    assert {(node.name, node.role) for node in info.nodes} == {("prefill-0", "prefill"), ("decode-0", "decode")}
    first, second = info.nodes
    assert first.incarnation != second.incarnation
    assert dict(first.fingerprint) == dict(second.fingerprint)
    for name, load in cluster.loads().items():
        assert name.startswith(load.role)
        assert load.state == "ready"
        assert load.num_blocks == 1600
        assert load.rss_bytes > 2**20


async def test_loads_show_a_running_request(cluster):
    """Every check of ours that nothing stays behind stands on these numbers."""
    async with cluster.connect() as stub:
        answering = stream(stub, request(PROMPT, **LONG))
        await answering.tokens(1)
        num_blocks = len(PROMPT) // 8
        await asyncio.to_thread(wait_until, lambda: _is_held(cluster, num_blocks), "the request is in the loads", 60)
        answering.cancel()
        await answering.end()
    cluster.wait_all_free()


def _is_held(cluster, num_blocks):
    decode = cluster.loads()["decode-0"]
    return decode.num_running == 1 and decode.num_blocks - decode.num_blocks_free >= num_blocks


# ---- what ends an answer ----


async def test_eos_ends_an_answer_and_ignore_eos_does_not(cluster, reference):
    prompt, expected = _prompt_that_reaches_eos(reference)
    answer = await _ask(cluster, prompt, max_tokens=100)
    assert answer.token_ids == expected
    assert answer.finish_reason == "STOP"
    beyond = await _ask(cluster, prompt, max_tokens=len(expected) + 20, ignore_eos=True)
    assert beyond.finish_reason == "LENGTH"
    assert beyond.token_ids[: len(expected)] == expected
    assert len(beyond.token_ids) == len(expected) + 20


def _prompt_that_reaches_eos(reference):
    for first in range(256):
        prompt = [first, *PROMPT]
        expected = reference.greedy(prompt, 60)
        if 3 <= len(expected) < 60:
            return prompt, expected
    raise AssertionError("no prompt reaches EOS")


async def test_min_tokens_as_in_transformers(cluster, reference):
    prompt, expected = _prompt_that_reaches_eos(reference)
    fewest = len(expected) + 5
    answer = await _ask(cluster, prompt, max_tokens=60, min_tokens=fewest)
    assert answer.token_ids == reference.greedy(prompt, 60, min_new_tokens=fewest)
    assert len(answer.token_ids) >= fewest


async def test_stop_token_ids(cluster, reference):
    undisturbed = reference.greedy(PROMPT, 30)
    stop = undisturbed[7]
    answer = await _ask(cluster, PROMPT, max_tokens=30, stop_token_ids=[stop, 0])
    assert answer.token_ids == undisturbed[: undisturbed.index(stop) + 1]
    assert answer.finish_reason == "STOP"
    assert answer.complete.WhichOneof("matched_stop") == "matched_token_id"
    assert answer.complete.matched_token_id == stop


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("position", [0, 1, 11])
async def test_stop_strings_across_tokens(cluster, include, position):
    fields = {"max_tokens": 40, "logit_bias": ONLY_ASCII, "repetition_penalty": 1.5}
    undisturbed = (await _ask(cluster, PROMPT, **fields)).text
    assert len(undisturbed) == 40  # a token is a character
    stop = undisturbed[position : position + 5]
    answer = await _ask(cluster, PROMPT, stop=["never comes", stop], include_stop_str_in_output=include, **fields)
    end = undisturbed.index(stop) + (len(stop) if include else 0)
    assert answer.text == undisturbed[:end]
    assert answer.finish_reason == "STOP"
    assert answer.complete.matched_stop_str == stop
    assert undisturbed.startswith(answer.text)


async def test_a_stop_string_that_only_begins_holds_nothing_back_in_the_end(cluster):
    fields = {"max_tokens": 20, "logit_bias": ONLY_ASCII, "repetition_penalty": 1.5}
    undisturbed = (await _ask(cluster, PROMPT, **fields)).text
    answer = await _ask(cluster, PROMPT, stop=[undisturbed[-3:] + "!"], **fields)
    assert answer.text == undisturbed
    assert answer.finish_reason == "LENGTH"


async def test_no_stop_string_before_min_tokens(cluster):
    fields = {"max_tokens": 30, "logit_bias": {ord("a"): 100.0}}
    answer = await _ask(cluster, PROMPT, stop=["aaa"], min_tokens=10, **fields)
    assert len(answer.token_ids) == 10
    assert answer.finish_reason == "STOP"


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_answers_of_one_and_two_tokens(cluster, reference, max_tokens):
    answer = await _ask(cluster, PROMPT, max_tokens=max_tokens)
    assert answer.token_ids == reference.greedy(PROMPT, max_tokens)
    assert answer.finish_reason == "LENGTH"


async def test_abort(cluster):
    async with cluster.connect() as stub:
        answering = stream(stub, request(PROMPT, request_id="mine", **LONG))
        await answering.tokens(2)
        reply = await stub.Abort(AbortRequest(request_ids=["mine", "nobody's"]))
        assert (list(reply.aborted), list(reply.unknown)) == (["mine"], ["nobody's"])
        answer = await answering.complete()
        assert answer.finish_reason == "ABORT"
        assert (await stub.Abort(AbortRequest(request_ids=["mine"]))).unknown == ["mine"]
    cluster.wait_all_free()


async def test_cancel_and_deadline_free_everything(cluster):
    async with cluster.connect() as stub:
        message = request(PROMPT, **LONG)
        late, left = stream(stub, message, timeout=0.2), stream(stub, message)
        await left.tokens(3)
        left.cancel()
        assert outcome(await left.end()) == "CANCELLED"
        assert outcome(await late.end()).split()[0] == "DEADLINE_EXCEEDED"
    cluster.wait_all_free()


# ---- how tokens are chosen ----


async def test_logprobs_are_the_models_own(cluster, reference):
    answer = await _ask(cluster, PROMPT, max_tokens=12, logprobs=4, temperature=0.7, seed=3, repetition_penalty=1.2)
    expected = reference.logits([*PROMPT, *answer.token_ids]).log_softmax(-1)[len(PROMPT) - 1 : -1]
    assert len(answer.logprobs) == len(answer.token_ids) == len(expected)
    for token, item, row in zip(answer.token_ids, answer.logprobs, expected, strict=True):
        assert item.token_id == token
        assert item.logprob == pytest.approx(row[token].item(), abs=1e-3)
        values, ids = row.topk(4)
        assert [top.token_id for top in item.top] == ids.tolist()
        assert [top.logprob for top in item.top] == pytest.approx(values.tolist(), abs=1e-3)


async def test_logprobs_of_named_tokens(cluster, reference):
    named = [5, 7, 250, 99]
    answer = await _ask(cluster, PROMPT, max_tokens=6, logprobs=2, logprob_token_ids=named)
    expected = reference.logits([*PROMPT, *answer.token_ids]).log_softmax(-1)[len(PROMPT) - 1 : -1]
    for token, item, row in zip(answer.token_ids, answer.logprobs, expected, strict=True):
        assert [item.token_id, item.logprob] == [token, pytest.approx(row[token].item(), abs=1e-3)]
        assert {top.token_id: top.logprob for top in item.top} == {
            each: pytest.approx(row[each].item(), abs=1e-3) for each in named
        }


async def test_logprobs_of_0_and_of_none(cluster):
    alone = await _ask(cluster, PROMPT, max_tokens=5, logprobs=0)
    assert [len(item.top) for item in alone.logprobs] == [0] * 5
    assert not (await _ask(cluster, PROMPT, max_tokens=5)).logprobs


NARROW = {"top_k": 1, "top_p": 1e-6, "min_p": 1.0, "temperature": 1e-4}


@pytest.mark.parametrize("narrow", NARROW)
async def test_the_narrowest_sampling_is_greedy(cluster, reference, narrow):
    answer = await _ask(
        cluster, PROMPT, **{"max_tokens": 25, "temperature": 1.5, "ignore_eos": True, narrow: NARROW[narrow]}
    )
    greedy = reference.adjusted_greedy(PROMPT, 25, lambda logits, _: logits)
    assert answer.token_ids == greedy


async def test_repetition_penalty_as_in_transformers(cluster, reference):
    answer = await _ask(cluster, PROMPT, max_tokens=40, repetition_penalty=1.6)
    assert answer.token_ids == reference.greedy(PROMPT, 40, repetition_penalty=1.6)
    assert answer.token_ids != reference.greedy(PROMPT, 40)


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty"])
@pytest.mark.parametrize("strength", [1.7, -0.8])
async def test_penalties_for_what_was_answered(cluster, reference, name, strength):
    def penalize(logits, answer):
        counts = torch.bincount(torch.tensor(answer, dtype=torch.long), minlength=VOCAB_SIZE)
        return logits - strength * (counts if name == "frequency_penalty" else (counts > 0))

    answer = await _ask(cluster, PROMPT, max_tokens=40, ignore_eos=True, **{name: strength})
    assert answer.token_ids == reference.adjusted_greedy(PROMPT, 40, penalize)


async def test_logit_bias_as_in_transformers(cluster, reference):
    bias = {token: 3.0 if token % 2 else -3.0 for token in range(100)}
    processor = transformers.SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})

    def add(logits, answer):
        return processor(torch.tensor([[*PROMPT, *answer]]), logits[None])[0]

    answer = await _ask(cluster, PROMPT, max_tokens=40, ignore_eos=True, logit_bias=bias)
    assert answer.token_ids == reference.adjusted_greedy(PROMPT, 40, add)


async def test_bad_tokens_as_in_transformers(cluster, reference):
    free = await _ask(cluster, PROMPT, max_tokens=40, ignore_eos=True)
    bad = [[free.token_ids[0]], free.token_ids[5:7], free.token_ids[20:23]]
    processor = transformers.NoBadWordsLogitsProcessor(bad, eos_token_id=EOS)

    def ban(logits, answer):
        return processor(torch.tensor([answer], dtype=torch.long), logits[None])[0]

    runs = [{"input_ids": each} for each in bad]
    answer = await _ask(cluster, PROMPT, max_tokens=40, ignore_eos=True, bad_tokens=runs)
    assert answer.token_ids == reference.adjusted_greedy(PROMPT, 40, ban)


async def test_bad_words_do_not_come(cluster):
    free = await _ask(cluster, PROMPT, max_tokens=40, logit_bias=ONLY_ASCII)
    words = [free.text[3:5], free.text[12:15]]
    held = await _ask(cluster, PROMPT, max_tokens=40, logit_bias=ONLY_ASCII, bad_words=words)
    assert held.text[:4] == free.text[:4]
    assert not any(word in held.text for word in words), "each byte is one token"


async def test_allowed_tokens_as_in_transformers(cluster, reference):
    allowed = [7, 97, 120, 200, EOS]
    processor = transformers.PrefixConstrainedLogitsProcessor(lambda *_: allowed, num_beams=1)

    def mask(logits, answer):
        return processor(torch.tensor([[*PROMPT, *answer]]), logits[None])[0]

    answer = await _ask(cluster, PROMPT, max_tokens=20, ignore_eos=True, allowed_token_ids=allowed)
    assert answer.token_ids == reference.adjusted_greedy(PROMPT, 20, mask)
    answer = await _ask(cluster, PROMPT, max_tokens=20, min_tokens=20, temperature=2.0, allowed_token_ids=allowed)
    assert set(answer.token_ids) <= {*allowed} - {EOS}


async def test_several_answers(cluster):
    fields = {"max_tokens": 30, "n": 3, "seed": 9, "temperature": 1.0, "ignore_eos": True}
    async with cluster.connect() as stub:
        first, again = [await stream(stub, request(PROMPT, **fields)).end() for _ in range(2)]
    assert first.error is None
    assert sorted(first.answers) == [0, 1, 2]
    answers = [first.answers[index] for index in range(3)]
    assert len({tuple(answer.token_ids) for answer in answers}) == 3
    assert all(len(answer.token_ids) == 30 for answer in answers)
    assert [again.answers[index].token_ids for index in range(3)] == [answer.token_ids for answer in answers]
    assert len({answer.request_id for answer in answers}) == 1


async def test_abort_ends_every_one_of_several_answers(cluster):
    async with cluster.connect() as stub:
        answering = stream(stub, request(PROMPT, request_id="three", n=3, **LONG))
        await answering.tokens(2)
        assert (await stub.Abort(AbortRequest(request_ids=["three"]))).aborted == ["three"]
        ended = await answering.end()
    assert sorted(ended.answers) == [0, 1, 2]
    assert {answer.finish_reason for answer in ended.answers.values()} == {"ABORT"}
    cluster.wait_all_free()


# ---- text ----


async def test_text_in_and_text_out(cluster, reference):
    answer = await _ask(cluster, "Grüße, 世界 🙂", max_tokens=50)
    prompt = reference.tokenizer("Grüße, 世界 🙂")["input_ids"]
    assert answer.complete.prompt_tokens == len(prompt)
    assert answer.token_ids == reference.greedy(prompt, 50)
    assert answer.text == reference.tokenizer.decode(answer.token_ids, skip_special_tokens=True)


async def test_a_conversation_through_the_chat_template(cluster, reference):
    turns = [
        {"role": "user", "content": "What is ½ + ½?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "Sure? <|eos|>"},
    ]
    prompt = reference.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
    answer = await _ask(cluster, turns, max_tokens=20)
    assert answer.complete.prompt_tokens == len(prompt)
    assert answer.token_ids == reference.greedy(prompt, 20)


@pytest.mark.parametrize("skip", [True, False])
async def test_special_tokens_in_the_text(cluster, skip):
    fields = {"max_tokens": 2, "ignore_eos": True, "logit_bias": {EOS: 100.0}}
    answer = await _ask(cluster, PROMPT, skip_special_tokens=skip, **fields)
    assert answer.token_ids == [EOS, EOS]
    assert answer.text == ("" if skip else "<|eos|><|eos|>")


# ---- accounts ----


async def test_usage_and_request_id(cluster):
    answer = await _ask(cluster, PROMPT, request_id="my-request:1", max_tokens=5, ignore_eos=True)
    assert answer.request_id == "my-request:1"
    assert answer.complete.prompt_tokens == len(PROMPT)
    assert answer.complete.completion_tokens == 5
    assert answer.complete.cached_tokens <= len(PROMPT)
    other = await _ask(cluster, PROMPT, max_tokens=5)
    third = await _ask(cluster, PROMPT, max_tokens=5)
    assert len({"", other.request_id, third.request_id}) == 3


@pytest.mark.parametrize("max_tokens", [1, 60])
async def test_timeline_adds_up(cluster, max_tokens):
    started_at = time.monotonic()
    async with cluster.connect() as stub:
        messages = [request(PROMPT * 5, max_tokens=max_tokens, ignore_eos=True) for _ in range(12)]
        answers = await ask_all(stub, messages)
    elapsed_s = time.monotonic() - started_at
    for answer in answers:
        timeline = answer.complete.timeline
        phases = [
            timeline.prefill_queue_s, timeline.prefill_s, timeline.kv_alloc_s,
            timeline.kv_transfer_s, timeline.decode_queue_s, timeline.decode_s,
        ]  # fmt: skip
        assert min(phases) >= 0
        assert sum(phases) == pytest.approx(timeline.e2e_s, rel=0.01)
        assert 0 < timeline.ttft_s <= timeline.e2e_s <= elapsed_s
        assert timeline.prefill_s > 0
        assert timeline.prefill_node == "prefill-0"
        assert timeline.num_restarts == 0
        if max_tokens > 1:
            assert timeline.decode_node == "decode-0"
            assert timeline.decode_s > 0


# ---- the Python client ----


def test_the_client_reads_all_of_it(cluster, reference):
    with Client(cluster.target) as client:
        chunks = list(client.generate(PROMPT, max_tokens=10, temperature=0, logprobs=1))
        assert client.health()
        assert client.model_info().served_model_name == "tiny-test"
        assert {node.name for node in client.loads().nodes} == {"prefill-0", "decode-0"}
    expected = reference.greedy(PROMPT, 10)
    assert [token for chunk in chunks for token in chunk.token_ids] == expected
    assert "".join(chunk.text for chunk in chunks) == reference.tokenizer.decode(expected, skip_special_tokens=True)
    assert chunks[-1].completion.completion_tokens == len(expected)


def test_leaving_the_loop_cancels(cluster):
    with Client(cluster.target) as client:
        for _chunk in client.generate(PROMPT, **LONG):
            break
        cluster.wait_all_free()


# ---- nodes with other weights ----


@pytest.mark.nightly
async def test_a_node_with_other_weights_is_refused(cluster, tmp_path):
    other = write_tiny_model(tmp_path / "tiny", "llama", seed=6, max_position_embeddings=MAX_MODEL_LEN)
    intruder = cluster.start_intruder(other, "decode-7")
    assert intruder.wait(START_DEADLINE_S) != 0
    assert "weights" in intruder.output().splitlines()[-1]
    assert cluster.attached() == {"prefill-0", "decode-0"}
