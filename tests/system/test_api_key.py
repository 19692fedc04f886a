"""With an API key set, every call of the public service needs it."""

import grpc
import pytest

from protos import inference_pb2
from splitserve import Client
from splitserve.client.errors import Unauthenticated
from tests.system.answers import request
from tests.tiny_models import write_fake_model

KEY = "key-of-the-test"


@pytest.fixture(scope="module")
def cluster(start_cluster, tmp_path_factory, num_api_servers):
    model = write_fake_model(tmp_path_factory.mktemp("model"))
    return start_cluster(
        model, env={"SPLITSERVE_API_KEY": KEY}, coordinator={"api_server_count": num_api_servers, "log_level": "debug"}
    )


CALLS = {
    "Generate": lambda stub, metadata: list(stub.Generate(request([1], max_tokens=1), timeout=60, metadata=metadata)),
    "Abort": lambda stub, metadata: stub.Abort(inference_pb2.AbortRequest(), timeout=60, metadata=metadata),
    "GetModelInfo": lambda stub, metadata: stub.GetModelInfo(
        inference_pb2.GetModelInfoRequest(), timeout=60, metadata=metadata
    ),
    "GetServerInfo": lambda stub, metadata: stub.GetServerInfo(
        inference_pb2.GetServerInfoRequest(), timeout=60, metadata=metadata
    ),
    "GetLoads": lambda stub, metadata: stub.GetLoads(inference_pb2.GetLoadsRequest(), timeout=60, metadata=metadata),
}
BAD_METADATA = {
    "no key": (),
    "wrong key": (("authorization", "Bearer wrong"),),
    "empty key": (("authorization", "Bearer "),),
    "no scheme": (("authorization", KEY),),
    "longer than the key": (("authorization", f"Bearer {KEY}x"),),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("metadata", BAD_METADATA.values(), ids=BAD_METADATA.keys())
def test_refused_without_the_key(cluster, call, metadata):
    with cluster.stub() as stub, pytest.raises(grpc.RpcError) as raised:
        call(stub, metadata)
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "--api-key" in raised.value.details()
    assert KEY not in raised.value.details()


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_served_with_the_key(cluster, call):
    with cluster.stub() as stub:
        call(stub, (("authorization", f"Bearer {KEY}"),))


def test_the_client_brings_its_key(cluster):
    with Client(cluster.target, api_key=KEY) as client:
        assert list(client.generate([1, 2], max_tokens=2))
    with Client(cluster.target, api_key="wrong") as client, pytest.raises(Unauthenticated, match="--api-key"):
        list(client.generate([1, 2], max_tokens=2))


def test_the_key_is_in_no_log(cluster):
    assert all(KEY not in child.output() for child in cluster.children.values())
