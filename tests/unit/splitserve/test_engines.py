"""`--engine` of a node's command."""

import pytest
from click.testing import CliRunner

from serving_node.process import node_command
from splitserve.cli import main
from splitserve.commands.engines import with_engine


def run(*arguments):
    return CliRunner().invoke(main, arguments)


@pytest.mark.parametrize("spelling", [["--engine", "vllm"], ["--engine=vllm"]])
def test_another_engine_has_a_command_of_its_own(spelling):
    own = node_command("decode")
    command, rest = with_engine("decode", own, ["/model", *spelling, "--name", "a", "--", "--enforce-eager"])
    assert command is not own
    assert rest == ["/model", "--name", "a", "--", "--enforce-eager"]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("decode", ["/model"]),
        ("decode", ["/model", "--engine", "splitserve"]),
        ("decode", ["/model", "--", "--engine", "vllm"]),
        ("decode", ["/model", "--engine"]),
        ("coordinator", ["--engine", "vllm"]),
    ],
)
def test_everything_else_is_our_own(name, arguments):
    own = node_command("decode")
    assert with_engine(name, own, arguments) == (own, arguments)


def test_up_keeps_its_command_and_vllm_gets_what_follows_the_dashes():
    own = node_command("decode")  # any command
    command, rest = with_engine("up", own, ["--engine", "vllm", "--mixed=2", "--", "--max-model-len", "1024"])
    assert command is own
    assert rest == ["--engine", "vllm", "--mixed=2", "--vllm-flag=--max-model-len", "--vllm-flag=1024"]


@pytest.mark.parametrize("role", ["prefill", "decode", "mixed"])
def test_help_has_both(role):
    assert "--engine [splitserve|vllm]" in run(role, "--help-all").output
    helped = run(role, "--engine", "vllm", "--help-all").output
    assert "VLLM_FLAGS" in helped
    assert "--step-timeout-s" in helped


def test_an_unknown_engine_is_refused():
    result = run("decode", "--engine", "other")
    assert result.exit_code == 2
    assert "'other' is not one of 'splitserve', 'vllm'" in result.output


def test_a_configuration_file_names_no_engine(tmp_path):
    (tmp_path / "config.yaml").write_text("engine: vllm")
    result = run("decode", "--config", str(tmp_path / "config.yaml"))
    assert result.exit_code == 2
    assert "vllm must be given on the command line" in result.output
