"""Decisions by prefill nodes alone, for OpenAI's client: those of transformers, to the bit whatever else is asked."""

import signal
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from splitserve import Client
from splitserve.client.errors import Refused
from tests.system.cluster import wait_until
from tests.system.oracle import Reference
from tests.tiny_models import write_tiny_model

INPUT = "The customer writes: I was charged twice, and nobody answers the phone. " * 6
PREDICATE = {"type": "predicate", "name": "p", "instructions": "A refund is asked for."}
CHOICES = [{"value": "billing"}, {"value": "technical", "description": "outages"}, {"value": True}]
SCORE = {"type": "score", "instructions": "How angry?", "levels": [{"label": "calm"}, {"label": "furious"}]}
END = "Answer with the {} that fits best alone."
TEXTS = (
    "A refund is asked for.\n\nyes\nno\n\nAnswer with yes or no alone.",
    "Question 0?\n\nA. billing\nB. technical: outages\nC. true\n\n" + END.format("letter of the option"),
    "How angry?\n\n0. calm\n1. furious\n\n" + END.format("number of the level"),
)


def choice(index):
    return {"type": "choice", "name": f"{index}", "instructions": f"Question {index}?", "choices": CHOICES}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", "llama", seed=5)


@pytest.fixture(scope="module")
def cluster(start_cluster, model, num_api_servers):
    cluster = start_cluster(
        model,
        num_prefill=2,
        http=True,
        coordinator={"api_server_count": num_api_servers, "node_wait_s": 60},
        node={"dtype": "float32", "batch_invariant": True, "num_kv_blocks": 400, "max_num_batched_tokens": 128},
    )
    yield cluster
    cluster.heal()
    cluster.wait_all_free()


@pytest.fixture
def client(cluster):
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=180) as client:
        yield client


def decide(client, questions, **fields):
    return client.decisions.create(model="", input=INPUT, questions=questions, extra_body=fields).answers


def by_hand(reference, text, labels):
    """The probabilities of these replies by transformers, of which one is given."""
    messages = [{"role": "user", "content": f"{INPUT}\n\n{text}"}]
    prompt = reference.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    whole = []
    for label in labels:
        token_ids = list(label.encode())
        logprobs = reference.logits([*prompt, *token_ids[:-1]]).log_softmax(-1)[len(prompt) - 1 :]
        whole.append(sum(row[token] for row, token in zip(logprobs, token_ids, strict=True)).exp().item())
    return [each / sum(whole) for each in whole], sum(whole)


def test_probabilities_are_those_of_transformers(cluster, client, model):
    reference = Reference(model)
    answers = decide(client, [PREDICATE, choice(0), SCORE])
    odds = [by_hand(reference, *each) for each in zip(TEXTS, (("yes", "no"), "ABC", "01"), strict=True)]
    (said, _), (chosen, mass), (levels, _) = odds
    assert (answers[0].name, answers[0].probability) == ("p", pytest.approx(said[0], rel=1e-4))
    assert [each.probability for each in answers[1].probabilities] == pytest.approx(chosen, rel=1e-4)
    assert [each.value for each in answers[1].probabilities] == ["billing", "technical", True]
    assert answers[1].choice == ["billing", "technical", True][chosen.index(max(chosen))]
    assert answers[1].confidence == pytest.approx(max(chosen) * mass, rel=1e-4)
    assert answers[2].score == pytest.approx(levels[1], rel=1e-4)
    messages = [{"role": "user", "content": f"{INPUT}\n\n"}]
    with Client(f"127.0.0.1:{cluster.port}") as own:
        scores = own.score(messages, [(TEXTS[1], ["A", "B", "C"])])
        assert sum(map(pow, [2.718281828459045] * 3, scores.logprobs[0])) == pytest.approx(mass, rel=1e-4)
        assert (scores.timeline.prefill_node[:7], scores.timeline.decode_node) == ("prefill", "")
        assert (scores.timeline.kv_alloc_s, scores.timeline.kv_transfer_s, scores.timeline.decode_s) == (0, 0, 0)
        with pytest.raises(Refused, match="items is empty"):
            own.score("a", [])


def test_a_question_has_the_same_bits_alone_among_400_beside_others_and_after_a_lost_node(cluster, client):
    questions = [choice(index) for index in range(400)]
    [alone] = decide(client, questions[7:8], cache_salt="alone")
    before = num_computed(cluster)
    among = decide(client, questions, cache_salt="among")
    assert among[7] == alone
    assert len({each.probabilities[0].probability for each in among}) > 300
    # One prefill of the input, and the questions with the end of the prompt, each up to a block of the input.
    assert num_computed(cluster) - before < len(INPUT) + 400 * (len(TEXTS[1]) + 32 + 16)
    assert all(load.num_kv_bytes == 0 for load in cluster.loads().values())
    with Client(f"127.0.0.1:{cluster.port}") as own, ThreadPoolExecutor(8) as threads:
        running = [threads.submit(list, own.generate([index] * 90, max_tokens=60)) for index in range(7)]
        assert decide(client, questions[:20], cache_salt="beside") == among[:20]
        assert all(each.result()[-1].completion.completion_tokens for each in running)
    assert decide_without_a_node(cluster, client, questions) == among
    cluster.heal()


def num_computed(cluster):
    """Prompt tokens that nodes have computed."""
    return sum(load.num_prompt_tokens - load.num_cached_tokens for load in cluster.loads().values())


def decide_without_a_node(cluster, client, questions):
    """The answers of a call whose node is killed when it has all of its prompts."""
    nodes = ["prefill-0", "prefill-1"]
    for name in nodes:
        cluster.children[name].send(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads, Client(f"127.0.0.1:{cluster.port}") as own:
        call = threads.submit(decide, client, questions, cache_salt="lost")
        wait_until(lambda: own.loads().num_live_requests == len(questions), "all questions are placed", 60.0)
        tokens = {node.load.name: node.num_tokens_to_compute for node in own.overview().nodes}
        busy, other = sorted(nodes, key=tokens.__getitem__, reverse=True)
        assert tokens[busy] > tokens[other]
        cluster.expect_end(busy).kill()
        cluster.children[other].send(signal.SIGCONT)
        return call.result()
