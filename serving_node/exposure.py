"""Check whether a node may listen as it is told to: fail closed."""

import os

from kv_transfer.descriptor import endpoint_of, host_of
from serving_core.errors import SettingsError
from serving_core.net.ports import Port, check_exposure, check_ports, is_loopback
from serving_core.net.tls import CLIENT, TlsError, check_open, check_purpose
from serving_node.ranks.processes import is_first_here, started_rank
from serving_node.settings import NodeSettings


def check_network(settings: NodeSettings) -> None:
    """Raise SettingsError for unusable TLS files, ports in use, or unprotected exposure.

    Unprotected means in reach of other machines without a secret, or without TLS where TLS is set; metrics are exempt.
    """
    link, tls = settings.link, settings.link.tls
    if (tls.tls_cert or tls.tls_key) and not tls.tls_ca:
        raise TlsError("--tls-cert and --tls-key need --tls-ca, by which the coordinator's certificate is checked")
    check_purpose(tls.files, CLIENT)
    host = host_of(endpoint_of(settings.kv_transport, settings.kv_bind, 0))
    if host is not None:
        check_exposure(host, "fleet_secret", link.fleet_secret)
        if settings.kv_transport != "zmq":
            check_open(f"--kv-transport {settings.kv_transport}", host, tls)
    if settings.distributed_kv and is_encrypted(settings):
        raise SettingsError("--distributed-kv: remote KV travels in the open, and --tls-ca asks for TLS off loopback")
    check_ports(_ports(settings))
    if settings.engine.num_ranks > 1 and started_rank() is not None:
        check_open("what ranks say to each other", os.environ.get("MASTER_ADDR", "localhost"), tls)


def _ports(settings: NodeSettings) -> list[Port]:
    """Return the ports on which this process listens beside the data plane."""
    health = Port("--health-port", settings.health_host, settings.health_port)
    metrics = Port("--metrics-port", settings.metrics_host, settings.metrics_port)
    return [*([health] if is_first_here() else []), *([] if started_rank() else [metrics])]


def is_encrypted(settings: NodeSettings) -> bool:
    """Return whether KV arrives encrypted here: the node uses TLS and other machines can reach it."""
    host = host_of(endpoint_of(settings.kv_transport, settings.kv_bind, 0))
    return bool(settings.link.tls.tls_ca) and host is not None and not is_loopback(host)
