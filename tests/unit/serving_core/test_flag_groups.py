"""Groups of options: every option of a command that serves is in one, and help shows them."""

import re
from collections import Counter
from itertools import chain

import click
import pytest
from click.testing import CliRunner

from serving_core.flag_groups import COMMON, GROUPS, NUM_COMMON
from splitserve.cli import main

SERVING = ("up", "coordinator", "api-server", "prefill", "decode", "mixed")
WITHOUT_GROUP = {"config"}


def command_of(name):
    return main.get_command(click.Context(main), name)


def options_of(name):
    return [param for param in command_of(name).params if isinstance(param, click.Option)]


def shown(*argv):
    result = CliRunner().invoke(main, list(argv))
    assert result.exit_code == 0, result.output
    return result.output


def test_every_option_is_in_one_group_and_every_name_is_an_option():
    names = {option.name.removesuffix("_file") for name in SERVING for option in options_of(name)}
    names |= {option.name for name in SERVING for option in options_of(name)}
    members = Counter(chain.from_iterable(GROUPS.values()))
    assert set(members.values()) == {1}
    assert set(members) <= names
    for name in SERVING:
        for option in options_of(name):
            assert {option.name, option.name.removesuffix("_file")} & set(members) or option.name in WITHOUT_GROUP
    assert set(COMMON) <= set(members)


@pytest.mark.parametrize("name", SERVING)
def test_help_shows_a_few_common_options_and_the_way_to_the_others(name):
    output = shown(name, "--help")
    common = output.partition("Common options:")[2].partition("Other options:")[0]
    assert sum(line.startswith("  --") for line in common.splitlines()) <= NUM_COMMON
    assert (name != "up") or {"--http-port", "--grpc-port"} <= set(common.split())
    assert "--help-all" in output
    assert "--heartbeat-s" not in output


@pytest.mark.parametrize("name", SERVING)
def test_all_help_has_each_option_once_below_its_group(name):
    output = shown(name, "--help-all")
    first_words = Counter(re.split(r"[ ,/]+", line)[1] for line in output.splitlines() if line.startswith("  -"))
    assert {option.opts[0]: first_words[option.opts[0]] for option in options_of(name)} == {
        option.opts[0]: 1 for option in options_of(name)
    }
    titles = [line.removesuffix(":") for line in output.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == [title for title in (*GROUPS, "Other options") if title in titles]


@pytest.mark.parametrize("name", SERVING)
def test_each_line_is_a_sentence(name):
    for option in options_of(name):
        assert option.help[0].isupper(), option.name
        assert option.help.endswith("."), option.name
