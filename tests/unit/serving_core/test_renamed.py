"""Names of the release before: taken with a warning."""

import click
import pytest
from click.testing import CliRunner

from coordinator.settings import CoordinatorSettings
from serving_core.figures import families, gauge
from serving_core.flags import settings_command
from serving_core.renamed import FLAGS, METRICS, rename_arguments, rename_keys, rename_role, rename_variables
from serving_core.shapes import preset
from splitserve_bench.simulate.profile import read_profile
from tests.unit.splitserve_bench.simulate_kit import PROFILE

WARNING = "Warning: {} is called {} now\n"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--doors", "2"], ["--api-server-count", "2"]),
        (["--doors=2", "--doorstep", "doors"], ["--api-server-count=2", "--doorstep", "doors"]),
        (["--api-server-count", "--", "-doors"], ["--api-server-count", "--", "-doors"]),
    ],
)
def test_flags(given, expected):
    assert rename_arguments(given, str) == expected


def test_a_role_has_its_old_name_as_a_command_and_as_a_value(capsys):
    from splitserve.cli import main

    context = click.Context(main)
    name, command, _ = main.resolve_command(context, ["both", "m"])
    assert (name, command) == ("mixed", main.get_command(context, "mixed"))
    shape = preset("mixed", max_num_batched_tokens=8, max_num_seqs=4)
    assert preset(rename_role("both"), max_num_batched_tokens=8, max_num_seqs=4) == shape
    assert capsys.readouterr().err == 2 * WARNING.format("both", "mixed")


def test_a_variable_under_its_new_name_wins():
    lines = []
    both = {"SPLITSERVE_DOORS": "2", "SPLITSERVE_API_SERVER_COUNT": "3", "OTHER": "4"}
    rename_variables(both, lines.append)
    assert both == {"SPLITSERVE_API_SERVER_COUNT": "3", "OTHER": "4"}
    assert lines == [WARNING.format("SPLITSERVE_DOORS", "SPLITSERVE_API_SERVER_COUNT").strip()]


@pytest.mark.parametrize("way", ["flag", "variable", "key"])
def test_a_command_takes_the_old_name(tmp_path, monkeypatch, way):
    (tmp_path / "c.yaml").write_text("model: m\ndoors: 2\n")
    words = {"flag": ["m", "--doors", "2"], "variable": ["m"], "key": ["--config", str(tmp_path / "c.yaml")]}[way]
    if way == "variable":
        monkeypatch.setenv("SPLITSERVE_DOORS", "2")
        monkeypatch.delenv("SPLITSERVE_API_SERVER_COUNT", raising=False)
        monkeypatch.setenv("SPLITSERVE_API_SERVER_COUNT", "1")  # so that the test leaves none behind
        monkeypatch.delenv("SPLITSERVE_API_SERVER_COUNT")
    found = []
    command = settings_command(CoordinatorSettings, found.append, name="coordinator", help="")
    done = CliRunner().invoke(command, words)
    assert (done.exit_code, found[0].api_server_count) == (0, 2), done.output
    old, new = {
        "flag": ("--doors", "--api-server-count"),
        "variable": ("SPLITSERVE_DOORS", "SPLITSERVE_API_SERVER_COUNT"),
        "key": ("doors", "api_server_count"),
    }[way]
    assert done.stderr == WARNING.format(old, new)


def test_a_metric_has_both_names():
    new, old = next(iter(METRICS.items()))
    shown = list(families([gauge(new, "Calls.", [({}, 3)])]))
    assert [(each.name, each.documentation, each.samples[0].value) for each in shown] == [
        (f"splitserve_{new}", "Calls.", 3),
        (f"splitserve_{old}", f"Old name of splitserve_{new}.", 3),
    ]


def test_no_flag_has_an_old_name():
    from splitserve.cli import COMMANDS, main

    context = click.Context(main)
    for name in ("coordinator", "prefill", "up", "role"):
        assert name in COMMANDS
        command = main.get_command(context, name)
        assert not FLAGS.keys() & {param.name for param in command.params}


def test_a_key_of_json_is_read_under_its_old_name_with_one_warning(capsys):
    for _ in range(2):
        assert rename_keys({"prefill_s": 1.0, "credit_wait_s": 2.0}) == {"prefill_s": 1.0, "kv_alloc_s": 2.0}
    assert capsys.readouterr().err == WARNING.format("the key credit_wait_s", "kv_alloc_s")


def test_a_profile_of_the_version_before_is_read(tmp_path):
    PROFILE.save(tmp_path / "profile.json")
    text = (tmp_path / "profile.json").read_text()
    old = text.replace('"kv_transfer"', '"corridor"').replace('"api_server_s"', '"door_s"')
    assert old != text
    (tmp_path / "profile.json").write_text(old)
    assert read_profile(tmp_path / "profile.json") == PROFILE
