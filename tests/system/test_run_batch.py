"""`splitserve run-batch` against a server that takes fewer at once than it is sent."""

import json
import math
import re

import httpx2
import pytest
from click.testing import CliRunner

from splitserve.cli import main
from tests.system.oracle import fake_answer
from tests.tiny_models import write_fake_model

MOST_AT_ONCE = 3
NUM_REQUESTS = 24
NUM_TOKENS = 4


@pytest.fixture(scope="module")
def cluster(start_cluster, tmp_path_factory):
    model = write_fake_model(tmp_path_factory.mktemp("model"), step_s=0.01)
    cluster = start_cluster(model, http=True, coordinator={"max_num_queued_reqs": MOST_AT_ONCE})
    yield cluster
    cluster.wait_all_free()


def prompt_of(index):
    return [65, 66, 67 + index]


def line(custom_id, body, path="/v1/completions"):
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": path, "body": body}) + "\n"


def run(cluster, tmp_path, *lines, output="out.jsonl", flags=()):
    (tmp_path / "in.jsonl").write_text("".join(lines))
    files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / output)]
    return CliRunner().invoke(main, ["run-batch", *files, "--server", cluster.url, *flags])


def metrics(cluster):
    return httpx2.get(f"{cluster.url}/metrics").text


def outcomes(tmp_path):
    told = [json.loads(each) for each in (tmp_path / "out.jsonl").read_text().splitlines()]
    return {each["custom_id"]: each for each in told}


@pytest.mark.nightly
def test_every_request_is_answered_though_most_are_turned_away_at_first(cluster, tmp_path):
    """Each is asked again when the server has said that it would be taken."""
    fields = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    lines = [line(f"r{index}", {"prompt": prompt_of(index), **fields}) for index in range(NUM_REQUESTS)]
    done = run(cluster, tmp_path, *lines, flags=["--max-concurrency", "8"])
    assert done.exit_code == 0, done.stderr
    told = outcomes(tmp_path)
    assert len(told) == NUM_REQUESTS
    for index in range(NUM_REQUESTS):
        [choice] = told[f"r{index}"]["response"]["body"]["choices"]
        assert choice["token_ids"] == fake_answer(prompt_of(index), NUM_TOKENS)
    assert f"{NUM_REQUESTS} of {NUM_REQUESTS} answered" in done.stderr.splitlines()[-1]
    refused = re.search(r'^splitserve_requests_refused_total.*"QUEUE_FULL".* (\d+)', metrics(cluster), re.MULTILINE)
    assert int(refused[1]) > 0


def test_what_the_server_refuses_is_told_beside_the_others(cluster, tmp_path):
    lines = [line("good", {"prompt": "x", "max_tokens": 1}), line("bad", {"prompt": "x", "max_tokens": -1})]
    done = run(cluster, tmp_path, *lines, line("odd", {}, "/v1/x"))
    assert done.exit_code == 1
    assert done.stderr.endswith(f"Error: 2 of 3 failed: their lines in {tmp_path / 'out.jsonl'} say why\n")
    told = outcomes(tmp_path)
    statuses = {custom_id: each["response"]["status_code"] for custom_id, each in told.items()}
    assert statuses == {"good": 200, "bad": 400, "odd": 404}
    assert "max_tokens" in told["bad"]["response"]["body"]["error"]["message"]


def test_a_line_that_cannot_be_sent_or_taken_does_not_end_the_run(cluster, tmp_path):
    deep = '{"custom_id": "deep", "url": "/v1/completions", "body": {"prompt": ' + "[" * 2000 + "]" * 2000 + "}}\n"
    good = [line(f"good{index}", {"prompt": "x", "max_tokens": 1}) for index in range(8)]
    bad = [
        line("half", {"prompt": "\ud800", "max_tokens": 1}),
        line("number", {"prompt": "x", "temperature": math.nan}),
        line("\udfff", {"prompt": "x", "max_tokens": 1}),
        deep,
        line("long", {"prompt": "x"}, "/" + "a" * 70_000),
    ]
    done = run(cluster, tmp_path, *bad, *good)
    assert (done.exit_code, "4 of 13 failed" in done.stderr) == (1, True), done.stderr
    told = outcomes(tmp_path)
    assert {told[f"good{index}"]["response"]["status_code"] for index in range(8)} == {200}
    assert told["\udfff"]["response"]["status_code"] == 200
    assert "prompt must be a string of valid Unicode" in told["half"]["response"]["body"]["error"]["message"]
    assert told["number"]["error"]["message"].startswith("the body is no JSON that can be sent")
    assert told["long"]["error"]["message"] == "the url is none: URL too long"
    assert told[None]["error"]["message"] == "line 4 is nested too deeply to be read"


def test_the_server_may_be_named_by_the_environment(cluster, tmp_path):
    (tmp_path / "in.jsonl").write_text(line("a", {"prompt": "x", "max_tokens": 1}))
    command = ["run-batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    done = CliRunner().invoke(main, command, env={"SPLITSERVE_SERVER": "localhost:50051"})
    assert (done.exit_code, "SPLITSERVE_SERVER, must be http://HOST:PORT" in done.stderr) == (2, True)
    done = CliRunner().invoke(main, command, env={"SPLITSERVE_SERVER": cluster.url})
    assert done.exit_code == 0, done.stderr
    assert outcomes(tmp_path)["a"]["response"]["status_code"] == 200


def test_nothing_is_asked_where_a_line_is_no_request_or_the_output_is_there(cluster, tmp_path):
    done = run(cluster, tmp_path, line("a", {"prompt": "x"}), "{}\n")
    assert (done.exit_code, done.stderr) == (
        2,
        "Error: line 2 needs a custom_id, a text by which its answer is known\n",
    )
    assert not (tmp_path / "out.jsonl").exists()
    done = run(cluster, tmp_path, line("a", {"prompt": "x"}), output="in.jsonl")
    assert done.exit_code == 2
    assert "in.jsonl is there already" in done.stderr


def test_without_a_server_there_is_one_sentence_and_no_output(tmp_path):
    (tmp_path / "in.jsonl").write_text(line("a", {}))
    files = ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    done = CliRunner().invoke(main, ["run-batch", *files, "--server", "http://127.0.0.1:1"])
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: no server answers at http://127.0.0.1:1")
    assert not (tmp_path / "out.jsonl").exists()
