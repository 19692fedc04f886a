import json
import subprocess
import sys
from dataclasses import replace

import pytest

from serving_core.errors import ModelError
from serving_core.layout import Widths
from serving_core.model_files.config import read_model_config
from serving_core.model_files.fingerprint import EDGE_BYTES, fingerprint, model_facts
from serving_core.node.prefix import root_name
from tests.tiny_models import write_fake_model, write_tiny_llama, write_tiny_model


def fingerprint_of(folder, block_size=16, dtype="float32", kv_cache_dtype="float32"):
    config = read_model_config(folder)
    return fingerprint(folder, config, config.kv_layout(block_size, kv_cache_dtype), dtype)


def differences(one, other):
    assert one.keys() == other.keys()
    return {key for key in one if one[key] != other[key]}


def test_equal_folders_are_equal(tmp_path):
    folders = [write_tiny_llama(tmp_path / name, seed=1) for name in ("a", "b")]
    facts = [fingerprint_of(folder) for folder in folders]
    assert differences(*facts) == set()
    assert all(isinstance(value, str) for value in facts[0].values())


def test_each_difference_shows_under_its_name(tmp_path):
    base = write_tiny_llama(tmp_path / "base", seed=1)
    facts = fingerprint_of(base)
    assert differences(facts, fingerprint_of(base, block_size=8)) == {"block_size"}
    assert differences(facts, fingerprint_of(base, dtype="bfloat16")) == {"dtype"}
    assert differences(facts, fingerprint_of(base, kv_cache_dtype="int8")) == {"kv_cache_dtype"}
    assert differences(facts, fingerprint_of(write_tiny_llama(tmp_path / "tuned", seed=2))) == {"weights"}
    narrow = write_tiny_llama(tmp_path / "narrow", seed=1, intermediate_size=64)
    assert differences(facts, fingerprint_of(narrow)) == {"intermediate_size", "weights"}
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    assert differences(facts, fingerprint_of(base)) == {"rms_norm_eps"}


def test_how_the_kv_lies_shows_and_names_blocks(tmp_path):
    folder = write_fake_model(tmp_path, num_layers=3, head_dim=8)
    config = read_model_config(folder)
    layout = config.kv_layout(16, "float32")
    facts = fingerprint(folder, config, layout, "float32")
    assert facts["kv_widths"] == "8 + 8 in layers 0-2"
    for other in (layout.with_layers(range(2)), replace(layout, widths=(Widths(8, 0),) * 3)):
        other_facts = fingerprint(folder, config, other, "float32")
        assert differences(facts, other_facts) == {"kv_widths"}
        assert root_name(facts, "") != root_name(other_facts, "")


def test_large_files_are_told_apart_by_size_header_start_and_end(tmp_path):
    folder = write_fake_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config.update(architectures=["LlamaForCausalLM"], model_type="llama")
    (folder / "config.json").write_text(json.dumps(config))
    header_bytes = 2 * EDGE_BYTES
    content = bytearray(header_bytes.to_bytes(8, "little") + bytes(5 * EDGE_BYTES))

    def weights_of(change_at=None, extra=0):
        changed = bytearray(content) + bytes(extra)
        if change_at is not None:
            changed[change_at] ^= 1
        (folder / "model.safetensors").write_bytes(changed)
        return fingerprint_of(folder)["weights"]

    base = weights_of()
    assert weights_of(extra=1) != base
    assert weights_of(change_at=8) != base
    assert weights_of(change_at=header_bytes + 7) != base
    assert weights_of(change_at=-1) != base
    assert weights_of(change_at=len(content) - EDGE_BYTES - 1) == base  # the middle is not read


def test_speed_of_the_fake_model_is_no_difference(tmp_path):
    slow, fast = write_fake_model(tmp_path / "slow", step_s=1.0), write_fake_model(tmp_path / "fast")
    assert differences(fingerprint_of(slow), fingerprint_of(fast)) == set()


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_what_a_coordinator_knows_is_in_the_fingerprint_of_its_nodes(tmp_path, family):
    folder, other = (write_tiny_model(tmp_path / name, family, seed=seed) for name, seed in (("a", 1), ("b", 2)))
    facts = model_facts(folder, read_model_config(folder))
    assert facts.items() <= fingerprint_of(folder, dtype="bfloat16").items()
    assert differences(facts, model_facts(other, read_model_config(other))) == {"weights"}
    config = read_model_config(folder, "transformers")  # as its nodes may be told
    assert facts.items() <= fingerprint(folder, config, config.kv_layout(16, "float32"), "float32").items()


def test_a_coordinator_without_weights_knows_the_rest(tmp_path):
    folder = write_tiny_llama(tmp_path)
    facts = model_facts(folder, read_model_config(folder))
    (folder / "model.safetensors").unlink()
    del facts["weights"]
    assert model_facts(folder, read_model_config(folder)) == facts


def test_missing_weights(tmp_path):
    folder = write_tiny_llama(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="has neither"):
        fingerprint_of(folder)


def test_the_torch_free_floor_imports_no_torch():
    modules = "serving_core.model_files.fingerprint, serving_core.process.cpus"
    code = f"import {modules}, sys; print({{'torch', 'transformers', 'numpy'}} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert result.stdout == "set()\n"
