"""Headers of GGUF files: what gguf's own writer writes is read as its own reader reads it; what is damaged, absurd or
hostile is one sentence, and takes no more memory than the file has bytes."""

import struct
import tracemalloc
from io import BytesIO

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_core.errors import ModelError
from serving_core.model_files import gguf_header
from serving_core.model_files.gguf_header import read_header
from tests.gguf_files import write, write_gguf

F32, Q8_0, STRING, ARRAY, U8, U32 = 0, 8, 8, 9, 0, 4
HUGE = 2**60


def text(value):
    return struct.pack("<Q", len(value)) + value


def pair(key, kind, value):
    return text(key) + struct.pack("<I", kind) + value


def tensor(name, dimensions=(4,), kind=F32, offset=0, num_dimensions=None):
    count = len(dimensions) if num_dimensions is None else num_dimensions
    return text(name) + struct.pack(f"<I{len(dimensions)}QIQ", count, *dimensions, kind, offset)


def header(*, magic=b"GGUF", version=3, pairs=(), tensors=(), num_pairs=None, num_tensors=None, data=64):
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(pairs) if num_pairs is None else num_pairs,
    )
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % 32 + data)


def read(content):
    return read_header(BytesIO(content), "a.gguf")


def refusal(content):
    """The sentence with which it is refused, else nothing."""
    try:
        read(content)
    except ModelError as error:
        return str(error)
    return ""


BROKEN = {
    "nothing": (b"", "its header needs 4 bytes or more, and the file has 0"),
    "another format": (b"PK\3\4" + bytes(100), "does not begin with GGUF"),
    "version 1": (header(version=1), "its version is 1, and only 2 and 3 are read"),
    "a version to come": (header(version=4), "its version is 4,"),
    "big-endian": (header(version=3 << 24), "its numbers are big-endian"),
    "billions of pairs": (header(num_pairs=HUGE), f"says that it has {HUGE} pairs of metadata, and at most 65536"),
    "billions of tensors": (header(num_tensors=2**64 - 1), "says that it has 18446744073709551615 tensors"),
    "more pairs than bytes": (header(num_pairs=60_000), "needs 780024 bytes or more, and the file has"),
    "a key without end": (header(pairs=[struct.pack("<Q", HUGE)], num_pairs=1), "its header needs .* bytes or more"),
    "a text without end": (header(pairs=[pair(b"a", STRING, struct.pack("<Q", HUGE))]), "its header needs .* bytes"),
    "a length that wraps": (header(pairs=[pair(b"a", STRING, struct.pack("<Q", 2**64 - 1))]), "its header needs"),
    "no UTF-8": (header(pairs=[pair(b"a", STRING, text(b"\xff"))]), "is no text of UTF-8"),
    "an empty key": (header(pairs=[pair(b"", U8, b"\0")]), "a name of 0 characters"),
    "a long key": (header(pairs=[pair(b"a" * 300, U8, b"\0")]), "a name of 300 characters"),
    "a key that rings": (header(pairs=[pair(b"a\7", U8, b"\0")]), "printable"),
    "a pair twice": (header(pairs=[pair(b"a", U8, b"\0")] * 2), "it has a twice"),
    "a value of no type": (header(pairs=[pair(b"a", 13, b"\0")]), "a value of type 13"),
    "a huge array": (header(pairs=[pair(b"a", ARRAY, struct.pack("<IQ", U8, HUGE))]), "more than 4194304 elements"),
    "a long array": (header(pairs=[pair(b"a", ARRAY, struct.pack("<IQ", U32, 2**22))]), "its header needs 1677"),
    "long texts": (header(pairs=[pair(b"a", ARRAY, struct.pack("<IQ", STRING, 2**22))]), "its header needs 3355"),
    "arrays of arrays": (header(pairs=[pair(b"a", ARRAY, struct.pack("<IQ", ARRAY, 1))]), "elements of type 9"),
    "an odd alignment": (header(pairs=[pair(b"general.alignment", U32, struct.pack("<I", 3))]), "alignment is 3"),
    "no alignment": (header(pairs=[pair(b"general.alignment", U32, bytes(4))]), "alignment is 0"),
    "a vast alignment": (
        header(pairs=[pair(b"general.alignment", U32, struct.pack("<I", 2**31))]),
        "alignment is 2147",
    ),
    "a word for it": (header(pairs=[pair(b"general.alignment", STRING, text(b"32"))]), "alignment is '32'"),
    "a tensor twice": (header(tensors=[tensor(b"a"), tensor(b"a", offset=32)]), "it has the tensor a twice"),
    "no dimension": (header(tensors=[tensor(b"a", ())]), "a has 0 dimensions"),
    "many dimensions": (header(tensors=[tensor(b"a", num_dimensions=2**32 - 1)]), "a has 4294967295 dimensions"),
    "nothing in it": (header(tensors=[tensor(b"a", (4, 0))]), r"a has shape \[0, 4\]"),
    "negative": (
        header(tensors=[tensor(b"a", (2**64 - 4,))]),
        "a ends at byte .*, and the file has .*: it was cut short",
    ),
    "a product that wraps": (header(tensors=[tensor(b"a", (2**32, 2**32))]), "a ends at byte"),
    "beyond the file": (header(tensors=[tensor(b"a", offset=64)]), "a ends at byte .*: it was cut short"),
    "an offset that wraps": (header(tensors=[tensor(b"a", offset=2**64 - 32)]), "a ends at byte"),
    "not aligned": (header(tensors=[tensor(b"a", offset=4)]), "a lies at 4, which is no multiple of the alignment 32"),
    "overlapping": (header(tensors=[tensor(b"a", (9,)), tensor(b"b", offset=32)]), "a and b overlap"),
    "the same place": (header(tensors=[tensor(b"a"), tensor(b"b")]), "a and b overlap"),
    "half a block": (header(tensors=[tensor(b"a", (48,), Q8_0)]), "Q8_0 needs rows of a multiple of 32"),
    "integers": (header(tensors=[tensor(b"a", kind=26)]), "a is stored as I32; supported are F32, F16, Q4_0"),
    "no type": (header(tensors=[tensor(b"a", kind=4)]), "a is stored as type 4; supported are"),
}


@pytest.mark.parametrize(("content", "sentence"), BROKEN.values(), ids=BROKEN)
def test_what_is_broken_is_one_sentence_and_takes_no_memory(content, sentence):
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=rf"^a\.gguf is not a GGUF file that can be served: .*{sentence}"):
            read(content)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_header_has_an_end(monkeypatch):
    monkeypatch.setattr(gguf_header, "MOST_HEADER_BYTES", 100)
    with pytest.raises(ModelError, match=r"its header needs .* bytes or more, and a header may have 100"):
        read(header(pairs=[pair(b"a", STRING, text(bytes(200)))]))


@pytest.mark.parametrize("num_bytes", [1, 30, 200])
def test_a_header_longer_than_usual_is_read_whole(monkeypatch, num_bytes):
    monkeypatch.setattr(gguf_header, "USUAL_HEADER_BYTES", num_bytes)
    assert read(header(pairs=[pair(b"a", STRING, text(b"x" * 200))])).metadata == {"a": "x" * 200}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", stored="Q8_0")


def test_it_reads_what_the_librarys_own_reader_reads(file):
    with file.open("rb") as stream:
        found = read_header(stream, file.name)
    theirs = gguf.GGUFReader(file)
    assert found.metadata.keys() == {name for name in theirs.fields if not name.startswith("GGUF.")}
    for name, value in found.metadata.items():
        expected = theirs.fields[name].contents()
        assert (value if isinstance(value, str | int | float) else list(value)) == expected, name
    assert found.tensors.keys() == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        ours = found.tensors[tensor.name]
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert (ours.type.name, ours.start, ours.num_bytes) == (
            tensor.tensor_type.name,
            tensor.data_offset,
            tensor.n_bytes,
        )


def test_values_of_every_type_and_another_alignment(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    kinds = gguf.GGUFValueType
    values = {kinds.UINT8: 255, kinds.INT8: -1, kinds.UINT16: 65535, kinds.INT16: -2, kinds.UINT32: 2**32 - 1}
    values |= {kinds.INT32: -3, kinds.UINT64: 2**64 - 1, kinds.INT64: -4, kinds.FLOAT32: 0.5, kinds.FLOAT64: 0.1}
    values |= {kinds.BOOL: True, kinds.STRING: "naïve"}
    for kind, value in values.items():
        writer.add_key_value(f"a.{kind.name}", value, kind)
    writer.add_array("a.list", [1, -2, 3])
    writer.add_custom_alignment(128)
    writer.add_tensor("odd", np.arange(5, dtype=np.float32))
    writer.add_tensor("next", np.arange(6, dtype=np.float32))
    write(writer)
    with (tmp_path / "a.gguf").open("rb") as stream:
        found = read_header(stream, "a.gguf")
        assert {kind: found.metadata[f"a.{kind.name}"] for kind in values} == values
        assert list(found.metadata["a.list"]) == [1, -2, 3]
        stream.seek(found.tensors["next"].start)
        assert stream.read(24) == np.arange(6, dtype=np.float32).tobytes()
    assert found.tensors["next"].start % 128 == 0


@given(data=st.data())
def test_what_is_cut_short_is_refused_wherever_the_cut_is(file, data):
    content = file.read_bytes()
    cut = data.draw(st.integers(0, len(content) - 32))  # the last tensor may be padded
    with pytest.raises(ModelError):
        read(content[:cut])


@given(data=st.data())
def test_whatever_is_changed_it_is_read_or_refused(file, data):
    content = bytearray(file.read_bytes())
    size = len(read(bytes(content)).content)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, size - 1))
        change = data.draw(st.one_of(st.binary(min_size=1, max_size=1), st.just(b"\xff" * 8), st.just(bytes(8))))
        content[place : place + len(change)] = change
    if not (refused := refusal(bytes(content))):
        assert all(tensor.end <= len(content) for tensor in read(bytes(content)).tensors.values())
    else:
        assert refused.startswith("a.gguf is not a GGUF file that can be served: ")


@given(st.binary(max_size=400))
def test_whatever_follows_the_magic_is_refused_or_read(content):
    assert "\n" not in refusal(b"GGUF\3\0\0\0" + content)
