"""What tests of several rooms begin with."""

import pytest

from tests.tiny_models import write_tokenizer
from tests.unit.kv_transfer.transfer_kit import LAYOUT, ByteStore, Fabric

ZMQ_KINDS = ["tcp", "ipc", "shm"]


@pytest.fixture(params=["loopback", *ZMQ_KINDS, "curve", "torch_dist"])
def fabric(request, tmp_path):
    return Fabric(request.param, tmp_path)


@pytest.fixture(params=ZMQ_KINDS)
def zmq_fabric(request, tmp_path):
    return Fabric(request.param, tmp_path)


@pytest.fixture
def stores():
    return ByteStore(LAYOUT, 4, seed=16), ByteStore(LAYOUT, 6)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    """Of a model of which there is the byte-level tokenizer alone."""
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    return folder
