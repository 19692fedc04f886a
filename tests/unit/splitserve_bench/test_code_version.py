import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from splitserve_bench.code_version import SERVING, SIMULATED, code_digest, files_digest

# What the process that simulates imports of the bench, and no figure depends on: how runs are told, saved and shown.
BESIDE = {
    *("child", "code_version", "crew", "errors", "options", "prompts"),
    *("dominance.runs", "dominance.worker", "serve.command", "serve.results", "serve.stages"),
}
LISTED = """if True:
    import json, sys
    import splitserve_bench.dominance.worker
    ours = {name: each.__file__ for name, each in sys.modules.items() if name.startswith("splitserve_bench.")}
    print(json.dumps(ours))
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "measured_code"
    (folder / "part").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "part" / "rule.py").write_text("LIMIT = 1\n")
    code_digest.cache_clear()
    yield folder
    code_digest.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == folder.name]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "text", "is_other"),
    [
        ("part/rule.py", "LIMIT = 2\n", True),
        ("part/rule.py", "LIMIT = 1\n", False),
        ("part/other.py", "LIMIT = 1\n", True),
        ("kernels.so", "compiled", True),
        ("notes.md", "words", False),
    ],
)
def test_every_source_counts_and_nothing_else(package, name, text, is_other):
    before = code_digest(("measured_code",))
    code_digest.cache_clear()
    (package / name).write_text(text)
    assert (code_digest(("measured_code",)) != before) == is_other


@pytest.mark.parametrize(
    ("name", "text", "is_other"),
    [("rule.py", "LIMIT = 2\n", True), ("rule.py", "LIMIT = 1\n", False), ("other.py", "LIMIT = 2\n", False)],
)
def test_a_module_that_is_no_package_counts_alone(package, name, text, is_other):
    before = code_digest(("measured_code.part.rule",))
    code_digest.cache_clear()
    (package / "part" / name).write_text(text)
    assert (code_digest(("measured_code.part.rule",)) != before) == is_other


def test_what_serves_is_more_than_what_is_simulated():
    assert len({code_digest(SERVING), code_digest(SIMULATED), code_digest(("splitserve",))}) == 3


@pytest.mark.nightly
def test_all_that_makes_and_judges_simulated_requests_counts(monkeypatch):
    told = subprocess.run([sys.executable, "-c", LISTED], capture_output=True, text=True, check=True).stdout
    imported = {name.partition(".")[2]: Path(file).resolve() for name, file in json.loads(told).items()}
    counted, read_bytes = set(), Path.read_bytes

    def counting(path):
        counted.add(path.resolve())
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", counting)
    code_digest.cache_clear()
    code_digest(SIMULATED)
    left = {name for name, file in imported.items() if file not in counted and file.stat().st_size}
    assert left <= BESIDE
    assert {"plan.loads", "serve.datasets", "serve.metrics", "dominance.simulator"} <= imported.keys() - left


def test_a_model_is_known_by_its_files_not_by_where_they_are(tmp_path):
    folder = tmp_path / "one" / "model"
    (folder / "part").mkdir(parents=True)
    config, weights = folder / "config.json", folder / "part" / "weights.safetensors"
    config.write_text('{"vocab_size": 10}')
    weights.write_bytes(b"1234")
    before = files_digest(folder)
    assert files_digest(shutil.copytree(folder, tmp_path / "two" / "model")) == before  # which keeps their times
    taken_ns = weights.stat().st_mtime_ns
    os.utime(weights, ns=(0, taken_ns))  # when it was read last says nothing
    assert files_digest(folder) == before

    weights.write_bytes(b"5678")
    os.utime(weights, ns=(taken_ns, taken_ns + 10**9))
    assert files_digest(folder) != before
    weights.write_bytes(b"12345")
    os.utime(weights, ns=(taken_ns, taken_ns))
    assert files_digest(folder) != before
    weights.write_bytes(b"1234")
    os.utime(weights, ns=(taken_ns, taken_ns))
    assert files_digest(folder) == before
    taken_ns = config.stat().st_mtime_ns
    config.write_text('{"vocab_size": 20}')
    os.utime(config, ns=(taken_ns, taken_ns))
    assert files_digest(folder) != before


@pytest.mark.parametrize("change", ["added", "removed", "renamed"])
def test_a_model_with_other_files_is_another_model(tmp_path, change):
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "a.safetensors"
    weights.write_bytes(b"1234")
    before = files_digest(tmp_path)
    if change == "added":
        (tmp_path / "b.safetensors").write_bytes(b"")
    elif change == "removed":
        weights.unlink()
    else:
        weights.rename(tmp_path / "b.safetensors")
    assert files_digest(tmp_path) != before
