"""deploy/'s files for Prometheus and Grafana, by Prometheus' own tool where it is installed (Debian: prometheus)."""

import json
import re
import shutil
import subprocess

import pytest
import yaml

from coordinator.settings import CoordinatorSettings
from serving_node.settings import NodeSettings
from serving_node.watchdog import LEAST_S
from tests.observability import ALERTS, DASHBOARDS, DEPLOY, queries
from tests.promql import parse
from tests.vllm_dashboards import queries as vllm_queries

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed (Debian: apt install prometheus)"
)


def promtool(*arguments):
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def plain(expression):
    """Without what Grafana fills in."""
    return expression.replace("$__rate_interval", "1m")


@needs_promtool
def test_alerts_are_rules():
    assert "8 rules found" in promtool("check", "rules", str(ALERTS))


def rule(name):
    [group] = yaml.safe_load(ALERTS.read_text())["groups"]
    return next(each for each in group["rules"] if each["alert"] == name)


def test_a_step_that_hangs_is_told_before_nobody_tells_of_it():
    """A node that is stuck tells of its step until it ends, attached nodes until the coordinator gives them up."""
    own_s, attached_s = (
        int(each) for each in re.findall(r"step_age_seconds > (\d+)", rule("SplitServeStepHangs")["expr"])
    )
    scrape_s = 15
    assert LEAST_S < own_s < LEAST_S + NodeSettings().stuck_exit_s - 2 * scrape_s
    assert attached_s < CoordinatorSettings().step_timeout_s - 2 * scrape_s


C, A = {"instance": "c"}, {"node": "a"}
FAILED, FINISHED = "splitserve_requests_failed_total", "splitserve_requests_finished_total"
REFUSED, NODES = "splitserve_requests_refused_total", 'splitserve_nodes{instance="c",role="mixed"}'
ATTAINED, OF_CLASS = (
    'splitserve_slo_attained_total{limit="both",slo_class="a"}',
    'splitserve_slo_requests_total{slo_class="a"}',
)
NODE_AGE, OWN_AGE = 'splitserve_node_step_age_seconds{node="a"}', 'splitserve_step_age_seconds{node="a"}'
ALERT_TESTS = {  # what promtool is to find, by rule: series as it writes them, when, and the labels of the alerts
    "SplitServeNotReady": [
        ({'splitserve_ready{instance="c"}': "0x9"}, "1m", [C]),
        ({'splitserve_ready{instance="c"}': "0x9"}, "45s", []),
        ({'splitserve_ready{instance="c"}': "0x2 1x9"}, "2m", []),
    ],
    "SplitServeProcessDown": [
        ({'up{instance="c",job="splitserve"}': "1 0x9"}, "3m", [C | {"job": "splitserve"}]),
        ({'up{instance="c",job="splitserve"}': "1 0x9"}, "2m", []),
        ({'up{instance="c",job="nodes-of-splitserve"}': "0x20"}, "3m", []),  # which may be loading
    ],
    "SplitServeRequestsFail": [
        ({FAILED: "0+1x60", FINISHED: "0+10x60"}, "6m", [{}]),
        ({FAILED: "0+1x60", FINISHED: "0+10x60"}, "4m", []),
        ({FAILED: "0+1x60", FINISHED: "0+30x60"}, "14m", []),
    ],
    "SplitServeRequestsRefused": [
        ({f'{REFUSED}{{reason="QUEUE_FULL"}}': "0+1x60"}, "11m", [{}]),
        ({f'{REFUSED}{{reason="QUEUE_FULL"}}': "0+1x60"}, "9m", []),
        ({f'{REFUSED}{{reason="PROMPT_TOO_LONG"}}': "0+1x60"}, "14m", []),
    ],
    "SplitServeSloMissed": [
        ({ATTAINED: "0+8x60", OF_CLASS: "0+10x60"}, "11m", [{"slo_class": "a"}]),
        ({ATTAINED: "0+8x60", OF_CLASS: "0+10x60"}, "9m", []),
        ({ATTAINED: "0+19x60", OF_CLASS: "0+20x60"}, "14m", []),
    ],
    "SplitServeStepHangs": [
        ({OWN_AGE: "0 10 25 40"}, "45s", [A]),  # it has left
        ({OWN_AGE: "0 10 25 40", NODE_AGE: "0 10 25 40"}, "45s", []),
        ({NODE_AGE: "40 55 70 85"}, "45s", [A]),
    ],
    "SplitServeNodesLost": [
        ({NODES: "4x8 3x20"}, "5m", [C]),
        ({NODES: "4x8 3x4 4x20"}, "5m", []),  # it is back
        ({NODES: "2x8 4x20"}, "5m", []),
    ],
    "SplitServeBlocksLeaked": [
        ({'splitserve_node_kv_blocks_leaked{node="a"}': "0 3x9"}, "75s", [A]),
        ({'splitserve_node_kv_blocks_leaked{node="a"}': "0 3 0x9"}, "75s", []),
    ],
}


def test_every_alert_is_tried():
    [group] = yaml.safe_load(ALERTS.read_text())["groups"]
    assert set(ALERT_TESTS) == {each["alert"] for each in group["rules"]}


@needs_promtool
@pytest.mark.parametrize("name", ALERT_TESTS)
def test_alerts_are_raised_by_what_they_are_for(tmp_path, name):
    tests = []
    for series, at, alerts in ALERT_TESTS[name]:
        given = [{"series": each, "values": values} for each, values in series.items()]
        wanted = [{"exp_labels": labels} for labels in alerts]
        asked = {"eval_time": at, "alertname": name, "exp_alerts": wanted}
        tests.append({"interval": "15s", "input_series": given, "alert_rule_test": [asked]})
    files = {"rule_files": ["rules.yml"], "evaluation_interval": "15s"}
    summary = {**rule(name), "annotations": {}}  # whose words are not what is tested
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "one", "rules": [summary]}]}))
    (tmp_path / "tests.yml").write_text(yaml.safe_dump({**files, "tests": tests}))
    promtool("test", "rules", str(tmp_path / "tests.yml"))


@needs_promtool
def test_the_configuration_is_one(tmp_path):
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    key = tmp_path / "key"
    key.write_text("k")
    config["scrape_configs"][0]["authorization"]["credentials_file"] = str(key)
    config["rule_files"] = [str(ALERTS)]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    assert "SUCCESS" in promtool("check", "config", str(tmp_path / "prometheus.yml"))


@needs_promtool
def test_every_query_is_prometheus_own_language(tmp_path):
    asked = [query for _, query, _ in queries()] + vllm_queries("m")
    rules = [{"record": f"r{index}", "expr": plain(query)} for index, query in enumerate(asked)]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    assert f"{len(asked)} rules found" in promtool("check", "rules", str(tmp_path / "rules.yml"))


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_panels_have_places_of_their_own(path):
    board = json.loads(path.read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or panel["targets"]
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
    assert [variable["name"] for variable in board["templating"]["list"]] == ["datasource"]


def test_names_and_labels_of_an_expression_are_found():
    parsed = parse('sum by (a, b) (rate(x_total{c="1", d=~"2|3"}[5m])) / on (e) group_left (f) (y:z > 0.5 and up)')
    found = [(selector.metric, selector.matchers) for selector in parsed.selectors]
    assert found == [("x_total", [("c", "=", "1"), ("d", "=~", "2|3")]), ("y:z", []), ("up", [])]
    assert parsed.labels == {"a", "b", "e", "f"}


@pytest.mark.parametrize("text", ["sum(x", "sum(x))", "x{a=1}", "x ? y", "sum by x (y)"])
def test_what_is_no_expression_is_refused(text):
    with pytest.raises(ValueError):  # noqa: PT011 - whatever it says
        parse(text)
