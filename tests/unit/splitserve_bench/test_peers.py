import json

import pytest

from serving_core.errors import SettingsError
from splitserve_bench.engine.peers import PeerResult, Ratio, ratios, read_peers

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
