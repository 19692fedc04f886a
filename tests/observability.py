"""What deploy/ asks Prometheus, and whether what processes tell has an answer."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import yaml
from prometheus_client.core import Metric

from tests.promql import OF_SCRAPES, Selector, parse

DEPLOY: Final = Path(__file__).parent.parent / "deploy"
DASHBOARDS: Final = sorted((DEPLOY / "dashboards").glob("*.json"))
ALERTS: Final = DEPLOY / "alerts.yml"
SCRAPED: Final = {"up": OF_SCRAPES}  # that Prometheus makes itself
_LEGEND: Final = re.compile(r"{{\s*(?:\$labels\.)?(\w+)\s*}}")

Told = Mapping[str, Mapping[str, set[str]]]
"""By the name of a sample, the values of each of its labels."""


def queries() -> Iterator[tuple[str, str, str]]:
    """Where each stands, the expression, and the text that names labels of its results."""
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", []):
                yield f"{path.name}: {panel['title']}", target["expr"], target["legendFormat"]
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            yield f"alert {rule['alert']}", rule["expr"], rule["annotations"]["summary"]


def told_by(metrics: Iterable[Metric]) -> dict[str, dict[str, set[str]]]:
    """What there is to be asked."""
    told: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for metric in metrics:
        for sample in metric.samples:
            told[sample.name]["__name__"].add(sample.name)
            for label, value in sample.labels.items():
                told[sample.name][label].add(value)
    return told


def problems(told: Told, expression: str, legend: str = "") -> list[str]:
    """What the expression names and nobody tells."""
    parsed = parse(expression)
    found = [problem for selector in parsed.selectors for problem in _unanswered(told, selector)]
    known = set(OF_SCRAPES)
    for selector in parsed.selectors:
        known |= set(told.get(selector.metric, {}))
    found += [f"no metric of {expression} has the label {label}" for label in sorted(parsed.labels - known)]
    return found + [f"{label} of the legend is not there" for label in _LEGEND.findall(legend) if label not in known]


def _unanswered(told: Told, selector: Selector) -> Iterator[str]:
    name = selector.metric
    if name in SCRAPED:
        return
    if name not in told:
        yield f"nobody tells {name}"
        return
    for label, operator, value in selector.matchers:
        if label in OF_SCRAPES or "$" in value:
            continue
        values = told[name].get(label)
        if values is None:
            yield f"{name} has no label {label}"
        elif operator == "=" and value not in values:
            yield f"{label} of {name} is never {value}"
        elif operator == "=~" and not any(re.fullmatch(value, each) for each in values):
            yield f"{label} of {name} is never like {value}"
