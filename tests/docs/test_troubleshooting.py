"""What the pages quote is what is said, and what they name is there."""

import re

import yaml

from coordinator.api.statuses import CODES
from tests import metric_table
from tests.docs.pages import PAGES, ROOT, prose_of
from tests.docs.sentences import is_said, sentences

TROUBLESHOOTING, OPERATIONS = (ROOT / "docs" / "guides" / f"{name}.md" for name in ("troubleshooting", "operations"))
CODE = re.compile(r"`([^`]+)`")
LEAST_WORDS = 3
OTHER_NAMES = ("splitserve_bench",)  # that begin as metrics do


def first_cells():
    return [row.split(" | ")[0] for row in TROUBLESHOOTING.read_text().splitlines() if row.startswith("| ")]


def test_quoted_sentences_are_said():
    said = sentences()
    quoted = [code for cell in first_cells() for code in CODE.findall(cell) if len(code.split()) >= LEAST_WORDS]
    assert len(quoted) > 50
    assert [each for each in quoted if not is_said(each, said)] == []


def test_a_sentence_that_nobody_says_is_found():
    said = sentences()
    assert is_said("no heartbeat for ... s (limit ... s)", said)
    assert not is_said("no heartbeat since ... s (limit ... s)", said)
    assert not is_said("(limit ... s) no heartbeat for", said)


def test_reasons_of_failures_are_reasons():
    named = {code for cell in first_cells() for code in CODE.findall(cell) if re.fullmatch(r"[A-Z]+(_[A-Z]+)+", code)}
    assert named <= set(CODES)
    assert len(named) >= 5


def test_metrics_that_are_named_are_told():
    told = set(re.findall(r"`((?:splitserve|vllm|http)[a-z_:]+)[`{]", metric_table.table()))
    for page in PAGES:
        named = set(re.findall(r"`(splitserve_[a-z_]+)[`{]", prose_of(page)))
        assert named - told - set(OTHER_NAMES) == set(), page.name


def test_every_alert_has_its_line():
    alerts = [
        rule["alert"]
        for group in yaml.safe_load((ROOT / "deploy" / "alerts.yml").read_text())["groups"]
        for rule in group["rules"]
    ]
    assert alerts
    page = OPERATIONS.read_text()
    assert [alert for alert in alerts if f"| `{alert}` |" not in page] == []
