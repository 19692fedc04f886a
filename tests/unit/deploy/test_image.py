"""The image's file, as far as it can be read: the image itself is built by `make compose-demo`."""

import re
from pathlib import Path

import yaml

from tests.unit.deploy.chart_kit import container, pools

ROOT = Path(__file__).parents[3]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
SERVICES = yaml.safe_load((ROOT / "deploy" / "docker-compose.yml").read_text())["services"]
IGNORED = (ROOT / ".dockerignore").read_text()
STAGES = {
    found[2]: found[0] for found in re.findall(r"(^FROM (\S+) AS (\w+)\n.*?)(?=^FROM |\Z)", DOCKERFILE, re.M | re.S)
}
BASED_ON = {found[1]: found[0] for found in re.findall(r"^FROM (\S+) AS (\w+)$", DOCKERFILE, re.M)}


def test_it_holds_every_package_and_runs_as_nobody_in_particular():
    copied = set(re.findall(r"^COPY (\w+) \w+$", STAGES["build"], re.M))
    assert copied == {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert re.search(r"^USER [1-9]\d*$", STAGES["serving"], re.M)
    assert "USER" not in STAGES["demo"]
    assert BASED_ON["demo"] == "serving"
    assert [*STAGES][-1] == "demo"


def test_no_compiler_gets_into_the_stages_that_run():
    assert BASED_ON["serving"] == "${BASE}"
    assert "gcc" in STAGES["compiler"]
    assert not re.search(r"gcc|apt-get|pip ", STAGES["serving"] + STAGES["demo"])
    assert set(re.findall(r"^COPY --from=(\w+)", STAGES["serving"], re.M)) == {"dependencies", "build"}


def test_that_for_cuda_has_one_and_runs_as_nobody_in_particular():
    assert BASED_ON["cuda"] == "serving"
    assert "gcc libc6-dev" in STAGES["cuda"]
    assert re.findall(r"^USER (\S+)$", STAGES["cuda"], re.M)[-1] != "root"
    (kept_in,) = re.findall(r"^ENV TRITON_CACHE_DIR=(\S+)$", STAGES["cuda"], re.M)
    assert f"install -d -o splitserve {kept_in}" in STAGES["cuda"]


def test_what_triton_compiles_can_be_written_and_loaded_where_the_root_is_read_only():
    (kept_in,) = re.findall(r"^ENV TRITON_CACHE_DIR=(\S+)$", STAGES["cuda"], re.M)
    for name in ("prefill-gpu", "decode-gpu"):
        (mount,) = [each for each in SERVICES[name]["tmpfs"] if each.startswith(kept_in)]
        assert {"exec", "mode=1777"} == set(mount.removeprefix(f"{kept_in}:").split(","))
    for variant in ("gpu", "ranks"):
        pod = pools(variant)["decode"]
        (mount,) = [each for each in container(pod)["volumeMounts"] if each["mountPath"] == kept_in]
        assert not mount.get("readOnly")


def test_the_dependencies_are_installed_before_the_sources_are_there():
    copied = re.findall(r"^COPY (.*)$", STAGES["dependencies"], re.M)
    assert copied == ["pyproject.toml constraints.txt .ci/requirements.py ./"]
    assert "requirements.txt" in STAGES["dependencies"]


def test_nothing_that_was_built_here_gets_into_the_image():
    *_, last = [line for line in IGNORED.splitlines() if "!" in line]
    after = IGNORED.partition(f"{last}\n")[2].split()
    assert {"**/*.so", "**/build", "**/__pycache__"} <= set(after)


def test_what_is_copied_is_not_ignored():
    sources = {word for line in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.M) for word in line.split()}
    assert {f"!{source}" for source in sources} == {line for line in IGNORED.splitlines() if line.startswith("!")}
