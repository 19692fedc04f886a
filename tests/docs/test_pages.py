"""The pages hang together, and say what the code says."""

import re
import tomllib

import pytest
from click import Option
from packaging.requirements import Requirement

from coordinator.api.statuses import CODES
from protos import inference_pb2
from splitserve.cli import COMMANDS
from tests import api_table, settings_table
from tests.docs.pages import DOCS, PAGES, README, anchors_of, links_of

FOR_DEVELOPMENT = ("dev", "docs", "fuzz")
WITHOUT_ROW = ("config", "engine")  # of the command line alone
INDEX = README.parent / "docs" / "README.md"
GENERATED = {**settings_table.pages(), api_table.PAGE: api_table.page()}


@pytest.mark.parametrize("page", GENERATED, ids=lambda page: page.name)
def test_tables_are_what_the_code_says(page):
    assert page.read_text() == GENERATED[page], f"{page.name} is out of date: make tables"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in links_of(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        of_scheme = target.suffix == ".png" and anchor in ("only-light", "only-dark")  # the site shows it there alone
        assert not anchor or of_scheme or anchor in anchors_of(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_are_there(page):
    root = README.parent
    files = {
        path.relative_to(root).as_posix() for folder in ("[!.]*/**", ".ci") for path in root.glob(f"{folder}/*.py")
    }
    named = set(re.findall(r"`([\w./]+\.py)`", page.read_text()))
    assert {name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in files)} == set()


def test_the_index_has_every_page():
    assert {link.partition("#")[0] for link in links_of(INDEX)} >= {
        page.relative_to(INDEX.parent).as_posix() for page in DOCS if page != INDEX
    }


def test_every_setting_is_in_the_configuration():
    page = settings_table.SETTINGS_PAGE.read_text()
    for name in ("up", "coordinator", "api-server", "prefill", "decode", "mixed"):
        for option in dict(settings_table.all_commands())[name].params:
            if isinstance(option, Option) and option.name not in WITHOUT_ROW and not option.name.endswith("_file"):
                assert f"`--{option.name.replace('_', '-')}" in page, option.name
                assert option.envvar in (f"SPLITSERVE_{option.name.upper()}", None), option.name  # as the page says


def test_every_library_has_a_reason():
    project = tomllib.loads((README.parent / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    extras = {name: each for name, each in optional.items() if name not in FOR_DEVELOPMENT}
    page = (README.parent / "docs" / "design" / "dependencies.md").read_text()
    told = set(re.findall(r"^\|(?: `(\w+)` \|)? `([\w-]+)` \| \w", page, re.MULTILINE))
    wanted = [("", each) for each in project["dependencies"]]
    wanted += [(extra, each) for extra, requirements in extras.items() for each in requirements]
    assert told == {(extra, Requirement(each).name) for extra, each in wanted}


def test_every_command_has_a_part():
    parts = set(re.findall(r"^## splitserve (.+)$", settings_table.COMMANDS_PAGE.read_text(), re.MULTILINE))
    with_settings = {"up", "coordinator", "api-server", "prefill", "decode", "mixed"}
    assert parts | with_settings == {name for name, _ in settings_table.all_commands()} >= set(COMMANDS)


def test_every_method_and_every_field_of_a_timeline_is_in_the_api():
    page, file = api_table.PAGE.read_text(), inference_pb2.DESCRIPTOR
    for service in file.services_by_name.values():
        assert all(f"| `{method.name}` |" in page for method in service.methods)
    part = page.partition("\n### Timeline\n")[2]
    assert all(f"| `{field.name}` |" in part for field in file.message_types_by_name["Timeline"].fields)


def test_every_route_and_reason_has_a_sentence():
    assert {route.path for route in api_table.routes()} == set(api_table.ABOUT_ROUTES)
    assert set(CODES) == set(api_table.ABOUT_REASONS)
