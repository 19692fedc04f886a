"""Models in several GGUF files, as gguf's own writer divides them: read as one, or refused in one sentence."""

import shutil
import struct

import gguf
import pytest

from serving_core.errors import ModelError
from serving_core.model_files.config import read_model_config
from serving_core.model_files.fingerprint import fingerprint
from serving_core.model_files.gguf_weights import gguf_weights
from splitserve.gguf.folder import gguf_folder
from splitserve.launch.models import resolve
from tests.gguf_files import replace, write_gguf


@pytest.fixture
def first(tmp_path):
    return write_gguf(tmp_path / "tiny.gguf", part_tensors=12)


def part(first, number):
    return first.with_name(first.name.replace("00001-of", f"{number:05}-of"))


def test_they_hold_the_tensors_and_say_what_one_file_does(first, tmp_path):
    folder = gguf_folder(first, tmp_path / "cache")
    whole = gguf_folder(write_gguf(tmp_path / "whole.gguf"), tmp_path / "cache")
    names = sorted(path.name for path in folder.glob("model.gguf*"))
    assert names == ["model.gguf", "model.gguf.2", "model.gguf.3", "model.gguf.source"]
    assert read_model_config(folder) == read_model_config(whole)
    assert (folder / "tokenizer.json").read_text() == (whole / "tokenizer.json").read_text()
    found, expected = gguf_weights(folder).tensors, gguf_weights(whole).tensors
    assert {name: (tensor.shape, tensor.type) for name, tensor in found.items()} == {
        name: (tensor.shape, tensor.type) for name, tensor in expected.items()
    }
    assert {tensor.part for tensor in found.values()} == {0, 1, 2}


def test_a_hub_cache_links_to_blobs_of_other_names(first, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for number in (1, 2, 3):
        there = part(first, number).rename(blobs / f"{number:064x}")
        (snapshot / part(first, number).name).symlink_to(there)
    found = resolve(str(snapshot / first.name), pytest.fail)
    assert found.name == "tiny"
    assert (found.folder / "model.gguf.3").resolve() == blobs / f"{3:064x}"
    with gguf_weights(found.folder).open() as streams:
        assert len(streams) == 3


def test_the_fingerprint_is_that_of_all_parts(first, tmp_path):
    def facts():
        folder = gguf_folder(first, tmp_path / "cache")
        config = read_model_config(folder)
        return fingerprint(folder, config, config.kv_layout(16, "bfloat16"), "bfloat16")

    before = facts()
    content = bytearray(part(first, 3).read_bytes())
    content[-1] ^= 1
    part(first, 3).write_bytes(content)
    assert {name for name, value in facts().items() if value != before[name]} == {"weights"}


def test_the_first_stands_for_all(first, tmp_path):
    with pytest.raises(ModelError, match=r"^tiny-00002-of-00003\.gguf is part 2 of a model: the first, tiny-00001-"):
        gguf_folder(part(first, 2), tmp_path / "cache")


def test_one_that_is_missing_is_named(first, tmp_path):
    folder = gguf_folder(first, tmp_path / "cache")
    part(first, 3).unlink()
    for ask in (lambda: gguf_folder(first, tmp_path / "cache"), lambda: gguf_weights(folder)):
        with pytest.raises(ModelError, match=r"tiny-00003-of-00003\.gguf cannot be read: No such file"):
            ask()


def test_one_that_is_replaced_behind_the_folder_is_refused(first, tmp_path):
    folder = gguf_folder(first, tmp_path / "cache")
    weights = gguf_weights(folder)
    other = write_gguf(tmp_path / "other.gguf", part_tensors=12, rms_norm_eps=1e-3, hidden_size=32)
    part(other, 2).replace(part(first, 2))
    with pytest.raises(ModelError, match=r"tiny-00002-of-00003\.gguf is no longer the file"), weights.open():
        pytest.fail("the file is another one")
    with pytest.raises(ModelError, match="is no longer the file that"):
        gguf_weights(folder)


def test_parts_that_are_not_of_one_model_are_refused(first, tmp_path):
    second, third = part(first, 2), part(first, 3)
    kept = shutil.copy(second, tmp_path / "kept")
    shutil.copy(third, second)
    with pytest.raises(ModelError, match=r"00002-of-00003\.gguf says that it is part 3 of 3, and is read as part 2"):
        gguf_folder(first, tmp_path / "cache")
    other = write_gguf(tmp_path / "other.gguf", part_tensors=11)
    shutil.copy(part(other, 2), second)
    with pytest.raises(ModelError, match=r"has the tensor .*, which an earlier part has too"):
        gguf_folder(first, tmp_path / "cache")
    shutil.copy(kept, second)
    assert gguf_folder(first, tmp_path / "cache")


def test_a_part_says_nothing_that_the_first_does_not(first, tmp_path):
    writer = gguf.GGUFWriter(part(first, 3), "llama")
    for key, value in (("split.no", 2), ("split.count", 3)):
        replace(writer, key, value, gguf.GGUFValueType.UINT16)
    writer.add_rope_freq_base(5.0)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    with pytest.raises(ModelError, match=r"00003\.gguf says llama\.rope\.freq_base, and the first part does not say"):
        gguf_folder(first, tmp_path / "cache")


def test_how_many_tensors_there_are_is_held_against_what_the_first_says(first, tmp_path):
    key, count = b"split.tensors.count", struct.pack("<Ii", gguf.GGUFValueType.INT32, 30)
    content = first.read_bytes()
    assert key + count in content
    first.write_bytes(content.replace(key + count, key + count[:4] + struct.pack("<i", 99)))
    with pytest.raises(ModelError, match=r"00001-of-00003\.gguf says that its parts have 99 tensors, and they have 30"):
        gguf_folder(first, tmp_path / "cache")


@pytest.mark.parametrize("name", ["a-00001-of-00000.gguf", "a-00001-of-99999.gguf"])
def test_parts_have_a_number(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(ModelError, match=r"parts; 1 to 256 are read"):
        gguf_folder(tmp_path / name, tmp_path / "cache")
