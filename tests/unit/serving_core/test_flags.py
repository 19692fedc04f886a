"""Flags, environment and YAML from a settings class: precedence, types, refusals."""

import os
from dataclasses import dataclass, field

import pytest
from click.testing import CliRunner

from serving_core.flags import environment_of, flag, settings_command, to_argv


@dataclass(frozen=True)
class Inner:
    block_size: int = flag(16, "Tokens in a block.", minimum=1, maximum=64)
    dtype: str = flag("auto", "The dtype.", choices=("auto", "float32"))


@dataclass(frozen=True)
class Outer:
    model: str = flag("", "The model.", positional=True)
    inner: Inner = field(default_factory=Inner)
    share: float = flag(0.5, "A share.", minimum=0.0, maximum=1.0)
    verbose: bool = flag(False, "Say more.")
    limit: int | None = flag(None, "A limit.", minimum=1)
    token: str = flag("", "A secret.", secret=True)
    kind: tuple[str, ...] = flag((), "A kind.")
    place: str = flag("", "A place.", bare="here")
    pool_bytes: int = flag(512 * 2**20, "A size.", minimum=1, maximum=2**33)


@dataclass(frozen=True)
class Enclosing:
    outer: Outer = field(default_factory=Outer)
    speculation: str = flag("lookup", "What is guessed.", choices=("off", "lookup"))


def invoke(*argv, env=None, of=Outer):
    seen = []
    command = settings_command(of, seen.append, name="outer", help="Try it.")
    result = CliRunner().invoke(command, list(argv), env=env or {})
    return result, seen


def parse(*argv, env=None, of=Outer):
    result, seen = invoke(*argv, env=env, of=of)
    assert result.exit_code == 0, result.output
    return seen[0]


def test_defaults_are_those_of_the_dataclass():
    assert parse() == Outer()


def test_flags_reach_nested_settings():
    assert parse("folder", "--block-size", "8", "--verbose", "--limit", "3") == Outer(
        model="folder", inner=Inner(block_size=8), verbose=True, limit=3
    )


def test_a_flag_may_be_given_with_or_without_a_value():
    assert parse("folder", "--place", "--share", "0.25") == Outer(model="folder", place="here", share=0.25)
    assert parse("--place", "there").place == "there"
    assert parse(env={"SPLITSERVE_PLACE": "everywhere"}).place == "everywhere"


def test_flag_beats_environment_beats_file_beats_default(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("block-size: 4\nshare: 0.25\ndtype: float32\n")
    environment = {"SPLITSERVE_BLOCK_SIZE": "5", "SPLITSERVE_SHARE": "0.75"}
    settings = parse("--config", str(file), "--block-size", "6", env=environment)
    assert settings == Outer(inner=Inner(block_size=6, dtype="float32"), share=0.75)


@pytest.mark.parametrize(
    ("given", "num_bytes"),
    [("1", 1), ("4096", 4096), ("1KiB", 2**10), ("1.5 GiB", 3 * 2**29), ("512mib", 2**29), ("7 B", 7)],
)
def test_a_size_may_have_a_unit_wherever_it_is_given(tmp_path, given, num_bytes):
    file = tmp_path / "settings.yaml"
    file.write_text(f"pool-bytes: {given}\n")
    for settings in (
        parse("--pool-bytes", given),
        parse(env={"SPLITSERVE_POOL_BYTES": given}),
        parse("--config", str(file)),
    ):
        assert settings == Outer(pool_bytes=num_bytes)
        assert parse(*to_argv(settings)) == settings


def test_a_flag_that_may_be_repeated_keeps_its_values_in_order(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("kind: [b=1, 'a=2,c']\n")
    for settings in (
        parse("--kind", "b=1", "--kind", "a=2,c"),
        parse(env={"SPLITSERVE_KIND": "b=1 a=2,c"}),
        parse("--config", str(file)),
    ):
        assert settings == Outer(kind=("b=1", "a=2,c"))
        assert parse(*to_argv(settings)) == settings


def test_one_value_of_such_a_flag_needs_no_list_in_a_file(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("kind: b=1\n")
    assert parse("--config", str(file)) == Outer(kind=("b=1",))


def test_a_file_means_what_the_same_words_mean_as_flags(tmp_path):
    """YAML itself would make numbers of 0123456 (42798), 1.10 and 12:30, truths of on, off and no, and a date."""
    file = tmp_path / "settings.yaml"
    file.write_text(
        "model: on\ntoken: 0123456\nplace: 1.10\nspeculation: off\nkind: [no, 0x10, 2026-11-23, 12:30]\n"
        "pool-bytes: 4096\nblock-size: 8\nshare: 1e-1\nlimit: 3\nverbose: yes\n"
    )
    outer = Outer(
        model="on",
        inner=Inner(block_size=8),
        share=0.1,
        verbose=True,
        limit=3,
        token="0123456",
        kind=("no", "0x10", "2026-11-23", "12:30"),
        place="1.10",
        pool_bytes=4096,
    )
    assert parse("--config", str(file), of=Enclosing) == Enclosing(outer, "off")


def test_help_shows_a_size_with_its_unit():
    assert "[default: (512.0 MiB)" in " ".join(invoke("--help")[0].output.split())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--pool-bytes", "lots"], "'lots' is no size such as 512MiB"),
        (["--pool-bytes", "0"], "0 is not in the range 1<=x<=8589934592"),
        (["--pool-bytes", "9GiB"], "9663676416 is not in the range 1<=x<=8589934592"),
        (["--block-size", "0"], "0 is not in the range 1<=x<=64"),
        (["--block-size", "many"], "'many' is not a valid integer."),
        (["--dtype", "int3"], "'int3' is not one of 'auto', 'float32'"),
        (["--no-such-flag", "1"], "No such option"),
        (["--share", "1.5"], "1.5 is not in the range 0.0<=x<=1.0"),
    ],
)
def test_bad_flags_are_refused_with_the_limit(argv, message):
    result, seen = invoke(*argv)
    assert result.exit_code == 2
    assert message in result.output
    assert not seen


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("block_sise: 4\n", "unknown keys: block_sise"),
        ("- a\n- b\n", "must hold a mapping"),
        ("a: [1\n", "is not YAML"),
        ("block-size: 1000\n", "1000 is not in the range"),
        ("block-size:\nshare: 0.25\nplace: ~\n", "has keys without a value: block_size, place"),
        ("place: [a, b]\ntoken: {a: b}\nblock-size: [4]\nshare: 0.5\n", "list of texts: place, token, block_size"),
        ("kind: [a, [b, c]]\n", "list of texts: kind"),
        ("kind: {a: 1}\n", "list of texts: kind"),
    ],
)
def test_bad_files_are_refused(tmp_path, content, message):
    file = tmp_path / "settings.yaml"
    file.write_text(content)
    result, seen = invoke("--config", str(file))
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert not seen


def test_to_argv_rebuilds_the_settings_without_secrets():
    settings = Outer(model="folder", inner=Inner(block_size=8), verbose=True, limit=2, token="canary")
    argv = to_argv(settings)
    assert "canary" not in " ".join(argv)
    assert parse(*argv) == Outer(model="folder", inner=Inner(block_size=8), verbose=True, limit=2)


def test_another_process_gets_the_secrets_and_no_variable_that_would_change_a_flag(monkeypatch):
    kept = {"PATH": "/bin", "SPLITSERVE_NATIVE": "off", "SPLITSERVE_FAILPOINTS": "sent:3=kill"}
    dropped = {"SPLITSERVE_BLOCK_SIZE": "8", "SPLITSERVE_TOKEN": "other", "SPLITSERVE_TOKEN_FILE": "/file"}
    monkeypatch.setattr(os, "environ", {**kept, **dropped})
    assert environment_of(Enclosing()) == kept
    told = environment_of(Enclosing(Outer(token="canary")))
    assert told == {**kept, "SPLITSERVE_TOKEN": "canary"}


def test_another_process_gets_the_name_of_a_secrets_file_and_not_the_secret(monkeypatch, tmp_path):
    file = tmp_path / "token"
    file.write_text("canary\n")
    monkeypatch.setattr(os, "environ", {"SPLITSERVE_TOKEN_FILE": str(file)})
    assert environment_of(Enclosing(Outer(token="canary"))) == {"SPLITSERVE_TOKEN_FILE": str(file)}
    assert environment_of(Enclosing(Outer(token="made here"))) == {"SPLITSERVE_TOKEN": "made here"}


def test_secrets_come_from_the_environment_and_help_does_not_show_them():
    assert parse(env={"SPLITSERVE_TOKEN": "canary"}).token == "canary"
    result, _ = invoke("--help", env={"SPLITSERVE_TOKEN": "canary"})
    assert "canary" not in result.output


def test_a_secret_may_be_named_by_its_file(tmp_path):
    file, config = tmp_path / "token", tmp_path / "settings.yaml"
    file.write_text("canary\n")
    config.write_text(f"token-file: {file}\n")
    for settings in (
        parse("--token-file", str(file)),
        parse(env={"SPLITSERVE_TOKEN_FILE": str(file)}),
        parse("--config", str(config)),
    ):
        assert settings == Outer(token="canary")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "must hold one line of ASCII, with the secret alone"),
        (b"\n", "must hold one line of ASCII, with the secret alone"),
        (b"one\ntwo\n", "must hold one line of ASCII, with the secret alone"),
        ("clé two".encode(), "must hold one line of ASCII, with the secret alone"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"x" * 4097, "has more than 4096 bytes, the most of a secret"),
    ],
)
def test_files_that_hold_no_secret_are_refused_and_not_shown(tmp_path, content, message):
    file = tmp_path / "token"
    file.write_bytes(content)
    result, seen = invoke("--token-file", str(file))
    assert (result.exit_code, seen) == (2, [])
    assert f"--token-file {file} {message}" in result.output
    assert "two" not in result.output


@pytest.mark.parametrize("secret", ["canarý", "canary\x1b", "canary\nmore"])
def test_what_cannot_go_with_a_call_is_no_secret_and_is_not_shown(secret):
    result, seen = invoke(env={"SPLITSERVE_TOKEN": secret})
    assert (result.exit_code, seen) == (2, [])
    assert "--token must be of printable ASCII alone" in result.output
    assert "canar" not in result.output


def test_a_secret_and_its_file_are_one_too_many(tmp_path):
    file = tmp_path / "token"
    file.write_text("canary")
    result, _ = invoke("--token-file", str(file), env={"SPLITSERVE_TOKEN": "other"})
    assert (result.exit_code, "--token and --token-file are both given" in result.output) == (2, True)
    assert parse("--token-file", str(file), env={"SPLITSERVE_TOKEN": ""}).token == "canary"
    result, _ = invoke("--token-file", str(tmp_path / "nowhere"))
    assert "does not exist" in result.output
