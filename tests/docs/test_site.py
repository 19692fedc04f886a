"""The site that `make docs` builds: it has every page, and no link in it leads nowhere."""

import subprocess
import sys

import pytest
import yaml

from tests.docs.pages import DOCS, ROOT
from tools.site_links import without_outside_links


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags name functions."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda loader, suffix, node: suffix)


def pages_of(nav):
    for entry in nav:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            yield from [value] if isinstance(value, str) else pages_of(value)


def test_the_site_has_every_page():
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=_Loader)["nav"]
    assert sorted(pages_of(nav)) == sorted(page.relative_to(ROOT / "docs").as_posix() for page in DOCS)


def test_links_out_of_the_pages_become_their_text():
    text = "See [the schema](../../protos/inference.proto#x) and [deploy](../guides/deploy.md#roles)."
    assert without_outside_links(text, "start/quick-start.md") == (
        "See the schema and [deploy](../guides/deploy.md#roles)."
    )
    with pytest.raises(FileNotFoundError, match=r"docs/start/quick-start.md links to protos/none.proto"):
        without_outside_links("[no](../../protos/none.proto)", "start/quick-start.md")


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_site_can_be_built_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="make docs installs it")
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert "Quick start" in (tmp_path / "site" / "search" / "search_index.json").read_text()
