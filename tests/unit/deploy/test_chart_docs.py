"""docs/guides/kubernetes.md says what the chart has."""

import re

import yaml

from coordinator.control.roles import BUSY, CATCH_UP_S, MAX_SAMPLES, WINDOW_S
from serving_core.version import VERSION
from tests.unit.deploy.chart_kit import CHART, EXAMPLES, PAGE, RELEASE, container, named, objects, pools

VALUES = yaml.safe_load((CHART / "values.yaml").read_text())


def test_every_example_is_named_and_every_name_is_an_example():
    table = PAGE.partition("| example |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == set(EXAMPLES)


def test_values_that_it_names_are_there():
    def has(path, value):
        first, _, rest = path.partition(".")
        if first == "NAME":
            return has(rest, VALUES["poolDefaults"])
        return isinstance(value, dict) and first in value and (not rest or has(rest, value[first]))

    table = PAGE.partition("| value |")[2].partition("\n\n")[0]
    named_values = re.findall(r"^\| `([\w.]+)`", table, re.MULTILINE)
    named_values += re.findall(r"`((?:tls|monitoring|inferencePool|networkPolicies)\.\w+)`", PAGE)
    assert len(named_values) > 8
    assert [each for each in named_values if not has(each, VALUES)] == []


def test_the_chart_is_of_this_version():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == VERSION


def test_its_commands_name_what_there_is():
    deployments = {each["metadata"]["name"].replace(RELEASE, "splitserve") for each in objects("default", "Deployment")}
    services = {each["metadata"]["name"].replace(RELEASE, "splitserve") for each in objects("default", "Service")}
    assert set(re.findall(r"kubectl rollout status deployment ([\w-]+)", PAGE)) <= deployments
    assert set(re.findall(r"port-forward service/([\w-]+)", PAGE)) <= services
    [secret] = re.findall(r"kubectl create secret generic (\w+)", PAGE)
    assert secret == VALUES["secret"]


def test_its_figures_are_those_of_the_code():
    assert (CATCH_UP_S, BUSY, MAX_SAMPLES, WINDOW_S) == (30.0, 0.8, 256, 60.0)
    assert "waiting / 30 s" in PAGE
    assert "/ 0.8, rounded up" in PAGE
    assert "the last 256 outputs" in PAGE
    pod = pools("default")["decode"]
    assert f"within `drainSeconds` ({VALUES['poolDefaults']['drainSeconds']})" in PAGE
    assert f"`startupSeconds` ({VALUES['poolDefaults']['startupSeconds']})" in PAGE
    liveness = container(pod)["livenessProbe"]
    assert f"gives it {liveness['periodSeconds'] * liveness['failureThreshold']} s" in PAGE
    policy, *_ = named("default", "NetworkPolicy", "-node")["spec"]["ingress"]
    (ports,) = policy["ports"]
    assert f"({ports['port']}, one more" in PAGE
    assert f"{ports['endPort']} of `--distributed-kv`" in PAGE
    for role in ("prefill", "decode"):
        assert f"`splitserve_{role}_nodes_needed`" in PAGE
