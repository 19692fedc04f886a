"""Every method of every service that the coordinator's ports have answers as itself, or with a status that says what is
wrong: none fails as a fault of ours, whatever bytes it is sent."""

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from protos import fleet_pb2
from tests.system.cluster import FLEET_SECRET, SERVICE
from tests.tiny_models import write_fake_model

DEADLINE_S = 180.0
MESSAGES = {"empty": b"", "no protobuf": b"\xff" * 20, "no text": b"\x0a\x02\xff\xfe"}
FAULTS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED)
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
OF_NODES = (("authorization", f"Bearer {FLEET_SECRET}"),)


@pytest.fixture(scope="module")
def cluster(start_cluster, tmp_path_factory, num_api_servers):
    """Which is stopped in the end, and then has no traceback in its log."""
    return start_cluster(
        write_fake_model(tmp_path_factory.mktemp("model")), coordinator={"api_server_count": num_api_servers}
    )


@pytest.fixture(scope="module")
def public_methods(cluster):
    """Their paths, as the port itself tells."""
    with cluster.channel() as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = DescriptorPool(database)
        services = [pool.FindServiceByName(name) for name in database.get_services()]
        return [path for service in services for path in paths(service)]


def paths(service):
    return [f"/{service.full_name}/{method.name}" for method in service.methods]


def status_of(channel, path, message, metadata=()):
    """How a call with one message ends, or OK as soon as something is answered."""
    call = channel.stream_stream(path)(iter([message]), timeout=DEADLINE_S, metadata=metadata)
    try:
        for _ in call:
            call.cancel()
            break
    except grpc.RpcError as error:
        return error.code(), error.details()
    return grpc.StatusCode.OK, ""


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES.keys())
def test_no_public_method_fails_as_a_fault_of_ours(cluster, public_methods, message):
    assert {f"/{SERVICE}/Generate", *paths(HEALTH)} <= {*public_methods}
    with cluster.channel() as channel:
        found = {path: status_of(channel, path, message) for path in public_methods}
    assert {path: status for path, status in found.items() if status[0] in FAULTS} == {}


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES.keys())
def test_no_method_of_the_fleet_port_fails_as_a_fault_of_ours(cluster, message):
    methods = [*paths(fleet_pb2.DESCRIPTOR.services_by_name["Fleet"]), *paths(HEALTH)]
    with cluster.channel(cluster.fleet_port) as channel:
        found = {path: status_of(channel, path, message, OF_NODES) for path in methods}
    assert {path: status for path, status in found.items() if status[0] in FAULTS} == {}


@pytest.mark.parametrize("port", ["port", "fleet_port"])
def test_health_lists_what_it_checks(cluster, port):
    with cluster.channel(getattr(cluster, port)) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        listed = health.List(health_pb2.HealthListRequest(), timeout=DEADLINE_S).statuses
        assert {*listed} == {"", SERVICE}
        for service, status in listed.items():
            assert status == health.Check(health_pb2.HealthCheckRequest(service=service), timeout=DEADLINE_S)
