"""What tests of KV transfers begin with. Torch is imported by the processes that run them alone."""

import pytest

from tests.unit.kv_transfer.fabric_kinds import FABRIC_KINDS, ZMQ_KINDS


@pytest.fixture(params=FABRIC_KINDS)
def fabric(request, tmp_path):
    from tests.unit.kv_transfer.transfer_kit import Fabric

    return Fabric(request.param, tmp_path)


@pytest.fixture(params=ZMQ_KINDS)
def zmq_fabric(request, tmp_path):
    from tests.unit.kv_transfer.transfer_kit import Fabric

    return Fabric(request.param, tmp_path)


@pytest.fixture
def stores():
    from tests.unit.kv_transfer.transfer_kit import LAYOUT, ByteStore

    return ByteStore(LAYOUT, 4, seed=16), ByteStore(LAYOUT, 6)
