import os
import shutil
import sys

import pytest

from splitserve_bench.code_version import SERVING, code_digest, files_digest


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


def test_what_serves_is_more_than_the_launcher():
    assert code_digest(SERVING) != code_digest(("splitserve",))


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
