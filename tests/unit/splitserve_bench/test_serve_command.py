"""`splitserve bench serve` as a user runs it, against servers that record what they do.

Most tests run the command and its load generator in the server's event loop; a few start both processes.
"""

import asyncio
import json
import signal
import sys

import psutil
import pytest
from click.testing import CliRunner

from splitserve.cli import main
from splitserve_bench.options import repeat_flags
from splitserve_bench.serve.command import ServeCommand, serve_command
from tests.tiny_models import write_tokenizer
from tests.unit.splitserve_bench.load_servers import (
    FAIL,
    HANG,
    MAX_MODEL_LEN,
    MODEL,
    REFUSE,
    SERVERS,
    SHORT,
    VOCAB_SIZE,
    Script,
    http_server,
)

FEW = ("--num-prompts", "6", "--random-input-len", "20", "--random-output-len", "4")
most_of_one = pytest.mark.parametrize(
    "serving", ["splitserve", pytest.param("openai", marks=pytest.mark.nightly)], indirect=True
)
PNG = b"\x89PNG"


@pytest.fixture(params=SERVERS)
def serving(request):
    return SERVERS[request.param]


async def start(target, *words):
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "splitserve", "bench", "serve", "--server", target.address, *words),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@most_of_one
async def test_json_has_vllms_keys(serving):
    script = Script()
    async with serving(script) as target:
        process = await start(target, *FEW, "--goodput", "ttft:60000", "tpot:60000", "--json", "--seed", "3")
        output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    assert "Traceback" not in errors.decode()
    result = json.loads(output)
    assert (result["completed"], result["failed"], result["num_prompts"]) == (6, 0, 6)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (6 * 20, 6 * 4)
    assert (result["model_id"], result["backend"], result["request_rate"]) == (MODEL, target.backend, "inf")
    assert result["slo_attainment"] == 1
    assert result["slo_limits_ms"] == {"ttft": 60000, "tpot": 60000}
    assert result["request_goodput"] == result["request_throughput"] > 0
    assert 0 < result["median_ttft_ms"] <= result["p99_ttft_ms"]
    assert all(len(seen.asked["prompt"]) == 20 and seen.asked["max_tokens"] == 4 for seen in script.seen.values())
    assert all(seen.asked["model"] == MODEL for seen in script.seen.values())


async def test_prompts_are_of_the_servers_vocabulary(serve_here):
    script = Script()
    async with SERVERS["splitserve"](script) as target:
        await serve_here(target, *FEW)
    assert max(token for seen in script.seen.values() for token in seen.asked["prompt"]) < VOCAB_SIZE


@most_of_one
async def test_what_failed_is_a_miss_in_the_table(serve_here, serving):
    seed = ["--seed", "5"]
    script = Script()
    async with serving(script) as target:
        await serve_here(target, *FEW, *seed)
        first, *_ = script.order
        script.does[first] = FAIL
        output, _ = await serve_here(
            target, *FEW, *seed, "--goodput", "ttft:60000 e2el:90000", "--max-concurrency", "2"
        )
    assert "attainment 83.3%" in output
    assert "failures 1" in output
    assert output.count("  1 x ") == 1
    assert script.most_live <= 6


@most_of_one
async def test_a_load_of_which_nothing_is_complete_fails_and_says_why(serve_here, serving):
    script = Script()
    async with serving(script) as target:
        await serve_here(target, *FEW)
        script.does = dict.fromkeys(script.order, FAIL)
        script.does[script.order[0]] = REFUSE
        output, errors = await serve_here(target, *FEW, exit_code=1)
        result, _ = await serve_here(target, *FEW, "--json", exit_code=1)
    assert "none of the 6 requests has a complete output: " in errors
    frequent = json.loads(result)["frequent_errors"]
    assert list(frequent.values()) == [5, 1]
    assert all(f"  {count} x {error[:60]}" in output for error, count in frequent.items())


@most_of_one
async def test_files_and_pictures(serve_here, serving, tmp_path):
    detailed = ["--save-detailed", "--plots", "pictures", "--metadata", "chips=2", "where=here", "--label", "mine"]
    async with serving(Script()) as target:
        await serve_here(target, *FEW, *detailed, "--request-rate", "50", "--result-dir", "results")
        await serve_here(target, *FEW, "--save-result", "--result-filename", "plain.json")
    (result_file,) = (tmp_path / "results").glob("mine-50.0qps-scripted-*.json")
    result = json.loads(result_file.read_text())
    assert (result["chips"], result["where"], result["request_rate"]) == ("2", "here", 50)
    assert len(result["ttfts"]) == len(result["itls"]) == 6
    lines = result_file.with_name(f"{result_file.stem}.requests.jsonl").read_text().splitlines()
    assert [json.loads(line)["index"] for line in lines] == list(range(6))
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {"latencies.png"}
    assert all(path.read_bytes().startswith(PNG) for path in (tmp_path / "pictures").iterdir())
    assert "ttfts" not in json.loads((tmp_path / "plain.json").read_text())


async def test_a_trace_keeps_its_times(serve_here, tmp_path):
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    rows += [f"2023-11-16 18:15:46.{millis:03}0000,{10 + millis},{1 + millis // 100}" for millis in (0, 100, 400)]
    (tmp_path / "trace.csv").write_text("\n".join(rows))
    words = ["--dataset-name", "azure", "--dataset-path", "trace.csv", "--length-scale", "2"]
    script = Script()
    async with http_server(script) as target:
        await serve_here(target, *words, "--vocab-size", "5000", "--save-detailed")
    (lines,) = (path.read_text().splitlines() for path in tmp_path.glob("*.requests.jsonl"))
    requests = [json.loads(line) for line in lines]
    assert [request["scheduled_s"] for request in requests] == pytest.approx([0, 0.1, 0.4])
    assert [request["num_prompt_tokens"] for request in requests] == [20, 220, 820]
    assert [request["num_output_tokens"] for request in requests] == [2, 4, 10]
    assert max(token for seen in script.seen.values() for token in seen.asked["prompt"]) < 5000


@most_of_one
async def test_texts_are_sent_as_they_stand(serve_here, serving, tmp_path):
    write_tokenizer(tmp_path)
    rows = [{"prompt": text, "output_tokens": count} for text, count in {"ab": 3, "cde": 2, "äö": 1}.items()]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["--dataset-name", "custom", "--dataset-path", "prompts.jsonl", "--tokenizer", ".", "--num-prompts", "9"]
    words += ["--skip-chat-template"]
    script = Script()
    async with serving(script) as target:
        output, errors = await serve_here(target, *words, "--num-warmups", "1", "--json")
    asked = {
        seen.asked["prompt"]: seen.asked["max_tokens"] for key, seen in script.seen.items() if isinstance(key, str)
    }
    assert asked == {"ab": 3, "cde": 2, "äö": 1}
    assert [type(key) for key in script.order] == [int, str, str, str]  # the warm-up is none of them
    assert json.loads(output)["completed"] == 3
    assert "the data set has 3 requests, not the 9 of --num-prompts" in errors


@most_of_one
async def test_answers_may_end_early_where_that_is_wanted(serve_here, serving):
    script = Script()
    async with serving(script) as target:
        await serve_here(target, *FEW)
        assert all(seen.asked["ignore_eos"] for seen in script.seen.values())
        script.does = dict.fromkeys(script.order[:2], SHORT)
        output, _ = await serve_here(target, *FEW, "--no-ignore-eos", "--json")
    assert not any(seen.asked["ignore_eos"] for seen in script.seen.values())
    result = json.loads(output)
    assert (result["completed"], result["total_output_tokens"]) == (6, 6 * 4 - 2)


TAKES_TEXT = {"chats": ["--endpoint", "/v1/chat/completions"], "texts": ["--dataset-name", "custom"]}


@pytest.mark.parametrize("words", TAKES_TEXT.values(), ids=TAKES_TEXT.keys())
async def test_the_tokenizer_is_that_of_the_served_model_where_it_is_here(serve_here, tmp_path, words):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}')
    needs = f"{' '.join(words)} needs the model's tokenizer, which is not on this machine under the name {MODEL}: give"
    words = [*words, *(["--dataset-path", "prompts.jsonl", "--skip-chat-template"] if "custom" in words else FEW)]
    async with http_server(Script()) as target:
        _, errors = await serve_here(target, *words, exit_code=2)
        assert needs in " ".join(errors.split())
        (tmp_path / MODEL).mkdir()
        write_tokenizer(tmp_path / MODEL)
        _, errors = await serve_here(target, *words, exit_code=0 if "custom" in words else 1)
    assert f"tokenizer: {MODEL}" in errors
    assert ("HTTP 404" in errors) == ("custom" not in words)  # the server has no chats


async def test_warm_ups_do_not_count_and_share_no_prompt(serve_here):
    script = Script()
    async with http_server(script) as target:
        output, _ = await serve_here(target, *FEW, "--num-warmups", "3", "--json")
    assert json.loads(output)["num_prompts"] == 6
    assert len(script.order) == 9
    assert len({tuple(seen.asked["prompt"]) for seen in script.seen.values()}) == len(script.seen)


@pytest.mark.parametrize(("words", "limits"), [(["--send-limits"], (500.0, 40.0)), ([], (None, None))])
async def test_limits_are_told_when_that_is_wanted(serve_here, words, limits):
    script = Script()
    async with SERVERS["splitserve"](script) as target:
        await serve_here(target, *FEW, "--goodput", "ttft:500", "tpot:40", *words)
    assert {(seen.asked.get("ttft_ms"), seen.asked.get("tpot_ms")) for seen in script.seen.values()} == {limits}


async def test_more_fields_in_the_body(serve_here):
    script = Script()
    async with http_server(script) as target:
        await serve_here(target, *FEW, "--extra-body", '{"top_k": 3}')
    assert {seen.asked["top_k"] for seen in script.seen.values()} == {3}


async def test_what_the_model_cannot_take_is_clipped(serve_here):
    words = ["--num-prompts", "1", "--random-input-len", str(MAX_MODEL_LEN), "--random-output-len", "8"]
    script = Script()
    async with http_server(script) as target:
        output, errors = await serve_here(target, *words, "--json")
    (seen,) = script.seen.values()
    assert len(seen.asked["prompt"]) + seen.asked["max_tokens"] == MAX_MODEL_LEN
    assert json.loads(output)["clipped"] == 1
    assert "vocabulary" in errors


@most_of_one
async def test_ctrl_c_tells_what_came_and_leaves_no_process(serve_here, serving):
    script = Script()
    async with serving(script) as target:
        await serve_here(target, *FEW)
        last = script.order[-1]
        script.does[last] = HANG
        process = await start(target, *FEW)
        said = ""
        while "5 of 6 done" not in said:
            said += (await process.stderr.readline()).decode()
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.send_signal(signal.SIGINT)
        output, errors = await process.communicate()
        while script.num_live:
            await asyncio.sleep(0.01)
    assert process.returncode == 130
    assert "stopped: 1 of 6 requests have no outcome" in errors.decode()
    assert "Traceback" not in errors.decode()
    assert "requests offered" in output.decode()
    assert not any(child.is_running() for child in children)


@pytest.mark.nightly
@most_of_one
async def test_what_came_is_told_when_the_generator_dies(serve_here, serving):
    script = Script()
    async with serving(script) as target:
        await serve_here(target, *FEW)
        script.does[script.order[-1]] = HANG
        process = await start(target, *FEW)
        said = ""
        while "5 of 6 done" not in said:
            said += (await process.stderr.readline()).decode()
        (generator,) = (
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if child.cmdline()[-1] == "splitserve_bench.serve.generator"
        )
        generator.kill()
        output, errors = await process.communicate()
    assert process.returncode == 1
    assert "stopped: 1 of 6 requests have no outcome" in errors.decode()
    assert "without the outcomes of 1 requests" in errors.decode()
    assert "requests offered" in output.decode()


TEXT = ("--dataset-name", "custom", "--dataset-path", __file__)
TRACE = ("--dataset-name", "azure", "--dataset-path", __file__)
REFUSED = {
    "no trace": (["--dataset-name", "azure"], "--dataset-path"),
    "a trace for random requests": (["--dataset-path", __file__], "--dataset-path"),
    "texts without a file": (["--dataset-name", "sharegpt"], "sharegpt needs a file: --dataset-path"),
    "lengths of texts": ([*TEXT, "--length-scale", "2"], "--length-scale 2 is of a trace's lengths"),
    "a beginning of texts": ([*TEXT, "--random-prefix-len", "2"], "--random-prefix-len 2 is of random prompts"),
    "answers to no texts": (["--sharegpt-output-len", "2"], "--sharegpt-output-len 2 is of outputs of texts"),
    "lengths of no trace": (["--length-scale", "2"], "--length-scale 2 is of a trace's lengths"),
    "a template of random prompts": (["--skip-chat-template"], "--skip-chat-template is of custom"),
    "bursts of a trace": ([*TRACE, "--burstiness", "9"], "--burstiness 9 is of random arrivals"),
    "two servers": (["--server", "a:1", "--port", "2"], "--server (a:1) says where"),
    "gRPC of an OpenAI server": (["--backend", "openai", "--server", "a:1"], "takes http://HOST:PORT"),
    "a URL of SplitServe": (["--backend", "splitserve", "--server", "http://a:1"], "gRPC has HOST:PORT"),
    "no URL": (["--server", "http://a:b"], "is no URL"),
    "an unknown limit": (["--goodput", "itl:3"], "itl:3"),
    "an unknown metric": (["--percentile-metrics", "itl,speed"], "speed"),
    "no percentile": (["--metric-percentiles", "101"], "101"),
    "metadata without a value": (["--metadata", "chips"], "KEY=VALUE"),
    "a body that is no JSON": (["--extra-body", "x"], "--extra-body"),
    "a body that is no object": (["--extra-body", "[1]"], "--extra-body"),
    "a field that gRPC lacks": (
        ["--extra-body", '{"top_k": 3}'],
        "--extra-body may have ttft_ms, tpot_ms, slo_class, priority for SplitServe's gRPC, not 'top_k'",
    ),
    "no limits to be told": (["--send-limits"], "--send-limits tells the limits of --goodput, and there are none"),
    "a folder that cannot be": (["--save-result", "--result-dir", f"{__file__}/x"], "cannot be made"),
    "a file in no folder": (["--save-result", "--result-filename", f"{__file__}/x.json"], "cannot be made"),
}


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "--request-rate"),
        ("serve", "--random-range-ratio"),
        ("serve", "--attainment"),
        ("compare", "--seconds"),
        ("compare", "--first-rate"),
    ],
)
def test_what_is_no_number_is_in_no_range(words):
    command, flag = words
    result = CliRunner().invoke(main, ["bench", command, flag, "nan"])
    assert result.exit_code == 2
    assert f"Invalid value for '{flag}': 'nan' is no number" in result.output


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_flags_that_cannot_be_used(words, message):
    """Nothing listens where they point: they are found before a server is asked."""
    if "--server" not in words:
        words = ["--server", "127.0.0.1:1", *words]
    result = CliRunner().invoke(main, ["bench", "serve", *words])
    assert result.exit_code in (1, 2)
    assert message in result.output
    assert "no server" not in result.output


WHERE = {
    "gRPC": (["--server", "127.0.0.1:1"], "127.0.0.1:1"),
    "HTTP": (["--server", "http://127.0.0.1:1/"], "http://127.0.0.1:1:"),
    "the name before": (["--target", "127.0.0.1:1"], "127.0.0.1:1"),
    "vLLM's URL": (["--backend", "openai", "--base-url=http://127.0.0.1:1"], "http://127.0.0.1:1:"),
    "vLLM's host and port": (["--backend", "openai", "--host", "127.0.0.1", "--port", "1"], "http://127.0.0.1:1:"),
}


@pytest.mark.parametrize(("where", "address"), WHERE.values(), ids=WHERE.keys())
def test_no_server(where, address):
    result = CliRunner().invoke(main, ["bench", "serve", *where])
    assert result.exit_code == 1
    assert f"no server answers at {address}" in result.output


def test_the_environments_server_is_asked_as_by_the_other_commands():
    result = CliRunner().invoke(main, ["bench", "serve"], env={"SPLITSERVE_SERVER": "127.0.0.1:1"})
    assert "no server answers at 127.0.0.1:1" in result.output


def test_one_name_in_help():
    shown = CliRunner().invoke(main, ["bench", "serve", "--help"]).output
    assert "--server" in shown
    assert not {"--target", "--base-url", "--host", "--port"} & set(shown.split())


def test_the_overview_tells_whole_sentences():
    _, shown = CliRunner().invoke(main, ["bench", "--help"]).output.split("Commands:")
    assert "..." not in shown
    assert "share of requests within their limits." in " ".join(shown.split())


def test_help():
    result = CliRunner().invoke(main, ["bench", "serve", "--help"])
    assert result.exit_code == 0
    assert "--goodput" in result.output


@pytest.mark.parametrize(
    ("words", "repeated"),
    [
        ([], []),
        (["--goodput", "a", "b", "--json"], ["--goodput", "a", "--goodput", "b", "--json"]),
        (["--goodput", "a", "--goodput", "b"], ["--goodput", "a", "--goodput", "b"]),
        (["--goodput=a", "--model", "m", "x"], ["--goodput=a", "--model", "m", "x"]),
        (["--metadata", "a=1", "b=2"], ["--metadata", "a=1", "--metadata", "b=2"]),
    ],
)
def test_several_words_after_a_flag(words, repeated):
    assert repeat_flags(words, ServeCommand.lists) == repeated


def test_the_command_has_no_arguments():
    """Else words after a flag could be meant for them."""
    assert {parameter.param_type_name for parameter in serve_command.params} == {"option"}
