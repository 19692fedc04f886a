"""What the kernel is told to read before a model's weights are read: the bytes that will be, in order, and few at a
time."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine.model import checkpoint as module
from engine.model.checkpoint import Part, SafetensorsCheckpoint, Span, TextPart, read_ahead, whole_tensor
from serving_core.model_files.stored_tensors import FLOATS
from serving_core.sharding import Extent, whole

TENSORS = {
    "a.weight": torch.arange(60, dtype=torch.float32).reshape(10, 6),
    "b.weight": torch.arange(24, dtype=torch.int16).view(torch.bfloat16).reshape(2, 3, 4),
    "c.scale": torch.tensor(7.0),
}
DTYPES = {"a.weight": np.float32, "b.weight": np.int16, "c.scale": np.float32}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    return path


def bytes_at(span):
    return span.file.read_bytes()[span.start : span.stop]


@pytest.mark.parametrize("name", TENSORS)
def test_the_bytes_of_a_tensor_are_where_it_is_said(name, file):
    (span,) = SafetensorsCheckpoint([file]).spans(whole_tensor(name, TENSORS[name].shape, FLOATS))
    expected = TENSORS[name]
    expected = expected.view(torch.int16) if expected.dtype == torch.bfloat16 else expected
    assert bytes_at(span) == expected.numpy().astype(DTYPES[name]).tobytes()


def test_of_a_part_they_are_those_of_its_rows(file):
    (span,) = SafetensorsCheckpoint([file]).spans(Part("a.weight", (Extent(10, range(3, 7)), Extent(6, range(2, 4)))))
    assert np.frombuffer(bytes_at(span), np.float32).tolist() == list(range(18, 42))


def test_names_that_are_changed_on_the_way_are_found(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"model.language_model.norm.weight": torch.ones(4)}, path)
    text = TextPart(SafetensorsCheckpoint([path]))
    (name,) = text.names()
    (span,) = text.spans(Part(name, (whole(4),)))
    assert np.frombuffer(bytes_at(span), np.float32).tolist() == [1.0] * 4
    decoder = tmp_path / "decoder.safetensors"
    save_file({"norm.weight": torch.full((2,), 3.0)}, decoder)
    (span,) = SafetensorsCheckpoint([decoder], "model.").spans(Part("model.norm.weight", (whole(2),)))
    assert np.frombuffer(bytes_at(span), np.float32).tolist() == [3.0] * 2


@pytest.mark.parametrize("size", [1, 10, 1000])
def test_items_come_in_order_and_what_is_ahead_of_them_is_bounded(size, file, monkeypatch):
    monkeypatch.setattr(module, "AHEAD_BYTES", 100)
    asked = []

    def spans_of(item):
        asked.append(item)
        return [Span(file, 0, size)]

    for place, item in enumerate(read_ahead(range(300), spans_of)):
        assert item == place
        assert asked == list(range(len(asked)))
        assert place + 1 <= len(asked) <= max(place + 1, place + 100 // size)
    assert len(asked) == 300


def test_what_cannot_be_read_ahead_holds_nobody_up(file):
    gone = file.parent / "gone"
    assert list(read_ahead([1, 2], lambda _: [Span(gone, 0, 10)])) == [1, 2]
    assert list(read_ahead([], lambda _: [])) == []


def test_it_can_be_closed_before_its_end(file):
    coming = read_ahead(range(1000), lambda _: [Span(file, 0, 10)])
    assert next(coming) == 0
    coming.close()
    assert list(coming) == []
