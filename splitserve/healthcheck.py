"""Exit code 0 when healthy, for container health checks: `python -m splitserve.healthcheck HOST:HTTP_PORT [NODE]`.

Without NODE: the coordinator answers. With NODE: the node of that name is attached to it and ready. Over HTTP, since a
process that imports gRPC costs several times as much. Over TLS where SPLITSERVE_TLS_CA or SPLITSERVE_TLS_CERT is set,
as for the process that is checked: by that CA, or else by that very certificate, whatever names it is for.
"""

import os
import ssl
import sys
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import quote

from serving_core.tls import TlsError, TlsFiles, client_context

TIMEOUT_S = 5.0


def is_healthy(target: str, node: str | None = None, *, tls: ssl.SSLContext | None = None) -> bool:
    """Raises OSError or HTTPException when the coordinator does not answer."""
    connection = _connection(target, tls)
    connection.request("GET", "/health" if node is None else f"/health?node={quote(node)}")
    status = connection.getresponse().status
    return node is None or status == 200


def context_of(environment: Mapping[str, str]) -> ssl.SSLContext | None:
    """What the variables of a process ask for. Raises TlsError."""
    cert, key, ca = (environment.get(f"SPLITSERVE_TLS_{name}", "") for name in ("CERT", "KEY", "CA"))
    if not cert and not ca:
        return None
    context = client_context(TlsFiles(cert, key, ca or cert))
    if not ca:
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.check_hostname = False
    return context


def _connection(target: str, tls: ssl.SSLContext | None) -> HTTPConnection:
    if tls is None:
        return HTTPConnection(target, timeout=TIMEOUT_S)
    return HTTPSConnection(target, timeout=TIMEOUT_S, context=tls)


if __name__ == "__main__":
    try:
        sys.exit(0 if is_healthy(*sys.argv[1:], tls=context_of(os.environ)) else "not ready")
    except (OSError, HTTPException) as error:
        sys.exit(f"the coordinator does not answer: {error}")
    except TlsError as error:
        sys.exit(str(error))
