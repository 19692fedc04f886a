"""Exit code 0 when healthy, for container health checks: `python -m splitserve.healthcheck HOST:HTTP_PORT [NODE]`.

Without NODE: the coordinator answers. With NODE: the node of that name is attached to it and ready. Over HTTP, since a
process that imports gRPC costs several times as much.
"""

import sys
from http.client import HTTPConnection, HTTPException
from urllib.parse import quote

TIMEOUT_S = 5.0


def is_healthy(target: str, node: str | None = None) -> bool:
    """Raises OSError or HTTPException when the coordinator does not answer."""
    connection = HTTPConnection(target, timeout=TIMEOUT_S)
    connection.request("GET", "/health" if node is None else f"/health?node={quote(node)}")
    status = connection.getresponse().status
    return node is None or status == 200


if __name__ == "__main__":
    try:
        sys.exit(0 if is_healthy(*sys.argv[1:]) else "not ready")
    except (OSError, HTTPException) as error:
        sys.exit(f"the coordinator does not answer: {error}")
