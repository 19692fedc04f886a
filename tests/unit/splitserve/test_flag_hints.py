"""A flag that a command does not have gets a hint, and what the hint names is there."""

import functools
import itertools
import re

import pytest
from click.testing import CliRunner

from splitserve.cli import COMMANDS, main
from splitserve.commands.flag_hints import COMMAND_HINTS, HINTS, VALUE_HINTS
from splitserve_bench.commands import bench
from tests.effort import effort

PATHS = {name: [name] for name in COMMANDS} | {"serve": ["bench", "serve"]}
FLAG = re.compile(r"--[a-z][a-z-]+")


def command(name):
    return bench.commands["serve"] if name == "serve" else main.get_command(None, name)


@functools.cache
def flags_of(name):
    return {spelling for parameter in command(name).params for spelling in [*parameter.opts, *parameter.secondary_opts]}


@pytest.mark.parametrize("name", HINTS)
def test_hints_name_flags_that_exist(name):
    for flag, hint in HINTS[name].items():
        assert flag not in flags_of(name), "a command's own flag needs no hint"
        for other, named in re.findall(r"`splitserve (\w+) (--[a-z-]+)`", hint):
            assert named in {*flags_of(other), "--help"}
        named = FLAG.findall(re.sub("`.*?`", "", hint))
        assert set(named) <= flags_of(name)


@pytest.mark.parametrize("name", HINTS)
def test_a_hint_comes_instead_of_a_guess(name):
    for flag, hint in itertools.islice(HINTS[name].items(), effort(4, None, None)):
        result = CliRunner().invoke(main, [*PATHS[name], flag, "2"])
        assert result.exit_code == 2
        assert f"Error: No such option '{flag}': {hint}." in result.stderr


def test_every_command_that_asks_a_server_says_where_its_ports_are():
    asking = [name for name in PATHS if "--server" in flags_of(name)]
    assert {"generate", "top", "drain", "run-batch", "serve"} <= set(asking)
    for name in (*asking, "prefill", "decode", "mixed"):
        for flag in {"--port", "--grpc-port", "--http-port"} - flags_of(name):
            assert "HOST:PORT" in HINTS[name][flag], (name, flag)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["up", "--tensor-parallel-size", "2"], "--prefill-tp and --decode-tp"),
        (["up", "-tp", "2"], "--prefill-tp and --decode-tp"),
        (["up", "m", "--port=8000"], "--grpc-port and --http-port"),
        (["coordinator", "m", "--port=8000"], "--grpc-port, --http-port and --fleet-port"),
        (["up", "--mem-fraction-static", "0.9"], "--gpu-memory-utilization"),
        (["up", "--model", "m"], "MODEL is given without a flag"),
        (["generate", "hi", "--target", "a:1"], "--server HOST:PORT"),
        (["serve", "m", "--port", "8000"], "No such command 'serve': a model is served by `splitserve up MODEL`."),
        (["up", "--page-size", "16"], "--block-size"),
        (["up", "--ctx-size", "4096"], "No such option '--ctx-size': it is --max-model-len."),
        (["coordinator", "--ctx-size", "4096"], "No such option '--ctx-size': it is --max-model-len."),
        (["decode", "--ctx-size", "4096"], "No such option '--ctx-size': it is --max-model-len."),
        (["generate", "hi", "--ctx-size", "4096"], "the server has it: `splitserve up --max-model-len`."),
        (["up", "--kv-cache-dtype", "fp8"], "'auto', 'int8', 'fp8_e4m3': floats of 8 bits are `fp8_e4m3`."),
    ],
)
def test_what_somebody_used_to_vllm_tries(arguments, hint):
    assert hint in CliRunner().invoke(main, arguments).stderr


@pytest.mark.parametrize("name", COMMAND_HINTS)
def test_a_hint_about_a_command_names_one_that_exists(name):
    assert name not in COMMANDS
    [named] = re.findall(r"`splitserve (\w+).*?`", COMMAND_HINTS[name])
    assert named in COMMANDS


@pytest.mark.parametrize(
    ("flag", "value", "hint"),
    [(flag, value, hint) for flag, hints in VALUE_HINTS.items() for value, hint in hints.items()],
)
def test_a_hint_about_a_value_names_one_that_the_flag_takes(flag, value, hint):
    commands = [name for name in ("up", "coordinator", "decode", "serve") if flag in flags_of(name)]
    assert commands
    for name in commands:
        [choices] = [each.type.choices for each in command(name).params if flag in each.opts]
        assert value not in choices
        assert set(re.findall(r"`(\w+)`", hint)) <= set(choices)
        result = CliRunner().invoke(main, [*PATHS[name], flag, value])
        assert result.exit_code == 2
        assert result.stderr.endswith(f": {hint}.\n")


def test_a_hint_about_a_value_tells_where_it_comes_from_too():
    stderr = CliRunner().invoke(main, ["decode"], env={"SPLITSERVE_DTYPE": "half"}).stderr
    assert stderr.endswith(": it is `float16`. (environment variable SPLITSERVE_DTYPE)\n")


def test_click_guesses_where_there_is_no_hint():
    stderr = CliRunner().invoke(main, ["up", "--block-sizes", "8"]).stderr
    assert "Did you mean" in stderr
    assert "--block-size'" in stderr


def test_a_wrong_value_tells_where_it_comes_from(tmp_path):
    """As in Kubernetes, which sets variables of such names for a service of this name."""
    config = tmp_path / "c.yaml"
    config.write_text("block-size: small\n")
    for arguments, environment, source in (
        (["prefill"], {"SPLITSERVE_BLOCK_SIZE": "tcp://a:80"}, " (environment variable SPLITSERVE_BLOCK_SIZE)"),
        (["prefill", "--config", str(config)], {}, " (--config)"),
        (["prefill", "--block-size", "small"], {"SPLITSERVE_BLOCK_SIZE": "8"}, "."),
    ):
        done = CliRunner().invoke(main, arguments, env=environment)
        assert (done.exit_code, "--block-size" in done.stderr) == (2, True)
        assert done.stderr.rstrip().endswith(source)
