import pytest

from splitserve_bench.code_version import SERVING, SIMULATED, code_digest


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


def test_what_serves_is_more_than_what_is_simulated():
    assert len({code_digest(SERVING), code_digest(SIMULATED), code_digest(("splitserve",))}) == 3
