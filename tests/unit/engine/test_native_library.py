import os
import subprocess
import sys

import pytest
import torch

from engine.attention.native import NativeAttention
from engine.cache.kv_pool import PagedKVPool
from engine.native.library import ENVIRONMENT, OFF, VARIANTS, NativeLibrary, native_library, wanted_variants
from engine.native.program import parallel_function
from serving_core.layout import KVLayout
from tests.unit.engine.native_kit import needs_library

SHOW_VARIANT = """
import torch
from engine.cache.kv_pool import PagedKVPool
from serving_core.layout import KVLayout
from engine.attention.native import NativeAttention
print(NativeAttention(PagedKVPool(KVLayout.uniform(1, 1, 16, 16, "float32"), 1, torch.device("cpu")), 1).variant)
"""


def test_every_variant_may_be_used_unless_one_is_named(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert wanted_variants() == VARIANTS
    monkeypatch.setenv(ENVIRONMENT, "plain")
    assert wanted_variants() == ("plain",)
    monkeypatch.setenv(ENVIRONMENT, "off")
    assert wanted_variants() == ()


def test_an_unknown_variant_is_refused(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, "sse9")
    with pytest.raises(
        ValueError, match="SPLITSERVE_NATIVE=sse9 is none of amx, avx512_bf16, avx512, avx2, plain, off"
    ):
        wanted_variants()


def test_a_file_of_something_else_is_refused(tmp_path):
    file = tmp_path / "native_kernels.so"
    file.write_bytes(b"no library")
    with pytest.raises(OSError, match="native_kernels"):
        NativeLibrary(file)


@needs_library
def test_plain_code_runs_everywhere():
    assert native_library().kernel("plain", "bfloat16", "bfloat16") is not None
    assert native_library().kernel("unheard of", "bfloat16", "bfloat16") is None


@needs_library
@pytest.mark.skipif(sys.platform != "linux", reason="torch's OpenMP is looked for in /proc")
def test_torch_and_the_kernels_share_threads():
    torch.ones(4).sum()
    assert parallel_function() is not None


@needs_library
def test_the_environment_decides_from_one_pool_to_the_next(monkeypatch):
    pool = PagedKVPool(KVLayout.uniform(1, 1, 16, 16, "float32"), 1, torch.device("cpu"))
    monkeypatch.setenv(ENVIRONMENT, "plain")
    assert NativeAttention(pool, 1).variant == "plain"
    monkeypatch.setenv(ENVIRONMENT, OFF)
    with pytest.raises(ValueError, match="no native kernel"):
        NativeAttention(pool, 1)


@needs_library
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["off", "plain"])
def test_the_environment_decides_for_a_process(name):
    result = subprocess.run(
        [sys.executable, "-c", SHOW_VARIANT],
        env={**os.environ, ENVIRONMENT: name},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.stdout == ("" if name == "off" else f"{name}\n")
    assert ("ValueError: no native kernel" in result.stderr) == (name == "off")
