"""Which vLLM a node starts with, and what it says of others. Distributions are folders on the path, as pip leaves."""

import sys
from types import ModuleType

import pytest

from serving_core.errors import SettingsError
from splitserve_vllm import seam
from splitserve_vllm.settings import check_vllm_flags


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs a vLLM of a version, with modules that lack everything."""

    def install(version):
        folder = tmp_path / f"vllm-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: vllm\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        for module, _ in seam.ASSUMED:
            for part in range(module.count(".") + 1):
                name = module.rsplit(".", part)[0]
                monkeypatch.setitem(sys.modules, name, ModuleType(name))

    return install


def test_without_vllm_the_node_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(SettingsError, match=r"pip install vllm==0\.32\.0"):
        seam.check_vllm()


@pytest.mark.parametrize("version", ["0.31.0", "0.32.1+cpu", "1.0"])
def test_an_untested_version_is_refused_with_those_that_are(installed, version):
    installed(version)
    with pytest.raises(SettingsError, match=r"0\.32\.0") as refused:
        seam.check_vllm()
    assert version in str(refused.value)


def test_what_a_version_has_changed_is_named(installed):
    installed("0.32.0+cpu")
    with pytest.raises(SettingsError, match=r"vllm.v1.engine.async_llm has no AsyncLLM\.generate"):
        seam.check_vllm()


def test_a_parameter_that_is_gone_is_named(installed, monkeypatch):
    installed("0.32.0")

    class AsyncLLM:
        def generate(self, prompt, sampling_params): ...

    monkeypatch.setattr(sys.modules["vllm.v1.engine.async_llm"], "AsyncLLM", AsyncLLM, raising=False)
    with pytest.raises(SettingsError, match=r"AsyncLLM\.generate has no parameter request_id"):
        seam.check_vllm()


@pytest.mark.parametrize("flag", ["--model", "--kv-transfer-config={}", "--kv_transfer_config", "--tokenizer"])
def test_flags_that_the_node_sets_are_refused(flag):
    with pytest.raises(SettingsError, match="set by the node"):
        check_vllm_flags(("--enforce-eager", flag))


def test_other_flags_of_vllm_are_vllms():
    check_vllm_flags(("--enforce-eager", "--max-model-len", "1024"))
