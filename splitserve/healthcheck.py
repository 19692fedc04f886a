"""Exit with code 0 when a process is healthy, for container health checks.

    python -m splitserve.healthcheck TARGET [SERVICE]

Asks gRPC's health service at HOST:PORT: the coordinator whether it answers at all, or with SERVICE
splitserve.v1.Inference whether it can take requests; a node at its --health-port whether it is ready. Over TLS where
SPLITSERVE_TLS_CA or SPLITSERVE_TLS_CERT is set, as for the process that is checked: by that CA, or else by that very
certificate, whatever names it is for. http://HOST:PORT is asked without TLS; fleet://HOST:PORT is the coordinator's
port for nodes, where clients cannot crowd a health check out, and which is over TLS where there is a CA.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from serving_core.net.channels import NO_PROXY
from serving_core.net.tls import TlsError, TlsFiles, hosts_of
from splitserve.client.dialling import Dialling

TIMEOUT_S: Final = 5.0
IN_THE_OPEN: Final = "http://"  # as a health port is, whatever the process says elsewhere
FLEET: Final = "fleet://"


def is_healthy(target: str, service: str = "", *, environment: Mapping[str, str]) -> bool:
    """Return whether a service at the target is SERVING; an empty service is the process as a whole.

    `environment` has the TLS variables. Raises grpc.RpcError when nobody answers within TIMEOUT_S, or the service is
    unknown, and TlsError for an unusable file.
    """
    with _dialling(target, environment).channel((NO_PROXY,)) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S)
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def _dialling(target: str, environment: Mapping[str, str]) -> Dialling:
    files = TlsFiles(*(environment.get(f"SPLITSERVE_TLS_{name}", "") for name in ("CERT", "KEY", "CA")))
    is_open = target.startswith(IN_THE_OPEN) or (target.startswith(FLEET) and not files.ca)
    target = target.removeprefix(IN_THE_OPEN).removeprefix(FLEET)
    if is_open or not (files.cert or files.ca):
        return Dialling(target)
    if files.ca:
        return Dialling(target, files)
    names = hosts_of(files)
    return Dialling(target, replace(files, ca=files.cert), names[0] if names else "")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python -m splitserve.healthcheck TARGET [SERVICE]")
    try:
        sys.exit(0 if is_healthy(*sys.argv[1:], environment=os.environ) else "not ready")
    except grpc.RpcError as error:
        sys.exit(f"{sys.argv[1]} does not answer: {error.code().name}: {error.details()}")
    except TlsError as error:
        sys.exit(str(error))
