"""Every command of the README and of docs/ names what there is, and is run: here, by another test, or by a script."""

import ast
import re
from itertools import groupby

import pytest
import yaml

from serving_core.flags import read_yaml
from splitserve.commands.serve import up
from tests.docs.commands import Command, commands, wrong_with
from tests.docs.fates import FATES, SERVED, By, Here, fate_of
from tests.docs.pages import DOCS, README, ROOT, blocks_of
from tests.docs.served import Shell
from tests.tiny_models import write_fake_model

COMMANDS = commands()
PROGRAMS = [block for page in (README, *DOCS) for block in blocks_of(page) if block.language == "python"]
AS_AT_FIRST = "splitserve role decode-0 decode && splitserve role decode-1 decode"


@pytest.mark.parametrize("page", dict.fromkeys(command.page for command in COMMANDS))
def test_they_name_what_there_is(page):
    for command in COMMANDS:
        if command.page == page:
            assert wrong_with(command) == [], command


def test_each_is_run_by_somebody():
    left = [str(command) for command in COMMANDS if fate_of(command) is None]
    assert left == [], "nobody runs these: say in tests/docs/fates.py who does, or why nobody can"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("splitserve up MODEL --prefill 1 --decodes 2", "No such option"),
        ("splitserve up MODEL --kv-transport pigeons", "is not one of"),
        ("splitserve drains decode-0", "No such command"),
        ("splitserve role decode-0 cook", "is not one of"),
        ("splitserve role decode-0", "Missing argument"),
        ("echo hi | splitserve generate - --max-token 3", "No such option"),
        ("SPLITSERVE_FLEET_SECRETS=x splitserve status", "nothing reads SPLITSERVE_FLEET_SECRETS"),
        ("python -m prefill_node MODEL --prompt 3", "No such option"),
        ("python -m prefill_nodes MODEL", "there is no module"),
        ("make tests", "make has no tests"),
        ("curl http://localhost:8000/metric", "there is no GET /metric"),
        ("pip install '.[nodes]'", "there is no extra nodes"),
        ("docker build -f deploy/Dockerfile --target server .", "no line like"),
    ],
)
def test_what_is_not_there_is_noticed(text, said):
    [found] = wrong_with(Command("any.md", text))
    assert said in found


def test_whoever_is_said_to_run_them_is_there():
    for fate in {fate for _, fate in FATES if isinstance(fate, By)}:
        file, _, name = fate.where.partition("::")
        assert (ROOT / file).is_file(), fate
        if name:
            tree = ast.parse((ROOT / file).read_text())
            assert name in {each.name for each in tree.body if hasattr(each, "name")}, fate


def test_every_line_has_a_command():
    used = {next(pattern for pattern, _ in FATES if re.match(pattern, command.plain)) for command in COMMANDS}
    assert [pattern for pattern, _ in FATES if pattern not in used] == []


def test_the_example_of_a_file_is_read(tmp_path):
    [block] = [
        block for block in blocks_of(ROOT / "docs" / "reference" / "configuration.md") if block.language == "yaml"
    ]
    (tmp_path / "cluster.yaml").write_text(block.text)
    assert len(read_yaml(tmp_path / "cluster.yaml", up)) == len(yaml.safe_load(block.text)) > 0


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_they_do_what_the_pages_say(tmp_path):
    """In the order of the pages; after one that changes roles both decode nodes write again."""
    model = write_fake_model(tmp_path / "fake", num_kv_heads=4, max_position_embeddings=1024)
    here = [command for command in COMMANDS if isinstance(fate_of(command), Here)]
    asked = [command for command in here if command.plain != SERVED]
    assert len(asked) < len(here)
    shell = Shell(tmp_path, model)
    with shell.serving(SERVED) as said:
        assert "1 prefill, 2 decode" in said
        for block in PROGRAMS:
            assert shell.python(block.text), block
        for _, its_own in groupby(asked, key=lambda command: command.page):
            texts = [command.text for command in its_own]
            for text in texts:
                shell.run(text)
            if any(" role " in text or " drain " in text for text in texts):
                shell.run(AS_AT_FIRST)
