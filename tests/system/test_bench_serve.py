"""`splitserve bench serve` on a real cluster, through both API servers."""

import json
import signal
import subprocess
import sys

import pytest

from tests.effort import few
from tests.system.cluster import wait_until
from tests.tiny_models import write_fake_model

DEADLINE_S = 240.0
PHASES = ("prefill_queue_s", "prefill_s", "kv_alloc_s", "kv_transfer_s", "decode_queue_s", "decode_s")


@pytest.fixture(scope="module")
def cluster(start_cluster, tmp_path_factory):
    model = write_fake_model(tmp_path_factory.mktemp("model") / "fake")
    cluster = start_cluster(model, http=True, coordinator={"served_model_name": "fake"}, node={"num_kv_blocks": 400})
    yield cluster
    cluster.wait_all_free()


@pytest.fixture(params=few(["splitserve", "openai"]))
def where(request, cluster):
    address = ["--server", cluster.target if request.param == "splitserve" else cluster.url]
    return ["--backend", request.param, *address]


def command(where, *words):
    return [sys.executable, "-m", "splitserve", "bench", "serve", *where, *map(str, words)]


def run(where, *words, cwd):
    done = subprocess.run(command(where, *words), capture_output=True, text=True, timeout=DEADLINE_S, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def prompt_tokens_at(cluster):
    return sum(load.num_prompt_tokens for load in cluster.loads().values() if load.role == "prefill")


def test_the_nodes_count_the_same(cluster, where, tmp_path):
    """Every request is answered in full, with its timeline, and the prefill node has seen as many prompt tokens."""
    words = ["--num-prompts", 30, "--random-input-len", 40, "--random-output-len", 12, "--random-range-ratio", 0.5]
    before = prompt_tokens_at(cluster)
    result = run(
        where, *words, "--vocab-size", 250, "--request-rate", 100, "--json", "--save-detailed",
        "--goodput", "e2el:60000", cwd=tmp_path,
    )  # fmt: skip
    assert (result["completed"], result["failed"], result["slo_attainment"]) == (30, 0, 1)
    cluster.wait_all_free()
    assert prompt_tokens_at(cluster) - before == result["total_input_tokens"]
    (file,) = tmp_path.glob("*.requests.jsonl")
    for request in map(json.loads, file.read_text().splitlines()):
        assert request["error"] == ""
        assert sum(request["arrival_tokens"]) == request["num_output_tokens"]
        timeline = request["timeline"]
        assert sum(timeline[name] for name in PHASES) == pytest.approx(timeline["e2e_s"], abs=1e-3)
        assert timeline["e2e_s"] <= request["ended_s"] - request["sent_s"]  # the server's time lies within the client's


def test_both_sides_count_the_tokens_of_texts_alike(cluster, where, tmp_path):
    turns = [
        [{"from": "human", "value": text}, {"from": "gpt", "value": "x" * 6}] for text in ("ähnlich", "<|eos|> is 1")
    ]
    (tmp_path / "chats.json").write_text(json.dumps([{"conversations": each} for each in turns]))
    data = ["--dataset-name", "sharegpt", "--dataset-path", "chats.json", "--tokenizer", cluster.model]
    before = prompt_tokens_at(cluster)
    result = run(where, *data, "--json", cwd=tmp_path)
    assert (result["completed"], result["total_input_tokens"], result["total_output_tokens"]) == (2, 8 + 6, 12)
    cluster.wait_all_free()
    assert prompt_tokens_at(cluster) - before == 8 + 6


@pytest.mark.nightly
@pytest.mark.parametrize("where", ["openai"], indirect=True)
def test_chats_count_what_the_nodes_count(cluster, where, tmp_path):
    """A conversation has the tokens of its text, and those that the chat template puts around it."""
    words = ["--num-prompts", 12, "--random-input-len", 20, "--random-output-len", 6, "--num-warmups", 2]
    flags = ["--endpoint", "/v1/chat/completions", "--tokenizer", cluster.model, "--json", "--save-detailed"]
    result = run(where, *words, *flags, cwd=tmp_path)
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (12, 0, 12 * 6)
    (file,) = tmp_path.glob("*.requests.jsonl")
    for request in map(json.loads, file.read_text().splitlines()):
        assert sum(request["arrival_tokens"]) == request["num_output_tokens"] == 6
        assert request["num_prompt_tokens"] > 20


def test_more_than_a_cluster_can_answer_is_counted_by_stages(start_cluster, tmp_path):
    """A prompt of 100 tokens takes 220 ms, so that of twenty a second most cannot have their first token in time: they
    are refused with the time to come back."""
    model = write_fake_model(tmp_path / "fake", step_s=0.02, token_s=0.002)
    cluster = start_cluster(model, coordinator={"admission": "timely"})
    words = ["--random-input-len", 100, "--random-output-len", 10, "--goodput", "ttft:2000", "--send-limits", "--json"]
    words += ["--request-rate", 4, "--stages", "0.5x4,5x5,0.5x4"]
    result = run(["--server", cluster.target], *words, cwd=tmp_path)
    before, highest, after = result["stages"]["by_stage"]
    assert [each["num_offered"] for each in (before, highest, after)] == [8, 100, 8]
    assert (result["num_prompts"], result["misses"]["failed"]) == (116, 0)
    assert highest["num_refused_until"] > 20
    told = result["stages"]["highest"]
    assert told["num_admitted"] + told["num_refused_until"] == told["num_offered"] == 100
    assert told["refusal_ms"]["median"] is not None
    cluster.wait_all_free()


@pytest.mark.nightly
def test_ctrl_c_frees_the_cluster(cluster, where, tmp_path):
    words = ["--num-prompts", 400, "--random-input-len", 30, "--random-output-len", 900, "--vocab-size", 250]
    process = subprocess.Popen(
        command(where, *words, "--max-concurrency", 4),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    with process:
        wait_until(lambda: sum(load.num_running for load in cluster.loads().values()) > 0, "it runs", DEADLINE_S)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, errors
    assert "of 400 requests have no outcome" in errors
    cluster.wait_all_free()
