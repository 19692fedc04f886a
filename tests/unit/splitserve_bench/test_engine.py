"""The bench of the engine, on tiny models: what it computes, what it says, and what it refuses."""

import json
import signal
import tempfile

import pytest
import torch
from click.testing import CliRunner

from engine.build import build_engine
from serving_core.errors import SettingsError
from serving_core.settings import EngineSettings
from splitserve.cli import main
from splitserve_bench.engine import machine, measure
from splitserve_bench.engine.driver import NUM_STEPS, DecodeRun, PromptRun, chunks_of, num_blocks_for
from splitserve_bench.engine.measure import SAMPLING, read_weight_bytes
from splitserve_bench.engine.peers import PeerResult, Ratio, ratios, read_peers
from splitserve_bench.engine.sizes import EngineBench, PromptSize
from splitserve_bench.models import SHAPES, Shape
from tests.effort import few
from tests.tiny_models import write_fake_model, write_tiny_llama, write_tiny_model
from tests.transformers_models import write_transformers_model

SIZES = ("--prompts", "2x40,1x24", "--batches", "3 1", "--contexts", "36,20", "--repeats", "1", "--threads", "1")
# Of layers, head and norms, in float32; packed matrices may have some rows of padding.
READ_PARAMETERS = 3 * (48 * 48 * 2 + 48 * 24 * 2 + 3 * 48 * 80) + 48 * 260 + 7 * 48
READ_BYTES = pytest.approx(4 * READ_PARAMETERS, rel=0.01)
TINY = Shape("LlamaForCausalLM", "llama", 48, 3, 4, 2, 12, 80, 260, 1024)


@pytest.fixture
def small_machine(monkeypatch):
    """A short look at the machine."""
    monkeypatch.setattr(machine, "MAX_BUFFER_BYTES", 2**22)
    monkeypatch.setattr(machine, "CPU_SHAPES", ((32, 64, 64),))
    monkeypatch.setattr(machine, "SAMPLE_S", 0.0)


@pytest.fixture
def run(small_machine):
    return lambda *arguments: CliRunner().invoke(main, ["bench", "engine", *map(str, arguments)])


def load(folder, num_kv_blocks=64, **settings):
    return build_engine(EngineSettings(model=str(folder), num_kv_blocks=num_kv_blocks, block_size=8, **settings))


def test_the_json_holds_every_figure(tmp_path, run):
    folder = write_tiny_llama(tmp_path / "model")
    peer = tmp_path / "peer.log"
    peer.write_text('RESULT {"peer": "a", "prefill": {"2x40": 1e-3}, "decode": {"b3_ctx36": 1e-9, "b9_ctx9": 1}}\n')
    threads_before = torch.get_num_threads()
    result = run(folder, *SIZES, "--json", "--peer-json", peer)
    assert result.exit_code == 0, result.output
    assert torch.get_num_threads() == threads_before
    figures = json.loads(result.stdout)
    assert figures["model"] == "model"
    assert figures["engine"]["dtype"] == figures["machine"]["gemm_dtype"] == "float32"
    assert figures["machine"]["num_threads"] == 1
    start = figures["start"]
    assert start["ready_s"] == pytest.approx(start["imports_s"] + start["load_s"] + start["warm_up_s"])
    _check_prefill(figures["prefill"], figures["machine"]["gemm_flops_per_s"])
    _check_decode(figures["decode"], figures["machine"]["read_bytes_per_s"])
    assert [each["parameters"] for each in figures["sampling"]] == list(SAMPLING)
    assert all((each["batch"], each["vocab_size"]) == (3, 260) and each["step_s"] > 0 for each in figures["sampling"])
    assert [(each["kind"], each["key"], each["is_ahead"]) for each in figures["ratios"]] == [
        ("prefill", "2x40", True),
        ("decode", "b3_ctx36", False),
    ]


def _check_prefill(rows, gemm_flops_per_s):
    assert [(row["prompts"]["count"], row["prompts"]["num_tokens"]) for row in rows] == [(2, 40), (1, 24)]
    for row in rows:
        seconds = row["prompts"]["count"] * row["prompts"]["num_tokens"] / row["tokens_per_s"]
        assert row["gemm_share"] == pytest.approx(row["flops"] / seconds / gemm_flops_per_s)
        assert row["best_tokens_per_s"] >= row["tokens_per_s"]


def _check_decode(rows, read_bytes_per_s):
    assert [(row["context_tokens"], row["batch"]) for row in rows] == [(20, 1), (20, 3), (36, 1), (36, 3)]
    for row in rows:
        # 16 steps, of which the first sees one token more than the context and the last sixteen more.
        assert row["kv_bytes"] == row["batch"] * (row["context_tokens"] + 8.5) * 2 * 2 * 12 * 4 * 3
        assert row["weight_bytes"] == READ_BYTES
        rate = (row["weight_bytes"] + row["kv_bytes"]) / row["step_s"]
        assert row["bandwidth_share"] == pytest.approx(rate / read_bytes_per_s)
        assert row["best_step_s"] <= row["step_s"]


def test_the_tables_show_every_figure(tmp_path, run):
    folder = write_tiny_llama(tmp_path / "model")
    peer = tmp_path / "peer.json"
    peer.write_text('{"peer": "[a]", "load_s": 1e9, "decode": {"b3_ctx36": 1e9}}')
    result = run(folder, *SIZES, "--kv-cache-dtype", "int8", "--peer-json", peer)
    assert result.exit_code == 0, result.output
    for text in (
        "imports",
        "GFLOP/s",
        "GB/s",
        "2x40",
        "of the bandwidth",
        *SAMPLING,
        "decode b3_ctx36, ms",
        "[a]",
        "ahead",
    ):
        assert text in result.stdout
    assert "decode steps of 3 requests at 36 tokens" in result.stderr


@pytest.mark.nightly
def test_a_model_that_transformers_computes_has_figures_without_what_is_known_of_ours_alone(tmp_path, run):
    folder = write_transformers_model(tmp_path / "model", "gpt2")
    result = run(folder, *SIZES, "--json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["engine"]["model_impl"].startswith("transformers")
    assert min(row["tokens_per_s"] for row in figures["prefill"]) > 0
    assert min(row["step_s"] for row in figures["decode"]) > 0
    assert {row["kv_bytes"] for row in figures["decode"]} == {
        b * (c + 8.5) * 2 * 48 * 4 * 3 for b in (1, 3) for c in (20, 36)
    }
    unknown = ("weight_bytes", "flops", "bandwidth_share", "gemm_share")
    assert {row[name] for row in figures["decode"] for name in unknown} == {None}
    assert {row[name] for row in figures["prefill"] for name in ("flops", "gemm_share")} == {None}


@pytest.mark.nightly
def test_what_is_not_known_of_a_model_that_transformers_computes_is_said(tmp_path, run):
    shown = run(write_transformers_model(tmp_path / "model", "gpt2"), *SIZES)
    assert shown.exit_code == 0, shown.output
    assert "operations and bytes of weights are not known" in shown.stdout


@pytest.mark.nightly
def test_the_line_above_prefill_says_what_a_step_holds(tmp_path, run):
    folder = write_tiny_llama(tmp_path / "model")
    shown = run(folder, *SIZES, "--max-num-batched-tokens", "96")
    assert "prefill, prompts together in steps of 96 tokens:" in shown.stdout


@pytest.mark.nightly
def test_a_shape_is_measured_without_a_model(run, monkeypatch):
    monkeypatch.setitem(SHAPES, "qwen3-0.6b", TINY)
    result = run("--shape", "qwen3-0.6b", *SIZES, "--json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["engine"]["dtype"] == "bfloat16"
    padded = figures["decode"][0]["weight_bytes"]  # by up to 15 rows below each matrix that is packed
    assert 2 * READ_PARAMETERS <= padded <= 1.05 * 2 * READ_PARAMETERS


@pytest.mark.nightly
def test_other_settings_are_compared_by_what_the_command_printed_with_them(run, monkeypatch, tmp_path):
    tiny = Shape("Gemma3ForCausalLM", "gemma3_text", 48, 3, 4, 1, 12, 80, 260, 1024)
    monkeypatch.setitem(SHAPES, "gemma-3-1b", tiny)
    theirs = run("--shape", "gemma-3-1b", *SIZES, "--model-impl", "transformers", "--json")
    assert theirs.exit_code == 0, theirs.output
    file = tmp_path / "transformers.json"
    file.write_text(theirs.stdout)
    figures = json.loads(run("--shape", "gemma-3-1b", *SIZES, "--peer-json", file, "--json").stdout)
    assert figures["engine"]["model_impl"] == "native"
    rows = {(row["kind"], row["key"]): row for row in figures["ratios"]}
    keys = {("prefill", "2x40"), ("prefill", "1x24")}
    assert rows.keys() == {("load", ""), *keys, *(("decode", f"b{b}_ctx{c}") for b in (1, 3) for c in (20, 36))}
    row = rows["decode", "b1_ctx20"]
    assert row["peer"] == "transformers"
    assert row["ours"] == pytest.approx(figures["decode"][0]["step_s"] * 1e3)
    assert row["theirs"] == pytest.approx(json.loads(theirs.stdout)["decode"][0]["step_s"] * 1e3)
    assert row["ratio"] == pytest.approx(row["ours"] / row["theirs"])


def test_random_weights_do_not_stay_behind(run, tmp_path, monkeypatch):
    monkeypatch.setitem(SHAPES, "qwen3-0.6b", TINY)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    handler, folders = signal.getsignal(signal.SIGTERM), []

    def interrupted(folder, *others):
        folders.append((folder, folder.exists()))
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(measure, "measure_engine", interrupted)
    assert run("--shape", "qwen3-0.6b").exit_code == 128 + signal.SIGTERM
    ((folder, was_there),) = folders
    assert (was_there, folder.is_relative_to(tmp_path), list(tmp_path.iterdir())) == (True, True, [])
    assert signal.getsignal(signal.SIGTERM) == handler


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model", "--shape", "qwen3-0.6b"], "not both"),
        (["model", "--layers", "2"], "--layers goes with --shape"),
        (["--shape", "smollm2-135m", "--measure", "accuracy"], "--measure accuracy needs a MODEL"),
        (["--shape", "smollm2-135m", "--measure", "speculation"], "--measure speculation needs a MODEL"),
        (["--measure", "accuracy", "--peer-json", __file__], "--peer-json goes with --measure speed"),
        (["--speculative-model", "MODEL"], "--speculative-model goes with --measure speculation"),
        (["--speculative-quantization", "int8"], "--speculative-quantization goes with --speculative-model"),
        (["--shape", "smollm2-135m", "--layers", "31"], "--layers 31: smollm2-135m has 30"),
        (["--prompts", "8x"], "'8x' is not of the form COUNTxLENGTH"),
        (["--prompts", "0x8"], "'0x8' is not of the form COUNTxLENGTH"),
        (["--batches", "1,-2"], "'-2' is not a whole number of at least 1"),
        (["--contexts", ","], "there must be one at least"),
    ],
)
def test_sizes_that_cannot_be_are_refused(run, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_models_that_cannot_be_measured_are_refused(tmp_path, run):
    result = run(write_fake_model(tmp_path / "fake"))
    assert (result.exit_code, "the fake model computes nothing" in result.stderr) == (2, True)
    result = run(write_tiny_llama(tmp_path / "tiny"), "--contexts", "1009")
    assert (result.exit_code, "1025 tokens are more than the model's 1024" in result.stderr) == (2, True)


@pytest.mark.parametrize("tie", few([False, True]))
def test_the_embedding_is_read_only_where_it_is_the_head(tmp_path, tie):
    write = write_tiny_model if tie else write_tiny_llama
    loaded = load(write(tmp_path, tie_word_embeddings=tie))
    assert read_weight_bytes(loaded, 1) == READ_BYTES
    assert loaded.weight_bytes - (0 if tie else 4 * 48 * 260) == READ_BYTES


@pytest.mark.nightly
def test_decode_steps_continue_their_contexts(tmp_path):
    import transformers

    folder = write_tiny_llama(tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder)
    decode = DecodeRun(load(folder), 3, 37)
    for context_tokens in (12, 16, 37):  # within a block, at its end, over several
        decode.extend(context_tokens)
        for batch in (1, 3, 2):
            decode.rewind(batch)
            assert decode.run_s(batch) > 0
            for request in decode.requests[:batch]:
                with torch.inference_mode():
                    likeliest = reference(torch.tensor([request.token_ids])).logits[0].argmax(-1).tolist()
                assert len(request.token_ids) == context_tokens + 1 + NUM_STEPS
                assert request.token_ids[context_tokens + 1 :] == likeliest[context_tokens:-1]


def test_a_rewound_8_bit_cache_gives_the_same_answer_again(tmp_path):
    loaded = load(write_tiny_llama(tmp_path), kv_cache_dtype="int8")
    decode = DecodeRun(loaded, 1, 13)
    decode.extend(13)
    answers = []
    for _ in range(3):
        decode.rewind(1)
        decode.run_s(1)
        answers.append(list(decode.requests[0].token_ids))
    assert answers[0] == answers[1] == answers[2]


def test_prompts_are_computed_each_in_its_own_blocks(tmp_path):
    size = PromptSize(3, 20)
    sizes = EngineBench((size, PromptSize(1, 30)), (1,), (8,), 1)
    loaded = load(write_tiny_llama(tmp_path), num_blocks_for(sizes, load(tmp_path).layout))
    assert loaded.num_blocks == 3 * 3  # 20 tokens in blocks of 8; one of 30 takes 4, and 8 + 16 take 3
    assert PromptRun(loaded, size).run_s() > 0
    keys = loaded.pool.keys(0)
    assert all(keys[block].any() for block in range(9))


def test_prompts_share_steps():
    size = PromptSize(3, 5)
    assert chunks_of(size, 4) == [[(0, 0, 4)], [(0, 4, 1), (1, 0, 3)], [(1, 3, 2), (2, 0, 2)], [(2, 2, 3)]]
    assert chunks_of(size, 100) == [[(0, 0, 5), (1, 0, 5), (2, 0, 5)]]


# ---- figures of peers ----

RESULT = {"peer": "a", "load_s": 0.5, "prefill": {"8x512": 1000}, "decode": {"b1_ctx128": 20.0}}
FIGURES = {("load", ""): 0.5, ("prefill", "8x512"): 1000.0, ("decode", "b1_ctx128"): 20.0}


def test_a_file_holds_one_object(tmp_path):
    file = tmp_path / "peer.json"
    file.write_text(json.dumps(RESULT, indent=2))
    assert read_peers(file) == [PeerResult("a", FIGURES)]


def test_a_file_holds_what_a_script_printed(tmp_path):
    file = tmp_path / "peer.log"
    file.write_text(f'loading ...\nRESULT {json.dumps(RESULT)}\nINFO the RESULT is above\nRESULT {{"peer": "b"}}\n')
    assert read_peers(file) == [PeerResult("a", FIGURES), PeerResult("b", {})]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "neither a JSON object nor a line that begins with RESULT"),
        ("RESULT {", "neither a JSON object nor a line that begins with RESULT"),
        ("[]", "with the name of the peer"),
        ('{"prefill": {}}', "with the name of the peer"),
        ('{"peer": "a", "prefill": []}', "prefill must be a JSON object"),
        ('{"peer": "a", "decode": {"b1_ctx128": 0}}', "b1_ctx128 must be a number above 0, not 0"),
        ('{"peer": "a", "decode": {"b1_ctx128": NaN}}', "b1_ctx128 must be a number above 0, not nan"),
        ('{"peer": "a", "load_s": "1"}', "load_s must be a number above 0, not '1'"),
    ],
)
def test_what_is_no_result_is_refused_with_the_files_name(tmp_path, text, message):
    file = tmp_path / "peer.json"
    file.write_text(text)
    with pytest.raises(SettingsError, match=rf"peer\.json.*{message}"):
        read_peers(file)


def test_ratios_are_to_the_best_peer_of_each_figure():
    ours = PeerResult(
        "splitserve",
        {("load", ""): 2.0, ("prefill", "1x512"): 1500.0, ("prefill", "8x512"): 900.0, ("decode", "b1_ctx128"): 15.0},
    )
    slow_decode = PeerResult("a", {("prefill", "1x512"): 1000.0, ("decode", "b1_ctx128"): 20.0, ("load", ""): 1.0})
    slow_prefill = PeerResult("b", {("prefill", "1x512"): 500.0, ("decode", "b1_ctx128"): 12.0})
    assert ratios(ours, [slow_decode, slow_prefill]) == [
        Ratio("load", "", "s", 2.0, 1.0, "a", 2.0, is_ahead=False),
        Ratio("prefill", "1x512", "tokens/s", 1500.0, 1000.0, "a", 1.5, is_ahead=True),
        Ratio("decode", "b1_ctx128", "ms", 15.0, 12.0, "b", 1.25, is_ahead=False),
    ]


def test_without_peers_there_is_nothing_to_compare():
    assert ratios(PeerResult("splitserve", FIGURES), []) == []
