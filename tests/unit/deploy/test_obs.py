"""The compose file's profile `obs`: Prometheus finds whom it asks, Grafana finds Prometheus and its dashboards, and
what they keep has a place. Whether their own tools take the files, test_observability.py asks."""

import json
import re
from pathlib import PurePosixPath
from urllib.parse import urlsplit

import pytest
import yaml

from tests.observability import DASHBOARDS, DEPLOY, queries
from tests.promql import parse
from tests.unit.deploy.chart_kit import objects

COMPOSE = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())
SERVICES = COMPOSE["services"]
GRAFANA, PROMETHEUS = SERVICES["grafana"], SERVICES["prometheus"]
PROVISIONING = PurePosixPath("/etc/grafana/provisioning")  # where Grafana's image looks
CONFIG = PurePosixPath("/etc/prometheus/prometheus.yml")  # what the command of Prometheus' image names
SECRETS = PurePosixPath("/run/secrets")
# What Grafana documents of a data source and of a provider of dashboards, of what is used here.
SOURCE_KEYS = {"name": str, "uid": str, "type": str, "access": str, "url": str, "isDefault": bool}
PROVIDER_KEYS = {"name": str, "type": str, "options": dict}


def mounts(service):
    """The files and folders of deploy/ by where the service sees them."""
    found = {}
    for volume in service["volumes"]:
        source, place, *mode = volume.split(":")
        if source.startswith("./"):
            assert mode == ["ro"], volume
            found[PurePosixPath(place)] = DEPLOY / source
    return found


def provisioned(kind):
    """The one thing of this kind that Grafana is told to have at its start."""
    [path] = [each for place, each in mounts(GRAFANA).items() if place.parent == PROVISIONING / kind]
    told = yaml.safe_load(path.read_text())
    assert told.pop("apiVersion") == 1
    [(_, [thing])] = told.items()
    return thing


def networks(name):
    return set(SERVICES[name]["networks"])


def test_each_file_that_is_mounted_is_there_where_it_is_read():
    for service in (GRAFANA, PROMETHEUS):
        assert all(path.exists() for path in mounts(service).values())
    read = {PROVISIONING / "datasources", PROVISIONING / "dashboards"}
    read |= {PurePosixPath(provisioned("dashboards")["options"]["path"]).parent}
    assert {place.parent for place in mounts(GRAFANA)} == read
    assert all(place.suffix in (".yml", "") for place in mounts(GRAFANA))


@pytest.mark.parametrize(("kind", "keys"), [("datasources", SOURCE_KEYS), ("dashboards", PROVIDER_KEYS)])
def test_grafana_is_told_in_words_that_it_knows(kind, keys):
    told = provisioned(kind)
    assert {key: type(value) for key, value in told.items()} == keys


def test_the_dashboards_are_where_their_provider_looks_and_ask_the_source_that_there_is():
    provider, source = provisioned("dashboards"), provisioned("datasources")
    assert provider["type"] == "file"
    folder = mounts(GRAFANA)[PurePosixPath(provider["options"]["path"])]
    assert sorted(folder.glob("*.json")) == DASHBOARDS
    boards = [json.loads(path.read_text()) for path in DASHBOARDS]
    assert len({board["uid"] for board in boards}) == len(boards) > 0
    for board in boards:
        [variable] = board["templating"]["list"]  # which is the default of its type until someone chooses another
        assert (variable["type"], variable["query"]) == ("datasource", source["type"])
        chosen = {"type": source["type"], "uid": f"${{{variable['name']}}}"}
        panels = [each for each in board["panels"] if each["type"] != "row"]
        assert all(each["datasource"] == chosen for each in panels)
    assert source["isDefault"]


def test_grafana_reaches_prometheus_and_whoever_watches_reaches_both():
    source = provisioned("datasources")
    address = urlsplit(source["url"])
    assert (source["access"], address.scheme) == ("proxy", "http")
    assert SERVICES[address.hostname] is PROMETHEUS
    assert networks("grafana") & networks("prometheus")
    for name, port in (("prometheus", address.port), ("grafana", 3000)):
        [published] = SERVICES[name]["ports"]
        assert published.startswith("127.0.0.1:")
        assert published.endswith(f":{port}")
        assert any(not (COMPOSE["networks"][each] or {}).get("internal") for each in networks(name))


def test_prometheus_reaches_all_whom_it_asks_at_the_ports_that_they_have():
    files = mounts(PROMETHEUS)
    config = yaml.safe_load(files[CONFIG].read_text())
    assert all(CONFIG.parent / name in files for name in config["rule_files"])
    of_coordinator, of_nodes = config["scrape_configs"]
    [asked] = of_coordinator["static_configs"]  # which stays a target, and is down, where its name is gone
    asked = {name: int(port) for name, port in (target.split(":") for target in asked["targets"])}
    for each in of_nodes["dns_sd_configs"]:
        assert each["type"] == "A"
        asked |= dict.fromkeys(each["names"], each["port"])
    nodes = {name: each for name, each in SERVICES.items() if "SPLITSERVE_METRICS_PORT" in each.get("environment", {})}
    ports = {name: int(each["environment"]["SPLITSERVE_METRICS_PORT"]) for name, each in nodes.items()}
    assert {name: port for name, port in asked.items() if name in SERVICES} == {"coordinator": 8000} | ports
    assert all(networks(name) & networks("prometheus") for name in SERVICES if name in asked)


def test_keys_are_files_that_each_sees():
    job = yaml.safe_load(mounts(PROMETHEUS)[CONFIG].read_text())["scrape_configs"][0]
    key = SERVICES["coordinator"]["environment"]["SPLITSERVE_API_KEY_FILE"]
    assert job["authorization"] == {"credentials_file": key}
    password = GRAFANA["environment"]["GF_SECURITY_ADMIN_PASSWORD__FILE"]  # its image reads what ends so
    assert "GF_SECURITY_ADMIN_PASSWORD" not in GRAFANA["environment"]
    for service, path in ((PROMETHEUS, key), (GRAFANA, password)):
        assert PurePosixPath(path).parent == SECRETS
        assert PurePosixPath(path).name in service["secrets"]


@pytest.mark.parametrize(("name", "data"), [("grafana", "/var/lib/grafana"), ("prometheus", "/prometheus")])
def test_what_cannot_change_itself_has_a_volume_for_its_data(name, data):
    assert SERVICES[name]["read_only"]
    volumes = dict(volume.split(":")[:2] for volume in SERVICES[name]["volumes"])
    [kept] = [source for source, place in volumes.items() if place == data]
    assert kept in COMPOSE["volumes"]


def test_panels_of_processes_show_those_of_every_job_that_is_scraped():
    jobs = [job["job_name"] for job in yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]]
    monitors = objects("gpu", "ServiceMonitor", "PodMonitor")
    endpoints = [each["spec"].get("endpoints", []) + each["spec"].get("podMetricsEndpoints", []) for each in monitors]
    jobs += [each["replacement"] for [endpoint] in endpoints for each in endpoint["relabelings"]]
    assert len(jobs) == 4
    parsed = [parse(expression) for where, expression, _ in queries() if not where.startswith("alert")]
    matchers = [each for query in parsed for selector in query.selectors for each in selector.matchers]
    chosen = [each for each in matchers if each[0] == "job"]
    assert len(chosen) == 3
    assert all(operator == "=~" and re.fullmatch(value, job) for _, operator, value in chosen for job in jobs)
