"""Layers on disk: the rule by hand and by properties, the file by what it gives back, and answers beside those of the
same model in memory."""

import ctypes
import errno
import gc
import mmap
import os
import tempfile
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.build import build_engine
from engine.native.linear import best_variant
from engine.offload import layers_on_disk
from engine.offload.layers_on_disk import PIECE_BYTES, LayerFile, LayerMemory, WeightsLost, folder_on_disk
from engine.offload.residence import ROOM, Residence, layers_elsewhere
from engine.stepper import cause_of, is_fatal
from serving_core.errors import SettingsError
from serving_core.settings import EngineSettings
from tests.tiny_models import VOCAB_SIZE, write_fake_model, write_tiny_model
from tests.toy_scheduler import greedy, run_all, token_ids
from tests.unit.engine.rank_process import rank_case, run_ranks
from tests.unit.engine.unnamed_file import unnamed_file

PROMPTS = [list(b"The"), list(b"a longer prompt, of two blocks at least"), list(b"ab" * 40)]
NUM_TOKENS = 10
SIZES = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 6}


def test_layers_that_do_not_fit_are_spread_evenly():
    assert layers_elsewhere([10] * 6, 5, 65) == []
    assert layers_elsewhere([10] * 6, 5, 64) == [1, 3, 5]
    assert layers_elsewhere([10] * 6, 5, 25) == [0, 1, 2, 3, 4, 5]
    assert layers_elsewhere([10] * 6, 5, 45) == [1, 2, 4, 5]
    with pytest.raises(SettingsError, match=r"--weights-memory-bytes 24: these weights take 25 at least"):
        layers_elsewhere([10] * 6, 5, 24)
    with pytest.raises(SettingsError, match=r"--weights-memory-bytes 24: these weights take 25 at least"):
        layers_elsewhere([10, 10], 5, 24)


@given(st.lists(st.integers(1, 1000), min_size=3, max_size=80), st.integers(0, 5000), st.integers(0, 100_000))
def test_what_is_in_memory_fits(sizes, others, limit):
    try:
        on_disk = layers_elsewhere(sizes, others, limit)
    except SettingsError:
        assert others + 2 * max(sizes) > limit
        return
    stays = sum(size for number, size in enumerate(sizes) if number not in on_disk)
    largest = sorted((sizes[number] for number in on_disk), reverse=True)[:ROOM]
    assert others + stays + sum(largest) <= limit


@given(st.integers(1, 6), st.lists(st.integers(0, 5), max_size=30))
def test_the_layer_that_computes_is_there_and_at_most_one_beside_it(num_layers, entered):
    residence, loaded = Residence(list(range(num_layers))), set()

    def settle():
        while True:
            to_let_go, to_read = residence.next_move(loaded)
            loaded.difference_update(to_let_go)
            if to_read is None:
                return
            loaded.add(to_read)
            assert len(loaded) <= ROOM

    for layer in (each % num_layers for each in entered):
        residence.begin(layer)
        settle()
        following = (layer + 1) % num_layers
        assert loaded == {layer, following}
        residence.end(layer)
        settle()
        assert following in loaded


@pytest.mark.parametrize("folder", ["disk", "/dev/shm"])
def test_a_file_gives_back_what_was_written(tmp_path, folder):
    file = LayerFile(str(tmp_path) if folder == "disk" else folder)
    memories = [LayerMemory() for _ in range(3)]
    torch.manual_seed(0)
    tensors = [
        [memory.moved(torch.randint(256, (size,), dtype=torch.uint8)) for size in (5, PIECE_BYTES + 777, 64)]
        for memory in memories
    ]
    expected = [[tensor.clone() for tensor in each] for each in tensors]
    places = [file.append(memory) for memory in memories]
    for memory in memories:
        memory.let_go()
    assert not any(tensor.any() for each in tensors for tensor in each)
    for memory, place in reversed(list(zip(memories, places, strict=True))):
        file.read(memory, place)
    assert all(torch.equal(*pair) for each in zip(tensors, expected, strict=True) for pair in zip(*each, strict=True))
    assert list(tmp_path.iterdir()) == []
    file.close()


def test_memory_of_layers_is_apart():
    one, other = LayerMemory(), LayerMemory()
    ranges = []
    for memory in (one, other, one, other):
        tensor = memory.empty(1000)
        assert tensor.data_ptr() % 64 == 0
        ranges.append(range(tensor.data_ptr(), tensor.data_ptr() + 1000))
    assert all(a.stop <= b.start or b.stop <= a.start for a in ranges for b in ranges if a is not b)
    assert one.num_bytes == other.num_bytes == 4096


def test_a_folder_that_cannot_be_written_and_a_full_disk_are_sentences(tmp_path, monkeypatch):
    with pytest.raises(SettingsError, match=r"^--weights-disk-path .*/nowhere: No such file or directory$"):
        LayerFile(str(tmp_path / "nowhere"))
    file = LayerFile(str(tmp_path))
    memory = LayerMemory()
    memory.empty(10)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SettingsError, match=r"does not take 4096 bytes of weights: No space left on device$"):
        file.append(memory)
    file.close()


@pytest.fixture
def folder(written):
    return written(write_tiny_model, **SIZES)


def engine_of(folder, **settings):
    return build_engine(EngineSettings(model=str(folder), num_kv_blocks=64, device="cpu", **settings))


def answers(engine):
    return token_ids(run_all(engine, PROMPTS, greedy(NUM_TOKENS, ignore_eos=True)))


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "weights"]


@pytest.mark.parametrize(
    ("family", "dtype", "quantization"),
    [
        ("llama", "float32", "none"),
        ("mistral", "bfloat16", "w8a8"),
        pytest.param("qwen2", "float16", "none", marks=pytest.mark.nightly),
        ("qwen3", "bfloat16", "int4"),
    ],
)
def test_answers_are_those_of_the_model_in_memory(written, tmp_path, family, dtype, quantization):
    folder = written(write_tiny_model, family, **SIZES)
    settings = {"dtype": dtype, "quantization": quantization}
    whole = engine_of(folder, **settings)
    expected = answers(whole)
    limit = whole.weight_bytes * 3 // 4
    engine = engine_of(folder, weights_memory_bytes=limit, weights_disk_path=str(tmp_path), **settings)
    on_disk = engine.model.offloaded
    assert 1 < len(on_disk.layer_bytes) <= 6
    assert answers(engine) == expected
    assert on_disk.num_read_bytes > NUM_TOKENS * min(on_disk.layer_bytes.values())
    assert engine.weight_bytes == whole.weight_bytes
    assert list(tmp_path.iterdir()) == []
    del engine
    gc.collect()
    for thread in threads():
        thread.join(60)
    assert threads() == []


def test_the_bits_are_the_same(written):
    folder = written(write_tiny_model, "qwen3", **SIZES)
    whole = engine_of(folder)
    engine = engine_of(folder, weights_memory_bytes=whole.weight_bytes * 3 // 4)
    found, expected = (
        run_all(each, PROMPTS, greedy(NUM_TOKENS, ignore_eos=True, logprobs=2)) for each in (engine, whole)
    )
    assert found == expected


@pytest.mark.nightly
def test_every_rank_of_every_stage_keeps_to_its_own_limit(tmp_path):
    folder = write_tiny_model(tmp_path / "model", dtype="bfloat16", **SIZES)
    whole = engine_of(folder)
    outside = (
        2 * VOCAB_SIZE * SIZES["hidden_size"]
    )  # bytes of embedding or head on each of two ranks, half of 2 * V * E
    layer = (whole.weight_bytes - 2 * outside) / 2 / SIZES["num_hidden_layers"]
    settings = {"pipeline_parallel_size": 2, "weights_memory_bytes": round(outside / 2 + 2.6 * layer)}
    expected = run_ranks(tmp_path, 4, {"tiny": rank_case(folder, PROMPTS, 8, 64, pipeline_parallel_size=2)})
    sampled, facts = run_ranks(tmp_path, 4, {"tiny": rank_case(folder, PROMPTS, 8, 64, **settings)})
    assert [rank["tiny"]["description"]["layers_offloaded"] for rank in facts] == ["3"] * 4
    assert sampled == expected[0]


def test_a_limit_that_holds_all_leaves_all_in_memory(folder):
    engine = engine_of(folder, weights_memory_bytes=2**30)
    assert engine.model.offloaded is None
    assert engine.description["layers_offloaded"] == "0"
    assert (engine.program is not None) == (best_variant(torch.float32) is not None)


def test_a_limit_that_holds_too_little_is_a_sentence(folder):
    with pytest.raises(SettingsError, match=r"^--weights-memory-bytes 4096: these weights take \d+ at least$"):
        engine_of(folder, weights_memory_bytes=4096)


def test_products_are_not_tried_with_weights_that_are_not_there(folder):
    settings = {"dtype": "float16", "weights_memory_bytes": engine_of(folder, dtype="float16").weight_bytes * 3 // 4}
    assert engine_of(folder, **settings).model.offloaded is not None
    with pytest.raises(SettingsError, match=r"^--weights-memory-bytes: --batch-invariant tries products of torch out"):
        engine_of(folder, **settings, batch_invariant=True)


def test_what_has_no_weights_of_ours_has_none_on_disk(tmp_path):
    said = "--weights-memory-bytes: the fake model has no weights"
    with pytest.raises(SettingsError, match=said):
        engine_of(write_fake_model(tmp_path / "fake"), weights_memory_bytes=2**20)
    folder = write_tiny_model(tmp_path / "model")
    said = "--weights-memory-bytes: transformers computes LlamaForCausalLM, with all weights in memory"
    with pytest.raises(SettingsError, match=said):
        engine_of(folder, weights_memory_bytes=2**20, model_impl="transformers")


def test_no_folder_in_memory_is_taken_for_a_disk(tmp_path, monkeypatch):
    with pytest.raises(SettingsError, match=r"^--weights-disk-path /dev/shm/a is in memory: name a folder on a disk"):
        folder_on_disk("/dev/shm/a")
    assert folder_on_disk(str(tmp_path)) == str(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    assert folder_on_disk("") == "/var/tmp"
    monkeypatch.setattr(os, "access", lambda folder, mode: folder != "/var/tmp")
    with pytest.raises(SettingsError, match=r"^--weights-disk-path is needed: folders for temporary"):
        folder_on_disk("")


@pytest.fixture
def memories(monkeypatch):
    """Return a list of the memories that a store makes for layers."""
    made = []

    class Noted(LayerMemory):
        def __init__(self):
            super().__init__()
            made.append(self)

    monkeypatch.setattr(layers_on_disk, "LayerMemory", Noted)
    return made


@pytest.fixture
def offloading(folder, memories, tmp_path):
    """An engine with some layers on disk, that has answered, and the limit of its weights in memory."""
    limit = engine_of(folder).weight_bytes * 3 // 4
    engine = engine_of(folder, weights_memory_bytes=limit, weights_disk_path=str(tmp_path))
    answers(engine)
    return engine, limit


def test_what_cannot_be_read_any_more_is_fatal(offloading, tmp_path):
    engine, _ = offloading
    os.ftruncate(unnamed_file(tmp_path), 0)
    with pytest.raises(WeightsLost, match=r"^weights cannot be read from .*: .* bytes of \d+ were read") as raised:
        answers(engine)
    assert is_fatal(raised.value)
    assert not is_fatal(ValueError("odd"))
    assert is_fatal(RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"))


def test_the_cause_of_a_failed_step_is_told_in_words_that_hold_no_path():
    out_of_memory = RuntimeError("Triton Error [CUDA]: out of memory")
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**60)
    for error in (out_of_memory, refused.value, torch.OutOfMemoryError("20 MiB"), MemoryError()):
        assert (is_fatal(error), cause_of(error)) == (False, "the node is out of memory")
    assert cause_of(OSError(5, "I/O error", "/a/path")) == "the step failed (OSError)"


def test_a_disk_that_gives_nothing_is_waited_for_a_while(offloading, monkeypatch):
    engine, _ = offloading
    monkeypatch.setattr(layers_on_disk, "READ_TIMEOUT_S", 0.2)
    goes_on = threading.Event()
    monkeypatch.setattr(LayerFile, "read", lambda *_: goes_on.wait())
    try:
        with pytest.raises(WeightsLost, match=r"^weights were not read from .* within 0.2 s$"):
            answers(engine)
    finally:
        goes_on.set()


def num_node_request_pages(memory):
    """Of the layer's memory, as the kernel counts them."""
    libc, count = ctypes.CDLL(None, use_errno=True), 0
    for pages in memory.pages():
        is_node_request = (ctypes.c_ubyte * (pages.nbytes // mmap.PAGESIZE))()
        assert not libc.mincore(ctypes.c_void_p(pages.data_ptr()), ctypes.c_size_t(pages.nbytes), is_node_request)
        count += sum(each & 1 for each in is_node_request)
    return count


def test_weights_take_no_more_memory_than_they_may(offloading, memories):
    engine, limit = offloading
    offloaded = engine.model.offloaded
    in_memory = engine.weight_bytes - sum(offloaded.layer_bytes.values())
    assert in_memory + ROOM * max(offloaded.layer_bytes.values()) <= limit
    given_out = [memory for memory in memories if memory.num_bytes]
    num_staying = len(given_out) - len(offloaded.layer_bytes)  # the first layer, by whose size all are judged
    assert num_staying == (0 not in offloaded.layer_bytes)
    assert len(offloaded.layer_bytes) > ROOM
    assert sum(num_node_request_pages(memory) > 0 for memory in given_out) <= ROOM + num_staying
